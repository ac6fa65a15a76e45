"""One verification from end to end: arms to query, their logprobs, references, verdict, explanation.

Logprobs come over an OpenAI-compatible API or SGLang's own: ``ktbridge.verify.logprobs`` has the ways.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.adapter import Adapter, open_adapter
from ktbridge.adapter.checks.files import require_hashes
from ktbridge.adapter.lora_config import half_numbers
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.model import read_model_config, resolve_model
from ktbridge.server_api.served_names import (
    ModelEntry,
    bare_adapter,
    base_name,
    engine_of,
    listed_as,
    read_models,
    split_name,
)
from ktbridge.verify.hypotheses import AdapterFacts, explain
from ktbridge.verify.logprobs import SAMPLED, WAYS, LogprobClient, ServedLogprobs
from ktbridge.verify.protocols import TokenSpan
from ktbridge.verify.sampled import FORMS, ContinuationSampler
from ktbridge.verify.verdict import References, Variant, Verification, judge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ktbridge.verify.reference_model import ReferenceModel

# Ordinary sentences beside random tokens: an adapter may affect one and hardly the other.
TEXTS = (
    "The old bridge was closed for repairs, so we walked along the river until it grew dark.",
    "请用一句话介绍一下你自己，然后告诉我今天适合做什么。",
    "Question: how many legs does a spider have?\nAnswer: a spider has eight legs.",
    "小明把书放进书包，锁好门，慢慢地走回了家。",
)
SEED = 20_260
LENGTH = 32


def arms_to_ask(model: str, listed: Sequence[str], expert_model: str | None = None) -> dict[str, str]:
    """Served names to measure -> expected reference: base, expert or full.

    ``model`` is measured as full. For ``S:NAME`` its neighbors ``S:base`` and ``S`` are measured where
    the server lists them. A name that isn't listed is refused: some engines answer it with the base.
    """
    served, adapter = split_name(model)
    known = set(listed)
    if listed_as(model, known) is None:
        raise _not_listed(model, known, "--model")
    if expert_model is not None and expert_model not in known:
        raise _not_listed(expert_model, known, "--expert-model")
    arms = {}
    if adapter is not None:
        if base_name(served) in known:
            arms[base_name(served)] = "base"
        if served in known and expert_model is None:
            arms[served] = "expert"
    if expert_model is not None:
        arms[expert_model] = "expert"
    arms[model] = "full"
    return arms


def _not_listed(model: str, known: set[str], option: str) -> KtbridgeError:
    return KtbridgeError(
        f"the server does not list {model!r}; it lists {', '.join(sorted(known)) or 'nothing'}.",
        f"choose {option} from these" if known else "check --server and the server's log",
    )


def verify(
    base_url: str,
    model: str,
    adapter: str | Adapter,
    base_model: str,
    *,
    expert_model: str | None = None,
    api_key: str | None = None,
    repeat: int = 1,
    logprobs_from: str = "auto",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Verification:
    """Measure the server at ``base_url`` (http://HOST:PORT) against references computed here.

    ``model`` is the served name to judge, ``expert_model`` one that should have the expert LoRA alone;
    ``adapter`` is one of any format, opened or as a path, ``base_model`` a checkpoint's directory. ``repeat``
    asks the server several times; differences between identical requests count as noise.
    ``logprobs_from``: one of ``logprobs.WAYS``, or "auto" for the first that the server has; sampled tokens
    are only ``ok`` by name. ``on_progress(done, total)`` counts decoder layers of a stage that ``on_stage``
    names.

    Raises KtbridgeError when the server cannot be measured or the references not be computed;
    a Verification is only ever made of numbers from both.
    """
    base = Path(resolve_model(base_model))
    if not isinstance(adapter, Adapter):
        adapter = open_adapter(adapter, base_model=base)
    require_hashes(adapter.path)
    halves = find_halves(adapter)
    server = LogprobClient(base_url, api_key)
    entries = server.entries()
    arms = _arms(server, entries, model, expert_model)

    from ktbridge.experts.load_model import load_tokenizer
    from ktbridge.verify.reference_model import ReferenceModel, compute_references

    tokenizer = load_tokenizer(base)
    prompts = fixed_prompts(tokenizer, read_model_config(base).vocab_size)
    sampler = ContinuationSampler(tokenizer, prompts)
    server.choose(model, prompts, sampler, logprobs_from)
    asked = server.ask_all(arms, repeat, needed=(model, expert_model))
    spans = list(dict.fromkeys(span for answer in asked.values() for span in answer.spans))
    reference_model = ReferenceModel(
        base, adapter, [span.tokens for span in spans], [span.start for span in spans]
    )
    on_stage("computing references")
    (computed,) = compute_references(reference_model, [halves], on_progress)
    means = name_references(*halves)
    served = {name: (means[arms[name]], answer) for name, answer in asked.items()}
    result = judge_answers(model, served, spans, computed)
    if result.in_doubt:
        on_stage("trying explanations")
        result = explain_answer(result, asked[model], spans, computed, adapter, reference_model, on_progress)
    result = replace(result, problems=(*_other_name(model, entries, halves), *result.problems))
    return _with_source(result, server.way, sampler, accepted=logprobs_from == SAMPLED)


def _other_name(model: str, entries: Mapping[str, ModelEntry], halves: tuple[bool, bool]) -> list[Problem]:
    """KTV012 where the server says that ``model`` isn't all of an adapter with such ``halves``."""
    models = read_models(entries)
    named = models.get(model)
    if named is None or not named.says or named.variant not in ("base", "expert"):
        return []
    if named.variant == "expert" and not halves[1]:
        return []
    whole = [one.name for one in models.values() if one.variant == "full"]
    expected = f"all of the adapter: {' or '.join(whole)}" if whole else "all of the adapter"
    return [problem("KTV012", model, f"its server says {named.says!r} of it", expected)]


def _arms(
    server: LogprobClient, entries: Mapping[str, ModelEntry], model: str, expert_model: str | None
) -> dict[str, str]:
    engine = engine_of(entries)
    arms = arms_to_ask(model, list(entries), expert_model)
    parent = entries.get(model, {}).get("parent")
    if isinstance(parent, str) and parent in entries:
        if engine == "vllm":  # whose base has no LoRA
            return {parent: "base", **arms}
        if engine == "sglang":
            raise bare_adapter(model, read_models(entries), "--model")
    served, _ = split_name(model)
    if served == model or arms.get(served) != "expert" or engine != "sglang" or expert_model:
        return arms
    # SGLang-KT's bare name may have the experts' LoRA, upstream's has none.
    applied = server.applied_adapter(engine)
    others = {name: expected for name, expected in arms.items() if name != served}
    return arms if applied else {**({served: "base"} if applied is not None else {}), **others}


def find_halves(adapter: Adapter) -> tuple[bool, bool]:
    """Return whether the adapter has an expert and a non-expert half."""
    halves = (bool(adapter.expert_layers()), bool(adapter.nonexpert_keys()))
    if not any(halves):
        raise KtbridgeError(
            f"the adapter in {adapter.path} has no LoRA tensor.", "check it with `ktbridge validate`"
        )
    return halves


def name_references(expert: bool, nonexpert: bool) -> dict[str, str]:
    """Arm -> reference: an adapter with one half has fewer than the names suggest."""
    return {
        "base": "base",
        "expert": "expert" if expert else "base",
        "full": "full" if expert and nonexpert else "expert" if expert else "nonexpert",
    }


def find_places(spans: Sequence[TokenSpan], of: Sequence[TokenSpan]) -> list[int]:
    """Return where the tokens of the spans ``of`` are among those of all ``spans``."""
    starts, count = {}, 0
    for span in spans:
        starts[span] = count
        count += span.size
    return [starts[span] + n for span in of for n in range(span.size)]


def judge_answers(
    model: str,
    served: Mapping[str, tuple[str, ServedLogprobs]],
    spans: Sequence[TokenSpan],
    computed: References,
) -> Verification:
    """Judge ``model`` and the other arms, each on the tokens that it was measured on.

    ``served``: model name -> (reference it should equal, answer); ``computed``: references on all ``spans``.
    """
    own = {name: computed.at(find_places(spans, answer.spans)) for name, (_, answer) in served.items()}
    return judge(
        model,
        {name: (expected, answer.logprobs) for name, (expected, answer) in served.items()},
        own[model],
        {name: answer.spread for name, (_, answer) in served.items() if answer.spread is not None},
        own,
    )


def explain_answer(
    result: Verification,
    answer: ServedLogprobs,
    spans: Sequence[TokenSpan],
    computed: References,
    adapter: Adapter,
    model: ReferenceModel,
    on_progress: Callable[[int, int], None],
    number: int = 0,
) -> Verification:
    """``result``, with the explanation that fits ``answer``, if one does.

    ``number`` is the adapter's in ``model``, ``computed`` are its references on all ``spans``.
    """
    places = find_places(spans, answer.spans)

    def compute(variants: Sequence[Variant]) -> list[list[float]]:
        mine = [replace(variant, adapter=number) for variant in variants]
        vectors = model.logprobs(mine, on_progress=on_progress)
        return [[vector[n] for n in places] for vector in vectors]

    return explain(result, answer.logprobs, computed.at(places), adapter_facts(adapter), compute)


def _with_source(
    result: Verification, way: str, sampler: ContinuationSampler, accepted: bool
) -> Verification:
    """Return how the logprobs were got, and KTV010 and KTV011 for what sampled ones don't tell."""
    asked = describe_way(way, sampler)
    if way != SAMPLED:
        return replace(result, logprobs_from=way, asked=asked)
    told, *others = sampled_problems(result.model, result.positions, sampler, accepted)
    reason = f"{result.reason}; on {result.positions} tokens that the server chose"
    problems = (told, *result.problems, *others)
    return replace(result, reason=reason, logprobs_from=way, asked=asked, problems=problems)


def describe_way(way: str, sampler: ContinuationSampler) -> str:
    """Describe how logprobs were asked for."""
    return f"{WAYS[way]}, by {FORMS[sampler.form]}" if way == SAMPLED else WAYS[way]


def sampled_problems(
    where: str, positions: int, sampler: ContinuationSampler, accepted: bool
) -> Iterator[Problem]:
    """KTV010, and KTV011 if need be, of a check on ``positions`` sampled tokens; ``accepted``: by users."""
    found = f"logprobs of {positions} tokens of its own choosing, and of no fixed ones"
    told = problem("KTV010", where, found)
    if accepted:
        told = replace(told, severity="warning", next_step="nothing: it was asked for")
    yield told
    if sampler.unlike:
        left_out = f"{sampler.unlike} prompts of {len(sampler.prompts)} have another number of tokens there"
        yield problem("KTV011", where, left_out)


def adapter_facts(adapter: Adapter) -> AdapterFacts:
    """Ranks and layers of the halves of ``adapter``."""
    layers = {
        "expert": adapter.expert_layers(),
        "nonexpert": tuple(sorted({part.key.layer for part in adapter.nonexpert.values()})),
    }
    return AdapterFacts(
        {half: half_numbers(adapter, half).rank for half, found in layers.items() if found},
        {half: found for half, found in layers.items() if found},
    )


def fixed_prompts(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[list[int]]:
    """The token sequences that are measured: the same ones for every server of one model.

    Four sequences of ``LENGTH`` ordinary token ids, and a few tokenized texts.
    """
    special = set(tokenizer.all_special_ids)
    size = min(vocab_size, len(tokenizer))
    ordinary = [token for token in range(size) if token not in special]
    if not ordinary:
        raise KtbridgeError(
            "the base model's tokenizer has no ordinary token below config.json's vocab_size",
            "download both again",
        )
    draw = random.Random(SEED)
    prompts = [draw.choices(ordinary, k=LENGTH) for _ in range(4)]
    prompts += [tokenizer.encode(text, add_special_tokens=False)[: 2 * LENGTH] for text in TEXTS]
    return [prompt for prompt in prompts if len(prompt) > 1]
