"""The MoE-LoRA layer as a torch module: autograd on top of the C++ kernels.

Owes the trainer and the embedded engine one thing: the routed experts of a layer with their LoRA, on
the CPU, from the one copy of the weights that is already in memory. What is computed is written down in
``kernels/moe/layer.h``; the formulas below repeat it in the words of a user.
"""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Any, NoReturn, SupportsIndex, TypeGuard

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ktbridge import _kernels
from ktbridge.adapter.keys import LAYER
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts import MAX_EXPERT_RANK, recompute
from ktbridge.experts.autograd import ExpertFunction, KernelCall, kernels_of
from ktbridge.experts.gpu.executor import GpuBinding, GpuCall, GpuFunction
from ktbridge.experts.lora import LORA_NAMES, LoraUse, draw_dropout, float_zeros, lora_shapes
from ktbridge.experts.weights import PROJECTIONS, ExpertWeights, Stack, check_layer, describe_tensor

MERGE_STEP = (
    "Save with ktbridge.sft.save_raw_adapter, then `ktbridge merge` (or ktbridge.adapter.merge_adapter) "
    "writes a checkpoint with both halves merged."
)


class PeftLayer(BaseTunerLayer):
    """Mixin that makes a layer of routed experts one of PEFT's tuner layers.

    PEFT finds what is trained by walking over a model's tuner layers, and everything on one of them is the
    adapter's. So with this mixin the expert LoRA is not frozen by ``get_peft_model``, whatever came first;
    it is in ``save_pretrained`` and Trainer's checkpoints, and comes back from them; it is off within
    ``disable_adapter()``; and ``print_trainable_parameters`` counts it. PEFT does so from 0.21 on (before, it
    went by names); tests/sft/test_library_peft.py has a test of each.

    A layer has one expert LoRA, while PEFT's layers have one for each adapter name: it goes with the adapter
    ``peft_adapter`` and is off where that one isn't active. Nothing is wrapped, and no parameter is kept by
    adapter name, so what PEFT does to either finds nothing.
    """

    _base: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    _adapter: str = "default"
    _owned: bool = False
    """Whether PEFT had it."""

    def belong_to(self, base: nn.Module) -> None:
        """Take ``base``, held weakly, as the transformers model that the layer is in and PEFT works on.

        Where the expert LoRA's adapter has been deleted, it is set to nothing: it isn't the next one's.
        """
        if self._base() is not base:
            self._base = weakref.ref(base)
        adapters = self.peft_adapters
        if self._adapter not in adapters:
            assert isinstance(self, nn.Module)
            with torch.no_grad():
                for name, parameter in self.named_parameters() if self._owned else ():
                    if name.endswith("_b"):
                        parameter.zero_()
            self._adapter = self.peft_adapter
        self._owned = bool(adapters)

    def belongs_to(self, base: nn.Module) -> bool:
        """Return whether ``belong_to(base)`` would change nothing."""
        adapters = self.peft_adapters
        return self._base() is base and self._owned == bool(adapters) and self._adapter == self.peft_adapter

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
        base = self._base()
        tuner = first_tuner(base) if base is not None and len(self.peft_adapters) > 1 else None
        return list(tuner.active_adapters) if tuner is not None else [self.peft_adapter]

    @property
    def on_in_peft(self) -> bool:
        """Return whether PEFT has the adapter on: it is active, and not within ``disable_adapter()``."""
        if self.disable_adapters:
            return False
        return len(self.peft_adapters) < 2 or self.peft_adapter in self.peft_active

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Let the parameters of the adapters named be trained, or not."""
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
        """Do nothing: nothing is ever merged."""

    # The base class has these of the module that it wraps, and would look for one for ever.
    @property
    def weight(self) -> NoReturn:
        raise AttributeError("weight")

    @property
    def bias(self) -> NoReturn:
        raise AttributeError("bias")


def first_tuner(module: nn.Module) -> BaseTunerLayer | None:
    """Return the first of PEFT's own layers in a module."""
    for each in module.modules():
        if isinstance(each, BaseTunerLayer) and not isinstance(each, PeftLayer):
            return each
    return None


