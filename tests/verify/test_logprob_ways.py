"""Each engine's answers, in the shapes that its code gives them: the way that is taken, and what is refused.

llama-server's and llama-cpp-python's are as these (b1-0c1e570, 0.3.36) answered here; vLLM's follow 0.33.0's
entrypoints/openai/completion/serving.py, SGLang's srt/entrypoints of sglang-kt 0.7.2 and sglang 0.5.23, TGI's
router/src/lib.rs and the answers recorded in its integration-tests/models/__snapshots__.
Logprobs and next tokens are functions of all tokens before, so that one of another place is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mockserver import JsonServer
from tinyserver import ASCII, save_tokenizer

from ktbridge.adapter import read_adapter
from ktbridge.errors import KtbridgeError
from ktbridge.experts.load_model import load_tokenizer
from ktbridge.verify.logprobs import LogprobClient
from ktbridge.verify.protocols import TokenSpan
from ktbridge.verify.reference_model import ReferenceModel
from ktbridge.verify.run import verify
from ktbridge.verify.sampled import LENGTH, ContinuationSampler
from ktbridge.verify.verdict import Variant

PROMPTS = [[5, 40, 7], [90, 33, 12, 60], [17, 18, 19], [51, 52]]
REFUSED = {"error": {"message": "no such field"}}


def logprob(tokens: list[int], place: int) -> float:
    return -0.5 - sum((n + 1) * token for n, token in enumerate(tokens[: place + 1])) % 97 / 8


def continued(tokens: list[int], count: int) -> list[int]:
    found = list(tokens)
    for _ in range(count):
        found.append(8 + (sum(found) * 7 + len(found)) % 160)
    return found[len(tokens) :]


class Engine(JsonServer):
    """One engine's endpoints; ``shape`` makes the part of an answer that has logprobs."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__([{"id": "tiny", "object": "model"}])
        self.tokenizer = tokenizer

    def text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def answer(self, prompt: list[int], made: list[int], **choice: Any) -> Any:
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(made)}
        return 200, {}, {"choices": [{"index": 0, "text": "", **choice}], "usage": usage}

    def rows(self, prompt: list[int], made: list[int], *, ids: bool) -> list[dict[str, Any]]:
        whole = prompt + made
        return [
            ({"id": token} if ids else {})
            | {"token": self.text(token), "logprob": logprob(whole, n), "top_logprobs": []}
            for n, token in enumerate(whole)
            if n >= len(prompt)
        ]

    def ids(self, request: dict[str, Any]) -> list[int]:
        """The prompt of a request that gives ids, text or messages."""
        if "messages" in request:
            return self.tokenizer.apply_chat_template(
                request["messages"], add_generation_prompt=True, return_dict=False
            )
        prompt = request["prompt"]
        text = isinstance(prompt, str)
        return self.tokenizer.encode(prompt, add_special_tokens=False) if text else list(prompt)


class Vllm(Engine):
    def respond(self, request: dict[str, Any]) -> Any:
        prompt, made = request["prompt"], continued(request["prompt"], 1)
        if "prompt_logprobs" not in request:
            return Echo.respond(self, request)
        rows = [
            {str(t): {"logprob": logprob(prompt, n), "rank": 3, "decoded_token": self.text(t)}}
            for n, t in enumerate(prompt)
        ]
        return self.answer(prompt, made, logprobs=None, prompt_logprobs=[None, *rows[1:]])


class Echo(Engine):
    """vLLM without prompt_logprobs, our embedded engine, OpenAI's old completions."""

    def respond(self, request: dict[str, Any]) -> Any:
        if not request.get("echo"):
            return 400, {}, REFUSED
        prompt = request["prompt"]
        values = [None, *(logprob(prompt, n) for n in range(1, len(prompt)))]
        texts = [self.text(token) for token in prompt]
        return self.answer(prompt, [], logprobs={"tokens": texts, "token_logprobs": values})


