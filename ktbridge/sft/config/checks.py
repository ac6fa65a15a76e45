"""Checks across keys: contradictions are errors, surprising defaults are noted."""

from __future__ import annotations

from collections.abc import Collection

from ktbridge.codes import Problems
from ktbridge.experts import MAX_EXPERT_RANK
from ktbridge.files.yamlfile import shown
from ktbridge.machine import own_cpus
from ktbridge.sft.config.fields import CONTRADICTION, options
from ktbridge.sft.config.schema import METRICS, QUANTISING, SCHEDULERS, KtConfig, TrainConfig

_OF_STAGES = {
    "pref_beta": ("dpo", "kto"), "pref_ftx": ("dpo", "kto"), "pref_loss": ("dpo",),
    "dpo_label_smoothing": ("dpo",), "kto_chosen_weight": ("kto",), "kto_rejected_weight": ("kto",),
}  # fmt: skip
_ANSWERS = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k")
_STORED = {"RAWINT4": "INT4", "MXFP4": "MXFP4", "rawint4": "INT4", "mxfp4": "MXFP4"}
"""What KTransformers' backends and formats read, which nothing is converted to."""


def check(config: TrainConfig, given: Collection[str], problems: Problems) -> None:
    """Check ``config``, in which the keys ``given`` are the file's and all others have their defaults.

    Keys of the block are given as ``kt_config.KEY``.
    """
    _needed(config, problems)
    _contradictions(config, given, problems)
    _what_is_learned(config, problems)
    _check_schedule(config, problems)
    _check_mixing(config, problems)
    _check_streaming(config, given, problems)
    _held_out(config, given, problems)
    _check_prediction(config, problems)
    _notes_on_training(config, given, problems)
    _notes_on_experts(config, problems)


def _needed(config: TrainConfig, problems: Problems) -> None:
    if not config.use_kt:
        problems.error("use_kt", "false", "true", options(TrainConfig)["use_kt"].hint)
    if not config.do_train and not config.do_predict:
        problems.error("do_train", "false", "true", "Or set do_predict: true.")
    if config.expert_rank > MAX_EXPERT_RANK:
        problems.error(
            "lora_rank",
            f"{config.lora_rank}, which is the experts' rank too",
            f"at most {MAX_EXPERT_RANK} for the experts",
            "Set kt_lora_rank in the kt_config block.",
        )
    if "," in (config.adapter_name_or_path or ""):
        problems.error("adapter_name_or_path", "several adapters", "one", "Merge the others first.")


def _contradictions(config: TrainConfig, given: Collection[str], problems: Problems) -> None:
    def error_if(wrong: bool, key: str, found: str, expected: str, next_step: str) -> None:
        if wrong:
            problems.error(key, found, expected, next_step, code=CONTRADICTION)

    block, compared = config.kt_config, bool(config.forwards_alone)
    for key, value in (("packing", config.packing), ("neat_packing", config.neat_packing)):
        error_if(compared and value, key, f"true with stage: {config.stage}", "false",
                 "Answers are compared one by one: leave it out.")  # fmt: skip
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


def _what_is_learned(config: TrainConfig, problems: Problems) -> None:
    for key in ("train_on_prompt", "mask_history"):
        if config.stage != "sft" and getattr(config, key):
            step, found = "It is for stage: sft: leave it out.", f"true with stage: {config.stage}"
            problems.error(key, found, "false", step, CONTRADICTION)
    if config.train_on_prompt and config.mask_history:
        step = "The one counts everything, the other the last answer alone."
        found = "true with train_on_prompt: true"
        problems.error("mask_history", found, "one of the two", step, CONTRADICTION)
    if config.stage == "kto":
        _check_batches(config, problems)
    if config.stage == "dpo" and config.enable_thinking == "auto":
        step = "Both answers of a pair stand behind one prompt."
        problems.error(
            "enable_thinking", "auto with stage: dpo", "true or false", step, CONTRADICTION
        )


def _check_schedule(config: TrainConfig, problems: Problems) -> None:
    """Hold ``lr_scheduler_kwargs`` against the schedule, before transformers meets them in the first step."""
    name, given = config.lr_scheduler_type, config.lr_scheduler_kwargs or {}
    known, key = SCHEDULERS[name], "lr_scheduler_kwargs"
    for own, value in given.items():
        named = own in ("warmup_type", "decay_type")
        if own not in known:
            step = f"It takes {', '.join(known)}." if known else "Leave lr_scheduler_kwargs out."
            others = [each for each, keys in SCHEDULERS.items() if own in keys]
            expected = f"lr_scheduler_type: {' or '.join(others)}" if others else ""
            problems.error(f"{key}.{own}", f"not known to {name}", expected, step)
        elif isinstance(value, str) != named:
            problems.error(
                f"{key}.{own}", shown(value), "a text" if named else "a number, 0 or more"
            )
    ends = [own for own in ("min_lr", "min_lr_rate") if own in given]
    if name.endswith("_with_min_lr") and len(ends) != 1:
        found = " and ".join(ends) or "neither min_lr nor min_lr_rate"
        problems.error(
            key, found, "one of the two", f"Set {key}: {{min_lr_rate: 0.1}}, for example."
        )
    for own in ("min_lr", "lr_end"):
        lowest = given.get(own, 0.0)
        if not isinstance(lowest, str) and lowest >= config.learning_rate > 0:
            problems.error(
                f"{key}.{own}", shown(lowest), f"below learning_rate, {config.learning_rate:g}"
            )
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        problems.error(key, "no num_decay_steps", f"{key}: {{num_decay_steps: 100}}, for example")