_KEEP = {"retain": _kernels.Keep.retain, "recompute": _kernels.Keep.recompute}


@dataclass(frozen=True)
class ExpertOptions:
    """Options of a layer of experts. Raises ``UsageError`` for the first that a layer doesn't take."""

    lora_rank: int = 8
    """Rank of the LoRA, at most 128; 0 for none."""
    lora_alpha: float = 16
    """α: the LoRA's product is scaled by α / rank."""
    isa: str = "auto"
    """Kernel path, a name from ``ktbridge doctor``; "auto": KTBRIDGE_ISA, else the best that the CPU has."""
    threads: int | None = None
    """Kernel threads; more than the usable CPUs are clipped.

    None: KTBRIDGE_THREADS, else the physical cores this process may use, within its cgroup's limit.
    """
    _: KW_ONLY
    lora_targets: Sequence[str] = PROJECTIONS
    """Projections that have LoRA."""
    activation: str = "retain"
    """Activations that a forward keeps for its backward.

    "retain" keeps each expert's activations, "recompute" only the routing and the LoRA's thin products, for
    one more gate and up product in backward. Both give the same bits.
    """
    accumulate_grad: bool = False
    """Add LoRA gradients straight into float32 ``.grad`` buffers (made once, zeroed) in backward.

    Else autograd adds new tensors. The price: autograd doesn't see these gradients, so
    ``torch.autograd.grad`` and ``backward(inputs=...)`` are no use for the LoRA. A parameter with hooks, with
    a ``.grad`` of another layout, or in a process group of several (whose reducer is a hook we can't see)
    takes the normal way.
    With ``gpu`` set, a process group makes no difference: no reducer may be given these parameters then.
    """
    lora_dropout: float = 0.0
    """Probability, in training mode, with which an element of A's input is left out."""

    def __post_init__(self) -> None:
        rank, alpha, dropout = self.lora_rank, self.lora_alpha, self.lora_dropout
        if not _is_whole(rank) or not 0 <= rank <= MAX_EXPERT_RANK:
            raise UsageError(f"lora_rank must be from 0 to {MAX_EXPERT_RANK}, a whole number, not {rank!r}.")
        plain = _is_whole(alpha) or isinstance(alpha, float)  # numpy's float64 is one
        if not plain or not 0 <= alpha <= sys.float_info.max:
            raise UsageError(f"lora_alpha must be a number that is not negative, not {alpha!r}.")
        if not isinstance(self.isa, str):
            raise UsageError(f"isa must be a name such as 'auto', not {self.isa!r}.")
        if self.threads is not None and not _is_whole(self.threads):
            raise UsageError(f"threads must be a whole number or None, not {self.threads!r}.")
        if not isinstance(self.activation, str) or self.activation not in _KEEP:
            raise UsageError(f"activation must be {' or '.join(_KEEP)}, not {self.activation!r}.")
        number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
        if not number or not 0 <= dropout < 1:
            raise UsageError(f"lora_dropout must be a number from 0 to below 1, not {dropout!r}.")
        wanted = self.lora_targets
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
        chosen = tuple(name for name in PROJECTIONS if name in wanted and rank > 0)
        object.__setattr__(self, "lora_targets", chosen)


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
    computes the layer (``ktbridge.experts.lora``). ``layer.lora_dropout.p`` may be changed between passes.

    ``saved_bytes`` is what the last forward kept (0 where it was queued in a GPU's stream, as it hasn't run
    yet). Gradient checkpointing has no effect here: ``activation`` decides what the kernels keep. Switch it
    on with ``ktbridge.experts.recompute.enable``, which spares the experts' second forward.

    ``run_ahead = True`` queues passes whose inputs are on a GPU in its stream, so that Python goes on while
    they run (``ktbridge.experts.autograd``). The LoRA may then be changed, and its gradients read, only after
    a backward pass has returned; without gradients to compute a pass is waited for.

    The parameters stay float32 on the CPU whatever the model around them is moved or converted to, and so
    do the weights. Inputs may be on a GPU: they are copied through pinned memory, and so is the output.

    ``copy.deepcopy`` copies the LoRA and shares the frozen weights. A layer can't be pickled, since the
    kernels know its weights by address: save its ``state_dict()``.
    """

    def __init__(
        self,
        gate: ExpertWeights | Stack,
        up: ExpertWeights | Stack,
        down: ExpertWeights | Stack,
        options: ExpertOptions | None = None,
        **named: Any,
    ) -> None:
        """``options``, or its fields by their names. Raises as ``from_tensors``."""
        weights = check_layer(gate, up, down)
        options = options or ExpertOptions(**named)
        super().__init__()
        self.options = options
        """Options that the layer was made with; the attributes of the same names may be changed later."""
        # No buffers: the weights belong to the checkpoint and are neither saved nor moved with the layer.
        self.weights = weights
        """The frozen weights of gate, up and down."""
        self.storage = weights[0].storage
        """Storage format of the frozen weights: "bf16", "fp8", "int8", "int4" or "mxfp4"."""
        self.num_experts = weights[0].count
        self.intermediate_size, self.hidden_size = weights[0].rows, weights[2].rows
        self.lora_rank, self.lora_alpha = int(options.lora_rank), float(options.lora_alpha)
        self.lora_targets = tuple(options.lora_targets)
        self.activation = options.activation
        self.lora_dropout = nn.Dropout(options.lora_dropout)
        """Its p and mode are the LoRA's: it is never called, but found by whoever looks for dropout."""
        self.lora_enabled = True
        self.lora_tokens: torch.Tensor | None = None
        """Mask of the tokens [T] that have the LoRA in inference, bool on the CPU; None: all."""
        self.lora_frozen = False
        """True where the LoRA is kept from training on purpose (``ktbridge.sft.freeze_expert_lora``)."""
        self.lora_device = torch.device("cpu")
        """The device of the LoRA's masters: see ``move_lora``."""
        self.saved_bytes = 0
        self.accumulate_grad = options.accumulate_grad
        self.run_ahead = False
        self.gpu: GpuBinding | None = None
        """The GPU executor that computes this layer, where there is one."""
        sizes = self.num_experts, self.hidden_size, self.intermediate_size, self.lora_rank
        for name in self.lora_names:
            self.register_parameter(name, nn.Parameter(float_zeros(lora_shapes(*sizes)[name])))
        self.reset_lora()
        self._layer = kernels_of(weights, options.isa, options.threads)

    @classmethod
    def from_tensors(
        cls,
        gate: ExpertWeights | Stack,
        up: ExpertWeights | Stack,
        down: ExpertWeights | Stack,
        *options: Any,
        **named: Any,
    ) -> MoELoRAExperts:
        """Make a layer over ``gate``, ``up`` [E, I, H] and ``down`` [E, H, I], with ``ExpertOptions``.

        Each is a bfloat16 tensor, a list of E 2-D ones, or ``ExpertWeights`` for other storage formats (one
        format a layer). They are used in place: views into a fused [E, 2I, H] tensor or into a mapped
        file are welcome, as long as each row is contiguous. The rest are the fields of ``ExpertOptions``,
        the first four (lora_rank, lora_alpha, isa, threads) also by their place.

        Raises ``UsageError`` for wrong dtypes, shapes or strides (all at once), a missing ISA, a rank
        above 128, or targets that are no projections.
        """
        return cls(gate, up, down, ExpertOptions(*options, **named))

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

    def move_lora(self, device: torch.device) -> None:
        """Have the LoRA's masters on ``device``."""
        for parameter in self.lora_parameters():
            parameter.data = parameter.data.to(device)
            parameter.grad = None
            self.lora_device = parameter.device

    def draw_lora_use(self) -> LoraUse:
        """Return how a forward uses the LoRA's parameters now: none where it is switched off.

        With dropout, this draws a key; a forward whose output is known already draws, too, so that what
        follows it draws the same again. Raises ``UsageError`` for parameters that were converted or moved.
        """
        names = self.lora_names if self.lora_enabled and self.on_in_peft else ()
        where = "the CPU" if self.lora_device.type == "cpu" else str(self.lora_device)
        lora = {name: getattr(self, name) for name in names}
        for name, parameter in lora.items():
            if parameter.dtype != torch.float32 or parameter.device != self.lora_device:
                raise UsageError(
                    f"{name} must be float32 on {where}, not {describe_tensor(parameter)}.",
                    "Leave the expert LoRA's parameters as wrap_experts made them: whatever the model is "
                    f"moved or converted to, they stay float32 on {where}.",
                )
        dropout = draw_dropout(self.lora_dropout) if names else None
        scale = self.lora_alpha / self.lora_rank if names else 0.0
        growth = dropout.growth if dropout else 1
        return LoraUse(lora, scale * growth, dropout, self.lora_tokens)

    def forward(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H] bfloat16, topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, H] bfloat16.

        All on the CPU or all on one GPU, where the result is, too. Differentiable (once) in
        ``hidden``, ``topk_weights`` and the LoRA parameters. Raises ``UsageError`` for other dtypes or
        shapes, and ``IndexError`` when an id is not an expert's.
        """
        _check_inputs(hidden, topk_ids, topk_weights, self.hidden_size)
        used = self.draw_lora_use()
        lora = used.tensors.values()
        _check_tokens(used.tokens, len(hidden), self.gpu is not None or torch.is_grad_enabled())
        # Asked here because inside autograd's function it is always off.
        needed = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (hidden, topk_weights, *lora)
        )
        keep = _KEEP[self.activation] if needed else _kernels.Keep.nothing
        if self.gpu is not None and hidden.device == self.gpu.experts.device:
            experts, index = self.gpu.experts, self.gpu.index
            again = recompute.replayed()
            there = GpuCall(experts, index, used, needed, self.accumulate_grad, again)
            result: torch.Tensor = GpuFunction.apply(there, hidden, topk_ids, topk_weights, *lora)
            return result
        if used.tensors and self.lora_device.type != "cpu":
            raise UsageError(
                f"the expert LoRA is on {self.lora_device} for the executor there, and hidden states are on "
                f"{hidden.device}.",
                "Give the layer inputs on that device, or call layer.move_lora(torch.device('cpu')).",
            )
        call = KernelCall(
            self._layer, self.weights, used, keep, self.accumulate_grad, self.run_ahead, recompute.replayed()
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

    def __deepcopy__(self, memo: dict[int, object]) -> MoELoRAExperts:
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
            f"experts={self.num_experts}, hidden={self.hidden_size}, intermediate={self.intermediate_size}, "
            f"storage={self.storage}, rank={self.lora_rank}{targets}, alpha={self.lora_alpha:g}, "
            f"isa={self.isa}, threads={self.threads}, activation={self.activation}, "
            f"saved={self.saved_bytes / 2**20:.1f} MiB"
        )


def _check_tokens(which: torch.Tensor | None, tokens: int, unable: bool) -> None:
    """Raise ``UsageError`` where ``lora_tokens`` can't be used by a forward of ``tokens`` tokens."""
    if which is None:
        return
    right = which.dtype == torch.bool and which.shape == (tokens,) and which.device.type == "cpu"
    if unable or not right or not which.is_contiguous():
        raise UsageError(
            f"lora_tokens must be a bool tensor [{tokens}] on the CPU, without gradients and a GPU, not "
            f"{describe_tensor(which)}."
        )


def _check_inputs(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, hidden_size: int) -> None:
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


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def find_layers(module: nn.Module) -> list[MoELoRAExperts]:
    """Return the wrapped layers within a module, in its order."""
    return [each for each in module.modules() if isinstance(each, MoELoRAExperts)]


def expert_layers(model: nn.Module) -> dict[int, MoELoRAExperts]:
    """Return the wrapped layers of a model by decoder layer index, in rising order."""
    layers = {}
    for name, module in model.named_modules():
        match = LAYER.search(name)
        if isinstance(module, MoELoRAExperts) and match:
            layers[int(match.group(1))] = module
    return dict(sorted(layers.items()))