class Sglang(Engine):
    """Upstream 0.5.23. ``kt``: sglang-kt 0.7.2."""

    kt = False

    def get(self, path: str) -> dict[str, Any]:
        known = {"/model_info": {"model_path": "m"}, "/server_info": {"tp_size": 1}}
        if self.kt:
            known["/server_info"]["kt_expert_lora_path"] = "experts"
        return known.get(path) or super().get(path)

    def respond(self, request: dict[str, Any]) -> Any:
        return self.echoed(request) if "prompt" in request else self.generated(request)

    def generated(self, request: dict[str, Any]) -> Any:
        prompt = request["input_ids"]
        rows = [[logprob(prompt, n) if n else None, t, None] for n, t in enumerate(prompt)]
        return 200, {}, {"text": "", "meta_info": {"input_token_logprobs": rows}}

    def echoed(self, request: dict[str, Any]) -> Any:
        """/v1/completions: logprobs of the prompt where ``logprobs`` is above 0."""
        prompt = request["prompt"]
        if "prompt_logprobs" in request:  # an unknown field is no error
            return self.answer(prompt, continued(prompt, 1), logprobs=None)
        asked = request["logprobs"] > 0
        if self.kt and not asked:
            return 500, {}, "Internal Server Error"  # KeyError: 'input_top_logprobs'
        rows = [None, *(logprob(prompt, n) for n in range(1, len(prompt)))] if asked else []
        texts = [self.text(token) for token in prompt[: len(rows)]]
        logprobs = {"tokens": texts, "token_logprobs": rows, "text_offset": [-1] * len(rows)}
        return self.answer(prompt, [], logprobs=logprobs)


class SglangKt(Sglang):
    kt = True


class LlamaServer(Engine):
    """Ignores echo and prompt_logprobs; ``logprobs`` is a list of objects, in completions too."""

    def prefixed(self, prompt: list[int]) -> list[int]:
        return prompt

    def respond(self, request: dict[str, Any]) -> Any:
        prompt = self.prefixed(self.ids(request))
        made = continued(prompt, max(1, request["max_tokens"]))
        content = {"content": self.rows(prompt, made, ids=True)}
        return self.answer(prompt, made, logprobs=content if request.get("logprobs") else None)


class LlamaCppPython(Engine):
    """Takes text alone: ids end in 500."""

    def respond(self, request: dict[str, Any]) -> Any:
        if not isinstance(request.get("prompt"), str):
            return (
                500,
                {},
                {"error": {"message": "5 validation errors:\n  {'type': 'string_type'}"}},
            )
        prompt = self.ids(request)
        made = continued(prompt, request["max_tokens"])
        rows = self.rows(prompt, made, ids=False)
        logprobs = {
            "tokens": [row["token"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [{row["token"]: row["logprob"]} for row in rows],
        }
        return self.answer(prompt, made, logprobs=logprobs)


class Tgi(Engine):
    """Its completions never have logprobs; chat has, without ids or bytes.

    TGI 3 as it starts: ``prefill`` is empty. Tokens beyond the prompt are not counted in ``usage``.
    """

    prefill = False

    def get(self, path: str) -> dict[str, Any]:
        return {"model_id": "tiny", "version": "3.3.6"} if path == "/info" else super().get(path)

    def respond(self, request: dict[str, Any]) -> Any:
        if "inputs" in request:
            return self.generated(request)
        if "messages" in request:
            prompt = self.ids(request)
            made = continued(prompt, request["max_tokens"])
            content = {"content": self.rows(prompt, made, ids=False)}
            return self.answer(prompt, made, message={}, logprobs=content)
        if not isinstance(request["prompt"], str):
            return 422, {}, "Failed to deserialize the JSON body into the target type"
        prompt = self.ids(request)
        return self.answer(prompt, continued(prompt, 1), logprobs=None)

    def generated(self, request: dict[str, Any]) -> Any:
        """/generate, as test_flash_llama.json was recorded; TGI puts the model's first token before."""
        prompt = [1, *self.tokenizer.encode(request["inputs"], add_special_tokens=False)]
        rows = [
            {"id": token, "logprob": logprob(prompt, n) if n else None, "text": self.text(token)}
            for n, token in enumerate(prompt)
        ]
        (made,) = continued(prompt, 1)
        token = {"id": made, "logprob": -1.5351562, "special": False, "text": self.text(made)}
        details = {
            "best_of_sequences": None, "finish_reason": "length", "generated_tokens": 1,
            "prefill": rows if self.prefill else [], "seed": None, "tokens": [token], "top_tokens": None,
        }  # fmt: skip
        return 200, {}, {"details": details, "generated_text": token["text"]}


class TgiWithPrefill(Tgi):
    """TGI 2, and TGI 3 started with --enable-prefill-logprobs."""

    prefill = True


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), ASCII)


