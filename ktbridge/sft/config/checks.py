"""Checks across keys: contradictions are errors, surprising defaults are noted."""

from __future__ import annotations

import os
from collections.abc import Collection

from ktbridge.experts import MAX_EXPERT_RANK
from ktbridge.sft.config.findings import CONTRADICTION, Findings
from ktbridge.sft.config.schema import TrainConfig, options
from ktbridge.yamlfile import shown

_DPO = ("pref_beta", "pref_loss", "dpo_label_smoothing", "pref_ftx")
_QUANTISED = {
    "AMXINT8": "INT8", "INT8": "INT8", "AMXINT4": "INT4", "AMXINT4_KGroup": "INT4", "RAWINT4": "INT4",
    "MXFP4": "MXFP4", "llamafile": "GGUF", "int8": "INT8", "int4": "INT4", "rawint4": "INT4",
    "mxfp4": "MXFP4",
}  # fmt: skip
"""What KTransformers' backends and formats store, where that isn't what most checkpoints have."""


def check(config: TrainConfig, given: Collection[str], findings: Findings) -> None:
    """Check ``config``, in which the keys ``given`` are the file's and all others have their defaults.

    Keys of the block are given as ``kt_config.KEY``.
    """
    _needed(config, findings)
    _contradictions(config, given, findings)
    _notes_on_training(config, given, findings)
    _notes_on_experts(config, findings)


def _needed(config: TrainConfig, findings: Findings) -> None:
    for key, value in (("use_kt", config.use_kt), ("do_train", config.do_train)):
        if not value:
            findings.error(key, "false", "true", options(TrainConfig)[key].metadata["hint"])
    if config.lora_rank > MAX_EXPERT_RANK and not config.kt_config.kt_lora_rank:
        findings.error(
            "lora_rank",
            f"{config.lora_rank}, which is the experts' rank too",
            f"at most {MAX_EXPERT_RANK} for the experts",
            "Set kt_lora_rank in the kt_config block.",
        )
    if "," in (config.adapter_name_or_path or ""):
        findings.error("adapter_name_or_path", "several adapters", "one", "Merge the others first.")


def _contradictions(config: TrainConfig, given: Collection[str], findings: Findings) -> None:
    def error_if(wrong: bool, key: str, found: str, expected: str, next_step: str) -> None:
        if wrong:
            findings.error(key, found, expected, next_step, code=CONTRADICTION)

    block, dpo = config.kt_config, config.stage == "dpo"
    for key, value in (("packing", config.packing), ("neat_packing", config.neat_packing)):
        error_if(dpo and value, key, "true with stage: dpo", "false",
                 "Pairs are compared one by one: leave it out.")  # fmt: skip
    error_if(
        config.neat_packing and "packing" in given and not config.packing,
        "neat_packing", "true with packing: false", "one of the two", "neat_packing implies packing.",
    )  # fmt: skip
    error_if(
        config.dpo_label_smoothing > 0 and config.pref_loss != "sigmoid",
        "dpo_label_smoothing", f"{config.dpo_label_smoothing} with pref_loss: {config.pref_loss}",
        "pref_loss: sigmoid", "Leave one of the two out.",
    )  # fmt: skip
    error_if(
        bool(config.warmup_steps and config.warmup_ratio),
        "warmup_steps", f"{config.warmup_steps} beside warmup_ratio: {config.warmup_ratio}",
        "one of the two", "Leave one of the two out.",
    )  # fmt: skip
    error_if(
        config.pure_bf16 and not config.bf16,
        "pure_bf16", "true with bf16: false", "bf16: true", "Leave one of the two out.",
    )  # fmt: skip
    error_if(
        config.save_only_model and bool(config.resume_from_checkpoint),
        "save_only_model", "true with resume_from_checkpoint", "false",
        "Such checkpoints have no optimizer to go on with.",
    )  # fmt: skip
    error_if(
        config.use_cpu and config.flash_attn in ("fa2", "fa3"),
        "flash_attn", f"{config.flash_attn} with use_cpu: true", "auto, sdpa or disabled",
        "Flash-attention runs on GPUs only.",
    )  # fmt: skip
    error_if(
        "kt_config.expert_activation" in given
        and config.kt_cpu_activation not in (None, block.expert_activation),
        "kt_config.expert_activation", block.expert_activation,
        f"{config.kt_cpu_activation}, as kt_cpu_activation has it", "Keep kt_cpu_activation, the newer name.",
    )  # fmt: skip
    error_if(
        block.kt_backend == "kt-kernel" and block.kt_expert_weight_format not in (None, "bf16"),
        "kt_config.kt_expert_weight_format", f"{block.kt_expert_weight_format} with kt_backend: kt-kernel",
        "bf16", "Leave it out, or leave out kt_backend: ktbridge's kernels read bf16, FP8, INT8 and INT4.",
    )  # fmt: skip


