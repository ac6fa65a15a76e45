"""Contract of the clients: each kind of reply as eval, verify and chat take it, and in a run's ledger."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evalruns import is_item, prompt_of, run
from golden.store import contract
from mockserver import MockServer, completion

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.client import Client, OpenAIClient
from ktbridge.server_api.failures import remedy

KEY = "sk-0123456789abcdef"
SHORTEST = 200
"""Characters of a text from which on its length is stored, with its beginning."""
TIMEOUT = 0.5
EVAL, LISTED, ASKED, NAMES, STREAM = "eval", "eval-list", "verify", "verify-list", "chat"


@dataclass(frozen=True)
class Sent:
    """Bytes of a reply; then the connection ends, or hangs, or is kept."""

    data: bytes
    then: str = "keep"


Replies = list[Sent]


def http(body: object = b"", status: str = "200 OK", head: str = "", *, length: int | None = None) -> Sent:
    """A reply; ``body`` as JSON unless it is bytes. ``length``: another than the body's."""
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    size = len(data) if length is None else length
    start = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{head}content-length: {size}"
    return Sent(f"{start}\r\n\r\n".encode() + data, "keep" if size == len(data) else "end")


def failed(status: str, message: object = "it went wrong", head: str = "", **more: object) -> Sent:
    """An error in OpenAI's format."""
    return http({"error": {"message": message, **more}}, status, head)


def events(*lines: object, end: bool = True, then: str = "end") -> Sent:
    """A stream of events without a length."""
    told = [f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in lines]
    text = "".join(told) + "data: [DONE]\n\n" * end
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return Sent((head + text).encode(), then)


def piece(content: object, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]}


def message(**fields: object) -> Sent:
    return http({"choices": [{"message": fields, "finish_reason": "stop"}]})


FINE = http(completion("好的。"))
CHUNKED = Sent(
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"".join(
        b"%x\r\n%s\r\n" % (len(part), part)
        for part in (FINE.data.partition(b"\r\n\r\n")[2][n : n + 7] for n in range(0, 4000, 7))
        if part
    )
    + b"0\r\n\r\n"
)
BODY = FINE.data.partition(b"\r\n\r\n")[2]
TOO_LONG = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
OTHER_LIMIT = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens'."
FASTAPI = {"detail": [{"loc": ["body", "seed"], "msg": "extra fields not permitted"}]}

