"""The client against servers that send whatever bytes they like; tests/golden has what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from mockserver import JsonServer, MockServer

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.client import Client, OpenAIClient

BODY = json.dumps(
    {"choices": [{"message": {"content": "好的。"}, "finish_reason": "stop"}]}, ensure_ascii=False
).encode()
JSON = b"content-type: application/json\r\n"


def whole(body, head=b"", status=b"200 OK"):
    length = b"content-length: %d\r\n" % len(body)
    return b"HTTP/1.1 " + status + b"\r\n" + JSON + length + head + b"\r\n" + body


def chunked(body, size):
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    told = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\n" + JSON + b"transfer-encoding: chunked\r\n\r\n" + told + b"0\r\n\r\n"


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET "):
        return head, None
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return head, json.loads(await reader.readexactly(int(length.split(b":")[1])))


@contextlib.asynccontextmanager
async def speaking(replies, end_after=()):
    """A server whose n-th request, over all connections, gets replies[n], a few bytes at a time;
    None hangs. After those in ``end_after`` it ends the connection. Gives the URL and what came."""
    seen, writers = [], []

    async def handle(reader, writer):
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head, body = await read_request(reader)
                number = len(seen)
                seen.append((len(writers), head, body))
                if replies[number] is None:
                    await asyncio.sleep(30)
                for part in (replies[number][:40], replies[number][40:]):
                    writer.write(part)
                    await asyncio.sleep(0.001)
                if number in end_after:
                    writer.close()
                    return

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", seen
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.01)


def ask(replies, *, times=None, end_after=(), **options):
    """The answers to ``times`` questions, one after the other, and what the server saw."""

    async def scenario():
        async with (
            speaking(replies, end_after) as (url, seen),
            Client(url, **{"attempts": 1, "backoff": 0.001, "timeout": 20, **options}) as client,
        ):
            answers = []
            for number in range(len(replies) if times is None else times):
                message = {"role": "user", "content": f"问题 {number}"}
                answers.append(await client.chat({"model": "m", "messages": [message], "seed": 0}))
                await asyncio.sleep(0.005)
            return answers, seen, client.faults

    return asyncio.run(scenario())


GOOD = {
    "length": whole(BODY),
    "chunks": chunked(BODY, 7),
    "until-the-end": b"HTTP/1.1 200 OK\r\n" + JSON + b"\r\n" + BODY,
    "http-1.0": b"HTTP/1.0 200 OK\r\n" + JSON + b"\r\n" + BODY,
    "after-100": b"HTTP/1.1 100 Continue\r\n\r\n" + whole(BODY),
    "closing": whole(BODY, b"connection: close\r\n"),
}


def test_replies_in_any_framing_are_read(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-server")
    replies = list(GOOD.values())
    ends = [i for i, name in enumerate(GOOD) if name in ("until-the-end", "http-1.0", "closing")]
    answers, seen, faults = ask(replies, end_after=ends)
    assert [(one.outcome, one.text) for one in answers] == [("ok", "好的。")] * len(GOOD)
    assert all(one.seconds >= 0 for one in answers)
    assert not faults
    connections = [one[0] for one in seen]
    assert connections[:3] == [1, 1, 1], "a kept connection is used again"
    question = {"role": "user", "content": "问题 0"}
    assert seen[0][2] == {"model": "m", "messages": [question], "seed": 0}
    assert seen[0][1].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"authorization: bearer none\r\n" in seen[0][1].lower()  # not OPENAI_API_KEY's


def test_the_openai_package_is_loaded_only_where_it_is_needed():
    code = """
