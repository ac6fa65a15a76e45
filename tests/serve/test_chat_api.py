"""The chat endpoint through the real openai client."""

from __future__ import annotations

import http.client
import json
import urllib.request

import openai
import pytest

ASK = [{"role": "user", "content": "How are you today?"}]
ARMS = ("tiny", "tiny:neko", "tiny:base")


def ask(client: openai.OpenAI, model: str = "tiny:neko", **options: object):
    options = {"temperature": 0, "max_tokens": 24} | options
    return client.chat.completions.create(model=model, messages=ASK, **options)


def streamed(client: openai.OpenAI, **options: object):
    return list(ask(client, stream=True, **options))


def said(client: openai.OpenAI, stream: bool, **options: object) -> tuple[list, object]:
    """(text, logprobs, finish reason) of each choice, whole or put together from a stream; the usage."""
    if not stream:
        whole = ask(client, **options)
        return [
            (c.message.content, c.logprobs.content if c.logprobs else [], c.finish_reason)
            for c in whole.choices
        ], whole.usage
    *chunks, last = streamed(client, stream_options={"include_usage": True}, **options)
    assert last.choices == []
    found: dict[int, tuple] = {}
    for (choice,) in (chunk.choices for chunk in chunks):
        text, entries, reason = found.get(choice.index, ("", [], None))
        assert reason is None  # nothing comes after the end
        entries = entries + (choice.logprobs.content if choice.logprobs else [])
        found[choice.index] = (text + (choice.delta.content or ""), entries, choice.finish_reason)
    return [found[index] for index in sorted(found)], last.usage


def test_models_are_the_arms(client):
    assert [model.id for model in client.models.list()] == list(ARMS)
    assert client.models.retrieve("tiny:neko").id == "tiny:neko"
    parents = {model.id: model.to_dict()["parent"] for model in client.models.list()}
    assert parents == {"tiny": "tiny:base", "tiny:neko": "tiny:base", "tiny:base": None}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tiny:other")


def test_arms_answer_differently_and_repeatably(client):
    answers = {arm: ask(client, arm).choices[0].message.content for arm in ARMS}
    assert len(set(answers.values())) == 3
    # Switching there and back leaves no trace.
    assert {arm: ask(client, arm).choices[0].message.content for arm in ARMS} == answers


def test_stream_says_what_the_whole_says(client):
    whole = said(client, False)
    assert said(client, True) == whole
    assert (whole[0][0][2], whole[1].completion_tokens) == ("length", 24)
    chunks = streamed(client)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


def test_seed_and_temperature(client):
    def sample(**options: object) -> str:
        return ask(client, temperature=1.0, **options).choices[0].message.content

    assert sample(seed=1) == sample(seed=1)
    assert len({sample(seed=seed) for seed in range(4)}) > 1
    # A nucleus of next to nothing leaves the likeliest token only.
    assert sample(top_p=1e-6) == ask(client).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(client, stream):
    text = ask(client).choices[0].message.content
    ((got, _, reason),), _ = said(client, stream, stop=[text[7:10], "never said"])
    assert (got, reason) == (text[: text.index(text[7:10])], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_spell_the_text(client, stream):
    ((text, entries, _),), _ = said(client, stream, logprobs=True, top_logprobs=3)
    assert len(entries) == 24
    spelled = b"".join(bytes(e.bytes) for e in entries).decode(errors="replace")
    assert spelled.rstrip("\ufffd") == text
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        # Greedy: the chosen token is the likeliest.
        assert entry.logprob == values[0] <= 0


def test_several_choices(client):
    """Each is what its seed draws, whether they are streamed or not; usage counts them all."""
    options = {"temperature": 1.0, "seed": 8, "max_tokens": 12}
    whole, usage = said(client, False, n=3, **options)
    assert len({text for text, _, _ in whole}) == 3
    assert usage.completion_tokens == 36
    assert usage.prompt_tokens == ask(client).usage.prompt_tokens
    assert said(client, True, n=3, **options) == (whole, usage)
    assert said(client, False, **options)[0] == whole[:1]


def test_template_variables_and_its_refusals(client):
    plain = ask(client).usage.prompt_tokens
    extra = {"chat_template_kwargs": {"mood": "cheerful"}}
    assert ask(client, extra_body=extra).usage.prompt_tokens > plain
    late = [*ASK, {"role": "system", "content": "late"}]
    with pytest.raises(openai.BadRequestError, match="system message comes first"):
        client.chat.completions.create(model="tiny", messages=late)
    with pytest.raises(openai.BadRequestError, match="chat_template"):
        ask(client, extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})