def _check_mixing(config: TrainConfig, problems: Problems) -> None:
    probs, count = config.interleave_probs, len(config.dataset)
    if not probs:
        return
    found = ",".join(f"{each:g}" for each in probs)
    if config.mix_strategy == "concat":
        problems.error("interleave_probs", f"{found} with mix_strategy: concat", "interleave_under or "
                       "interleave_over", "Set mix_strategy, or leave this out.", "KTC081")  # fmt: skip
    elif len(probs) != count:
        problems.error("interleave_probs", found, f"{count}, as many as datasets", "", "KTC081")
    elif abs(sum(probs) - 1) > 1e-6:
        problems.error(
            "interleave_probs", f"{found}, which add up to {sum(probs):g}", "1", "", "KTC081"
        )


def _check_streaming(config: TrainConfig, given: Collection[str], problems: Problems) -> None:
    if not config.streaming:
        if "buffer_size" in given:
            problems.warn("buffer_size", "it is for streaming: true", "", "Leave it out.")
        return
    needs = {
        "max_steps": (config.max_steps < 1 and config.do_train, "a number of steps"),
        "val_size": (0 < config.val_size < 1, "a number of rows"),
        "eval_strategy": (config.eval_strategy == "epoch", "steps"),
        "tokenized_path": (config.tokenized_path is not None, "nothing"),
        "dataloader_num_workers": (config.dataloader_num_workers > 0, "0"),
    }
    for key, (wrong, expected) in needs.items():
        if wrong:
            found = f"{shown(getattr(config, key))} with streaming: true"
            problems.error(key, found, expected, f"Set {key} so, or leave out streaming.", "KTC082")


def _check_batches(config: TrainConfig, problems: Problems) -> None:
    """kto measures how far the model has left the base by answers of the batch behind other prompts of it."""
    for key in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if getattr(config, key) < 2 and (key.startswith("per_device_train") or config.evaluates):
            step = "Raise it, and lower gradient_accumulation_steps for as many rows in a step."
            problems.error(key, "1 with stage: kto", "2 or more", step, "KTC080")
    if config.tokens_per_pass != "auto":
        step = "Leave it out: batches go as per_device_train_batch_size says."
        found = f"{config.tokens_per_pass} with stage: kto"
        problems.error("tokens_per_pass", found, "auto", step, "KTC080")


def _check_prediction(config: TrainConfig, problems: Problems) -> None:
    if not config.do_predict:
        return
    if config.stage != "sft":
        problems.error(
            "do_predict",
            f"true with stage: {config.stage}",
            "stage: sft",
            "Train without it, then predict rows that are conversations: `ktbridge predict CONFIG stage=sft "
            "eval_dataset=FILE`.",
            code=CONTRADICTION,
        )
    if not config.predict_with_generate:
        hint = options(TrainConfig)["predict_with_generate"].hint
        problems.error(
            "predict_with_generate", "false with do_predict", "true", hint, CONTRADICTION
        )


def _held_out(config: TrainConfig, given: Collection[str], problems: Problems) -> None:
    there = bool(config.eval_dataset or config.val_size)
    at_steps = config.eval_strategy in ("steps", "epoch")
    asked = {
        "do_eval": config.do_eval and "do_eval" in given,
        "eval_strategy": at_steps,
        "load_best_model_at_end": config.load_best_model_at_end,
        "early_stopping_steps": bool(config.early_stopping_steps),
    }
    choosing = ("load_best_model_at_end", "early_stopping_steps")
    for key in (key for key, wanted in asked.items() if wanted):
        found, expected, step = f"{shown(getattr(config, key))} ", "", "Leave one of the two out."
        if not there:
            found += "without held-out rows"
            expected, step = "val_size or eval_dataset", "Set one of them, or leave this out."
        elif not config.do_eval:
            found, expected = found + "with do_eval: false", "do_eval: true"
        elif key in choosing and config.eval_strategy == "no":
            found, expected = found + "with eval_strategy: no", "eval_strategy: steps or epoch"
        elif key == "load_best_model_at_end" and not config.save_steps:
            found, expected = (
                found + "with save_steps: 0, which saves no step",
                "save_steps above 0",
            )
        else:
            continue
        problems.error(key, found, expected, step, code=CONTRADICTION)
    if (
        config.val_size and config.eval_dataset and not config.do_predict
    ):  # which would answer the latter
        found = f"{config.val_size:g} beside eval_dataset"
        problems.error("val_size", found, "one of the two", "Leave one of the two out.",
                       code=CONTRADICTION)  # fmt: skip
    if config.metric not in METRICS[config.stage]:
        problems.error(
            "metric_for_best_model",
            f"{shown(config.metric_for_best_model)}, which stage {config.stage} doesn't measure",
            " or ".join(METRICS[config.stage]),
        )
    for key in ("eval_steps", "eval_on_start", "metric_for_best_model", "greater_is_better"):
        if key in given and getattr(config, key) and not there:
            step = "Set val_size or eval_dataset, or leave it out."
            problems.warn(key, "it is for held-out rows, and there are none", "", step)


