"""Checks across keys: contradictions are errors, surprising defaults are noted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ktbridge.experts import MAX_EXPERT_RANK
from ktbridge.sft.config.findings import CONTRADICTION, MEANINGLESS, Findings, shown
from ktbridge.sft.config.schema import KtConfig, TrainConfig, options

_DPO = ("pref_beta", "pref_loss", "dpo_label_smoothing", "pref_ftx")
_QUANTISED = {"AMXINT8": "INT8", "INT8": "INT8", "AMXINT4": "INT4", "AMXINT4_KGroup": "INT4"} | {
    "RAWINT4": "INT4", "MXFP4": "MXFP4", "llamafile": "GGUF", "int8": "INT8", "int4": "INT4",
    "rawint4": "INT4", "mxfp4": "MXFP4",
}  # fmt: skip
"""What KTransformers' backends and formats store, where that isn't what most checkpoints have."""


def check(main: Mapping[str, Any], kt: Mapping[str, Any], findings: Findings) -> None:
    """Check the parsed values that were given: ``main`` of the file, ``kt`` of the block."""
    values = {key: item.default for key, item in options(TrainConfig).items()} | dict(main)
    block = {key: item.default for key, item in options(KtConfig).items()} | dict(kt)
    _needed(values, block, findings)
    _contradictions(values, main, block, kt, findings)
    if block["kt_backend"] == "kt-kernel":
        _kt_kernel(block, findings)
    _notes_on_training(values, main, block, findings)
    _notes_on_experts(block, kt, findings)


def _needed(values: Mapping[str, Any], block: Mapping[str, Any], findings: Findings) -> None:
    for key in ("use_kt", "do_train"):
        if values[key] is False:
            hint = options(TrainConfig)[key].metadata["hint"]
            findings.error(key, "false", "true", hint)
    if values["lora_rank"] > MAX_EXPERT_RANK and not block["kt_lora_rank"]:
        findings.error(
            "lora_rank",
            f"{values['lora_rank']}, which is the experts' rank too",
            f"at most {MAX_EXPERT_RANK} for the experts",
            "Set kt_lora_rank in the kt_config block.",
        )
    if "," in (values["adapter_name_or_path"] or ""):
        findings.error("adapter_name_or_path", "several adapters", "one", "Merge the others first.")


def _contradictions(
    values: Mapping[str, Any],
    main: Mapping[str, Any],
    block: Mapping[str, Any],
    kt: Mapping[str, Any],
    findings: Findings,
) -> None:
    def error_if(wrong: bool, key: str, found: str, expected: str, next_step: str) -> None:
        if wrong:
            findings.error(key, found, expected, next_step, code=CONTRADICTION)

    dpo = values["stage"] == "dpo"
    for key in ("packing", "neat_packing"):
        error_if(dpo and values[key], key, "true with stage: dpo", "false",
                 "Pairs are compared one by one: leave it out.")  # fmt: skip
    error_if(
        values["neat_packing"] and main.get("packing") is False,
        "neat_packing", "true with packing: false", "one of the two", "neat_packing implies packing.",
    )  # fmt: skip
    error_if(
        values["dpo_label_smoothing"] > 0 and values["pref_loss"] != "sigmoid",
        "dpo_label_smoothing", f"{values['dpo_label_smoothing']} with pref_loss: {values['pref_loss']}",
        "pref_loss: sigmoid", "Leave one of the two out.",
    )  # fmt: skip
    error_if(
        bool(values["warmup_steps"] and values["warmup_ratio"]),
        "warmup_steps", f"{values['warmup_steps']} beside warmup_ratio: {values['warmup_ratio']}",
        "one of the two", "Leave one of the two out.",
    )  # fmt: skip
    error_if(
        values["pure_bf16"] and not values["bf16"],
        "pure_bf16", "true with bf16: false", "bf16: true", "Leave one of the two out.",
    )  # fmt: skip
    error_if(
        values["save_only_model"] and bool(values["resume_from_checkpoint"]),
        "save_only_model", "true with resume_from_checkpoint", "false",
        "Such checkpoints have no optimizer to go on with.",
    )  # fmt: skip
    error_if(
        values["use_cpu"] and values["flash_attn"] in ("fa2", "fa3"),
        "flash_attn", f"{values['flash_attn']} with use_cpu: true", "auto, sdpa or disabled",
        "Flash-attention runs on GPUs only.",
    )  # fmt: skip
    policy = values["kt_cpu_activation"]
    error_if(
        "expert_activation" in kt and policy not in (None, kt["expert_activation"]),
        "kt_config.expert_activation", block["expert_activation"],
        f"{policy}, as kt_cpu_activation has it", "Keep kt_cpu_activation, the newer name.",
    )  # fmt: skip


def _kt_kernel(block: Mapping[str, Any], findings: Findings) -> None:
    """KTransformers' wheel needs bfloat16 tensors, which it packs itself."""
    storage = block["kt_expert_weight_format"]
    if storage not in (None, "bf16"):
        findings.error(
            "kt_config.kt_expert_weight_format",
            f"{storage} with kt_backend: kt-kernel",
            "bf16",
            "Leave it out, or leave out kt_backend: ktbridge's kernels read bf16, FP8, INT8 and INT4.",
            code=CONTRADICTION,
        )


