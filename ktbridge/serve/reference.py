"""What the adapter should do: prompt logprobs computed here, apart from any serving code.

transformers runs the base with the adapter's ``ΔW = scale · B A`` added to the weights, in float32 for
the references and again in bfloat16 for the noise floor: what precision alone may change. Our kernels
take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ktbridge.adapter import Adapter
from ktbridge.adapter.keys import parse_key
from ktbridge.errors import Problem, ProblemsError
from ktbridge.serve.verify import References, mean_distance
from ktbridge.sft.loading import load_model
from ktbridge.sft.modules import LAYER, experts_modules
from ktbridge.sft.tensors import to_torch

UNSUPPORTED = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")


@dataclass(frozen=True)
class Delta:
    """An addition to part of one parameter: ``weight`` is a view, [..., out, in]."""

    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def add(self) -> None:
        """Computed and added in float32, rounded to the weight's dtype once."""
        change = self.scale * torch.matmul(self.b.float(), self.a.float())
        self.weight.copy_(self.weight.float() + change)


def compute_references(
    base: Path,
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> References:
    """Reference logprobs of the arms that ``adapter`` makes, and the noise floor of each.

    Each vector has one natural logprob for every prompt token but the first of each prompt, in order.
    Raises ProblemsError for adapter tensors that have no place in the model.
    """
    if adapter.leftovers:
        with _collecting(adapter, "whole") as problems:
            for part in adapter.leftovers:
                problems.append(_problem(adapter, part.entry.name, "a tensor that goes nowhere"))
    exact: dict[str, list[float]] = {}
    rounded: dict[str, list[float]] = {}
    arms = 2 ** (bool(adapter.expert_layers()) + bool(adapter.nonexpert_keys()))
    total = 2 * arms * len(prompts)
    done = 0
    for dtype, results in ((torch.float32, exact), (torch.bfloat16, rounded)):
        model = load_model(base, dtype)
        for arm in _states(model, adapter):
            results[arm] = []
            for prompt in prompts:
                results[arm] += _prompt_logprobs(model, prompt)
                done += 1
                on_progress(done, total)
        del model
    noise = {arm: mean_distance(exact[arm], rounded[arm]) for arm in exact}
    return References(exact, noise)


@torch.inference_mode()
def _prompt_logprobs(model: Any, prompt: Sequence[int]) -> list[float]:
    ids = torch.tensor([list(prompt)])
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()


def _states(model: Any, adapter: Adapter) -> Iterator[str]:
    """Put ``model`` into each arm in turn: base, nonexpert, full, expert (those that exist).

    In this order only the small non-expert weights are ever kept twice.
    """
    with torch.no_grad():
        experts, others = expert_deltas(model, adapter), nonexpert_deltas(model, adapter)
        yield "base"
        originals = [delta.weight.clone() for delta in others]
        if others:
            for delta in others:
                delta.add()
            yield "nonexpert"
        if experts:
            for delta in experts:
                delta.add()
            if others:
                yield "full"
            for delta, original in zip(others, originals, strict=True):
                delta.weight.copy_(original)
            yield "expert"


def expert_deltas(model: Any, adapter: Adapter) -> list[Delta]:
    """Where the expert LoRA goes: gate_up_proj [E, 2I, H] (gate rows first), down_proj [E, H, I]."""
    modules: dict[int, Any] = {}
    for name, module in experts_modules(model):
        if match := LAYER.search(name):
            modules[int(match.group(1))] = module
    deltas: list[Delta] = []
    with _collecting(adapter, "expert") as problems:
        for layer in adapter.expert_layers():
            module = modules.get(layer)
            if module is None or not (
                module.has_gate and module.is_concatenated and not module.is_transposed
            ):
                found = "no experts" if module is None else "experts in another layout"
                problems.append(_problem(adapter, f"layer {layer}", f"the base has {found} there"))
                continue
            inner = module.gate_up_proj.shape[1] // 2
            places = {
                "gate": module.gate_up_proj.data[:, :inner],
                "up": module.gate_up_proj.data[:, inner:],
                "down": module.down_proj.data,
            }
            for name, weight in places.items():
                a, b = (
                    to_torch(adapter.expert_tensor(layer, f"{name}_lora_{half}")) for half in "ab"
                )
                where = f"layer {layer} {name}"
                _append(
                    deltas, problems, adapter, where, weight, a, b, adapter.alpha / adapter.rank
                )
    return deltas


def nonexpert_deltas(model: Any, adapter: Adapter) -> list[Delta]:
    """Where the non-expert LoRA goes: the 2-D ``weight`` of the module that each key names."""
    parameters = dict(model.named_parameters())
    halves: dict[str, dict[str, str]] = {}
    deltas: list[Delta] = []
    with _collecting(adapter, "non-expert") as problems:
        for key in adapter.nonexpert_keys():
            parsed = parse_key(key)
            if parsed.kind != "lora":
                problems.append(_problem(adapter, key, "not a LoRA tensor of a linear module"))
                continue
            halves.setdefault(parsed.module, {})[parsed.half] = key
        if halves and (odd := [name for name in UNSUPPORTED if adapter.config.get(name)]):
            problems.append(_problem(adapter, "adapter_config.json", f"{odd[0]} is set"))
        for module, pair in halves.items():
            weight = parameters.get(f"{module}.weight")
            if set(pair) != {"A", "B"}:
                problems.append(_problem(adapter, module, "lora_A or lora_B is missing"))
            elif weight is None or weight.dim() != 2:
                problems.append(_problem(adapter, module, "the base has no such linear module"))
            else:
                a, b = (to_torch(adapter.nonexpert_tensor(pair[half])) for half in "AB")
                scale = adapter.nonexpert_scale
                _append(deltas, problems, adapter, module, weight.data, a, b, scale)
    return deltas


def _append(
    deltas: list[Delta],
    problems: list[Problem],
    adapter: Adapter,
    where: str,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> None:
    fits = a.shape[-2] == b.shape[-1] and (*b.shape[:-1], a.shape[-1]) == tuple(weight.shape)
    if fits and a.shape[:-2] == b.shape[:-2]:
        deltas.append(Delta(weight, a, b, scale))
    else:
        found = f"A {list(a.shape)} and B {list(b.shape)} for a weight {list(weight.shape)}"
        problems.append(_problem(adapter, where, found))


@contextmanager
def _collecting(adapter: Adapter, half: str) -> Iterator[list[Problem]]:
    problems: list[Problem] = []
    yield problems
    if problems:
        raise ProblemsError(
            f"the {half} LoRA in {adapter.path} does not match the base model.", problems
        )


def _problem(adapter: Adapter, where: str, found: str) -> Problem:
    return Problem(
        code="KTV001",
        severity="error",
        where=f"{adapter.path}: {where}",
        found=found,
        next_step="check that --base-model is the base this adapter was trained on",
    )
