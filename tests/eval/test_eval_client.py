"""The client against a server that speaks whatever bytes it likes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.client import Client
from ktbridge.server_api.completions import read_completion
from ktbridge.server_api.replies import BadReplyError

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
    return (
        b"HTTP/1.1 200 OK\r\n" + JSON + b"transfer-encoding: chunked\r\n\r\n" + told + b"0\r\n\r\n"
    )


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET "):
        return head, None
    length = next(
        line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
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
BAD = {
    "not-http": (b"SSH-2.0-OpenSSH_9.6\r\n" + b"x" * 60, "not HTTP"),
    "endless-head": (b"HTTP/1.1 200 OK\r\n" + b"x-y: " + b"z" * 70_000, "not HTTP"),
    "half-a-body": (whole(BODY)[:-5], "message body"),
    "half-a-chunk": (chunked(BODY, 30)[:-9], ""),
    "nothing": (b"", "without a reply"),
    "gzip": (whole(gzip.compress(BODY), b"content-encoding: gzip\r\n"), "content-encoding 'gzip'"),
    "latin-1": (whole(BODY.decode().encode("gb18030")), "not JSON"),
    "html": (whole(b"<html>gateway</html>"), "not JSON, it begins with '<html>"),
    "redirect": (whole(b"", b"location: /elsewhere\r\n", b"307 Elsewhere"), "HTTP 307"),
    "null": (whole(b"null"), "NoneType instead of an object"),
}


def test_replies_in_any_framing_are_read():
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
    assert b"authorization: bearer none" in seen[0][1].lower()


def test_a_list_of_models_is_had_or_its_lack_is_explained():
    listed = whole(json.dumps({"data": [{"id": "模型"}]}).encode())

    async def models(reply):
        async with (
            speaking([reply], end_after=[0]) as (url, seen),
            Client(url, timeout=20, api_key=" key\n") as client,
        ):
            try:
                return await client.models()
            finally:
                assert seen[0][1].startswith(b"GET /v1/models HTTP/1.1\r\n")
                assert b"authorization: bearer key\r\n" in seen[0][1].lower()

    bare = whole(json.dumps([{"id": "模型"}]).encode())  # some gateways' list
    for reply in (listed, bare):
        assert asyncio.run(models(reply)) == [{"id": "模型"}]
    for reply, words, next_step in (
        (whole(b"{}", status=b"401 No"), "answered HTTP 401", "KTBRIDGE_API_KEY"),
        (whole(b"{}", status=b"404 No"), "answered HTTP 404", "base URL"),
        (whole(b"<html>"), "not a list of models", "base URL"),
        (whole(b'["a"]'), "an entry without an id", "base URL"),
        (whole(b'{"data": [{}]}'), "not a list of models", "base URL"),
    ):
        with pytest.raises(KtbridgeError, match=words) as caught:
            asyncio.run(models(reply))
        assert next_step in caught.value.next_step
    with pytest.raises(KtbridgeError, match="no request can carry"):
        Client("http://127.0.0.1:9/v1", api_key="schlüssel")


def test_the_openai_package_is_loaded_only_where_it_is_needed():
    code = """
