"""The keys of the ``kt_config`` block, by KTransformers' names, with their defaults and what each does."""

from __future__ import annotations

from dataclasses import dataclass

from ktbridge.experts import MAX_EXPERT_RANK
from ktbridge.sft.config.values import (
    flag,
    gpu_experts,
    number,
    one_of,
    option,
    share,
    size,
    text,
    whole,
)

STORAGE_BACKENDS = (
    "AMXBF16", "AMXINT8", "AMXINT4", "AMXINT4_KGroup", "AMXFP8", "BF16", "INT8", "FP8", "RAWINT4",
    "MXFP4", "TORCH", "llamafile", "AMXBF16_SkipLoRA", "AMXINT8_SkipLoRA", "AMXINT4_SkipLoRA",
)  # fmt: skip
"""KTransformers' names of backends: each stands for a storage of the experts and a kernel for it."""
QUANTISING = {"AMXINT8": "int8", "INT8": "int8", "AMXINT4": "int4", "AMXINT4_KGroup": "int4"}
"""Of these, those that quantise bfloat16 experts, and to what."""


@dataclass(frozen=True)
class KtConfig:
    """The ``kt_config`` block: how the experts run. Its keys may also stand outside the block."""

    kt_backend: str = option(
        one_of("auto", *STORAGE_BACKENDS),
        "auto",
        "Leave it out: ktbridge's own kernels compute the experts; the backend kt-kernel is gone since 0.7.",
    )
    """A storage of the experts by KTransformers' name, computed by our kernels: AMXINT8, INT8, AMXINT4 and
    AMXINT4_KGroup are kt_expert_weight_format: int8 or int4; auto and the others read experts as the
    checkpoint stores them. AMXBF16, AMXINT8 and AMXINT4 with _SkipLoRA at the end also do what
    kt_skip_expert_lora_adaptation does."""
    kt_num_threads: int = option(whole(0, 4096), 0)
    """Kernel threads; 0 takes KTBRIDGE_THREADS, else the physical cores this process may use."""
    kt_weight_path: str | None = option(text, None)
    """A safetensors checkpoint to take the experts from, such as one of scripts/quantize_experts.py;
    default: model_name_or_path. Files in KTransformers' own order aren't read."""
    kt_expert_weight_format: str | None = option(
        one_of("bf16", "int8", "fp8", "int4", "rawint4", "mxfp4"), None
    )
    """int8, int4: experts in BF16, F16 or F32 are quantised once, before the first run, beside the checkpoint
    or where KTBRIDGE_CACHE says. All else: as the checkpoint stores them."""
    kt_experts: str = option(one_of("auto", "cpu", "stream", "hybrid", "resident"), "auto")
    """What computes the routed experts. auto: without a GPU our kernels on the CPU, with one the fastest that
    fits its memory, by times measured at the start. cpu: the kernels. stream: the GPU, to which each layer's
    weights are transferred from the checkpoint in RAM. resident: the GPU, which keeps them all. hybrid: what
    stream is, since 0.7."""
    kt_gpu_memory: int | None = option(size, None)
    """GPU memory that the run may take in all, as 24GB; default: what is free."""
    kt_num_gpu_experts: int | None = option(gpu_experts, None)
    """How many of each layer's experts the GPU keeps, as so many whole layers; default: what fits."""
    kt_lora_rank: int | None = option(whole(1, MAX_EXPERT_RANK), None)
    """Rank of the expert LoRA; default: lora_rank."""
    kt_lora_alpha: float | None = option(number, None)
    """Alpha of the expert LoRA; default: twice kt_lora_rank where that is given, else lora_alpha."""
    kt_lora_dropout: float | None = option(share(), None)
    """Dropout of the expert LoRA's inputs; default: lora_dropout."""
    kt_skip_expert_lora_adaptation: bool = option(flag, False)
    """true: no expert LoRA is made; attention and what else lora_target names are trained alone."""
    expert_activation: str = option(one_of("retain", "recompute"), "retain")
    """The older name of kt_cpu_activation."""

    @property
    def backend(self) -> str:
        """``kt_backend`` without its suffix about LoRA."""
        return self.kt_backend.removesuffix("_SkipLoRA")

    @property
    def experts_frozen(self) -> bool:
        """Return whether the routed experts get no LoRA."""
        return self.kt_skip_expert_lora_adaptation or self.kt_backend != self.backend

    @property
    def storage(self) -> str | None:
        """int8 or int4 where the experts shall be quantised to it; None: as the checkpoint has them."""
        asked = self.kt_expert_weight_format
        if asked is None:
            return QUANTISING.get(self.backend)
        return asked if asked in QUANTISING.values() else None
