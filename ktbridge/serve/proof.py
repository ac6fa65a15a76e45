"""One verification from end to end: which arms to ask, the references, the judgement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ktbridge.adapter import read_adapter
from ktbridge.errors import KtbridgeError
from ktbridge.model import read_model_config, resolve_model
from ktbridge.serve.probe import ArmRefused, ServerProbe, fixed_prompts
from ktbridge.serve.verify import Verification, judge


def arms_to_ask(
    model: str, listed: Sequence[str], expert_model: str | None = None
) -> dict[str, str]:
    """Served names to measure -> what each should be: base, expert or full.

    ``model`` is asked as full. For ``S:NAME`` its neighbours ``S:base`` and ``S`` are measured where
    the server lists them. A name that isn't listed is refused: some engines answer it with the base.
    """
    served, colon, name = model.partition(":")
    known = set(listed)
    # SGLang lists an adapter without the served prefix that requests need.
    if model not in known and not (colon and name in known and served in known):
        offered = ", ".join(sorted(known)) or "nothing"
        raise KtbridgeError(
            f"the server does not list {model!r}; it lists {offered}.", "choose --model from these"
        )
    if expert_model is not None and expert_model not in known:
        offered = ", ".join(sorted(known))
        raise KtbridgeError(
            f"the server does not list {expert_model!r}; it lists {offered}.",
            "choose --expert-model from these",
        )
    arms = {}
    if colon:
        if f"{served}:base" in known:
            arms[f"{served}:base"] = "base"
        if served in known and expert_model is None:
            arms[served] = "expert"
    if expert_model is not None:
        arms[expert_model] = "expert"
    arms[model] = "full"
    return arms


def verify(
    base_url: str,
    model: str,
    adapter_dir: str,
    base_model: str,
    *,
    expert_model: str | None = None,
    api_key: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Measure the server at ``base_url`` against references computed here.

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
    probe = ServerProbe(base_url, api_key)
    arms = arms_to_ask(model, probe.models(), expert_model)

    from ktbridge.serve.reference import compute_references
    from ktbridge.sft.loading import load_tokenizer

    vocab_size = read_model_config(base).text["vocab_size"]
    prompts = fixed_prompts(load_tokenizer(base), vocab_size)
    served = {}
    for name in list(arms):
        try:
            served[name] = probe.prompt_logprobs(name, prompts)
        except ArmRefused:
            # A listed neighbour need not be served: with a merged adapter, sglang-kt 0.7.2 lists the
            # bare name and refuses it. What was asked for by name must be.
            if name in (model, expert_model):
                raise
            del arms[name]
    references = compute_references(base, adapter, prompts, on_progress)
    # An adapter with one half makes fewer arms than the names suggest.
    means = {
        "base": "base",
        "expert": "expert" if halves[0] else "base",
        "full": "full" if all(halves) else "expert" if halves[0] else "nonexpert",
    }
    return judge(
        model,
        {name: (means[expected], served[name]) for name, expected in arms.items()},
        references,
    )
