"""Verify several adapters of one server and its base: who answers under which name, and does it stay so?

The server is asked first, in the stages of ``ktbridge.verify.matrix``: the base, each name, all of them at
once (their prompts, then tokens that they generate), the base again; with ``reload`` the adapters exchange
their names and come back. References of the base and of all adapters are then computed together, by one
reading of the base model for all that fits into ``TOKENS_OF_ALL``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktbridge.adapter import Adapter
from ktbridge.adapter.checks.files import require_hashes
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.model import read_model_config, resolve_model
from ktbridge.server_api.served_names import (
    BASE,
    ModelEntry,
    ServedModel,
    engine_of,
    find_served_model,
    read_models,
    split_name,
)
from ktbridge.verify.logprobs import SAMPLED, LogprobClient
from ktbridge.verify.matrix import (
    AFTER,
    BEFORE,
    GENERATING,
    ONE_BY_ONE,
    RELOADED,
    RESTORED,
    TOGETHER,
    UNLOADED,
    Reading,
    SeveralVerification,
    StageAnswer,
    find_problems,
    judge_names,
    make_rows,
)
from ktbridge.verify.protocols import Unusable
from ktbridge.verify.reload import AdapterLoader
from ktbridge.verify.run import (
    describe_way,
    explain_answer,
    find_halves,
    find_places,
    fixed_prompts,
    judge_answers,
    name_references,
    sampled_problems,
)
from ktbridge.verify.sampled import ContinuationSampler
from ktbridge.verify.verdict import References

TOKENS_OF_ALL = 16_384  # of all variants, in one pass over the checkpoint: some GB of activations
GENERATED_FROM = 2  # every so many-th prompt is continued as well


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter, the NAME that a user gave it, and the served ``model`` that requests must use."""

    name: str
    model: str
    adapter: Adapter
    halves: tuple[bool, bool]