def _notes_on_training(
    values: Mapping[str, Any],
    main: Mapping[str, Any],
    block: Mapping[str, Any],
    findings: Findings,
) -> None:
    if values["template"]:
        findings.note(
            "template",
            f"{shown(values['template'])}: conversations are written with the tokenizer's own chat template",
            "",
            "Leave it out; chat_template.jinja of the base is what the engines use, too.",
        )
    if values["stage"] == "sft":
        for key in _DPO:
            if key in main:
                findings.note(key, "it is for stage: dpo", "", "Leave it out.")
    if values["lora_dropout"]:
        findings.note(
            "lora_dropout", "the expert LoRA has none: it is for the non-experts alone", "",
            "Set it to 0 to train both alike.",
        )  # fmt: skip
    if values["logging_dir"] and "tensorboard" not in values["report_to"]:
        findings.note("logging_dir", "it is for report_to: tensorboard", "", "Leave it out.")
    rank, alpha = values["lora_rank"], values["lora_alpha"]
    own, own_alpha = block["kt_lora_rank"], block["kt_lora_alpha"]
    if own and own_alpha is None and alpha not in (None, 2 * rank):
        findings.note(
            "kt_config.kt_lora_alpha",
            f"missing, so it is {2 * own}, twice kt_lora_rank, whatever lora_alpha is",
            "a number",
            "Set it, or leave kt_lora_rank out to train the experts with lora_rank and lora_alpha.",
            code=CONTRADICTION,
        )


def _notes_on_experts(block: Mapping[str, Any], kt: Mapping[str, Any], findings: Findings) -> None:
    ours = block["kt_backend"] != "kt-kernel"
    usable = len(os.sched_getaffinity(0))
    if block["kt_num_threads"] > usable:
        findings.note(
            "kt_config.kt_num_threads",
            f"{block['kt_num_threads']}, but this process may use {usable} CPUs, and so many are used",
            "",
            "Leave it out: the cores are counted.",
        )
    if ours and block["kt_threadpool_count"] is not None:
        findings.note(
            "kt_config.kt_threadpool_count",
            f"{block['kt_threadpool_count']}: one pool of threads works on all NUMA nodes",
            "",
            "Leave it out.",
        )
    for key in ("kt_gpu_memory", "kt_num_gpu_experts"):
        if block["kt_experts"] == "cpu" and block[key]:
            findings.note(
                f"kt_config.{key}",
                f"{block[key]}, while kt_experts is cpu: no expert is on the GPU",
                "",
                "Set kt_experts: stream, hybrid, resident or auto (docs/gpu-experts.md), or leave it out.",
                code=MEANINGLESS,
            )
    for key in ("kt_backend", "kt_expert_weight_format"):
        storage = _QUANTISED.get(str(block[key]))
        if ours and storage and not block["kt_weight_path"]:
            findings.note(
                f"kt_config.{key}",
                f"{block[key]}: the kernels read experts as the checkpoint stores them, {storage} or not",
                "",
                "Leave it out. scripts/quantize_experts.py makes an INT8 checkpoint, half the memory of "
                "BF16; INT4 checkpoints are read as shipped.",
                code=MEANINGLESS,
            )
