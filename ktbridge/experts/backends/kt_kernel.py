"""KTransformers' own wheel (``kt-kernel``) as a backend for the experts, where it is installed.

It lets users compare, and tests our reading of its contract, which is that of one version: another may
take the same calls and mean something else, so it is refused. Its bfloat16 method, ``AMXBF16_SFT``, needs
AMX or AVX512-BF16, and packs the weights twice, for forward and for backward: beside the checkpoint's
pages it takes twice the experts' bfloat16 size.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch

from ktbridge.errors import UsageError
from ktbridge.experts import checkpointing
from ktbridge.experts.backends.kt_call import KtCall, KtFunction, KtLayer
from ktbridge.experts.experts_layer import ExpertsLayer, check_inputs, lora_shapes
from ktbridge.experts.weights import PROJECTIONS, SILU, ExpertWeights, Stack, checked_layer
from ktbridge.kernel_choice import choose_threads

VERSION = "0.7.2"
"""The version whose contract was read."""
INSTALL = f"pip install --no-deps kt-kernel=={VERSION} gguf"
_STEP = 32  # rows and columns that its packed weights come in
_ACTIVATIONS = ("retain", "recompute")

_indices = itertools.count()  # kt-kernel identifies layers by number, over all models of a process
_pool: tuple[int, int] | None = None


def load_kt_kernel(moe_class: str = "AMXBF16_SFT_MOE") -> Any:
    """The module ``kt_kernel``, of the version read, with the class that trains on this CPU.

    Raises ``UsageError`` with what to do where it is not installed, doesn't import, is another version,
    or has no such class for this CPU.
    """
    leave = "leave kt_backend out of the configuration"
    if importlib.util.find_spec("kt_kernel") is None:
        raise UsageError(
            "kt_backend is kt-kernel, but kt-kernel is not installed.",
            f"{INSTALL}, or {leave}.",
        )
    try:
        module: Any = importlib.import_module("kt_kernel")
    except Exception as error:  # it loads its extension by hand, so anything may come
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"kt-kernel is installed but does not import: {reason}",
            f"Install what it lacks, or {leave}.",
        ) from error
    if module.__version__ != VERSION:
        raise UsageError(
            f"kt-kernel {module.__version__} is installed, and ktbridge knows how to drive {VERSION} only.",
            f"{INSTALL}, or {leave}.",
        )
    if not hasattr(module.kt_kernel_ext.moe, moe_class):
        raise UsageError(
            f"kt-kernel has no {moe_class} for this CPU (its {module.__cpu_variant__} variant is loaded): "
            "training in bfloat16 takes AMX or AVX512-BF16.",
            f"Run on such a CPU, or {leave}: ktbridge's own kernels run on every x86-64.",
        )
    return module


@dataclass(frozen=True, kw_only=True)
class KtRequest:
    """What a layer asks of kt-kernel: sizes, LoRA, and how it is to run."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    rank: int
    alpha: float
    threads: int
    threadpool_count: int
    max_tokens: int
    storage: str = "bf16"
    targets: Collection[str] = PROJECTIONS
    numa_nodes: int = 1
    dropout: float = 0.0
    plain: bool = True
    """Whether experts are silu(gate) * up without biases."""

    def arguments(self) -> dict[str, object]:
        """The keyword arguments of ``KTMoEWrapper`` for the layer, but for its number and method.

        Raises ``UsageError`` naming everything that kt-kernel can't do.
        """
        if found := list(self._problems()):
            raise UsageError(
                f"kt-kernel can't run these experts: {'; '.join(found)}.",
                "Change that, or leave kt_backend out of the configuration.",
            )
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inner,
            "gpu_experts_mask": None,
            "num_gpu_experts": 0,
            "cpuinfer_threads": self.threads,
            "threadpool_count": self.threadpool_count,
            "weight_path": "",
            "chunked_prefill_size": self.max_tokens,
            "mode": "sft",
            "lora_rank": self.rank,
            "lora_alpha": float(self.alpha),
            "max_cache_depth": 1,
        }

    def _problems(self) -> Iterator[str]:
        pools = self.threadpool_count
        if self.storage != "bf16":
            yield f"the experts are {self.storage} (it takes bf16 tensors)"
        if not self.plain:
            yield "the experts have biases or a gating of their own (it computes silu(gate) * up)"
        if set(self.targets) != set(PROJECTIONS) or self.rank < 1:
            yield "the expert LoRA is not on all of gate, up and down (it knows no other)"
        if not self.alpha > 0:
            yield f"lora_alpha is {self.alpha:g} (expected above 0)"
        if self.dropout:
            yield f"lora_dropout is {self.dropout:g} (it has none on the experts)"
        if self.hidden % _STEP or self.inner % (_STEP * max(pools, 1)):
            parts = f" on each of {pools} NUMA nodes" if pools > 1 else ""
            sizes = f"hidden size {self.hidden} or intermediate size {self.inner}"
            yield f"{sizes} is not a multiple of {_STEP}{parts}"
        if not 1 <= self.top_k <= self.experts:
            yield f"top_k is {self.top_k} of {self.experts} experts"
        if self.max_tokens < 1:
            yield f"max_tokens is {self.max_tokens} (expected at least 1)"
        if not 1 <= pools <= self.numa_nodes:
            yield f"threadpool_count is {pools} on {self.numa_nodes} NUMA node(s)"
        if self.threads < pools:
            yield f"there are {self.threads} threads for {pools} pools"