@pytest.fixture
def start(tokenizer):
    """start(engine, way): a client that has chosen how to ask it, and the sampler."""
    servers = []

    def run(engine, way="auto", using=None):
        servers.append(engine(using or tokenizer))
        client = LogprobClient(servers[-1].url, timeout=10)
        sampler = ContinuationSampler(using or tokenizer, PROMPTS)
        client.choose("tiny", PROMPTS, sampler, way)
        return client, sampler

    yield run
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("engine", "way", "form"),
    [
        (Vllm, "prompt_logprobs", ""),
        (Echo, "echo", ""),
        (Sglang, "sglang", ""),
        (SglangKt, "sglang", ""),
        (TgiWithPrefill, "tgi", ""),
        (LlamaServer, "sampled", "ids"),
        (LlamaCppPython, "sampled", "text"),
        (Tgi, "sampled", "chat"),
    ],
)
def test_each_engine_is_asked_in_the_way_that_it_has(start, engine, way, form):
    client, sampler = start(engine)
    assert (client.way, sampler.form) == (way, form)
    answer = client.ask_all(["tiny"], repeat=2)["tiny"]
    assert answer.spread == 0.0
    place = 0
    for span in answer.spans:
        tokens = list(span.tokens)
        for n in range(span.start, len(tokens)):
            assert answer.logprobs[place] == pytest.approx(logprob(tokens, n))
            place += 1
    assert place == len(answer.logprobs)
    if way == "sampled":
        assert place == LENGTH * len(answer.spans)
        assert all(list(s.tokens[s.start :]) == continued(list(s.tokens[: s.start]), LENGTH)
                   for s in answer.spans)  # fmt: skip
    else:
        before = (1,) if way == "tgi" else ()
        assert answer.spans == tuple(TokenSpan((*before, *prompt), 1) for prompt in PROMPTS)


class ComputedSglang(Sglang):
    """Answers with an adapter's real logprobs; lists ``neko`` for requests to ``tiny:neko``.

    The bare name is the base, that of sglang-kt base + experts.
    """

    def __init__(self, base: Path, adapter: Path) -> None:
        super().__init__(load_tokenizer(base))
        self.base, self.adapter = base, read_adapter(adapter)
        self.listed = [
            {"id": "tiny", "owned_by": "sglang", "root": "tiny", "parent": None},
            {"id": "neko", "owned_by": "sglang", "root": str(adapter), "parent": "tiny"},
        ]

    def generated(self, request: dict[str, Any]) -> Any:
        prompt, whole = request["input_ids"], request.get("lora_path") == "neko"
        variant = Variant(int(whole or self.kt), int(whole))
        with self.lock:
            (found,) = ReferenceModel(self.base, self.adapter, [prompt]).logprobs([variant])
        rows = [[x, t, None] for x, t in zip([None, *found], prompt, strict=True)]
        return 200, {}, {"text": "", "meta_info": {"input_token_logprobs": rows}}


class ComputedSglangKt(ComputedSglang):
    kt = True


class Hidden(ComputedSglang):
    """Doesn't say which SGLang it is."""

    def get(self, path: str) -> dict[str, Any]:
        return "not here" if path.endswith("server_info") else super().get(path)


@pytest.mark.quick("-base|Hidden")
@pytest.mark.parametrize(
    ("engine", "bare"),
    [(ComputedSglang, "base"), (ComputedSglangKt, "expert"), (Hidden, "")],
)
def test_upstream_sglangs_bare_name_is_the_base(base, adapter, engine, bare):
    server = engine(base, adapter)
    result = verify(server.url, "tiny:neko", str(adapter), str(base))
    with pytest.raises(KtbridgeError, match="answers for 'neko' with its base") as caught:
        verify(server.url, "neko", str(adapter), str(base))
    server.close()
    assert (result.verdict, result.ok, result.problems) == ("applied", True, ())
    asked = [("tiny", bare)] if bare else []
    assert [(arm.model, arm.expected) for arm in result.arms] == [*asked, ("tiny:neko", "full")]
    assert "--model tiny:neko" in str(caught.value.next_step)


