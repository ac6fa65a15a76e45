"""Reference prompt logprobs with the adapter, computed independently of any serving code.

transformers' modules run the base in float32 with ``scale · B (A x)`` added where the adapter has a
pair, and again in bfloat16 for the noise floor: the effect of precision alone. Our kernels aren't
used. All variants go through a layer together, so that the checkpoint is read once for all of them, and
no more than a layer is in memory (``ktbridge.verify.layerwise``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ktbridge.adapter import Adapter
from ktbridge.errors import Problem, ProblemsError
from ktbridge.files.publish import OnProgress
from ktbridge.verify.layerwise import LayerwiseModel
from ktbridge.verify.lora import AdapterLora
from ktbridge.verify.verdict import STANDARD, References, Variant, standard_variants

TOKENS = 8192  # of all variants together, in one pass over the checkpoint


class ReferenceModel:
    """Prompt logprobs of a base in ``path`` with any variants of one adapter, or of several.

    ``prompts`` are token ids; logprobs are of those from ``starts`` on, of all but the first one where it
    isn't given. ``tokens``: how many of all variants together go through the model in one reading of the
    checkpoint. Raises ProblemsError for adapter tensors that have no place in the
    model, and KtbridgeError for a base that can't be read.
    """

    def __init__(
        self,
        path: Path,
        adapters: Adapter | Sequence[Adapter],
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
        tokens: int = TOKENS,
    ) -> None:
        self._path, self._prompts, self._tokens = path, prompts, tokens
        self._adapters = [adapters] if isinstance(adapters, Adapter) else list(adapters)
        self._starts = starts or [1] * len(prompts)
        self._models: dict[torch.dtype, tuple[LayerwiseModel, list[AdapterLora]]] = {}
        self._at(torch.float32)

    def logprobs(
        self,
        variants: Sequence[Variant],
        dtype: torch.dtype = torch.float32,
        on_progress: OnProgress = lambda done, total: None,
    ) -> list[list[float]]:
        """For each variant the natural logprob of each prompt's measured tokens, in order."""
        model, loras = self._at(dtype)
        length = max(map(len, self._prompts))
        padded = [[*prompt, *[prompt[-1]] * (length - len(prompt))] for prompt in self._prompts]
        many = max(1, self._tokens // (length * len(padded)))
        parts = [variants[start : start + many] for start in range(0, len(variants), many)]
        found: list[list[float]] = []
        for number, part in enumerate(parts):
            model.on_layer = part_of(on_progress, number, len(parts))
            found += self._run(model, loras, part, torch.tensor(padded))
        return found

    def _run(
        self,
        model: LayerwiseModel,
        loras: Sequence[AdapterLora],
        variants: Sequence[Variant],
        ids: torch.Tensor,
    ) -> list[list[float]]:
        with ExitStack() as present:
            for lora in loras:
                present.enter_context(lora.present(variants))
            output = model.hidden(ids.repeat(len(variants), 1))
        found = []
        assert output.last_hidden_state is not None
        parts = output.last_hidden_state.chunk(len(variants))
        for variant, hidden in zip(variants, parts, strict=True):
            # Padding is behind each prompt, where attention and states of causal models don't see it.
            measured = list(zip(hidden, self._prompts, self._starts, strict=True))
            states = torch.cat([h[start - 1 : len(p) - 1] for h, p, start in measured])
            targets = torch.tensor([token for _, p, start in measured for token in p[start:]])
            with loras[variant.adapter].in_head(variant):
                found.append(model.logprobs(output, states, targets).tolist())
        return found

    def _at(self, dtype: torch.dtype) -> tuple[LayerwiseModel, list[AdapterLora]]:
        if dtype not in self._models:
            model = LayerwiseModel(self._path, dtype)
            self._models[dtype] = model, _put_on(model, self._adapters)
        return self._models[dtype]


def part_of(on_progress: OnProgress, number: int, parts: int) -> OnProgress:
    """Return what hears the progress of one of several equal ``parts``, for ``on_progress`` of the whole."""
    return lambda done, total: on_progress(number * total + done, parts * total)


def _put_on(model: LayerwiseModel, adapters: Sequence[Adapter]) -> list[AdapterLora]:
    """Put every adapter on ``model``. Raises ProblemsError with what has no place, of all of them."""
    loras, failed = [], []
    for number, adapter in enumerate(adapters):
        try:
            loras.append(AdapterLora(model, adapter, number))
        except ProblemsError as error:
            failed.append(error)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        problems: list[Problem] = [problem for error in failed for problem in error.problems]
        sentence = f"{len(failed)} of {len(adapters)} adapters do not fit the base model {model.path}."
        raise ProblemsError(sentence, problems, failed[0].next_step)
    return loras


def compute_references(
    model: ReferenceModel,
    halves: Sequence[tuple[bool, bool]],
    on_progress: OnProgress = lambda done, total: None,
) -> list[References]:
    """References of the variants that each adapter of ``model`` makes, by one pass for all.

    With the noise floor of each: its mean |bfloat16 - float32|. ``halves`` has an adapter's (expert,
    non-expert) each. The base is computed once.
    """
    keys = [
        (number, name)
        for number, own in enumerate(halves)
        for name in standard_variants(*own)
        if number == 0 or name != "base"
    ]
    variants = [replace(STANDARD[name], adapter=number) for number, name in keys]
    exact: dict[tuple[int, str], list[float]] = {}
    rounded: dict[tuple[int, str], list[float]] = {}
    for half, (dtype, found) in enumerate(((torch.float32, exact), (torch.bfloat16, rounded))):
        vectors = model.logprobs(variants, dtype, part_of(on_progress, half, 2))
        found.update(zip(keys, vectors, strict=True))

    def of(vectors: Mapping[tuple[int, str], list[float]], number: int) -> dict[str, list[float]]:
        return {
            name: vectors[number if name != "base" else 0, name]
            for name in standard_variants(*halves[number])
        }

    return [References.of(of(exact, n), of(rounded, n)) for n in range(len(halves))]