import sys
import ktbridge.eval, ktbridge.eval.judge
assert not {"aiohttp", "openai", "jieba", "nltk", "rouge_score", "sacrebleu"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kept_connection_that_the_server_ended_is_replaced():
    answers, seen, faults = ask([whole(BODY)] * 3, end_after=[0, 1])
    assert [one.outcome for one in answers] == ["ok"] * 3
    assert [one[0] for one in seen] == [1, 2, 3]
    # The end may cross the next request on its way: that request is sent again, once.
    answers, seen, faults = ask([whole(BODY), b"", whole(BODY)], times=2, end_after=[1])
    assert [one.outcome for one in answers] == ["ok"] * 2
    assert len(seen) == 3
    assert not faults


def test_bytes_that_nobody_asked_for_answer_nothing():
    forged = whole(BODY.replace("好的。".encode(), b"forged"))
    answers, seen, _ = ask([whole(BODY) + forged, whole(BODY)])
    assert [one.text for one in answers] == ["好的。"] * 2
    assert [one[0] for one in seen] == [1, 2]


def test_retry_after_is_waited_for(monkeypatch):
    now = [0.0]

    async def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("ktbridge.server_api.client.asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("ktbridge.server_api.client.time", clock)
    busy = whole(b"{}", b"retry-after: 7\r\n", b"429 Too Many Requests")
    told = []
    (answer,), seen, _ = ask([busy, whole(BODY)], times=1, attempts=2, on_wait=told.append)
    assert (answer.outcome, len(seen)) == ("ok", 2)
    assert [one.partition(" wants ")[2] for one in told] == ["to be asked again in 7 s (HTTP 429: {})"]
    assert now[0] >= 7


def test_no_more_in_flight_than_wanted_and_a_connection_each():
    """20 questions by 5 workers: 5 connections, each used 4 times, and a cancelled request's is ended."""

    async def scenario():
        async with (
            speaking([whole(BODY)] * 20 + [None] + [whole(BODY)]) as (url, seen),
            Client(url, attempts=1, timeout=20) as client,
        ):
            request = {"model": "m", "messages": [{"role": "user", "content": "好"}]}
            numbers = iter(range(20))

            async def worker():
                for _ in numbers:
                    assert (await client.chat(request)).outcome == "ok"

            await asyncio.gather(*(worker() for _ in range(5)))
            assert len({one[0] for one in seen}) <= 5
            task = asyncio.create_task(client.chat(request))
            while len(seen) < 21:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.chat(request)).text == "好的。", "not the cancelled one's reply"

    asyncio.run(scenario())


def test_a_limit_by_its_other_name_is_asked_for_once():
    said = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    refused = whole(json.dumps({"error": {"message": said}}).encode(), status=b"400 No")

    async def scenario():
        async with (
            speaking([refused, whole(BODY), whole(BODY)]) as (url, seen),
            Client(url, attempts=1, timeout=20) as client,
        ):
            request = {"model": "m", "messages": [], "max_tokens": 7}
            answers = [await client.chat(request) for _ in range(2)]
            return answers, [body for _, _, body in seen], client

    answers, sent, client = asyncio.run(scenario())
    assert [one.outcome for one in answers] == ["ok", "ok"]
    renamed = {"model": "m", "messages": [], "max_completion_tokens": 7}
    assert sent == [{"model": "m", "messages": [], "max_tokens": 7}, renamed, renamed]
    assert not client.faults
    assert [*client.notes] == ["m takes its limit of tokens as max_completion_tokens"]


# --- one request after the other


def test_an_address_key_or_proxy_that_is_none_is_said(monkeypatch):
    for url in ("http://127.0.0.1:abc", "http://[::1", "http://a b/", "http://:1"):
        with pytest.raises(KtbridgeError, match=r"not a server's URL|cannot be asked|not known|in name"):
            OpenAIClient(url, timeout=1).models()
    for key in ("hush\nhush", "schlüssel-hush"):
        with pytest.raises(KtbridgeError, match="no request can carry") as caught:
            OpenAIClient("http://127.0.0.1:9", key)
        assert "hush" not in str(caught.value)
    monkeypatch.setenv("all_proxy", "socks4://proxy:9")
    with pytest.raises(KtbridgeError, match="socks4") as caught:
        OpenAIClient("http://192.0.2.1", timeout=1).models()
    assert "ALL_PROXY" in caught.value.next_step
    with pytest.raises(KtbridgeError, match="socks4"):
        list(OpenAIClient("http://192.0.2.1", timeout=1).chat("m", []))


def test_who_waits_for_an_answer_can_be_interrupted():
    """At once, by Ctrl-C; and the server is left alone."""
    code = """
import sys
from ktbridge.server_api.client import OpenAIClient
try:
    list(OpenAIClient(sys.argv[1]).chat("m", []))
except KeyboardInterrupt:
    print("interrupted")
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        run = [sys.executable, "-c", code, f"http://127.0.0.1:{listener.getsockname()[1]}"]
        with subprocess.Popen(run, stdout=-1, stderr=-1, text=True) as process:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(60)
                assert connection.recv(1 << 16)
                process.send_signal(signal.SIGINT)
                while connection.recv(1 << 16):  # until it hangs up
                    pass
            assert process.communicate(timeout=60) == ("interrupted\n", "")


def test_this_machine_is_asked_without_the_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = MockServer()
    assert "tiny" in OpenAIClient(server.url, timeout=10).models()
    with pytest.raises(KtbridgeError, match="no TLS connection"):
        OpenAIClient(server.url.replace("http:", "https:"), timeout=10).models()
    server.close()


def test_who_has_an_event_loop_may_ask():
    """As a notebook has."""
    server = MockServer()

    async def notebook():
        return OpenAIClient(server.url, timeout=10).models()

    assert "tiny" in asyncio.run(notebook())
    server.close()


class Odd(JsonServer):
    """Wants ``max_completion_tokens``, and gives its answer in parts, slowly."""

    def respond(self, request):
        if "max_tokens" in request:
            return 400, {}, {"error": {"message": "Use 'max_completion_tokens' instead."}}
        if not request.get("stream"):
            return 200, {}, {"limit": request["max_completion_tokens"]}
        thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
        pieces = [[thinking, {"type": "text", "text": "It "}], "is 4."]
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, {"choices": None}])
        return 200, {"content-type": "text/event-stream"}, f"{text}data: [DONE]\n\n"


def test_a_server_that_wants_another_limit_and_answers_in_parts():
    server = Odd([{"id": "m"}])
    client = OpenAIClient(server.url, timeout=10)
    message = {"role": "user", "content": "2 + 2?"}
    assert "".join(client.chat("m", [message], max_tokens=7)) == "It is 4."
    assert client.ask("/completions", {"model": "m", "max_tokens": 7}) == {"limit": 7}
    answer = client.chat("m", [message])
    assert next(answer) == "It "
    answer.close()  # in the middle
    server.close()