def changed(engine: type[Engine], change: Callable[[dict[str, Any]], object]) -> type[Engine]:
    """``engine`` whose good answers are changed in place by ``change(body)``."""

    class Changed(engine):  # type: ignore[valid-type, misc]
        def respond(self, request: dict[str, Any]) -> Any:
            status, headers, body = super().respond(request)
            if status == 200:
                change(body)
            return status, headers, body

    return Changed


def refusing(status: int, message: str) -> type[Engine]:
    """An engine that refuses everything."""

    class Refusing(Engine):
        def respond(self, request: dict[str, Any]) -> Any:
            return status, {}, {"error": {"message": message}}

    return Refusing


def with_rows(engine: type[Engine], change: Callable[..., list[Any]]) -> type[Engine]:
    """``engine`` with other rows of generated tokens: ``change(rows)``."""

    class Changed(engine):  # type: ignore[valid-type, misc]
        def rows(self, prompt: list[int], made: list[int], *, ids: bool) -> list[dict[str, Any]]:
            return change(super().rows(prompt, made, ids=ids))

    return Changed


class Shifted(Vllm):
    """Has the logprobs of other tokens than it was asked for."""

    def respond(self, request: dict[str, Any]) -> Any:
        return super().respond({**request, "prompt": [n + 1 for n in request["prompt"]]})


@pytest.mark.parametrize("engine", [Vllm, Sglang, SglangKt])
def test_a_way_can_be_insisted_on(start, engine):
    assert start(engine, "echo")[0].way == "echo"


@pytest.mark.parametrize(
    ("engine", "way", "said"),
    [
        (LlamaServer, "echo", r"no logprobs of tiny .*\(echo: no prompt logprobs\)"),
        (Echo, "sglang", "sglang: 400, no such field"),
        (Tgi, "tgi", r"tgi: no prompt logprobs.*--enable-prefill-logprobs"),
        (Shifted, "prompt_logprobs", "prompt_logprobs: not the logprobs of 3 tokens"),
        (refusing(401, "who are you?"), "auto", r"answered HTTP 401: who are you\?"),
        (refusing(404, "not here " * 100), "auto", r"(?s)^.{1,1200}$"),
        *((refusing(404, "not here " * 100), "auto", f"{way}: 404")
          for way in ("prompt_logprobs", "echo", "ids", "text", "chat")),
        (with_rows(LlamaCppPython, lambda rows: rows[2:]), "auto",
         "text: 0 tokens whose ids are known"),
    ],
)  # fmt: skip
def test_what_a_server_has_not_is_told_by_way(start, engine, way, said):
    with pytest.raises(KtbridgeError, match=said):
        start(engine, way)


def test_an_echo_may_end_with_what_was_generated(start):
    """``max_tokens: 0`` isn't every server's zero; how many they are stands in ``usage``."""

    def lengthen(body):
        body["choices"][0]["logprobs"]["token_logprobs"] += [-1.0]
        body["usage"]["completion_tokens"] = 1

    client, _ = start(changed(Echo, lengthen))
    answer = client.ask_all(["tiny"])["tiny"]
    assert answer.spans == tuple(TokenSpan(tuple(prompt), 1) for prompt in PROMPTS)
    assert -1.0 not in answer.logprobs


def with_prefill(change: Callable[[list[Any]], Any]) -> type[Engine]:
    def alter(body: dict[str, Any]) -> None:
        if "details" in body:
            body["details"]["prefill"] = change(body["details"]["prefill"])

    return changed(TgiWithPrefill, alter)


def with_echo(change: Callable[[list[Any]], Any]) -> type[Engine]:
    def alter(body: dict[str, Any]) -> None:
        logprobs = body["choices"][0]["logprobs"]
        logprobs["token_logprobs"] = change(logprobs["token_logprobs"])

    return changed(Echo, alter)


