"""A layer of routed experts with its LoRA, whoever computes it: our kernels, the GPU, KTransformers' wheel.

``ExpertsLayer`` is what the rest of training knows of one: the LoRA's parameters and their names, the sizes,
and one forward. Finding layers, loading, saving and resuming ask for it and for nothing else.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts.dropout import Dropout, draw
from ktbridge.experts.expert_call import LORA_NAMES, LoraUse, float_zeros
from ktbridge.experts.weights import ExpertWeights

MERGE_STEP = (
    "Save with ktbridge.sft.save_raw_adapter, then `ktbridge merge` (or ktbridge.adapter.merge_adapter) "
    "writes a checkpoint with both halves merged."
)


def _no_base() -> None:
    return None


class PeftLayer(BaseTunerLayer):
    """What PEFT sees of a layer of routed experts: a tuner layer, whose LoRA is one of its own.

    PEFT finds what is trained by walking over a model's tuner layers, and everything on one of them is the
    adapter's. So with this mixin the expert LoRA is not frozen by ``get_peft_model``, whatever came first;
    it is in ``save_pretrained`` and Trainer's checkpoints, and comes back from them; it is off within
    ``disable_adapter()``; and ``print_trainable_parameters`` counts it. PEFT does so from 0.21 on (before, it
    went by names); tests/sft/test_library_peft.py has a test of each.

    A layer has one expert LoRA, while PEFT's layers have one for each adapter name: it goes with the adapter
    ``peft_adapter`` and is off where that one isn't active. Nothing is wrapped, and no parameter is kept by
    adapter name, so what PEFT does to either finds nothing.
    """

    _base: Callable[[], Any] = staticmethod(_no_base)
    _adapter: str = "default"

    def belong_to(self, base: nn.Module) -> None:
        """Take ``base``, held weakly, as the transformers model that the layer is in and PEFT works on."""
        if self._base() is not base:
            self._base = weakref.ref(base)
        adapters = self.peft_adapters
        if len(adapters) == 1:
            (self._adapter,) = adapters

    def belongs_to(self, base: nn.Module) -> bool:
        """Return whether ``belong_to(base)`` would change nothing."""
        adapters = self.peft_adapters
        return self._base() is base and (len(adapters) != 1 or adapters == [self._adapter])

    @property
    def peft_adapters(self) -> list[str]:
        """Names of all adapters that PEFT has put into the model."""
        return list(getattr(self._base(), "peft_config", None) or ())

    @property
    def peft_adapter(self) -> str:
        """Name of the one that the expert LoRA belongs to: the first that there was."""
        adapters = self.peft_adapters
        return adapters[0] if adapters and self._adapter not in adapters else self._adapter

    @property
    def peft_active(self) -> list[str]:
        """Names of the active adapters, as PEFT's own layers have them: it doesn't set them on this one."""
        tuner = first_tuner(self._base()) if len(self.peft_adapters) > 1 else None
        return list(tuner.active_adapters) if tuner is not None else [self.peft_adapter]

    @property
    def on_in_peft(self) -> bool:
        """Return whether PEFT has the adapter on: it is active, and not within ``disable_adapter()``."""
        if self.disable_adapters:
            return False
        return len(self.peft_adapters) < 2 or self.peft_adapter in self.peft_active

    def set_requires_grad(
        self, adapter_names: str | Sequence[str], requires_grad: bool = True
    ) -> None:
        """PEFT's: let the parameters of the adapters named be trained, or not."""
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        assert isinstance(self, nn.Module)
        if self.peft_adapter in names:
            self.requires_grad_(requires_grad)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: the experts' weights belong to the checkpoint and aren't written to."""
        raise KtbridgeError(
            "PEFT can't merge the expert LoRA: the experts' weights are the checkpoint's, and read only.",
            f"model.unmerge_adapter() takes back what was merged before. {MERGE_STEP}",
        )

    def unmerge(self) -> None:
        """Nothing to do: nothing is ever merged."""

    # The base class has these of the module that it wraps, and would look for one for ever.
    @property
    def weight(self) -> Any:
        raise AttributeError("weight")

    @property
    def bias(self) -> Any:
        raise AttributeError("bias")


def first_tuner(module: nn.Module) -> BaseTunerLayer | None:
    """The first of PEFT's own layers in a module."""
    for each in module.modules():
        if isinstance(each, BaseTunerLayer) and not isinstance(each, PeftLayer):
            return each
    return None


