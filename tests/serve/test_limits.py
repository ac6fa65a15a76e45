"""What a server takes on: a full queue, hang-ups, keys, bodies that don't come, and its end."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import struct
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import openai
import pytest
from click.testing import CliRunner
from waiting import wait_for

from ktbridge.cli import main

KEY = "hush-hush"
RUNNING, WAITING, CONTEXT = 8, 2, 500
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def small(launch, base):
    """A server that takes on little, and reads prompts slowly while it answers."""
    limits = f"--max-running {RUNNING} --max-waiting {WAITING} --context-length {CONTEXT}"
    limits += " --prefill-chunk 1 --body-seconds 1 --drain-seconds 30"
    return launch(
        *("--model", str(base), "--served-model-name", "tiny", *limits.split()),
        KTBRIDGE_API_KEY=KEY,
    )


def health(server) -> dict:
    with urllib.request.urlopen(f"{server.root}/health", timeout=10) as response:
        return json.load(response)


def half_sent(server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEY}\r\n"
    connection.sendall(f"{head}Content-Length: 500\r\n\r\n{{".encode())
    return connection


def answer(connection: socket.socket) -> bytes:
    rest = b""
    while piece := connection.recv(65536):
        rest += piece
    return rest


def long_stream(client: openai.OpenAI):
    return client.completions.create(
        model="tiny", prompt=[5], max_tokens=CONTEXT - 1, temperature=0, stream=True
    )


def fill(server, client: openai.OpenAI, stack: ExitStack, count: int) -> list:
    """Long streams, begun one after the other; those that there is no place for wait."""
    streams = []
    for begun in range(1, count + 1):
        streams.append(stack.enter_context(long_stream(client)))
        places = min(begun, RUNNING)
        wait_for(lambda n=places: health(server)["running"] == n)
    return streams


@pytest.mark.slow
def test_a_full_queue_says_when_to_come_back(small):
    with small.client(KEY) as client, ExitStack() as stack:
        streams = fill(small, client, stack, RUNNING + WAITING)
        assert health(small)["waiting"] == WAITING
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt=[5], max_tokens=1)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["Retry-After"]) > 0
        # Whoever hangs up makes room at once.
        for stream in streams[1:]:
            stream.close()
        wait_for(lambda: (now := health(small))["running"] <= 1 and not now["waiting"])
        got = client.completions.create(model="tiny", prompt=[5], max_tokens=2)
        assert got.usage.completion_tokens == 2
        assert sum(1 for _ in streams[0]) > 1
        assert health(small) == {"status": "ok", "waiting": 0, "running": 0}


@pytest.mark.quick("reading|answering")
@pytest.mark.parametrize("way", ["answering", "reading a prompt", "reset"])
def test_a_place_is_free_once_its_client_has_gone(small, way):
    """In the middle of its prompt and of its answer; the one beside it goes on."""
    with small.client(KEY) as client, long_stream(client) as beside:
        chunks = iter(beside)
        next(chunks)
        if way == "answering":
            with long_stream(client) as gone:
                next(iter(gone))
        else:  # 290 tokens, read one a step
            streamed = way == "reading a prompt"  # else it's a reset that tells at once
            body = {"model": "tiny", "prompt": [5] * 290, "max_tokens": 210, "stream": streamed}
            reader = http.client.HTTPConnection("127.0.0.1", small.port, timeout=20)
            headers = AUTHORIZATION | {"Content-Type": "application/json"}
            reader.request("POST", "/v1/completions", json.dumps(body), headers)
            wait_for(lambda: health(small)["running"] == 2)
            if way == "reset":
                at_once = struct.pack("ii", 1, 0)
                reader.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            reader.close()
        assert list(chunks)[-1].choices[0].finish_reason in ("stop", "length")
    # The other one began later and would take as many steps: it wasn't continued.
    assert health(small)["running"] == 0


def test_limits_are_said_before_anything_is_read(small):
    """Also of more prompts than a request may bring, and of text that no context has room for."""
    long = "a " * 500_000
    with small.client(KEY) as client:
        assert client.models.list().data[0].max_model_len == CONTEXT
        for options, words in (
            ({"max_tokens": CONTEXT}, "context is 500"),
            ({"n": 9}, "n must be at most 8"),
            ({"prompt": ["a " * 200] * 5_000}, "at most 2 prompts"),
            ({"prompt": long}, "1,000,000 characters, at most"),  # a tokenizer isn't asked
            ({"prompt": [5] * 262_145}, "a list has 262,145 items"),
            (
                {"extra_body": dict.fromkeys(map(str, range(9)), 1)},
                "unknown fields: 0, 1, 2, 3, 4 and 4",
            ),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                client.completions.create(**{"model": "tiny", "prompt": "x"} | options)
        asked = [{"role": "user", "content": long}]
        with pytest.raises(openai.BadRequestError, match="characters, at most"):
            client.chat.completions.create(model="tiny", messages=asked)


def test_keys(small):
    """Without the right one there is nothing but /health, whatever the rest of the request is."""
    wrong = (f"Bearer {KEY}x", f"Basic {KEY}", "Bearer ", KEY)
    for headers in ({}, *({"Authorization": text} for text in wrong)):
        for path, data in (("/v1/models", None), ("/nowhere", b"{")):
            request = urllib.request.Request(small.root + path, data, headers)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=10)
            with caught.value as error:
                assert (error.code, error.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert json.load(error)["error"]["code"] == "invalid_api_key"
    assert health(small)["status"] == "ok"
    right = urllib.request.Request(small.root + "/v1/models", headers={"Authorization": f"bearer {KEY}"})
    with urllib.request.urlopen(right, timeout=10) as answered:
        assert answered.status == 200


def test_limits_belong_to_the_local_engine(base):
    """What was asked for is in the plan; SGLang-KT's own flags are named where it would serve."""
    args = ("serve", "--model", str(base), "--max-body-mib", "2", "--max-running", "3", "--dry-run")
    done = CliRunner().invoke(main, [*args, "--engine", "local", "--port", "0", "--json"])
    plan = json.loads(done.stdout)
    assert (plan["limits"]["body"], plan["limits"]["running"]) == (2 * 2**20, 3)
    assert plan["limits"]["waiting"] == 64
    refused = CliRunner().invoke(main, [*args, "--engine", "sglang"])
    assert refused.exit_code == 2
    assert "--max-running, --max-body-mib: for the local engine only" in refused.stderr
    assert "--max-running-requests N" in refused.stderr


def test_a_body_that_does_not_come(small):
    with half_sent(small) as connection:
        told = answer(connection)
    assert told.startswith(b"HTTP/1.1 408")
    assert b"didn't come in time" in json.dumps(json.loads(told.split(b"\r\n\r\n")[1])).encode()


@pytest.mark.slow
def test_the_end_waits_for_answers_and_for_nothing_else(small):
    """SIGTERM: eight streams are finished, a half-sent request holds nothing up."""
    with small.client(KEY) as client, ExitStack() as stack:
        streams = fill(small, client, stack, RUNNING)
        with half_sent(small) as connection:
            time.sleep(0.1)
            small.process.send_signal(signal.SIGTERM)
            assert answer(connection).startswith(b"HTTP/1.1 408")
        ends = [list(stream)[-1].choices[0].finish_reason for stream in streams]
        assert set(ends) <= {"stop", "length"}
    assert small.process.wait(60) == 0