@pytest.mark.parametrize(
    ("way", "engine"),
    [
        ("tgi", with_prefill(lambda rows: rows[1:])),  # no null first
        ("tgi", with_prefill(lambda rows: [{**row, "id": 10**6} for row in rows])),
        ("tgi", with_prefill(lambda rows: [{**row, "id": None} for row in rows])),
        ("tgi", with_prefill(lambda rows: [*rows[:2], {**rows[2], "logprob": None}, *rows[3:]])),
        ("tgi", with_prefill(lambda rows: rows[:1])),
        ("tgi", with_prefill(lambda rows: "rows")),
        ("echo", with_echo(lambda values: values[1:])),
        ("echo", with_echo(lambda values: [*values, -1.0])),
        # No null first: as llama-cpp-python's echo has it, whose logprobs are another token's.
        ("echo", with_echo(lambda values: [*values[1:], -1.0])),
        ("echo", with_echo(lambda values: [None, *["-1.5"] * (len(values) - 1)])),
        ("echo", with_echo(lambda values: [None] * len(values))),
    ],
)
def test_logprobs_that_are_not_of_these_tokens_are_not_used(start, way, engine):
    with pytest.raises(KtbridgeError, match=f"{way}: "):
        start(engine, way)
    if way == "tgi":
        assert start(engine)[0].way == "sampled"


@pytest.mark.parametrize("always", [False, True])
def test_prompts_that_the_server_counts_otherwise_are_left_out(start, always):
    class Begins(LlamaServer):
        """Puts a token of its own before prompts of three, or all."""

        def prefixed(self, prompt):
            return [1, *prompt] if always or len(prompt) == 3 else prompt

    if always:
        with pytest.raises(KtbridgeError, match="4 of 4 prompts tokenized otherwise"):
            start(Begins)
        return
    client, sampler = start(Begins)
    assert (sampler.unlike, len(client.ask_all(["tiny"])["tiny"].spans)) == (2, 2)


def test_tokens_that_are_not_certain_end_a_continuation(start):
    """llama-server skips tokens that end inside a character, and gives the next id the text of all."""

    def join(rows):
        if len(rows) > 10:
            rows[10]["token"] = rows[9]["token"] + rows[10]["token"]
            del rows[9]
        return rows

    client, _ = start(with_rows(LlamaServer, join))
    assert {span.size for span in client.ask_all(["tiny"])["tiny"].spans} == {9}


def test_rounds_that_part_count_up_to_where_they_do(start):
    class Wavering(LlamaServer):
        def respond(self, request):
            self.seen[str(request["prompt"])] += 1
            status, headers, body = super().respond(request)
            logprobs = body["choices"][0]["logprobs"]
            if logprobs and self.seen[str(request["prompt"])] > 4:
                row = logprobs["content"][12]
                row["id"] = 8 if row["id"] != 8 else 9
                row["token"] = self.text(row["id"])
            return status, headers, body

    client, _ = start(Wavering)
    answer = client.ask_all(["tiny"], repeat=4)["tiny"]
    assert {span.size for span in answer.spans} == {12}


def test_a_token_that_begins_texts_is_counted_in(start, tmp_path):
    """llama.cpp puts BOS before a text, where the GGUF says so, and not before ids."""
    tokenizer = save_tokenizer(tmp_path, ASCII)
    tokenizer.bos_token = "<|endoftext|>"

    class Begins(LlamaCppPython):
        def ids(self, request):
            return [tokenizer.bos_token_id, *super().ids(request)]

    client, sampler = start(Begins, using=tokenizer)
    assert (sampler.form, sampler.unlike) == ("text", 0)
    for span in client.ask_all(["tiny"])["tiny"].spans:
        assert span.tokens[0] == tokenizer.bos_token_id


def test_an_arm_with_too_few_tokens_is_not_judged(start):
    class Terse(LlamaServer):
        def rows(self, prompt, made, *, ids):
            return super().rows(prompt, made, ids=ids)[: 3 if self.terse else None]

        def respond(self, request):
            self.terse = request["model"] != "tiny"
            return super().respond(request)

    client, _ = start(Terse)
    with pytest.raises(KtbridgeError, match="12 tokens that tiny:base sampled are known, of 32"):
        client.ask_all(["tiny", "tiny:base"])