class ExpertsLayer(nn.Module, PeftLayer):
    """E gated experts with per-expert LoRA: ``y = Σ_k w_k · down(silu(gate(x)) · up(x))``.

    Each projection is ``W x + (α/r) · B A x`` with W frozen. Parameters are float32 masters, rounded to
    bfloat16 before use, named as in ``LORA_NAMES`` and shaped as in ``lora_shapes``. They stay float32 on
    the CPU whatever the model around them is moved or converted to.

    ``forward(hidden, topk_ids, topk_weights)`` takes [T, H] bfloat16, [T, K] int64, [T, K] float32, all on
    the CPU or all on one GPU, and gives [T, H] bfloat16 there; differentiable (once) in ``hidden``,
    ``topk_weights`` and the LoRA.
    """

    def __init__(
        self,
        weights: tuple[ExpertWeights, ExpertWeights, ExpertWeights],
        *,
        lora_rank: int,
        lora_alpha: float,
        lora_targets: tuple[str, ...],
        activation: str,
        lora_dropout: float = 0.0,
    ) -> None:
        """``weights`` are gate, up and down, checked; ``lora_targets`` is empty where there is no LoRA."""
        super().__init__()
        # Kept by this module, but no buffers: the weights belong to the checkpoint and are neither saved
        # nor moved with it.
        self._weights, self._storage = weights, weights[0].storage
        self.num_experts = weights[0].count
        self.intermediate_size, self.hidden_size = weights[0].rows, weights[2].rows
        self.lora_rank, self.lora_alpha = int(lora_rank), float(lora_alpha)
        self.lora_targets, self.activation = lora_targets, activation
        self.lora_dropout = nn.Dropout(lora_dropout)
        """Its p and mode are the LoRA's: it is never called, but found by whoever looks for dropout."""
        self.lora_enabled = True
        self.lora_frozen = False
        """Whether the LoRA is kept from training on purpose (``ktbridge.sft.freeze_expert_lora``)."""
        self.saved_bytes = 0
        self.lora_device = torch.device("cpu")
        """Where the LoRA's masters are: see ``move_lora``."""
        sizes = self.num_experts, self.hidden_size, self.intermediate_size, self.lora_rank
        for name in self.lora_names:
            self.register_parameter(name, nn.Parameter(float_zeros(lora_shapes(*sizes)[name])))
        self.reset_lora()

    @property
    def isa(self) -> str:
        """The kernel path in use, such as "avx2"."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Threads that compute."""
        raise NotImplementedError

    @property
    def storage(self) -> str:
        """Return how the frozen weights are stored: "bf16", "fp8", "int8" or "int4"."""
        return self._storage

    @property
    def weights(self) -> tuple[ExpertWeights, ExpertWeights, ExpertWeights]:
        """The frozen weights of gate, up and down."""
        return self._weights

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the LoRA parameters there are, in the order of ``LORA_NAMES``."""
        return tuple(name for name in LORA_NAMES if name.partition("_")[0] in self.lora_targets)

    def lora_parameters(self) -> tuple[torch.Tensor, ...]:
        """The LoRA parameters, in the order of ``lora_names``."""
        return tuple(getattr(self, name) for name in self.lora_names)

    def reset_lora(self) -> None:
        """(Re)start the LoRA: A ~ U(±1/√in), which is PEFT's kaiming_uniform(a=√5); B = 0."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("_a"):
                    bound = 1 / math.sqrt(parameter.shape[-1])
                    parameter.uniform_(-bound, bound)
                else:
                    parameter.zero_()

    def move_lora(self, device: torch.device, pinned: bool = False) -> None:
        """Have the LoRA's masters on ``device``, ``pinned`` where a GPU shall read them on the host."""
        for parameter in self.lora_parameters():
            moved = parameter.data.to(device)
            parameter.data = moved.pin_memory() if pinned else moved
            parameter.grad = None
            self.lora_device = parameter.device

    def lora_in_use(self) -> tuple[tuple[str, ...], tuple[torch.Tensor, ...]]:
        """Names and parameters of the LoRA that a forward adds now: none where it is switched off.

        Raises ``UsageError`` for parameters that were converted or moved.
        """
        names = self.lora_names if self.lora_enabled and self.on_in_peft else ()
        where = "the CPU" if self.lora_device.type == "cpu" else str(self.lora_device)
        lora = tuple(getattr(self, name) for name in names)
        for name, parameter in zip(names, lora, strict=True):
            if parameter.dtype != torch.float32 or parameter.device != self.lora_device:
                raise UsageError(
                    f"{name} must be float32 on {where}, not {describe(parameter)}.",
                    "Leave the expert LoRA's parameters as wrap_experts made them: whatever the model is "
                    f"moved or converted to, they stay float32 on {where}.",
                )
        return names, lora

    def draw_lora_use(self) -> tuple[LoraUse, tuple[torch.Tensor, ...]]:
        """Return how a forward uses the LoRA now, and its parameters; with dropout, this draws a key.

        A forward whose output is known already draws, too, so that what follows it draws the same again.
        """
        names, lora = self.lora_in_use()
        dropout: Dropout | None = draw(self.lora_dropout) if names else None
        scale = self.lora_alpha / self.lora_rank if names else 0.0
        return LoraUse(names, scale * (dropout.growth if dropout else 1), dropout), lora

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        """As nn.Module's, for tensors of any dtype and device.

        Raises ``KtbridgeError`` where PEFT loads an adapter without expert LoRA, which would leave it as it
        is, or a second adapter's, which would overwrite the first's.
        """
        given = {
            name: state_dict[f"{prefix}{name}"].to("cpu", torch.float32)
            for name in self.lora_names
            if f"{prefix}{name}" in state_dict
        }
        adapters = len(self.peft_adapters)
        if adapters == 1 and self.lora_names and not given:
            raise KtbridgeError(
                "the adapter that PEFT loads has no expert LoRA under the names that PEFT saves.",
                "Load a raw adapter with ktbridge.sft.load_raw_adapter(base_model, directory); wrap experts "
                "with lora_rank=0 for an adapter that has none.",
            )
        own = {name: getattr(self, name) for name in self.lora_names}
        trained = any(bool(own[name].any()) for name in own if name.endswith("_b"))
        if adapters > 1 and trained and any(not torch.equal(given[n], own[n]) for n in given):
            raise KtbridgeError(
                "a model has one expert LoRA, which the adapter that is loaded would overwrite with its own.",
                "Load the second adapter onto a model of its own, or delete the other one first.",
            )
        full = state_dict | {f"{prefix}{name}": value for name, value in given.items()}
        super()._load_from_state_dict(full, prefix, *args, **options)

    def _apply(self, fn: object, recurse: bool = True) -> ExpertsLayer:
        """Return what ``Module.to``, ``cuda``, ``half`` and the like do to a module: here, nothing."""
        return self


