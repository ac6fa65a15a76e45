"""A family's model on our kernels or the GPU's executor, held against transformers' and PEFT's rule."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuexperts import slot_for
from moefamilies import IDS, everything, randomize, reference, with_images
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ktbridge.adapter.keys import LAYER
from ktbridge.experts.gpu.placement import Placement
from ktbridge.experts.inject import PlacedExperts, give_to_gpu
from ktbridge.experts.load_model import load_mapped
from ktbridge.experts.lora_targets import find_lora_targets
from ktbridge.experts.modules import experts_modules
from ktbridge.sft import expert_layers
from ktbridge.sft.model import attach_lora
from ktbridge.sft.plan.shape import read_shape

CPU = torch.device("cpu")
ON_GPU = ("streamed", "resident")
EXECUTORS = ("kernels", *ON_GPU)
"""Who computes the experts: the CPU's kernels, or the GPU's executor in its two ways."""


def check_family(
    model_type: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
    device: torch.device = CPU,
    images: bool = False,
) -> None:
    """Logits, loss and every LoRA gradient of a model on ``device``, against float32 autograd on the CPU.

    The experts' gradients of hidden states and of routing weights show in the LoRA on attention and routers.
    ``images``: the model has its vision tower, and both rows an image.
    """
    exact = reference(model_type, path)
    # Float32 around the experts, so that no token goes to another expert for a rounding.
    mapped = load_mapped(path, torch.float32, device, whole=images)
    batch = with_images(exact) if images else {"input_ids": IDS}
    assert not [name for name, _ in mapped.named_parameters() if name.endswith("gate_up_proj")]
    # A multimodal checkpoint's text model alone has other names in the same order.
    modules = dict(zip(find_lora_targets(mapped).modules, find_lora_targets(exact).modules, strict=True))
    tuned = attach_lora(mapped, everything(mapped, path))
    layers = expert_layers(tuned)
    placed = None if executor == "kernels" else given(tuned, device, executor == "resident")
    random = torch.Generator().manual_seed(3)
    randomize(tuned, random)
    weights: dict[str, torch.Tensor] = {}
    leaves: dict[str, dict[str, torch.Tensor]] = {}
    ours: dict[str, dict[str, torch.Tensor]] = {}
    for name, module in experts_modules(exact):
        ours[name] = dict(layers[int(LAYER.search(name)[1])].named_parameters())
        own = leaves[name] = copied(ours[name])
        delta = {part: 2 * own[f"{part}_lora_b"] @ own[f"{part}_lora_a"] for part in ("gate", "up", "down")}
        gate_up, down = torch.cat((delta["gate"], delta["up"]), 1), delta["down"]
        if not module.is_concatenated:
            gate_up = torch.stack((delta["gate"], delta["up"]), 2).flatten(1, 2)
        if module.is_transposed:
            gate_up, down = gate_up.mT, down.mT
        weights[f"{name}.gate_up_proj"] = module.gate_up_proj.detach() + gate_up
        weights[f"{name}.down_proj"] = module.down_proj.detach() + down
    assert len(leaves) == len(layers)
    known = read_shape(path)
    assert known.config.family is not None
    assert known.mappable
    assert tuple(sorted(layers)) == known.config.moe_layers
    for inner, name in modules.items():
        layer = mapped.get_submodule(inner)
        ours[name] = {half: getattr(layer, f"lora_{half}")["default"].weight for half in ("A", "B")}
        own = leaves[name] = copied(ours[name])
        weight = exact.get_submodule(name).weight.detach()
        weights[f"{name}.weight"] = weight + 2 * own["B"] @ own["A"]
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    assert len(trained) == sum(map(len, leaves.values()))

    choices = Choices(monkeypatch)
    slope = torch.randn((2, 20, 64), generator=random)
    expected = outcome(functional_call(exact, weights, (), batch).logits, slope, leaves)
    for _, module in experts_modules(exact):
        module.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))
        module.register_forward_hook(lambda _, __, made: rounded(made))
    choices.again()
    noisy = outcome(functional_call(exact, weights, (), batch).logits, slope, leaves)
    choices.again()
    there = {name: value.to(device) for name, value in batch.items()}
    found = outcome(tuned(**there).logits, slope, ours)
    if placed is not None:
        placed.copier.close()
        assert (placed.experts.ring.transfers > 0) == (executor == "streamed")
    choices.again()
    assert choices.others < 0.02 * choices.all
    assert expected.keys() == found.keys()
    # What rounding at the experts' doors alone does; inside, they round a few times more.
    noise = {key: distance(noisy[key], value) for key, value in expected.items()}
    usual = statistics.median(noise.values())  # that of a few numbers is a matter of luck
    for key, value in expected.items():
        assert value.norm() > 0
        assert distance(found[key], value) < 6 * max(noise[key], usual) + 1e-3, key


def given(model: Any, device: torch.device, resident: bool) -> PlacedExperts:
    """The experts given to the GPU's executor: all resident with their LoRA, or streamed in groups.

    LoRA of streamed ones stays on the host. The ring holds two groups of the two of each layer.
    """
    layers = list(expert_layers(model).values())
    kept = tuple(range(len(layers))) if resident else ()
    slot = max(slot_for(layer, 2) for layer in layers)
    return give_to_gpu(model, device, Placement(IDS.numel(), True, slot, 2, 1, kept, resident))


class Choices:
    """``torch.topk`` that chooses as it did at first: routers' ties are for no rounding to decide."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.topk, self.made, self.replay = torch.topk, [], None
        self.largest = torch.Tensor.max
        self.all = self.others = 0
        monkeypatch.setattr(torch, "topk", self)
        monkeypatch.setattr(torch.Tensor, "topk", lambda scores, *args, **kw: self(scores, *args, **kw))
        monkeypatch.setattr(torch.Tensor, "max", lambda scores, *args, **kw: self.max(scores, *args, **kw))

    def again(self) -> None:
        assert self.replay is None or next(self.replay, None) is None
        self.replay = iter(self.made)

    def anew(self) -> None:
        """Choose as ``torch.topk`` does, and remember that instead."""
        self.replay, self.made = None, []

    def __call__(self, scores: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        own = self.topk(scores, k, dim=dim, **options)
        if self.replay is None:
            self.made.append(own.indices)
            return own
        indices = next(self.replay).to(scores.device)
        values = scores.gather(dim, indices)
        self.all += indices.numel()
        # By value: which of the masked, equal ones fill up the number is each device's own affair.
        self.others += int((own.values.sort(dim).values != values.sort(dim).values).sum())
        return torch.return_types.topk((values, indices))

    def max(self, scores: torch.Tensor, *args: Any, **options: Any) -> Any:
        """As Phi-MoE chooses, one expert after the other."""
        if options != {"dim": -1, "keepdim": True}:
            return self.largest(scores, *args, **options)
        return torch.return_types.max(tuple(self(scores, 1)))


def copied(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone().requires_grad_() for name, value in parameters.items()}


def outcome(logits: Any, slope: Any, leaves: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Logits, their loss, and the gradient of every leaf, which are left without; all on the CPU."""
    logits.backward(slope.to(logits.device), retain_graph=True)
    made = logits.detach().cpu()
    loss = cross_entropy(made[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    results = {"logits": made, "loss": loss}
    for name, own in leaves.items():
        for key, leaf in own.items():
            results[f"{name}.{key}"], leaf.grad = leaf.grad.cpu(), None
    return results


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
