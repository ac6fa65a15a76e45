"""Rules across keys: contradictions are errors, surprising defaults are noted.

A contradiction is a row of ``RULES``; what needs a loop or has several answers is a function below them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from ktbridge.codes import Problems
from ktbridge.experts import MAX_EXPERT_RANK
from ktbridge.files.yamlfile import show_value
from ktbridge.machine import own_cpus
from ktbridge.sft.config.fields import options
from ktbridge.sft.config.schema import METRICS, QUANTIZING, SCHEDULERS, TrainConfig

Given = Collection[str]
"""The keys that the file has, those of the block as ``kt_config.KEY``; all others have their defaults."""
_ONE, _OUT = "Leave one of the two out.", "Leave it out."
_COMPARED = (
    "true with stage: {c.stage}", "false", "Answers are compared one by one: leave it out."
)  # fmt: skip
_OF_SFT = ("true with stage: {c.stage}", "false", "It is for stage: sft: leave it out.")
_SMALL_BATCH = (
    "1 with stage: kto", "2 or more",
    "Raise it, and lower gradient_accumulation_steps for as many rows in a step.", "KTC080",
)  # fmt: skip
_HINTS = {key: option.hint for key, option in options(TrainConfig).items()}
_OF_STAGES = {
    "lora_dropout": ("sft", "pt"), "kt_config.kt_lora_dropout": ("sft", "pt"),
    "pref_beta": ("dpo", "kto"), "pref_ftx": ("dpo", "kto"), "pref_loss": ("dpo",),
    "dpo_label_smoothing": ("dpo",), "kto_chosen_weight": ("kto",), "kto_rejected_weight": ("kto",),
}  # fmt: skip
_ANSWERS = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k")
_STORED = {"RAWINT4": "INT4", "MXFP4": "MXFP4", "rawint4": "INT4", "mxfp4": "MXFP4"}
"""What KTransformers' backends and formats read, which nothing is converted to."""


class Rule(NamedTuple):
    """A combination of keys that can't be meant, found at ``key``; ``{c}`` in texts is the configuration."""

    key: str
    applies: Callable[[TrainConfig, Given], object]
    found: str
    expected: str
    next_step: str = _ONE
    code: str = "KTC005"


RULES = (
    Rule("use_kt", lambda c, _: not c.use_kt, "false", "true", _HINTS["use_kt"], "KTC002"),
    Rule("do_train", lambda c, _: not (c.do_train or c.do_predict), "false", "true",
         "Or set do_predict: true.", "KTC002"),
    Rule("lora_rank", lambda c, _: c.expert_rank > MAX_EXPERT_RANK,
         "{c.lora_rank}, which is the experts' rank too", f"at most {MAX_EXPERT_RANK} for the experts",
         "Set kt_lora_rank in the kt_config block.", "KTC002"),
    Rule("adapter_name_or_path", lambda c, _: "," in (c.adapter_name_or_path or ""), "several adapters",
         "one", "Merge the others first.", "KTC002"),
    Rule("packing", lambda c, _: c.forwards_alone and c.packing, *_COMPARED),
    Rule("neat_packing", lambda c, _: c.forwards_alone and c.neat_packing, *_COMPARED),
    Rule("neat_packing", lambda c, given: c.neat_packing and "packing" in given and not c.packing,
         "true with packing: false", "one of the two", "neat_packing implies packing."),
    Rule("dpo_label_smoothing", lambda c, _: c.dpo_label_smoothing > 0 and c.pref_loss != "sigmoid",
         "{c.dpo_label_smoothing} with pref_loss: {c.pref_loss}", "pref_loss: sigmoid"),
    Rule("warmup_steps", lambda c, _: c.warmup_steps and c.warmup_ratio,
         "{c.warmup_steps} beside warmup_ratio: {c.warmup_ratio}", "one of the two"),
    Rule("pure_bf16", lambda c, _: c.pure_bf16 and not c.bf16, "true with bf16: false", "bf16: true"),
    Rule("save_only_model", lambda c, _: c.save_only_model and c.resume_from_checkpoint,
         "true with resume_from_checkpoint", "false",
         "Such checkpoints have no optimizer to go on with."),
    Rule("flash_attn", lambda c, _: c.use_cpu and c.flash_attn in ("fa2", "fa3"),
         "{c.flash_attn} with use_cpu: true", "auto, sdpa or disabled",
         "Flash-attention runs on GPUs only."),
    Rule("kt_config.expert_activation",
         lambda c, given: "kt_config.expert_activation" in given
         and c.kt_cpu_activation not in (None, c.kt_config.expert_activation),
         "{c.kt_config.expert_activation}", "{c.kt_cpu_activation}, as kt_cpu_activation has it",
         "Keep kt_cpu_activation, the newer name."),
    Rule("train_on_prompt", lambda c, _: c.stage != "sft" and c.train_on_prompt, *_OF_SFT),
    Rule("mask_history", lambda c, _: c.stage != "sft" and c.mask_history, *_OF_SFT),
    Rule("mask_history", lambda c, _: c.train_on_prompt and c.mask_history, "true with train_on_prompt: true",
         "one of the two", "The one counts everything, the other the last answer alone."),
    # kto measures how far the model has left the base by answers of the batch behind other prompts of it.
    Rule("per_device_train_batch_size",
         lambda c, _: c.stage == "kto" and c.per_device_train_batch_size < 2, *_SMALL_BATCH),
    Rule("per_device_eval_batch_size",
         lambda c, _: c.stage == "kto" and c.per_device_eval_batch_size < 2 and c.evaluates, *_SMALL_BATCH),
    Rule("tokens_per_pass", lambda c, _: c.stage == "kto" and c.tokens_per_pass != "auto",
         "{c.tokens_per_pass} with stage: kto", "auto",
         "Leave it out: batches go as per_device_train_batch_size says.", "KTC080"),
    Rule("enable_thinking", lambda c, _: c.stage == "dpo" and c.enable_thinking == "auto",
         "auto with stage: dpo", "true or false", "Both answers of a pair stand behind one prompt."),
    Rule("do_predict", lambda c, _: c.do_predict and c.stage != "sft", "true with stage: {c.stage}",
         "stage: sft", "Train without it, then predict rows that are conversations: `ktbridge predict CONFIG "
         "stage=sft eval_dataset=FILE`."),
    Rule("predict_with_generate", lambda c, _: c.do_predict and not c.predict_with_generate,
         "false with do_predict", "true", _HINTS["predict_with_generate"]),
    # With do_predict, eval_dataset is what is answered.
    Rule("val_size", lambda c, _: c.val_size and c.eval_dataset and not c.do_predict,
         "{c.val_size:g} beside eval_dataset", "one of the two"),
)  # fmt: skip