def _notes_on_training(config: TrainConfig, given: Collection[str], problems: Problems) -> None:
    for key, stages in _OF_STAGES.items():
        if key in given and config.stage not in stages:
            problems.warn(key, f"it is for stage: {' or '.join(stages)}", "", "Leave it out.")
    if not config.do_predict:
        for key in _ANSWERS:
            if key in given:
                problems.warn(key, "it is for do_predict", "", "Leave it out.")
    if config.logging_dir and "tensorboard" not in config.report_to:
        problems.warn("logging_dir", "it is for report_to: tensorboard", "", "Leave it out.")
    own = config.kt_config.kt_lora_rank
    if (
        own
        and config.expert_rank
        and config.kt_config.kt_lora_alpha is None
        and config.lora_alpha not in (None, 2 * config.lora_rank)
    ):
        problems.warn(
            "kt_config.kt_lora_alpha",
            f"missing, so it is {2 * own}, twice kt_lora_rank, whatever lora_alpha is",
            "a number",
            "Set it, or leave kt_lora_rank out to train the experts with lora_rank and lora_alpha.",
            code=CONTRADICTION,
        )


def _notes_on_experts(config: TrainConfig, problems: Problems) -> None:
    block = config.kt_config
    usable = len(own_cpus())
    if block.kt_num_threads > usable:
        problems.warn(
            "kt_config.kt_num_threads",
            f"{block.kt_num_threads}, but this process may use {usable} CPUs, and so many are used",
            "",
            "Leave it out: the cores are counted.",
        )
    for key in ("kt_lora_rank", "kt_lora_alpha"):
        if block.experts_frozen and getattr(block, key):
            problems.warn(
                f"kt_config.{key}",
                "it is the expert LoRA's, and none is trained",
                "",
                "Leave it out.",
            )
    if block.kt_experts == "hybrid":
        problems.warn(
            "kt_config.kt_experts",
            "hybrid is gone: the GPU computes all experts, as with stream",
            "auto, cpu, stream or resident",
            "Set kt_experts: auto, which takes what is fastest.",
        )
    gpu = {"kt_gpu_memory": block.kt_gpu_memory, "kt_num_gpu_experts": block.kt_num_gpu_experts}
    for key, value in gpu.items():
        if block.kt_experts == "cpu" and value:
            problems.warn(
                f"kt_config.{key}",
                f"{value}, while kt_experts is cpu: no expert is on the GPU",
                "",
                "Set kt_experts: stream, resident or auto (docs/gpu-experts.md), or leave it out.",
            )
    _notes_on_storage(block, problems)


def _notes_on_storage(block: KtConfig, problems: Problems) -> None:
    asked, named = block.kt_expert_weight_format, QUANTISING.get(block.backend)
    if asked and named and asked != named:
        problems.warn(
            "kt_config.kt_backend",
            f"{block.kt_backend}, with kt_expert_weight_format: {asked}",
            named,
            "Keep one; kt_expert_weight_format decides.",
            code=CONTRADICTION,
        )
    for key, given in (("kt_backend", block.kt_backend), ("kt_expert_weight_format", asked)):
        storage = _STORED.get(str(given))
        if given == "llamafile":
            problems.warn(
                f"kt_config.{key}",
                "llamafile: GGUF isn't read; ktbridge's own kernels compute the experts, as the checkpoint's "
                "safetensors store them",
                "",
                "Leave it out; kt_expert_weight_format: int8 or int4 takes less memory than BF16.",
            )
        elif storage and not block.kt_weight_path:
            problems.warn(
                f"kt_config.{key}",
                f"{given}: the kernels read experts as the checkpoint stores them, {storage} or not",
                "",
                "Leave it out. kt_expert_weight_format: int8 or int4 quantises BF16 experts.",
            )