# Asked in every way: a reply that is broken is no list, no answer and no stream.
ANY: Mapping[str, Replies] = {
    "nothing": [Sent(b"", "end")],
    "nothing, then fine": [Sent(b"", "end"), FINE],
    "not HTTP": [Sent(b"SSH-2.0-OpenSSH_9.6\r\n" + b"x" * 60, "end")],
    "endless head": [Sent(b"HTTP/1.1 200 OK\r\nx-y: " + b"z" * 70_000, "end")],
    "half a head": [Sent(b"HTTP/1.1 200 OK\r\ncontent-ty", "end")],
    "half a body": [Sent(FINE.data[:-9], "end")],
    "half a chunk": [Sent(CHUNKED.data[:-19], "end")],
    "a hang": [Sent(b"", "hang")],
    "a hang in the body": [Sent(FINE.data[:-9], "hang")],
    "gzip": [http(gzip.compress(BODY, mtime=0), head="content-encoding: gzip\r\n")],
    "an error in gzip": [
        http(gzip.compress(b"{}", mtime=0), "400 No", "content-encoding: gzip\r\n")
    ],
    "another encoding": [http(BODY.decode().encode("gb18030"))],
    "a page": [http(b"<html>\n<title>login</title>")],
    "empty": [http(b"")],
    "null": [http(b"null")],
    "a text": [http(b'"fine"')],
    "half of JSON": [http(b'{"data": [')],
    "deep JSON": [http(b"[" * 100_000)],
    "deeper JSON": [http(b"[" * 100_001)],
    "NaN": [http(b'{"choices": NaN, "data": NaN}')],
    "redirect": [http(b"", "307 Elsewhere", "location: /elsewhere\r\n")],
    "204": [Sent(b"HTTP/1.1 204 Nothing\r\n\r\n", "end")],
    "400": [failed("400 Bad Request")],
    "400 with the key": [failed("400 Bad Request", f"no such user: Bearer {KEY}")],
    "400 for the context": [failed("400 Bad Request", TOO_LONG)],
    "400 for a field": [failed("400 Bad Request", "Unknown parameter: 'seed'.", param="seed")],
    "400, no words": [http(b"", "400 Bad Request")],
    "400, a list": [http(FASTAPI, "400 Bad Request")],
    "400, half a character": [http(b'{"error": {"message": "bad \\ud800"}}', "400 Bad Request")],
    "400, long": [failed("400 Bad Request", "so " * 400)],
    "401": [failed("401 Unauthorized", "invalid key", code="invalid_api_key")],
    "402": [failed("402 Payment Required", "pay")],
    "403": [failed("403 Forbidden", "not you", code="no_access")],
    "404": [http({"detail": "Not Found"}, "404 Not Found")],
    "405": [http(b"Method Not Allowed", "405 Method Not Allowed")],
    "408": [failed("408 Request Timeout")],
    "413": [http(b"<html>too large</html>", "413 Payload Too Large")],
    "422": [http(FASTAPI, "422 Unprocessable Entity")],
    "429": [failed("429 Too Many Requests", "slow down", "retry-after: 0\r\n")],
    "429, then fine": [failed("429 Slow", head="retry-after: 0.01\r\n"), FINE],
    "429 for a day": [failed("429 Slow", "slow down", "retry-after: 86400\r\n")],
    "429 until a day gone by": [failed("429 Slow", head="retry-after: Wed, 21 Oct 2015 07:28:00 GMT\r\n")],
    "429 until nobody knows": [failed("429 Slow", head="retry-after: soon\r\n")],
    "429 for the quota": [failed("429 No", "You exceeded your current quota", code="insufficient_quota")],
    "429 by the minute": [failed("429 No", "quota exceeded: 3 requests per minute")],
    "500": [http(b"Internal Server Error", "500 Internal Server Error")],
    "500, then fine": [failed("500 Oh"), FINE],
    "500, half a body": [http(b'{"error": ', "500 Oh", length=100)],
    "501": [failed("501 Not Implemented")],
    "503 three times": [failed("503 Down", head="retry-after: 0\r\n")] * 3 + [FINE],
    "529": [failed("529 Overloaded", {"text": "not a text"})],
    "600": [failed("600 Odd")],
}  # fmt: skip
# Asked as eval asks a question.
QUESTIONS: Mapping[str, Replies] = {
    "fine": [FINE],
    "chunks": [CHUNKED],
    "until the end": [Sent(b"HTTP/1.1 200 OK\r\n\r\n" + BODY, "end")],
    "HTTP/1.0": [Sent(b"HTTP/1.0 200 OK\r\n\r\n" + BODY, "end")],
    "after 100": [Sent(b"HTTP/1.1 100 Continue\r\n\r\n" + FINE.data)],
    "201": [http(BODY, "201 Created")],
    "with a cookie": [http(BODY, head="set-cookie: a=b; Path=/\r\n")],
    "9 MiB": [http(b" " * (9 << 20))],
    "cut": [http(completion("好的", "length"))],
    "cut by another name": [http(completion("好的", "MAX_TOKENS"))],
    "an end by another name": [http(completion("好的", "eos_token"))],
    "an end in capitals": [http(completion("好的", "STOP"))],
    "aborted": [http(completion("好", "abort"))],
    "filtered": [http(completion("", "content_filter"))],
    "no reason": [http(completion("好的", None))],
    "a reason that is none": [http(completion("好的", ["stop"]))],
    "nothing said": [http(completion(""))],
    "null said": [http(completion(None))],
    "a number said": [http(completion(42))],
    "a picture": [http(completion([{"type": "image_url"}]))],
    "parts": [http(completion([{"type": "text", "text": "It "}, {"type": "text", "text": "is."}]))],
    "a tool call": [http(completion(None, "tool_calls", tool_calls=[{"id": "c", "type": "function",
        "function": {"name": "f", "arguments": "{}"}}]))],
    "a refusal": [message(content=None, refusal="I won't.")],
    "logprobs": [http({"choices": [{"message": {"content": "4"}, "finish_reason": "stop",
        "logprobs": {"content": [{"token": "4", "logprob": -0.1, "top_logprobs": []}]}}]})],
    "thinking": [message(content="4", reasoning_content="hm")],
    "thinking alone": [message(content="<think>hm")],
    "an end of thinking": [message(content="hm</think>4")],
    "thinking in parts": [message(content=[{"type": "thinking", "thinking": "hm"}])],
    "thinking in details": [message(content="4", reasoning_details=[{"text": "hm"}])],
    "thinking in an object": [message(content="4", reasoning={"text": "hm"})],
    "HTML": [message(content="<s>5</s>")],
    "a stop token alone": [message(content="<|im_end|>")],
    "an empty list said": [message(content=[])],
    "stop tokens": [message(content="4.<|im_end|>\n<|endoftext|>")],
    "250,000 characters": [message(content="x" * 250_000)],
    "half a character": [http(b'{"choices": [{"message": {"content": "\\ud800"}}]}')],
    "half a character thought": [
        http(b'{"choices": [{"message": {"content": "4", "reasoning": "\\ud800"}}]}')],
    "the key": [message(content=f"I saw {KEY}", reasoning=f"{KEY}!")],
    "counts that are none": [http({**completion("4"), "usage": [1]})],
    "no choices": [http({"choices": []})],
    "no list of choices": [http({"choices": "x"})],
    "no message": [http({"choices": [{"text": "4"}]})],
    "a message of null": [http({"choices": [{"message": None}]})],
    "an error": [http({"error": {"message": f"upstream has {KEY}", "code": 503}})],
    "an error without a code": [http({"error": "upstream failed"})],
    "an error beside an answer": [http({**completion("4"), "error": {"code": 500}})],
    "events": [events(piece("4"))],
    "another limit": [failed("400 No", OTHER_LIMIT), FINE],
    "a limit by another name alone": [failed("400 No", "'max_tokens' is not supported with this model")] * 2,
    "too many tokens": [failed("400 No", "'max_tokens' is too large: 9")],
    "tokens beyond the maximum": [failed("400 No", "Requested token count exceeds the model's maximum")],
    "a prompt beyond the context": [failed("400 No", "the prompt has 12 tokens; this model's context is 5")],
    "an unknown field": [failed("400 No", "unknown field 'tools'")],
    "an unrecognized field": [failed("400 No", "Unrecognized request argument supplied: seed")],
    "a field that isn't supported": [failed("400 No", "top_p is not supported by this model")],
    "a value that isn't supported": [failed("400 No", "Unsupported value: 'temperature' does not support 0")],
    "no role for a system": [failed("400 No", "no 'system' role")],
    "a quota by the second": [failed("429 No", "quota exceeded. Please retry in 34 s")],
}  # fmt: skip
LISTS: Mapping[str, Replies] = {
    "names": [http({"data": [{"id": "模型", "owned_by": "vllm"}, {"id": "b", "created": 1}]})],
    "a bare list": [http([{"id": "m"}])],
    "none": [http({"data": []})],
    "no ids": [http({"data": [{"name": "m"}]})],
    "texts": [http({"data": ["m"]})],
    "a number for an id": [http({"data": [{"id": 7}]})],
    "the key in a name": [http({"data": [{"id": f"m {KEY}"}]})],
    "half a character in a name": [http(b'{"data": [{"id": "\\ud800"}]}')],
    "9 MiB of names": [http(b" " * (9 << 20) + b'{"data": [{"id": "m"}]}')],
    "17 MiB of names": [http(b" " * (17 << 20) + b'{"data": [{"id": "m"}]}')],
}
STREAMS: Mapping[str, Replies] = {
    "pieces": [events(piece("It "), piece("is."), piece(None, "stop"), {"choices": None})],
    "parts": [events(piece([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}]))],
    "comments and spaces": [Sent(b"HTTP/1.1 200 OK\r\n\r\n: hello\r\n\r\nevent: x\r\ndata:{\"choices\":"
        b'[{"delta":{"content":"4"}}]}\r\n\r\ndata: [DONE]\r\n\r\nlater', "end")],
    "cut": [events(piece("4"), piece("", "length"))],
    "no end": [events(piece("4"), end=False)],
    "an error": [events(piece("4"), {"error": {"message": f"out of memory, {KEY}"}})],
    "not JSON": [events(piece("4"), "{")],
    "no object": [events("[1]")],
    "no choice": [events({"choices": [3]})],
    "a picture": [events(piece([{"type": "image_url"}]))],
    "another limit": [failed("400 No", OTHER_LIMIT), events(piece("4"))],
    "a hang": [events(piece("4"), end=False, then="hang")],
    "a document": [FINE],
}  # fmt: skip