def lora_shapes(
    experts: int, hidden: int, inner: int, rank: int
) -> dict[str, tuple[int, int, int]]:
    """Shapes of the fused expert LoRA of one layer, by name, in the order of ``LORA_NAMES``."""
    return {
        "gate_lora_a": (experts, rank, hidden),
        "gate_lora_b": (experts, inner, rank),
        "up_lora_a": (experts, rank, hidden),
        "up_lora_b": (experts, inner, rank),
        "down_lora_a": (experts, rank, inner),
        "down_lora_b": (experts, hidden, rank),
    }


def check_inputs(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, hidden_size: int
) -> None:
    """Raise ``UsageError`` where a forward's inputs have other dtypes, shapes or devices than it takes."""
    expected = (
        ("hidden", hidden, torch.bfloat16),
        ("topk_ids", ids, torch.int64),
        ("topk_weights", weights, torch.float32),
    )
    for name, tensor, dtype in expected:
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype != dtype
            or tensor.dim() != 2
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.device != hidden.device
        ):
            raise UsageError(
                f"{name} must be a 2-D {dtype} tensor on the CPU, or all on one GPU, "
                f"not {describe(tensor)}."
            )
    if hidden.shape[1] != hidden_size or ids.shape != weights.shape or len(ids) != len(hidden):
        raise UsageError(
            f"hidden {tuple(hidden.shape)}, topk_ids {tuple(ids.shape)} and topk_weights "
            f"{tuple(weights.shape)} don't fit: expected [T, {hidden_size}], [T, K] and [T, K]."
        )


def check_dropout(share: object) -> None:
    """Raise ``UsageError`` where ``share`` is no probability that something is dropped."""
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < 1:
        raise UsageError(f"lora_dropout must be a number from 0 to below 1, not {share!r}.")


def describe(tensor: object) -> str:
    """A tensor's shape, dtype and device, or what else it is."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
