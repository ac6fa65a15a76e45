"""Reference prompt logprobs with the adapter, computed independently of any serving code.

transformers' modules run the base in float32 with ``scale · B (A x)`` added where the adapter has a
pair, and again in bfloat16 for the noise floor: the effect of precision alone. Our kernels aren't
used. All variants go through a layer together, so that the checkpoint is read once for all of them, and
no more than a layer is in memory (``ktbridge.verify.layerwise``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ktbridge.adapter import Adapter
from ktbridge.verify.layerwise import LayerwiseModel
from ktbridge.verify.lora import AdapterLora
from ktbridge.verify.references import References
from ktbridge.verify.verdict import Variant, standard_variants

TOKENS = 8192  # of all variants together, in one pass over the checkpoint


class ReferenceModel:
    """Prompt logprobs of a base in ``path`` with any variants of one adapter.

    ``prompts`` are token ids; logprobs are of those from ``starts`` on, of all but the first one where it
    isn't given. Raises ProblemsError for adapter tensors that have no place in the
    model, and KtbridgeError for a base that can't be read.
    """

    def __init__(
        self,
        path: Path,
        adapter: Adapter,
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
    ) -> None:
        self._path, self._adapter, self._prompts = path, adapter, prompts
        self._starts = starts or [1] * len(prompts)
        self._models: dict[torch.dtype, tuple[LayerwiseModel, AdapterLora]] = {}
        self._at(torch.float32)

    def logprobs(
        self,
        variants: Sequence[Variant],
        dtype: torch.dtype = torch.float32,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[list[float]]:
        """For each variant the natural logprob of each prompt's measured tokens, in order."""
        model, lora = self._at(dtype)
        length = max(map(len, self._prompts))
        padded = [[*prompt, *[prompt[-1]] * (length - len(prompt))] for prompt in self._prompts]
        many = max(1, TOKENS // (length * len(padded)))
        parts = [variants[start : start + many] for start in range(0, len(variants), many)]
        found: list[list[float]] = []
        for number, part in enumerate(parts):
            before, whole = number * model.num_layers, len(parts) * model.num_layers

            def on_layer(done: int, _: int, before: int = before, whole: int = whole) -> None:
                on_progress(before + done, whole)

            model.on_layer = on_layer
            found += self._run(model, lora, part, torch.tensor(padded))
        return found

    def _run(
        self,
        model: LayerwiseModel,
        lora: AdapterLora,
        variants: Sequence[Variant],
        ids: torch.Tensor,
    ) -> list[list[float]]:
        with lora.present(variants):
            output = model.hidden(ids.repeat(len(variants), 1))
        found = []
        assert output.last_hidden_state is not None
        parts = output.last_hidden_state.chunk(len(variants))
        for variant, hidden in zip(variants, parts, strict=True):
            # Padding is behind each prompt, where attention and states of causal models don't see it.
            measured = list(zip(hidden, self._prompts, self._starts, strict=True))
            states = torch.cat([h[start - 1 : len(p) - 1] for h, p, start in measured])
            targets = torch.tensor([token for _, p, start in measured for token in p[start:]])
            with lora.in_head(variant):
                found.append(model.logprobs(output, states, targets).tolist())
        return found

    def _at(self, dtype: torch.dtype) -> tuple[LayerwiseModel, AdapterLora]:
        if dtype not in self._models:
            model = LayerwiseModel(self._path, dtype)
            self._models[dtype] = model, AdapterLora(model, self._adapter)
        return self._models[dtype]


def compute_references(
    model: ReferenceModel,
    halves: tuple[bool, bool],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> References:
    """References of the variants that an adapter with these halves (expert, non-expert) makes.

    With the noise floor of each: its mean |bfloat16 - float32|.
    """
    variants = standard_variants(*halves)
    found: list[dict[str, list[float]]] = []
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):

        def heard(done: int, total: int, before: int = number) -> None:
            on_progress(before * total + done, 2 * total)

        vectors = model.logprobs(tuple(variants.values()), dtype, heard)
        found.append(dict(zip(variants, vectors, strict=True)))
    return References.of(*found)