class _Server:
    """Answers requests to /CASE/WAY/… by the case's replies, the last of them again and again."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.bodies: dict[str, list[Any]] = {}
        self._cases: dict[str, Replies] = {}
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def place(self, replies: Replies) -> str:
        """A path below which requests are answered by ``replies``."""
        path = f"/{len(self._cases)}"
        self._cases[path] = replies
        return path

    def close(self) -> None:
        self._stop.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader, suppress(OSError):
            while line := reader.readline():
                head = {}
                while (row := reader.readline()).strip():
                    name, _, value = row.partition(b":")
                    head[name.lower()] = value.strip()
                body = reader.read(int(head.get(b"content-length", b"0")))
                path = "/" + line.split()[1].decode().split("/")[1]
                replies = self._cases.get(path, [failed("404 Not Found")])
                sent = replies[min(self.asked[path], len(replies) - 1)]
                self.asked[path] += 1
                self.bodies.setdefault(path, []).append(json.loads(body) if body else None)
                connection.sendall(sent.data)  # OSError: the client has read enough
                if sent.then == "hang":
                    self._stop.wait(60)
                if sent.then != "keep":
                    return


@contextmanager
def serving() -> Iterator[_Server]:
    server = _Server()
    try:
        yield server
    finally:
        server.close()


QUESTION = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 7}


def _shown(value: Any) -> Any:
    """``value`` with long texts shortened."""
    if isinstance(value, dict):
        return {key: _shown(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, str) and len(value) > 2 * SHORTEST:
        return f"{value[:40]}… {len(value)} characters"
    return value


def _ask_eval(url: str) -> dict[str, Any]:
    """An answer and what the client counted and told."""
    told: list[str] = []

    async def ask() -> dict[str, Any]:
        options = {"api_key": KEY, "timeout": TIMEOUT, "attempts": 3, "backoff": 0.001}
        async with Client(f"{url}/v1", **options, on_wait=told.append) as client:
            answer = asdict(await client.chat(dict(QUESTION)))
            answer["seconds"] = answer["seconds"] is not None
            failed = answer["outcome"] == "http-error"
            return {
                "answer": {key: value for key, value in answer.items() if value not in ("", None)},
                **({"remedy": remedy(answer["status"], answer["detail"])} if failed else {}),
                "faults": dict(client.faults), "notes": [*client.notes], "told": told,
            }  # fmt: skip

    return asyncio.run(ask())


def _list_eval(url: str) -> Any:
    async def ask() -> list[Any]:
        async with Client(f"{url}/v1", api_key=KEY, timeout=TIMEOUT) as client:
            return await client.models()

    return asyncio.run(ask())


def _stream(url: str) -> dict[str, Any]:
    pieces: list[str] = []
    ends: list[str] = []
    found = {"pieces": pieces, "ends": ends}
    try:
        with_limit = OpenAIClient(url, KEY, TIMEOUT)
        for one in with_limit.chat("m", QUESTION["messages"], ends.append, max_tokens=7):
            pieces.append(one)
    except KtbridgeError as error:
        return {**found, **_problem(error)}
    return found


def _problem(error: KtbridgeError) -> dict[str, str]:
    return {"raised": type(error).__name__, "sentence": error.sentence, "next": error.next_step}


WAYS = {
    EVAL: _ask_eval,
    LISTED: _list_eval,
    ASKED: lambda url: OpenAIClient(url, KEY, TIMEOUT).ask("/completions", dict(QUESTION)),
    NAMES: lambda url: OpenAIClient(url, KEY, TIMEOUT).models(),
    STREAM: _stream,
}


def _outcome(server: _Server, way: str, replies: Replies, elsewhere: str = "") -> Any:
    """What one way of asking makes of the replies, and how many requests it took."""
    path = server.place(replies)
    url = elsewhere or server.url + path
    try:
        found = WAYS[way](url)
    except KtbridgeError as error:
        found = _problem(error)
    outcome: dict[str, Any] = {"found": _shown(found)}
    if server.asked[path] != 1 and not elsewhere:
        outcome["requests"] = server.asked[path]
    names = [name for body in server.bodies.get(path, ()) if body for name in body if "max" in name]
    if "max_completion_tokens" in names:
        outcome["limits"] = names
    text = json.dumps(outcome, ensure_ascii=True)
    text = text.replace(KEY, "$KEY").replace("\\ud800", "$HALF")
    text = text.replace(url, "$URL").replace(server.url, "$HOST")
    return json.loads(re.sub(r"_ssl\.c:\d+", "_ssl.c", text))


@contract
def clients(directory: Path) -> dict[str, str]:
    """Each reply, asked for in each way that it may come: a file a way, a line a reply."""
    tables = {
        EVAL: {**ANY, **QUESTIONS}, LISTED: {**ANY, **LISTS}, ASKED: ANY, NAMES: {**ANY, **LISTS},
        STREAM: {**ANY, **STREAMS},
    }  # fmt: skip
    lines: dict[str, list[Any]] = {}
    with serving() as server, socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        for way, cases in tables.items():
            lines[way] = [[name, _outcome(server, way, cases[name])] for name in cases]
            lines[way].append(["no server", _outcome(server, way, [], nobody)])
    return {
        f"{way}.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for way, rows in lines.items()
    }


# --- a run's ledger

FAULTS: list[Any] = [
    lambda nth: (500, {}, "oh") if nth == 1 else None,
    lambda nth: (429, {"retry-after": "0"}, {"error": {"message": "busy"}}) if nth < 3 else None,
    lambda nth: (400, {}, {"error": {"message": TOO_LONG}}),
    lambda nth: (200, {}, completion("cut o", "length")),
    lambda nth: (200, {}, completion("", reasoning_content="hm")),
    lambda nth: (200, {}, completion(None)),
    lambda nth: (200, {}, "<html>login</html>"),
    lambda nth: (200, {}, {"error": {"message": "upstream", "code": 503}}),
    lambda nth: (503, {}, {"error": {"message": "down"}}),
    lambda nth: (200, {"content-length": "999"}, '{"choices": '),
    lambda nth: (200, {}, completion("好的", "content_filter")),
    lambda nth: (422, {}, FASTAPI),
    lambda nth: (307, {"location": "/login"}, ""),
    lambda nth: (200, {}, completion([{"type": "text", "text": "好的喵"}])),
]


@contract
def ledgers(directory: Path) -> dict[str, str]:
    """The answers of a run whose server fails at some items in some way, and the run's counts."""
    server = MockServer()
    prompts: dict[str, int] = {}

    def behave(request: dict[str, Any], nth: int) -> Any:
        if not is_item(request):
            return None
        number = prompts.setdefault(prompt_of(request), len(prompts))
        fault = {2 * n + 3: fault for n, fault in enumerate(FAULTS)}.get(number)
        return fault(nth) if fault else None

    server.behave = behave
    try:
        done = run(server, directory / "run", concurrency=1, limit=40)
    finally:
        server.close()
    rows = [json.loads(line) for line in (directory / "run/answers.jsonl").open(encoding="utf-8")]
    for row in rows:
        row.pop("key")  # it covers the server's port
        row["seconds"] = row["seconds"] is not None
    counts = {"asked": done.asked, "outcomes": done.outcomes, "faults": done.faults,
              "problems": [[one.code, one.where, one.found] for one in done.problems]}  # fmt: skip
    text = json.dumps(counts, indent=1, ensure_ascii=False).replace(server.url, "$URL")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return {"answers.jsonl": lines, "counts.json": text + "\n"}