import sys
import ktbridge.eval, ktbridge.eval.judging
assert not {"aiohttp", "openai", "jieba", "nltk", "rouge_score", "sacrebleu"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", BAD)
def test_whatever_else_comes_is_named(name):
    reply, words = BAD[name]
    (answer,), _, faults = ask([reply], end_after=[0])
    assert answer.outcome == "http-error"
    assert answer.text == ""
    assert words in answer.detail
    assert answer.detail
    assert sum(faults.values()) == 1


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


def test_a_hang_is_timed_out_twice_and_no_more():
    (answer,), seen, faults = ask([None] * 6, times=1, attempts=6, timeout=0.15)
    assert (answer.outcome, answer.detail, answer.status) == ("http-error", "timed out", 0)
    assert len(seen) == 2
    assert faults == {"timed out": 2}


def test_a_storm_of_429_is_waited_out_or_named():
    busy = whole(b"{}", b"retry-after: 0\r\n", b"429 Too Many Requests")
    (answer,), seen, faults = ask([busy] * 4 + [whole(BODY)], times=1, attempts=6)
    assert answer.outcome == "ok"
    assert faults == {"HTTP 429": 4}
    (answer,), seen, faults = ask([busy] * 6, times=1, attempts=6)
    assert (answer.outcome, answer.status) == ("http-error", 429)
    assert len(seen) == 6
    never = whole(b"{}", b"retry-after: 86400\r\n", b"429 Too Many Requests")
    (answer,), seen, _ = ask([never] * 6, times=1, attempts=6)
    assert len(seen) == 1, "a day is too long to wait"


def test_retry_after_is_waited_for(monkeypatch):
    now = [0.0]

    async def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("ktbridge.eval.client.asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("ktbridge.eval.client.time", clock)
    busy = whole(b"{}", b"retry-after: 7\r\n", b"429 Too Many Requests")
    told = []
    (answer,), seen, _ = ask([busy, whole(BODY)], times=1, attempts=2, on_wait=told.append)
    assert (answer.outcome, len(seen)) == ("ok", 2)
    assert [one.partition(" wants ")[2] for one in told] == [
        "to be asked again in 7 s (HTTP 429: {})"
    ]
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


# --- servers that answer otherwise than most


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "It is 4."}, ("ok", "It is 4.", "")),
        ({"content": [{"type": "text", "text": "It "}, {"type": "text", "text": "is 4."}]},
         ("ok", "It is 4.", "")),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                      {"type": "text", "text": "It is 4."}]}, ("ok", "It is 4.", "hm")),
        ({"content": [{"type": "thinking", "thinking": "hm"}]}, ("think-only", "", "hm")),
        ({"content": None, "reasoning_content": "It is 4."}, ("think-only", "", "It is 4.")),
        ({"content": "4", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
         ("ok", "4", "hm")),
        ({"content": "4", "reasoning": {"text": "hm"}}, ("ok", "4", "hm")),
        ({"content": None, "refusal": "I won't."}, ("ok", "I won't.", "")),
        ({"content": "It is 4.<|im_end|>"}, ("ok", "It is 4.", "")),
        ({"content": "It is 4.</s>\n"}, ("ok", "It is 4.", "")),
        ({"content": "It is 4.<|im_end|>\n<|endoftext|>"}, ("ok", "It is 4.", "")),
        ({"content": "<s>5</s>"}, ("ok", "<s>5</s>", "")),
        ({"content": "<|im_end|>"}, ("empty", "", "")),
        ({"content": []}, ("empty", "", "")),
    ],
)  # fmt: skip
def test_a_message_in_any_form_is_text_and_thinking(message, expected):
    answer = read_completion({"choices": [{"message": message, "finish_reason": "stop"}]})
    assert (answer.outcome, answer.text, answer.thinking) == expected
    assert ("stop token" in answer.detail) == (
        "<|im_end|>" in str(message) or "4.</s>" in str(message)
    )


@pytest.mark.parametrize("usage", ["many", [1], 3, {"prompt_tokens": "9"}])
def test_a_count_that_is_none_costs_no_answer(usage):
    answer = read_completion({"choices": [{"message": {"content": "4"}}], "usage": usage})
    assert (answer.outcome, answer.prompt_tokens) == ("ok", None)


@pytest.mark.parametrize("content", [42, {"text": "4"}, [{"type": "image_url"}], [7]])
def test_a_content_that_is_no_text_is_said_to_be_none(content):
    with pytest.raises(BadReplyError, match=r"no text|not text"):
        read_completion({"choices": [{"message": {"content": content}}]})


def test_a_limit_by_its_other_name_is_asked_for_once():
    said = (
        "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    )
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
