"""What a server takes on: a full queue, bodies that don't come, numbers, and its end."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from contextlib import ExitStack

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture(scope="module")
def small(launch, base):
    """A server that takes on next to nothing."""
    limits = (
        "--max-running 1 --max-waiting 2 --context-length 300 --body-seconds 1 --drain-seconds 15"
    )
    return launch("--model", str(base), "--served-model-name", "tiny", *limits.split())


def metrics(server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.root}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {".".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def wait_for(condition, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def half_sent(server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: 500\r\n\r\n{{".encode())
    return connection


def answer(connection: socket.socket) -> bytes:
    rest = b""
    while piece := connection.recv(65536):
        rest += piece
    return rest


def long_stream(client: openai.OpenAI):
    return client.completions.create(
        model="tiny", prompt=[5], max_tokens=299, temperature=0, stream=True
    )


def test_a_full_queue_says_when_to_come_back(small):
    with small.client() as client, ExitStack() as stack:
        streams = []
        for _ in range(3):
            streams.append(stack.enter_context(long_stream(client)))
        wait_for(lambda: metrics(small)["ktbridge_waiting_prompts"] == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt=[5], max_tokens=1)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["Retry-After"]) > 0
        # Whoever hangs up makes room at once.
        streams[1].close()
        wait_for(lambda: metrics(small)["ktbridge_requests_total.tiny.cancelled"] >= 1)
        got = client.completions.create(model="tiny", prompt=[5], max_tokens=2)
        assert got.usage.completion_tokens == 2
        assert sum(1 for _ in streams[2]) > 1
    wait_for(lambda: metrics(small)["ktbridge_running_answers"] == 0)
    seen = metrics(small)
    assert seen["ktbridge_requests_total.tiny.rejected"] == 1
    assert seen["ktbridge_requests_total.tiny.finished"] >= 2
    assert seen["ktbridge_prompt_tokens_total.tiny"] >= 3
    assert seen["ktbridge_generated_tokens_total"] >= 301
    assert seen["ktbridge_first_token_seconds_count"] >= 2


def test_limits_are_said_by_name(small):
    with small.client() as client:
        assert client.models.list().data[0].max_model_len == 300
        for options, words in (
            ({"max_tokens": 300}, "context is 300"),
            ({"n": 2}, "n must be at most 1"),
            ({"prompt": ["x"] * 3}, "at most 2 prompts"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                client.completions.create(**{"model": "tiny", "prompt": "x"} | options)


def test_limits_belong_to_the_local_engine(run_cli, base):
    """What was asked for is in the plan; SGLang-KT's own flags are named where it would serve."""
    args = ("serve", "--model", str(base), "--max-body-mib", "2", "--max-running", "3")
    plan = json.loads(run_cli(*args, "--engine", "local", "--dry-run", "--json").stdout)
    assert (plan["limits"]["body"], plan["limits"]["running"]) == (2 * 2**20, 3)
    assert plan["limits"]["waiting"] == 64
    refused = run_cli(*args, "--engine", "sglang", "--dry-run")
    assert refused.returncode == 2
    assert "--max-running, --max-body-mib: for the local engine only" in refused.stderr
    assert "--max-running-requests N" in refused.stderr


def test_a_body_that_does_not_come(small):
    with half_sent(small) as connection:
        told = answer(connection)
    assert told.startswith(b"HTTP/1.1 408")
    assert b"didn't come in time" in json.dumps(json.loads(told.split(b"\r\n\r\n")[1])).encode()


def test_the_end_waits_for_answers_and_for_nothing_else(small):
    """SIGTERM: what was accepted is finished, new requests and a half-sent one are refused."""
    with small.client() as client, long_stream(client) as stream:
        chunks = iter(stream)
        next(chunks)
        with half_sent(small) as connection:
            time.sleep(0.1)
            small.process.terminate()
            start = time.monotonic()
            assert b"503" in answer(connection)[:20]
            assert time.monotonic() - start < 0.9  # not by its own time limit
        last = None
        for chunk in chunks:
            last = chunk
        assert last.choices[0].finish_reason in ("stop", "length")
    assert small.process.wait(10) == 0
    assert time.monotonic() - start < 10