class KtKernelExperts(ExpertsLayer):
    """A layer of experts that kt-kernel computes, with ``MoELoRAExperts``'s parameters and results.

    The same within bfloat16's rounding: kt-kernel also rounds LoRA's gradients to bfloat16, after each
    backward. ``activation`` "retain" keeps one forward's activations in kt-kernel's own buffers, made for
    ``max_tokens``; where more forwards than one wait for their backward, and with "recompute", the forward
    is run again. With "recompute" all layers share those buffers. ``saved_bytes`` is what the last forward
    left in them, by kt-kernel's layout. A layer can be neither copied nor pickled.
    """

    METHOD: ClassVar[Mapping[str, object]] = {"method": "AMXBF16_SFT"}

    def __init__(
        self,
        gate: ExpertWeights | Stack,
        up: ExpertWeights | Stack,
        down: ExpertWeights | Stack,
        *,
        top_k: int,
        max_tokens: int,
        lora_rank: int = 8,
        lora_alpha: float = 16,
        lora_targets: Sequence[str] = PROJECTIONS,
        threads: int | None = None,
        threadpool_count: int = 1,
        activation: str = "retain",
        lora_dropout: float = 0.0,
        share_backward_bb: bool = False,
    ) -> None:
        """``gate``, ``up`` [E, I, H] and ``down`` [E, H, I] bfloat16, as for ``MoELoRAExperts``; packed here.

        ``top_k`` is the model's experts a token; ``max_tokens`` the most tokens of one forward, padding
        included. ``threads`` and ``threadpool_count`` (a pool a NUMA node) are one choice a process.
        ``share_backward_bb`` has one buffer of weights for backward for all layers, packed again in each
        backward: half the memory, more time.

        Raises ``UsageError`` for weights that don't fit, for what kt-kernel can't do (all at once), and as
        ``load_kt_kernel``.
        """
        weights, inner, hidden = checked_layer(gate, up, down)
        if activation not in _ACTIVATIONS:
            raise UsageError(f"activation must be {' or '.join(_ACTIVATIONS)}, not {activation!r}.")
        request = KtRequest(
            experts=weights[0].count,
            top_k=top_k,
            hidden=hidden,
            inner=inner,
            rank=lora_rank,
            alpha=lora_alpha,
            threads=choose_threads(threads or 0),
            threadpool_count=threadpool_count,
            max_tokens=max_tokens,
            storage=weights[0].storage,
            targets=lora_targets,
            numa_nodes=_numa_nodes(),
            dropout=lora_dropout,
            plain=weights[0].gating == SILU and all(each.bias is None for each in weights),
        )
        arguments = request.arguments()
        kt_kernel = load_kt_kernel(f"{self.METHOD['method']}_MOE")
        _one_pool(request.threads, threadpool_count)
        super().__init__(
            weights,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_targets=PROJECTIONS,
            activation=activation,
        )
        self.top_k, self.max_tokens = top_k, max_tokens
        self._isa, self._threads = str(kt_kernel.__cpu_variant__), request.threads
        shapes = lora_shapes(self.num_experts, hidden, inner, self.lora_rank)
        with _without_chatter():
            wrapper = kt_kernel.KTMoEWrapper(layer_idx=next(_indices), **arguments, **self.METHOD)
            wrapper.share_cache_pool = activation == "recompute"
            wrapper.share_backward_bb = (
                False  # weights for backward are kept, not packed again each time
            )
            self._load(wrapper)
            self._layer = KtLayer(wrapper, shapes)

    def _load(self, wrapper: Any) -> None:
        """Hand the weights over; they are packed when this returns."""
        tensors = (_stacked(weights.weight) for weights in self._weights)
        wrapper.load_weights_from_tensors(*tensors, torch.arange(self.num_experts))

    @property
    def isa(self) -> str:
        """kt-kernel's name for the variant in use, such as "amx"; KT_KERNEL_CPU_VARIANT chooses."""
        return self._isa

    @property
    def threads(self) -> int:
        return self._threads

    def forward(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``ExpertsLayer``. Raises ``UsageError`` for other dtypes, shapes or more than
        ``max_tokens``, and ``IndexError`` when an id is not an expert's."""
        check_inputs(hidden, topk_ids, topk_weights, self.hidden_size)
        self._check_limits(topk_ids)
        _, lora = self.lora_in_use()
        # Asked here because inside autograd's function it is always off.
        needed = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (hidden, topk_weights, *lora)
        )
        keep = needed and self.activation == "retain"
        call = KtCall(self._layer, keep, needed, checkpointing.replayed())
        out: torch.Tensor = KtFunction.apply(call, hidden, topk_ids, topk_weights, *lora)
        if call.replayed is None:
            self.saved_bytes = self._kept_bytes(*topk_ids.shape) if self._layer.holds(call) else 0
        return out

    def _check_limits(self, ids: torch.Tensor) -> None:
        if len(ids) > self.max_tokens:
            raise UsageError(
                f"{len(ids)} tokens at once are more than the {self.max_tokens} that kt-kernel's buffers "
                "were made for.",
                "Give a larger max_tokens: batch size times the longest sequence, twice that for DPO.",
            )
        if ids.shape[1] != self.top_k:
            raise UsageError(
                f"topk_ids has {ids.shape[1]} experts a token, and the layer was made for {self.top_k}."
            )
        if ids.numel() and not bool(((ids >= 0) & (ids < self.num_experts)).all()):
            raise IndexError(
                f"topk_ids has ids outside 0..{self.num_experts - 1}: "
                f"from {int(ids.min())} to {int(ids.max())}"
            )

    def _kept_bytes(self, tokens: int, top_k: int) -> int:
        """hidden, and of each slot: gate, up, their product, down's output and its LoRA's thin product."""
        slot = 3 * self.intermediate_size + self.hidden_size + self.lora_rank
        return 2 * tokens * (self.hidden_size + top_k * slot)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "a layer that kt-kernel computes can be neither copied nor pickled: its packed weights belong to "
            "this process.",
            "Save layer.state_dict(), or build the layer where it is needed.",
        )

    def extra_repr(self) -> str:
        return (
            f"kt-kernel {VERSION}, experts={self.num_experts}, hidden={self.hidden_size}, "
            f"intermediate={self.intermediate_size}, rank={self.lora_rank}, alpha={self.lora_alpha:g}, "
            f"isa={self.isa}, threads={self.threads}, activation={self.activation}"
        )


def _one_pool(threads: int, pools: int) -> None:
    """Refuse a second choice of threads: kt-kernel would silently keep the first."""
    global _pool
    if _pool is not None and _pool != (threads, pools):
        raise UsageError(
            f"kt-kernel already runs {_pool[0]} threads in {_pool[1]} pool(s) in this process; it can't "
            f"change to {threads} in {pools}.",
            "Use the same threads and threadpool_count for every layer of a process.",
        )
    _pool = threads, pools


def _numa_nodes() -> int:
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def _stacked(weight: Stack) -> torch.Tensor:
    """[E, out, in], contiguous: the tensor itself where it is that already."""
    if isinstance(weight, torch.Tensor):
        return weight.contiguous()
    return torch.stack(tuple(weight))


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Keep what kt-kernel's C++ prints to stdout off it; its last words in a crash are on stderr."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    before = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        flush(None)  # it waits in C's own buffer
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)
