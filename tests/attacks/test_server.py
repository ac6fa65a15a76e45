"""A server under attack: refusals come at once and are short, and everyone else is answered."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time

import pytest
from tinyserver import ENVIRONMENT, Server, read_document

BODY_SECONDS = 3


@pytest.fixture(scope="module")
def attacked(launch, base):
    options = ("--body-seconds", str(BODY_SECONDS), "--drain-seconds", "2")
    return launch("--model", str(base), "--served-model-name", "tiny", *options)


def post(server: Server, data: bytes, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {"Content-Type": "application/json", **headers}
    connection.request("POST", "/v1/chat/completions", data, headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def bare(server: Server, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(data)
    return connection


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
FLOODS = {
    "unknown fields": json.dumps(GOOD | {f"x{i}": 1 for i in range(200_000)}),
    "bad messages": json.dumps(GOOD | {"messages": [{"x": 1}] * 200_000}),
    "bad parts": json.dumps(GOOD | {"messages": [{"role": "user", "content": [{}] * 900_000}]}),
    "nesting": '{"model":' + '{"a":' * 600 + "1" + "}" * 600 + "}",
    "bad tools": json.dumps(GOOD | {"tools": [1] * 200_000}),
    "bad biases": json.dumps(GOOD | {"logit_bias": {f"{i}": "x" for i in range(150_000)}}),
    "many items": json.dumps(GOOD | {"stop": ["x"] * 600_000}),
    "a long name": json.dumps(GOOD | {"x" * 1_000_000: 1}),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_faults_by_the_hundred_thousand_get_a_short_answer(attacked, flood):
    """Each held up the event loop for seconds to minutes, or was 500."""
    start = time.monotonic()
    status, text = post(attacked, FLOODS[flood].encode())
    assert status == 400
    assert len(json.loads(text)["error"]["message"]) < 600
    assert time.monotonic() - start < 15
    assert post(attacked, json.dumps(GOOD).encode())[0] == 200


@pytest.mark.parametrize(
    "given",
    [{"tools": [1] * 1000}, {"stop": [1] * 1000}, {"logit_bias": dict.fromkeys("abcdefghi")}],
)
def test_a_field_full_of_faults_is_one(attacked, given):
    """Telling 200,000 of them took 0.4 s in one piece, and /health waited for it."""
    status, text = post(attacked, json.dumps(GOOD | given).encode())
    assert status == 400
    assert " more" not in json.loads(text)["error"]["message"]


def test_what_is_announced_too_large_is_refused_at_once(attacked):
    start = time.monotonic()
    with bare(attacked, HEAD + b"Content-Length: 10000000000\r\n\r\n") as connection:
        assert connection.recv(65536).split()[1] == b"413"
    assert time.monotonic() - start < BODY_SECONDS


def test_a_chunk_counts_as_it_arrives(attacked):
    """Whatever size it announces, no more of it than the limit is held."""
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    with bare(attacked, chunked + b"FFFFFFFFFFFFFFFFF\r\n" + b"x" * 5_000_000) as connection:
        assert connection.recv(65536).split()[1] == b"413"


def test_a_body_that_drips_is_let_go(attacked):
    """A byte now and then doesn't keep a request open."""
    dripping = bare(attacked, HEAD + b"Content-Length: 1000\r\n\r\n")
    start = time.monotonic()
    dripping.settimeout(0.5)
    told = b""
    while not told and time.monotonic() - start < 60:
        dripping.sendall(b" ")
        try:
            told = dripping.recv(65536)
        except TimeoutError:
            continue
    dripping.close()
    assert told.startswith(b"HTTP/1.1 408")


def test_pages_of_other_sites_get_nothing(attacked):
    body = json.dumps(GOOD).encode()
    assert post(attacked, body, Origin="http://localhost:3000")[0] == 200
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ):
        status, text = post(attacked, body, **headers)
        assert (status, "127.0.0.1" in text) == (403, True)
    # A form of another site sends no other kind than these without being asked.
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert post(attacked, body, **{"Content-Type": kind})[0] == 400
    connection = http.client.HTTPConnection("127.0.0.1", attacked.port, timeout=20)
    connection.request("GET", "/docs")
    assert connection.getresponse().status == 404
    connection.close()


@pytest.mark.parametrize("given", [{"KTBRIDGE_API_KEY": ""}, {}])
def test_an_empty_key_is_refused(run_cli, base, given):
    options = () if given else ("--api-key", "")
    found = run_cli("serve", "--model", str(base), "--dry-run", *options, **given)
    assert found.returncode == 2
    assert "the key is empty" in found.stderr


DYING = """
import sys
from ktbridge.serve.local import batch
def step(*args): raise MemoryError("no more")
batch.Worker._next = step
from ktbridge.cli import main
main()
"""


def test_a_server_whose_thread_died_says_so_and_ends(base):
    process = subprocess.Popen(
        [sys.executable, "-c", DYING, "serve", "--model", str(base), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    url = read_document(process, timeout=180)["base_url"]
    server = Server(process, url, {})
    status, _ = post(server, json.dumps(GOOD | {"model": base.name}).encode())
    assert status == 503
    assert process.wait(30) == 1
    assert "the thread that computes has died: MemoryError: no more" in process.communicate()[1]


def test_a_broken_request_leaves_no_line_in_the_log(base, tmp_path):
    log = tmp_path / "log"
    options = ("--model", str(base), "--port", "0", "--threads", "1", "--json")
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "ktbridge", "serve", *options],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=ENVIRONMENT,
        )
    server = Server(process, read_document(process, timeout=180)["base_url"], {})
    before = log.stat().st_size
    upgrade = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
    for data in (b"\x00\x01\r\n\r\n", HEAD + b"Content-Length: x\r\n\r\n", upgrade):
        with bare(server, data) as connection:
            assert connection.recv(9) == b"HTTP/1.1 "
    assert log.stat().st_size == before
    assert server.stop() == 0
    assert process.stdout is not None
    process.stdout.close()


def test_what_is_asked_for_comes_back_short(attacked):
    """Names and paths stand in errors, however long they are."""
    long = "x" * 1_000_000
    status, text = post(attacked, json.dumps(GOOD | {"model": long}).encode())
    assert (status, len(text) < 1000) == (404, True)
    connection = http.client.HTTPConnection("127.0.0.1", attacked.port, timeout=20)
    connection.request("GET", "/" + "x" * 50_000)
    reply = connection.getresponse()
    assert (reply.status, len(reply.read()) < 1000) == (404, True)
    connection.close()