def check_rules(config: TrainConfig, given: Given, problems: Problems) -> None:
    """Add what is wrong with ``config``, and what is worth a note."""
    for key, applies, found, expected, next_step, code in RULES:
        if applies(config, given):
            found, expected = found.format(c=config), expected.format(c=config)
            problems.error(key, found, expected, next_step, code)
    _check_schedule(config, problems)
    _check_mixing(config, problems)
    _check_streaming(config, problems)
    _check_held_out(config, given, problems)
    _note_unused(config, given, problems)
    _note_experts(config, problems)
    _note_storage(config, problems)


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
            expected = "a text" if named else "a number, 0 or more"
            problems.error(f"{key}.{own}", show_value(value), expected)
    ends = [own for own in ("min_lr", "min_lr_rate") if own in given]
    if name.endswith("_with_min_lr") and len(ends) != 1:
        found = " and ".join(ends) or "neither min_lr nor min_lr_rate"
        step = f"Set {key}: {{min_lr_rate: 0.1}}, for example."
        problems.error(key, found, "one of the two", step)
    for own in ("min_lr", "lr_end"):
        lowest = given.get(own, 0.0)
        if not isinstance(lowest, str) and lowest >= config.learning_rate > 0:
            expected = f"below learning_rate, {config.learning_rate:g}"
            problems.error(f"{key}.{own}", show_value(lowest), expected)
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        problems.error(key, "no num_decay_steps", f"{key}: {{num_decay_steps: 100}}, for example")


def _check_mixing(config: TrainConfig, problems: Problems) -> None:
    probs, count = config.interleave_probs, len(config.dataset)
    if not probs:
        return
    found, expected, step = ",".join(f"{each:g}" for each in probs), "", ""
    if config.mix_strategy == "concat":
        found += " with mix_strategy: concat"
        expected, step = "interleave_under or interleave_over", "Set mix_strategy, or leave this out."
    elif len(probs) != count:
        expected = f"{count}, as many as datasets"
    elif abs(sum(probs) - 1) > 1e-6:
        found, expected = f"{found}, which add up to {sum(probs):g}", "1"
    else:
        return
    problems.error("interleave_probs", found, expected, step, "KTC081")


def _check_streaming(config: TrainConfig, problems: Problems) -> None:
    needs = {
        "max_steps": (config.max_steps < 1 and config.do_train, "a number of steps"),
        "val_size": (0 < config.val_size < 1, "a number of rows"),
        "eval_strategy": (config.eval_strategy == "epoch", "steps"),
        "tokenized_path": (config.tokenized_path is not None, "nothing"),
        "dataloader_num_workers": (config.dataloader_num_workers > 0, "0"),
    }
    for key, (wrong, expected) in needs.items():
        if wrong and config.streaming:
            found = f"{show_value(getattr(config, key))} with streaming: true"
            problems.error(key, found, expected, f"Set {key} so, or leave out streaming.", "KTC082")