def test_content_parts_and_developer_role(client):
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    same = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    answers = [
        client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_completion_tokens=8
        )
        for messages in (plain, same)
    ]
    assert answers[0].usage == answers[1].usage
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


@pytest.mark.parametrize("name", ["tiny:", "tiny:Neko", "neko", "base", "TINY", "other:neko", ""])
def test_wrong_names_are_404_and_list_the_right_ones(client, name):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, name)
    assert caught.value.code == "model_not_found"
    assert all(repr(arm) in str(caught.value) for arm in ARMS)


GOOD = {"model": "tiny", "messages": ASK, "max_tokens": 1}
BAD = {
    "n": ({"n": 0}, "n", "greater than or equal to 1"),
    "too many choices": ({"n": 9}, "n", "at most 8"),
    "unknown field": ({"temprature": 1}, "temprature", "unknown field"),
    "tools": ({"tools": [{"type": "function"}]}, "tools", "tools are not supported"),
    "penalty": ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    "temperature": ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    "not finite": ({"temperature": float("nan")}, "temperature", "finite"),
    "top_p": ({"top_p": 0}, "top_p", "greater than 0"),
    "wrong type": ({"max_tokens": "7"}, "max_tokens", "integer"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "too many tokens": ({"max_tokens": 5000}, "max_tokens", "context is 512"),
    "seed": ({"seed": 2**64}, "seed", "less than"),
    "empty stop": ({"stop": [""]}, "stop.0", "at least 1 character"),
    "top_logprobs alone": ({"top_logprobs": 2}, None, "needs logprobs"),
    "stream options alone": ({"stream_options": {"include_usage": True}}, None, "needs stream"),
    "no messages": ({"messages": []}, "messages", "at least 1 item"),
    "role": ({"messages": [{"role": "cat", "content": "x"}]}, "messages.0.role", "Input should be"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "hex escape"),
    "long prompt": ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "512"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages.0.content",
        "image_url: this server reads text alone",
    ),
}


def post(server, path: str, data: bytes, content_type: str = "application/json"):
    request = urllib.request.Request(
        server.url + path, data, {"Content-Type": content_type, "Authorization": "Bearer x"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("case", BAD)
def test_bad_fields_are_named(server, case):
    change, param, words = BAD[case]
    status, body = post(server, "/chat/completions", json.dumps(GOOD | change).encode())
    error = body["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "data", "status", "words"),
    [
        ("/chat/completions", b"{", 400, "not JSON"),
        ("/chat/completions", b"", 400, "not JSON"),
        ("/chat/completions", b"[1]", 400, "object"),
        ("/chat/completions", b"\xff\xfe", 400, "body"),
        ("/chat/completions", b"[" * 100_000, 400, "body"),
        ("/chat/completions", b" " * (4 * 1024 * 1024 + 1), 413, "larger than"),
        ("/models", b"{}", 405, "Not Allowed"),
        ("/embeddings", b"{}", 404, "/v1/embeddings"),
    ],
)
def test_broken_requests_have_the_shape_of_errors(server, path, data, status, words):
    got, body = post(server, path, data)
    assert got == status
    assert words in body["error"]["message"]
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_a_body_of_unknown_length_is_limited_too(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    pieces = (b" " * 2**20 for _ in range(5))
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", pieces, headers, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413
    assert "larger than" in json.load(response)["error"]["message"]
    connection.close()


def test_nulls_mean_not_given(server):
    nulls = {"stop": None, "seed": None, "n": None, "tools": None, "stream_options": None}
    status, body = post(server, "/chat/completions", json.dumps(GOOD | nulls).encode())
    assert (status, body["object"]) == (200, "chat.completion")