def verify_several(
    server: LogprobClient,
    adapters: Mapping[str, Adapter],
    base_model: str,
    *,
    reload: bool = False,
    repeat: int = 1,
    logprobs_from: str = "auto",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> SeveralVerification:
    """Measure ``server`` against references of the base and of all ``adapters``.

    ``adapters``: served name -> adapter; the NAME of S:NAME will do. ``reload`` exchanges the adapters under
    their names and puts them back, through the API that vLLM and SGLang have: never while others use the
    server. The rest is as of ``ktbridge.verify.run.verify``.

    Raises KtbridgeError when the server cannot be measured or the references not be computed.
    """
    base = Path(resolve_model(base_model))
    require_hashes(*(adapter.path for adapter in adapters.values()))
    halves = {name: find_halves(adapter) for name, adapter in adapters.items()}
    entries = server.entries()
    models = read_models(entries, server.applied_adapter(engine_of(entries)) or "")
    found = find_names(adapters, entries, models)
    served = [ServedAdapter(n, m, adapters[n], halves[n]) for n, m in found.items()]
    base_name = find_base(list(found.values()), models)
    loader = AdapterLoader(server, entries, list(found.values())) if reload else None

    from ktbridge.experts.load_model import load_tokenizer
    from ktbridge.verify.reference_model import ReferenceModel, compute_references

    tokenizer = load_tokenizer(base)
    prompts = fixed_prompts(tokenizer, read_model_config(base).vocab_size)
    sampler = ContinuationSampler(tokenizer, prompts)
    first = base_name or served[0].model
    server.choose(first, prompts, sampler, logprobs_from)
    generator, silent = None, ""
    if server.way != SAMPLED:
        generator = ContinuationSampler(tokenizer, prompts[::GENERATED_FROM])
        try:
            generator.choose(server, first)
        except Unusable as unusable:
            generator, silent = None, unusable.what
    asked = list(_ask(_Server(server, generator, repeat, on_stage), served, base_name, loader))

    spans = list(dict.fromkeys(span for one in asked for span in one.answer.spans))
    reference_model = ReferenceModel(
        base,
        [one.adapter for one in served],
        [span.tokens for span in spans],
        [span.start for span in spans],
        TOKENS_OF_ALL,
    )
    on_stage("computing references")
    computed = compute_references(reference_model, [one.halves for one in served], on_progress)
    spread = max((one.answer.spread for one in asked if one.answer.spread is not None), default=None)
    columns = _columns(served, computed)
    readings = [
        Reading(one, columns.at(find_places(spans, one.answer.spans)).with_floor(spread or 0.0))
        for one in asked
    ]
    rows = make_rows(readings)
    alone = {row.expected: row.answers_as for row in rows if row.stage == ONE_BY_ONE}
    answers = {one.model: one.answer for one in asked if one.stage == ONE_BY_ONE}
    before = {one.model: (BASE, one.answer) for one in asked if one.stage == BEFORE}
    verifications = {}
    for number, one in enumerate(served):  # against its own adapter alone, as ``verify`` does it
        answer, own = answers[one.model], computed[number]
        arms = {**before, one.model: (name_references(*one.halves)["full"], answer)}
        result = judge_answers(one.model, arms, spans, own)
        # Another column's answer stays one, whatever explains it.
        if alone[one.name] in (None, one.name) and result.in_doubt:
            on_stage("trying explanations")
            result = explain_answer(
                result, answer, spans, own, one.adapter, reference_model, on_progress, number
            )
        verifications[one.name] = result
    paths = {one.name: str(one.adapter.path) for one in served}
    names = tuple(judge_names(verifications, rows, paths))
    fixed = next(reading for reading in readings if reading.asked.stage == ONE_BY_ONE)
    positions = len(fixed.asked.answer.logprobs)
    problems = list(find_problems(names, rows, readings, base_name))
    if server.way == SAMPLED:
        accepted = logprobs_from == SAMPLED
        problems[:0] = sampled_problems(server.url, positions, sampler, accepted)
    elif generator is None:
        problems.append(problem("KTV027", server.url, silent))
    return SeveralVerification(
        base=base_name,
        names=names,
        columns=tuple(columns.logprobs),
        rows=rows,
        noise=dict(fixed.references.noise),
        spread=spread,
        positions=positions,
        problems=tuple(problems),
        reloaded=reload,
        logprobs_from=server.way,
        asked=describe_way(server.way, sampler),
    )


def find_names(
    adapters: Mapping[str, object], entries: Mapping[str, ModelEntry], models: Mapping[str, ServedModel]
) -> dict[str, str]:
    """The served name of each NAME: itself, or the only S:NAME that the server offers.

    Raises UsageError for a NAME that no column can have and for two of one served name, and KtbridgeError
    for those that the server doesn't list.
    """
    found: dict[str, str] = {}
    missing = []
    for name in adapters:
        if name == BASE:
            raise UsageError("an adapter can't be named 'base' here: that is the base's column.")
        whole = [one for one in models if split_name(one)[1] == name]
        if name in models or (find_served_model(name, entries, models) is not None and ":" in name):
            found[name] = name
        elif len(whole) == 1:
            found[name] = whole[0]
        else:
            missing.append(name)
    if missing:
        listed = ", ".join(sorted(models)) or "nothing"
        raise KtbridgeError(
            f"the server does not list {', '.join(map(repr, missing))}; it lists {listed}.",
            "choose each NAME of --adapter NAME=DIR from these",
        )
    twice = [model for model in found.values() if list(found.values()).count(model) > 1]
    if twice:
        raise UsageError(f"two names are the same served model, {twice[0]}.", "give it once")
    return found


def find_base(names: Sequence[str], models: Mapping[str, ServedModel]) -> str | None:
    """The served name of the base that the models ``names`` are of; None if the server offers none."""
    said = {models[name].base for name in names if name in models}
    if len(said) == 1 and (only := next(iter(said))) is not None:
        return only
    bases = [one.name for one in models.values() if one.variant == BASE]
    return bases[0] if len(bases) == 1 else None


@dataclass
class _Server:
    """Access to the server, and the ways of asking it."""

    client: LogprobClient
    generator: ContinuationSampler | None
    repeat: int
    on_stage: Callable[[str], None]

    def ask(self, stage: str, expected: Mapping[str, str]) -> Iterator[StageAnswer]:
        """Ask one model after the other. ``expected``: model -> column."""
        answers = self.client.ask_all(expected, self.repeat, needed=expected.keys())
        for model, answer in answers.items():
            yield StageAnswer(stage, model, expected[model], answer)

    def ask_together(self, stage: str, expected: Mapping[str, str]) -> Iterator[StageAnswer]:
        """Ask all models at once."""
        for model, answer in self.client.ask_together(list(expected)).items():
            yield StageAnswer(stage, model, expected[model], answer)

    def generate(self, stage: str, expected: Mapping[str, str]) -> Iterator[StageAnswer]:
        """Have all models continue prompts at once, if logprobs of that are given."""
        if self.generator is None:
            return
        for model, answer in self.client.ask_together(list(expected), self.generator).items():
            if answer.logprobs:
                yield StageAnswer(stage, model, expected[model], answer, generated=True)


def _ask(
    server: _Server, served: Sequence[ServedAdapter], base: str | None, loader: AdapterLoader | None
) -> Iterator[StageAnswer]:
    """Ask the server in all stages, one after the other."""
    server.on_stage("asking the server")
    of_base = {base: BASE} if base is not None else {}
    own = {one.model: one.name for one in served}
    if base is not None and not server.client.ask_all([base]):  # listed, and refused
        base, of_base = None, {}
    yield from server.ask(BEFORE, of_base)
    yield from server.ask(ONE_BY_ONE, own)
    yield from server.ask_together(TOGETHER, of_base | own)
    yield from server.generate(GENERATING, of_base | own)
    yield from server.ask(AFTER, of_base)
    if loader is None:
        return
    server.on_stage("loading adapters anew")
    turned = {one.model: served[(n + 1) % len(served)] for n, one in enumerate(served)}
    with loader.restoring():
        for model in own:
            loader.unload(model)
        yield from server.ask(UNLOADED, of_base)
        for model, other in turned.items():
            loader.load(model, loader.roots[other.model])
        yield from _after_loading(server, RELOADED, {m: one.name for m, one in turned.items()})
        for model in own:
            loader.unload(model)
        for model in own:
            loader.load(model, loader.roots[model])
    yield from _after_loading(server, RESTORED, own | of_base)


def _after_loading(server: _Server, stage: str, expected: Mapping[str, str]) -> Iterator[StageAnswer]:
    """Ask for what is generated first: a prompt's cache may still be the former adapter's."""
    yield from server.generate(stage, expected)
    yield from server.ask(stage, expected)


def _columns(served: Sequence[ServedAdapter], computed: Sequence[References]) -> References:
    """References of the matrix: the base, and each adapter whole."""
    whole = [name_references(*one.halves)["full"] for one in served]
    base = computed[0]

    def of(vectors: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Sequence[float]]:
        own = zip(served, whole, vectors, strict=True)
        return {BASE: vectors[0][BASE]} | {one.name: found[name] for one, name, found in own}

    assert base.rounded
    return References.of(of([r.logprobs for r in computed]), of([r.rounded for r in computed]))
