"""The MoE-LoRA layer as a torch module: autograd on top of the C++ kernels.

Owes the trainer and the embedded engine one thing: the routed experts of a layer with their LoRA, on
the CPU, from the one copy of the weights that is already in memory. What is computed is written down in
``kernels/moe/layer.h``; the formulas below repeat it in the words of a user.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any, NoReturn, SupportsIndex, TypeGuard

import torch
from torch import nn

from ktbridge import _kernels
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts import MAX_EXPERT_RANK, recompute
from ktbridge.experts.dropout import draw
from ktbridge.experts.expert_call import (
    LORA_NAMES,
    ExpertCall,
    ExpertFunction,
    LoraUse,
    float_zeros,
    kernels_of,
)
from ktbridge.experts.gpu.executor import GpuCall, GpuFunction, OnGpu
from ktbridge.experts.peft_layer import PeftLayer
from ktbridge.experts.weights import (
    PROJECTIONS,
    ExpertWeights,
    Stack,
    checked_layer,
    describe_tensor,
)

_KEEP = {"retain": _kernels.Keep.retain, "recompute": _kernels.Keep.recompute}


class MoELoRAExperts(nn.Module, PeftLayer):
    """E gated experts with per-expert LoRA: ``y = Σ_k w_k · down(silu(gate(x)) · up(x))``.

    Each projection is ``W x + (α/r) · B A x`` with W frozen [out, in], A [r, in], B [out, r]
    (LoRA, arXiv:2106.09685). Parameters are float32 masters, rounded to bfloat16 before use, so the
    adapter saved in bfloat16 is exactly the one that was trained:

    * ``gate_lora_a``, ``up_lora_a`` [E, r, H]; ``gate_lora_b``, ``up_lora_b`` [E, I, r]
    * ``down_lora_a`` [E, r, I]; ``down_lora_b`` [E, H, r]

    A starts Kaiming-uniform as in PEFT, B at zero, so a fresh layer equals the base. Only ``lora_targets``
    have parameters; ``lora_rank=0`` has none. ``lora_enabled = False`` runs the base experts and keeps the
    parameters. Without gradients to compute (``torch.no_grad()``, or nothing that requires one) a forward
    keeps nothing.

    In training mode, ``lora_dropout`` is the probability p with which an element of A's input is left out, as
    in PEFT: y = W x + (α/r) · B A drop(x), where drop divides what is kept by 1 - p and is drawn anew for
    each projection, token and expert of a token. Masks follow from torch's seed, and are the same whoever
    computes the layer (``ktbridge.experts.dropout``). ``layer.lora_dropout.p`` may be changed between passes.

    ``activation`` decides what a forward keeps for its backward: "retain" keeps each expert's activations,
    "recompute" only the routing and the LoRA's thin products, for one more gate and up product in backward.
    Both give the same bits; ``saved_bytes`` is what the last forward kept (0
    where it was queued in a GPU's stream, as it hasn't run yet). Gradient checkpointing has no effect
    here: ``activation`` decides what the kernels keep. Switch it on with
    ``ktbridge.experts.checkpointing.enable``, which spares the experts' second forward.

    ``run_ahead = True`` queues passes whose inputs are on a GPU in its stream, so that Python goes on while
    they run (``ktbridge.experts.queued``). The LoRA may then be changed, and its gradients read, only after a
    backward pass has returned; without gradients to compute a pass is waited for.

    The parameters stay float32 on the CPU whatever the model around them is moved or converted to, and so
    do the weights. Inputs may be on a GPU: they cross through pinned memory, and so does the output.

    ``accumulate_grad = True`` lets backward add LoRA gradients straight into float32 ``.grad`` buffers (made
    once, zeroed) instead of filling new tensors for autograd to add. The price: autograd doesn't see
    these gradients, so ``torch.autograd.grad`` and ``backward(inputs=...)`` are no use for the LoRA. A
    parameter with hooks, with a ``.grad`` of another layout, or in a process group of several (whose
    reducer is a hook we can't see) takes the normal way. With ``gpu`` set, a process group makes no
    difference: no reducer may be given these parameters then.

    ``copy.deepcopy`` copies the LoRA and shares the frozen weights. A layer can't be pickled, since the
    kernels know its weights by address: save its ``state_dict()``.
    """

    def __init__(
        self,
        gate: ExpertWeights | Stack,
        up: ExpertWeights | Stack,
        down: ExpertWeights | Stack,
        *,
        lora_rank: int = 8,
        lora_alpha: float = 16,
        isa: str = "auto",
        threads: int | None = None,
        lora_targets: Sequence[str] = PROJECTIONS,
        activation: str = "retain",
        accumulate_grad: bool = False,
        lora_dropout: float = 0.0,
    ) -> None:
        weights = checked_layer(gate, up, down)
        _check_options(lora_rank, lora_alpha, isa, threads, activation, lora_dropout)
        super().__init__()
        # No buffers: the weights belong to the checkpoint and are neither saved nor moved with the layer.
        self.weights = weights
        """The frozen weights of gate, up and down."""
        self.storage = weights[0].storage
        """Storage format of the frozen weights: "bf16", "fp8", "int8", "int4" or "mxfp4"."""
        self.num_experts = weights[0].count
        self.intermediate_size, self.hidden_size = weights[0].rows, weights[2].rows
        self.lora_rank, self.lora_alpha = int(lora_rank), float(lora_alpha)
        self.lora_targets, self.activation = _targets(lora_targets, self.lora_rank), activation
        self.lora_dropout = nn.Dropout(lora_dropout)
        """Its p and mode are the LoRA's: it is never called, but found by whoever looks for dropout."""
        self.lora_enabled = True
        self.lora_frozen = False
        """Whether the LoRA is kept from training on purpose (``ktbridge.sft.freeze_expert_lora``)."""
        self.lora_device = torch.device("cpu")
        """The device of the LoRA's masters: see ``move_lora``."""
        self.saved_bytes = 0
        self.accumulate_grad = accumulate_grad
        self.run_ahead = False
        self.gpu: OnGpu | None = None
        """The GPU executor that computes this layer, where there is one."""
        sizes = self.num_experts, self.hidden_size, self.intermediate_size, self.lora_rank
        for name in self.lora_names:
            self.register_parameter(name, nn.Parameter(float_zeros(lora_shapes(*sizes)[name])))
        self.reset_lora()
        self._layer = kernels_of(weights, isa, threads)

    @classmethod
    def from_tensors(
        cls,
        gate: ExpertWeights | Stack,
        up: ExpertWeights | Stack,
        down: ExpertWeights | Stack,
        lora_rank: int = 8,
        lora_alpha: float = 16,
        isa: str = "auto",
        threads: int | None = None,
        *,
        lora_targets: Sequence[str] = PROJECTIONS,
        activation: str = "retain",
        accumulate_grad: bool = False,
        lora_dropout: float = 0.0,
    ) -> MoELoRAExperts:
        """A layer over ``gate``, ``up`` [E, I, H] and ``down`` [E, H, I].

        Each is a bfloat16 tensor, a list of E 2-D ones, or ``ExpertWeights`` for other storage formats (one
        format a layer). They are used in place: views into a fused [E, 2I, H] tensor or into a mapped
        file are welcome, as long as each row is contiguous. ``isa`` is "auto" (KTBRIDGE_ISA, else the
        best the CPU has) or a name from ``ktbridge doctor``; ``threads`` defaults to KTBRIDGE_THREADS,
        else to the physical cores this process may use, within its cgroup's limit; more threads than
        usable CPUs are clipped. The rest is explained above.

        Raises ``UsageError`` for wrong dtypes, shapes or strides (all at once), a missing ISA, a rank
        above 128, or targets that are no projections.
        """
        return cls(
            gate,
            up,
            down,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            isa=isa,
            threads=threads,
            lora_targets=lora_targets,
            activation=activation,
            accumulate_grad=accumulate_grad,
            lora_dropout=lora_dropout,
        )

    @property
    def isa(self) -> str:
        """The kernel path in use, such as "avx2"."""
        return self._layer.isa

    @property
    def threads(self) -> int:
        """Number of kernel threads."""
        return self._layer.threads

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

    def draw_lora_use(self) -> tuple[LoraUse, tuple[torch.Tensor, ...]]:
        """Return how a forward uses the LoRA now, and its parameters: none where it is switched off.

        With dropout, this draws a key; a forward whose output is known already draws, too, so that what
        follows it draws the same again. Raises ``UsageError`` for parameters that were converted or moved.
        """
        names = self.lora_names if self.lora_enabled and self.on_in_peft else ()
        where = "the CPU" if self.lora_device.type == "cpu" else str(self.lora_device)
        lora = tuple(getattr(self, name) for name in names)
        for name, parameter in zip(names, lora, strict=True):
            if parameter.dtype != torch.float32 or parameter.device != self.lora_device:
                raise UsageError(
                    f"{name} must be float32 on {where}, not {describe_tensor(parameter)}.",
                    "Leave the expert LoRA's parameters as wrap_experts made them: whatever the model is "
                    f"moved or converted to, they stay float32 on {where}.",
                )
        dropout = draw(self.lora_dropout) if names else None
        scale = self.lora_alpha / self.lora_rank if names else 0.0
        return LoraUse(names, scale * (dropout.growth if dropout else 1), dropout), lora

    def forward(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H] bfloat16, topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, H] bfloat16.

        All on the CPU or all on one GPU, where the result is, too. Differentiable (once) in
        ``hidden``, ``topk_weights`` and the LoRA parameters. Raises ``UsageError`` for other dtypes or
        shapes, and ``IndexError`` when an id is not an expert's.
        """
        _check_inputs(hidden, topk_ids, topk_weights, self.hidden_size)
        used, lora = self.draw_lora_use()
        # Asked here because inside autograd's function it is always off.
        needed = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (hidden, topk_weights, *lora)
        )
        keep = _KEEP[self.activation] if needed else _kernels.Keep.nothing
        if self.gpu is not None and hidden.device == self.gpu.experts.device:
            there = GpuCall(
                self.gpu.experts,
                self.gpu.index,
                used,
                needed,
                self.accumulate_grad,
                recompute.replayed(),
            )
            result: torch.Tensor = GpuFunction.apply(there, hidden, topk_ids, topk_weights, *lora)
            return result
        if any(parameter.device.type != "cpu" for parameter in lora):
            raise UsageError(
                f"the expert LoRA is on {self.lora_device} for the executor there, and hidden states are on "
                f"{hidden.device}.",
                "Give the layer inputs on that device, or call layer.move_lora(torch.device('cpu')).",
            )
        call = ExpertCall(
            self._layer,
            self.weights,
            used,
            keep,
            self.accumulate_grad,
            self.run_ahead,
            recompute.replayed(),
        )
        out = ExpertFunction.apply(call, hidden, topk_ids, topk_weights, *lora)
        if call.replayed is None:
            self.saved_bytes = call.saved.bytes if call.saved is not None else 0
        return out

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

    def _apply(self, fn: object, recurse: bool = True) -> MoELoRAExperts:
        """Return what ``Module.to``, ``cuda``, ``half`` and the like do to a module: here, nothing."""
        return self

    def __copy__(self) -> MoELoRAExperts:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELoRAExperts:
        made = type(self).__new__(type(self))
        # What no copy is made of: the frozen weights, and the kernels, which belong to one layer.
        memo.update({id(self): made, id(self.weights): self.weights})
        state = {name: value for name, value in self.__dict__.items() if name != "_layer"}
        made.__dict__.update(copy.deepcopy(state, memo))
        made._layer = kernels_of(self.weights, self.isa, self.threads)
        made.saved_bytes = 0
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "an expert layer can't be pickled, because its kernels read the weights at addresses of this "
            "process: save its state_dict() instead, and build the layer where it is loaded.",
            "Save layer.state_dict(), or build the layer in the child process.",
        )

    def extra_repr(self) -> str:
        targets = "" if self.lora_targets == PROJECTIONS else f" on {'+'.join(self.lora_targets)}"
        return (
            f"experts={self.num_experts}, hidden={self.hidden_size}, "
            f"intermediate={self.intermediate_size}, storage={self.storage}, "
            f"rank={self.lora_rank}{targets}, alpha={self.lora_alpha:g}, isa={self.isa}, "
            f"threads={self.threads}, activation={self.activation}, "
            f"saved={self.saved_bytes / 2**20:.1f} MiB"
        )


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


def _check_inputs(
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
                f"not {describe_tensor(tensor)}."
            )
    if hidden.shape[1] != hidden_size or ids.shape != weights.shape or len(ids) != len(hidden):
        raise UsageError(
            f"hidden {tuple(hidden.shape)}, topk_ids {tuple(ids.shape)} and topk_weights "
            f"{tuple(weights.shape)} don't fit: expected [T, {hidden_size}], [T, K] and [T, K]."
        )


def _check_options(
    rank: object, alpha: object, isa: object, threads: object, activation: object, dropout: object
) -> None:
    """Raise ``UsageError`` for the first option that a layer doesn't take."""
    if not _is_whole(rank) or not 0 <= rank <= MAX_EXPERT_RANK:
        raise UsageError(
            f"lora_rank must be from 0 to {MAX_EXPERT_RANK}, a whole number, not {rank!r}."
        )
    plain = _is_whole(alpha) or isinstance(alpha, float)  # numpy's float64 is one
    if not plain or not 0 <= alpha <= sys.float_info.max:  # type: ignore[operator]
        raise UsageError(f"lora_alpha must be a number that is not negative, not {alpha!r}.")
    if not isinstance(isa, str):
        raise UsageError(f"isa must be a name such as 'auto', not {isa!r}.")
    if threads is not None and not _is_whole(threads):
        raise UsageError(f"threads must be a whole number or None, not {threads!r}.")
    if not isinstance(activation, str) or activation not in _KEEP:
        raise UsageError(f"activation must be {' or '.join(_KEEP)}, not {activation!r}.")
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise UsageError(f"lora_dropout must be a number from 0 to below 1, not {dropout!r}.")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _targets(wanted: object, rank: int) -> tuple[str, ...]:
    """``wanted`` in the order of ``PROJECTIONS``; nothing when there is no LoRA."""
    if (
        isinstance(wanted, str)
        or not isinstance(wanted, Collection)
        or any(name not in PROJECTIONS for name in wanted)
        or (rank > 0 and not wanted)
    ):
        raise UsageError(
            f"lora_targets must be some of {', '.join(PROJECTIONS)}, not {wanted!r}.",
            "Give a list of names, or lora_rank=0 for no LoRA on the experts.",
        )
    return tuple(name for name in PROJECTIONS if name in wanted and rank > 0)
