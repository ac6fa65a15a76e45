"""One verification from end to end: arms to query, references, verdict, explanation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ktbridge.adapter import Adapter, read_adapter
from ktbridge.errors import KtbridgeError
from ktbridge.model import read_model_config, resolve_model
from ktbridge.served_names import base_name, listed_as, split_name
from ktbridge.verify.hypotheses import Facts, explain
from ktbridge.verify.logprob_client import LogprobClient, fixed_prompts
from ktbridge.verify.verdict import Verification, judge


def arms_to_ask(
    model: str, listed: Sequence[str], expert_model: str | None = None
) -> dict[str, str]:
    """Served names to measure -> expected reference: base, expert or full.

    ``model`` is measured as full. For ``S:NAME`` its neighbours ``S:base`` and ``S`` are measured where
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
    adapter_dir: str,
    base_model: str,
    *,
    expert_model: str | None = None,
    api_key: str | None = None,
    repeat: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Verification:
    """Measure the server at ``base_url`` (http://HOST:PORT) against references computed here.

    ``model`` is the served name to judge, ``expert_model`` one that should have the expert LoRA alone;
    ``adapter_dir`` is what training wrote, ``base_model`` a checkpoint's directory. ``repeat`` asks the
    server several times; differences between identical requests count as noise.
    ``on_progress(done, total)`` counts decoder layers of a stage that ``on_stage`` names.

    Raises KtbridgeError when the server cannot be measured or the references not be computed;
    a Verification is only ever made of numbers from both.
    """
    base = Path(resolve_model(base_model))
    adapter = read_adapter(adapter_dir)
    halves = (bool(adapter.expert_layers()), bool(adapter.nonexpert_keys()))
    if not any(halves):
        raise KtbridgeError(
            f"the adapter in {adapter_dir} has no LoRA tensor.", "check it with `ktbridge validate`"
        )
    server = LogprobClient(base_url, api_key)
    arms = arms_to_ask(model, server.models(), expert_model)

    from ktbridge.experts.loading import load_tokenizer
    from ktbridge.verify.reference_model import ReferenceModel, compute_references

    vocab_size = read_model_config(base).text["vocab_size"]
    prompts = fixed_prompts(load_tokenizer(base), vocab_size)
    asked = server.ask_all(arms, prompts, repeat, needed=(model, expert_model))
    reference_model = ReferenceModel(base, adapter, prompts)
    on_stage("computing references")
    references = compute_references(reference_model, halves, on_progress)
    # An adapter with one half has fewer arms than the names suggest.
    means = {
        "base": "base",
        "expert": "expert" if halves[0] else "base",
        "full": "full" if all(halves) else "expert" if halves[0] else "nonexpert",
    }
    served = {name: (means[arms[name]], answer.logprobs) for name, answer in asked.items()}
    spread = {name: a.spread for name, a in asked.items() if a.spread is not None}
    result = judge(model, served, references, spread)
    if not result.in_doubt:
        return result
    on_stage("trying explanations")
    return explain(
        result,
        asked[model].logprobs,
        references,
        facts_of(adapter, reference_model.can_leave_keys),
        lambda variants: reference_model.logprobs(variants, on_progress=on_progress),
    )


def facts_of(adapter: Adapter, can_leave_keys: bool) -> Facts:
    """Ranks and layers of the halves of ``adapter``, and what its base's family supports."""
    layers = {
        "expert": adapter.expert_layers(),
        "nonexpert": tuple(sorted({part.key.layer for part in adapter.nonexpert.values()})),
    }
    ranks = {"expert": adapter.rank, "nonexpert": adapter.nonexpert_rank}
    return Facts(
        {half: rank for half, rank in ranks.items() if layers[half]},
        {half: found for half, found in layers.items() if found},
        can_leave_keys,
    )