def _check_held_out(config: TrainConfig, given: Given, problems: Problems) -> None:
    asked = {
        "do_eval": config.do_eval and "do_eval" in given,
        "eval_strategy": config.eval_strategy in ("steps", "epoch"),
        "load_best_model_at_end": config.load_best_model_at_end,
        "early_stopping_steps": config.early_stopping_steps,
    }
    choosing = ("load_best_model_at_end", "early_stopping_steps")
    for key in (key for key, wanted in asked.items() if wanted):
        step = _ONE
        if not config.holds_out:
            why, expected = "without held-out rows", "val_size or eval_dataset"
            step = "Set one of them, or leave this out."
        elif not config.do_eval:
            why, expected = "with do_eval: false", "do_eval: true"
        elif key in choosing and config.eval_strategy == "no":
            why, expected = "with eval_strategy: no", "eval_strategy: steps or epoch"
        elif key == "load_best_model_at_end" and not config.save_steps:
            why, expected = "with save_steps: 0, which saves no step", "save_steps above 0"
        else:
            continue
        problems.error(key, f"{show_value(getattr(config, key))} {why}", expected, step, "KTC005")
    if config.metric not in METRICS[config.stage]:
        found = f"{show_value(config.metric_for_best_model)}, which stage {config.stage} doesn't measure"
        problems.error("metric_for_best_model", found, " or ".join(METRICS[config.stage]))


def _note_unused(config: TrainConfig, given: Given, problems: Problems) -> None:
    """Note the keys that nothing reads, as other keys are."""
    unused = {
        key: f"it is for stage: {' or '.join(stages)}"
        for key, stages in _OF_STAGES.items()
        if config.stage not in stages
    }
    if not config.do_predict:
        unused |= dict.fromkeys(_ANSWERS, "it is for do_predict")
    if not config.streaming:
        unused["buffer_size"] = "it is for streaming: true"
    if config.logging_dir and "tensorboard" not in config.report_to:
        unused["logging_dir"] = "it is for report_to: tensorboard"
    if config.lr_scheduler_type == "constant":
        unused |= dict.fromkeys(("warmup_ratio", "warmup_steps"), "only constant_with_warmup has one")
    for key, why in unused.items():
        if key in given:
            problems.warn(key, why, "", _OUT)
    for key in ("eval_steps", "eval_on_start", "metric_for_best_model", "greater_is_better"):
        if key in given and getattr(config, key) and not config.holds_out:
            step = "Set val_size or eval_dataset, or leave it out."
            problems.warn(key, "it is for held-out rows, and there are none", "", step)


def _note_experts(config: TrainConfig, problems: Problems) -> None:
    block, usable = config.kt_config, len(own_cpus())
    rank, usual = block.kt_lora_rank, (None, 2 * config.lora_rank)
    if rank and config.expert_rank and block.kt_lora_alpha is None and config.lora_alpha not in usual:
        found = f"missing, so it is {2 * rank}, twice kt_lora_rank, whatever lora_alpha is"
        step = "Set it, or leave kt_lora_rank out to train the experts with lora_rank and lora_alpha."
        problems.warn("kt_config.kt_lora_alpha", found, "a number", step, "KTC005")
    if block.kt_num_threads > usable:
        found = f"{block.kt_num_threads}, but this process may use {usable} CPUs, and so many are used"
        problems.warn("kt_config.kt_num_threads", found, "", "Leave it out: the cores are counted.")
    for key in ("kt_lora_rank", "kt_lora_alpha"):
        if block.experts_frozen and getattr(block, key):
            found = "it is the expert LoRA's, and none is trained"
            problems.warn(f"kt_config.{key}", found, "", _OUT)
    if block.kt_experts == "hybrid":
        found = "hybrid is gone: the GPU computes all experts, as with stream"
        step = "Set kt_experts: auto, which takes what is fastest."
        problems.warn("kt_config.kt_experts", found, "auto, cpu, stream or resident", step)
    for key in ("kt_gpu_memory", "kt_num_gpu_experts"):
        if block.kt_experts == "cpu" and (value := getattr(block, key)):
            found = f"{value}, while kt_experts is cpu: no expert is on the GPU"
            step = "Set kt_experts: stream, resident or auto (docs/placements.md), or leave it out."
            problems.warn(f"kt_config.{key}", found, "", step)


def _note_storage(config: TrainConfig, problems: Problems) -> None:
    block = config.kt_config
    asked, named = block.kt_expert_weight_format, QUANTIZING.get(block.backend)
    if asked and named and asked != named:
        found = f"{block.kt_backend}, with kt_expert_weight_format: {asked}"
        step = "Keep one; kt_expert_weight_format decides."
        problems.warn("kt_config.kt_backend", found, named, step, code="KTC005")
    for key, given in (("kt_backend", block.kt_backend), ("kt_expert_weight_format", asked)):
        storage = _STORED.get(str(given))
        if given == "llamafile":
            found = (
                "llamafile: GGUF isn't read; ktbridge's own kernels compute the experts, as the checkpoint's "
                "safetensors store them"
            )
            step = "Leave it out; kt_expert_weight_format: int8 or int4 takes less memory than BF16."
        elif storage and not block.kt_weight_path:
            found = f"{given}: the kernels read experts as the checkpoint stores them, {storage} or not"
            step = "Leave it out. kt_expert_weight_format: int8 or int4 quantizes BF16 experts."
        else:
            continue
        problems.warn(f"kt_config.{key}", found, "", step)