def _notes_on_training(config: TrainConfig, given: Collection[str], findings: Findings) -> None:
    if config.template:
        findings.note(
            "template",
            f"{shown(config.template)}: conversations are written with the tokenizer's own chat template",
            "",
            "Leave it out; chat_template.jinja of the base is what the engines use, too.",
        )
    if config.stage == "sft":
        for key in _DPO:
            if key in given:
                findings.note(key, "it is for stage: dpo", "", "Leave it out.")
    if config.lora_dropout:
        findings.note(
            "lora_dropout", "the expert LoRA has none: it is for the non-experts alone", "",
            "Set it to 0 to train both alike.",
        )  # fmt: skip
    if config.logging_dir and "tensorboard" not in config.report_to:
        findings.note("logging_dir", "it is for report_to: tensorboard", "", "Leave it out.")
    own = config.kt_config.kt_lora_rank
    if (
        own
        and config.kt_config.kt_lora_alpha is None
        and config.lora_alpha not in (None, 2 * config.lora_rank)
    ):
        findings.note(
            "kt_config.kt_lora_alpha",
            f"missing, so it is {2 * own}, twice kt_lora_rank, whatever lora_alpha is",
            "a number",
            "Set it, or leave kt_lora_rank out to train the experts with lora_rank and lora_alpha.",
            code=CONTRADICTION,
        )


def _notes_on_experts(config: TrainConfig, findings: Findings) -> None:
    block = config.kt_config
    ours = block.kt_backend != "kt-kernel"
    usable = len(os.sched_getaffinity(0))
    if block.kt_num_threads > usable:
        findings.note(
            "kt_config.kt_num_threads",
            f"{block.kt_num_threads}, but this process may use {usable} CPUs, and so many are used",
            "",
            "Leave it out: the cores are counted.",
        )
    if ours and block.kt_threadpool_count is not None:
        findings.note(
            "kt_config.kt_threadpool_count",
            f"{block.kt_threadpool_count}: one pool of threads works on all NUMA nodes",
            "",
            "Leave it out.",
        )
    gpu = {"kt_gpu_memory": block.kt_gpu_memory, "kt_num_gpu_experts": block.kt_num_gpu_experts}
    for key, value in gpu.items():
        if block.kt_experts == "cpu" and value:
            findings.note(
                f"kt_config.{key}",
                f"{value}, while kt_experts is cpu: no expert is on the GPU",
                "",
                "Set kt_experts: stream, hybrid, resident or auto (docs/gpu-experts.md), or leave it out.",
            )
    formats = {
        "kt_backend": block.kt_backend,
        "kt_expert_weight_format": block.kt_expert_weight_format,
    }
    for key, named in formats.items():
        storage = _QUANTISED.get(str(named))
        if ours and storage and not block.kt_weight_path:
            findings.note(
                f"kt_config.{key}",
                f"{named}: the kernels read experts as the checkpoint stores them, {storage} or not",
                "",
                "Leave it out. scripts/quantize_experts.py makes an INT8 checkpoint, half the memory of "
                "BF16; INT4 checkpoints are read as shipped.",
            )
