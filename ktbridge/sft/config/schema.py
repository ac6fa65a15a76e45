"""The keys that mean something, with their defaults and what each does.

LLaMA-Factory's names, and KTransformers' for the ``kt_config`` block. docs/train.md has them as a table.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from ktbridge.errors import Problem
from ktbridge.experts import MAX_EXPERT_RANK
from ktbridge.sft.config.values import (
    Parser,
    flag,
    flag_or_path,
    fraction,
    gpu_experts,
    number,
    one_of,
    positive,
    reporters,
    share,
    size,
    steps,
    text,
    texts,
    whole,
    whole_or_auto,
)

SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup", "polynomial")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "rmsprop", "adagrad")
STORAGE_BACKENDS = (
    "AMXBF16", "AMXINT8", "AMXINT4", "AMXINT4_KGroup", "AMXFP8", "BF16", "INT8", "FP8", "RAWINT4",
    "MXFP4", "TORCH", "llamafile",
)  # fmt: skip
"""KTransformers' names of backends: each stands for a storage of the experts and a kernel for it."""
ATTENTION = {
    "auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}  # fmt: skip
"""LLaMA-Factory's names of attention -> transformers'."""


def _option(parse: Parser, default: Any = MISSING, hint: str = "") -> Any:
    """A key of the configuration; ``hint`` is the next step after a value it doesn't take."""
    return field(default=default, metadata={"parse": parse, "hint": hint})  # type: ignore[call-overload]


option = _option
"""For configurations that other modules read by ``options`` and ``parse_keys``."""


@dataclass(frozen=True)
class KtConfig:
    """The ``kt_config`` block: how the experts run. Its keys may also stand outside the block."""

    kt_backend: str = _option(one_of("auto", "kt-kernel", *STORAGE_BACKENDS), "auto")
    """auto: our kernels; kt-kernel: KTransformers' own, where its wheel is installed. KTransformers' names of
    storages (AMXINT8, …) mean our kernels too, which read experts as the checkpoint stores them."""
    kt_num_threads: int = _option(whole(0, 4096), 0)
    """Kernel threads; 0 takes KTBRIDGE_THREADS, else the cores this process may use."""
    kt_threadpool_count: int | None = _option(whole(1, 64), None)
    """Thread pools of kt-kernel, one for each NUMA node; ours is one pool over all nodes."""
    kt_weight_path: str | None = _option(text, None)
    """A safetensors checkpoint to take the experts from, such as one of scripts/quantize_experts.py;
    default: model_name_or_path. Files in KTransformers' own order aren't read."""
    kt_expert_weight_format: str | None = _option(
        one_of("bf16", "int8", "fp8", "int4", "rawint4", "mxfp4"), None
    )
    """bf16 with kt-kernel, which is given nothing else; our kernels read what the checkpoint has."""
    kt_experts: str = _option(one_of("auto", "cpu", "stream", "hybrid", "resident"), "auto")
    """What computes the routed experts. auto: without a GPU our kernels on the CPU, with one the fastest that
    fits its memory, by times measured at the start. cpu: the kernels. stream: the GPU, to which each layer's
    weights cross from the checkpoint in RAM. hybrid: as stream, but the CPU computes those with the fewest
    tokens meanwhile. resident: the GPU, which keeps them all."""
    kt_gpu_memory: int | None = _option(size, None)
    """GPU memory that the run may take in all, as 24GB; default: what is free."""
    kt_num_gpu_experts: int | None = _option(gpu_experts, None)
    """How many of each layer's experts the GPU keeps, as so many whole layers, or in hybrid computes;
    default: what fits, what is fastest."""
    kt_lora_rank: int | None = _option(whole(1, MAX_EXPERT_RANK), None)
    """Rank of the expert LoRA; default: lora_rank."""
    kt_lora_alpha: float | None = _option(number, None)
    """Alpha of the expert LoRA; default: twice kt_lora_rank where that is given, else lora_alpha."""
    expert_activation: str = _option(one_of("retain", "recompute"), "retain")
    """The older name of kt_cpu_activation."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Field names and meanings are LLaMA-Factory's."""

    # model
    model_name_or_path: str = _option(text)
    """The base model: a directory, or the id of a model in the local Hub cache."""
    dataset: tuple[str, ...] = _option(texts)
    """JSON or JSONL files, relative to the configuration file, or names in dataset_info.json; comma-separated
    or a list. Not needed without do_train."""
    output_dir: str = _option(text)
    """Where the adapter, the log and the loss plot appear when the run is finished, and predictions."""
    adapter_name_or_path: str | None = _option(text, None)
    """A raw adapter to go on training from, instead of a new LoRA; do_predict: the one that answers, in any
    format that `ktbridge convert` reads."""
    flash_attn: str = _option(one_of(*ATTENTION), "auto")
    """Attention of transformers: its own choice, eager (disabled), sdpa or flash-attention (fa2,
    fa3)."""

    # method
    stage: str = _option(one_of("sft", "dpo"), "sft", "ktbridge train does sft and dpo.")
    """sft: imitate the answers; dpo: prefer the chosen answer to the rejected one."""
    finetuning_type: str = _option(
        one_of("lora"), "lora", "The base's weights are mapped read-only: train LoRA."
    )
    """Only LoRA is trained."""
    do_train: bool = _option(flag, True)
    """Train. Left out it is false where do_predict is true."""
    do_predict: bool = _option(flag, False)
    """Answer the rows of eval_dataset (docs/predict.md), after training with the trained adapter."""
    predict_with_generate: bool = _option(
        flag, True, "do_predict writes answers and their metrics."
    )
    """do_predict: false is an error, as there is no other way to predict."""
    lora_rank: int = _option(whole(1), 8)
    """Rank of the non-expert LoRA, and of the experts' unless kt_lora_rank is given."""
    lora_alpha: float | None = _option(number, None)
    """Default: twice the rank."""
    lora_dropout: float = _option(share(), 0.0)
    """Dropout of the non-expert LoRA; the expert LoRA has none."""
    lora_target: tuple[str, ...] = _option(texts, ("all",))
    """Module names for the non-expert LoRA, or "all": every linear module outside the experts."""
    pref_beta: float = _option(positive, 0.1)
    """dpo: how far the policy may leave the base."""
    pref_loss: str = _option(one_of("sigmoid", "hinge", "ipo"), "sigmoid")
    """dpo: the loss on a pair."""
    dpo_label_smoothing: float = _option(share(0.5), 0.0)
    """dpo, sigmoid: the share of pairs assumed to be the wrong way round."""
    pref_ftx: float = _option(number, 0.0)
    """dpo: weight of the ordinary loss on the chosen answer, added to the pair's."""

    # data
    dataset_dir: str | None = _option(text, None)
    """The directory of dataset_info.json; default: "data" beside the configuration or in the current
    directory."""
    eval_dataset: tuple[str, ...] = _option(texts, ())
    """Held-out rows: files or names as in dataset. They are never trained on."""
    template: str | None = _option(text, None)
    """Noted only: conversations are written with the tokenizer's own chat template."""
    cutoff_len: int = _option(whole(1), 2048)
    """Tokens of a conversation, at most; the rest is cut off and counted."""
    max_samples: int | None = _option(whole(1), None)
    """Rows of each dataset, at most."""
    packing: bool = _option(flag, False)
    """sft: several conversations fill one row of cutoff_len tokens."""
    neat_packing: bool = _option(flag, False)
    """Packing where conversations in a row don't see each other; implies packing."""
    strict_data: bool = _option(flag, False)
    """Refuse the run if any row can't be used, instead of listing it in a file."""
    allow_refused_rows: bool = _option(flag, False)
    """Train though more than half of the rows can't be used."""
    split_turns: bool = _option(flag, True)
    """sft: an answer that the chat template rewrites once more follows (Qwen3 drops its thoughts) is trained
    in a sequence of its own, as it is served. false: one sequence per conversation."""
    dataloader_num_workers: int = _option(whole(0, 4096), 0)
    """Processes that make batches; 0: this one."""

    # output
    logging_steps: int = _option(whole(1), 10)
    """Steps between two records of the log."""
    logging_dir: str | None = _option(text, None)
    """Where tensorboard writes."""
    report_to: str | tuple[str, ...] = _option(reporters("none", "tensorboard", "wandb"), "none")
    """tensorboard, wandb or both (a list); they must be installed."""
    run_name: str | None = _option(text, None)
    """The run's name in tensorboard and wandb."""
    plot_loss: bool = _option(flag, True)
    """Draw training_loss.png."""
    save_steps: int = _option(whole(0), 500)
    """Steps between checkpoints, in OUTPUT_DIR.checkpoints; the last step has one too. Each is an adapter
    that converts and serves, and a run can go on from it. 0: none."""
    save_total_limit: int = _option(whole(1), 1)
    """How many checkpoints are kept, while the run goes and after it."""
    save_only_model: bool = _option(flag, False)
    """Checkpoints without the optimizer's state: smaller, but no run can go on from one."""
    overwrite_output_dir: bool = _option(flag, False)
    """Replace a finished output_dir when the run ends. An unfinished run is not touched by it."""
    resume_from_checkpoint: bool | str | None = _option(flag_or_path, None)
    """Left out: an unfinished run of the same configuration goes on. true: go on from the last checkpoint,
    also with another learning rate or length; a path: from that one. false: start anew; earlier
    checkpoints are kept under another name."""

    # training
    per_device_train_batch_size: int = _option(whole(1), 1)
    """Conversations (dpo: pairs) in one forward and backward."""
    per_device_eval_batch_size: int = _option(whole(1), 8)
    """Conversations (dpo: pairs) that are evaluated or predicted at once."""
    gradient_accumulation_steps: int = _option(whole(1), 1)
    """Batches in one optimizer step."""
    tokens_per_pass: int | str = _option(whole_or_auto, "auto")
    """The rows of an optimizer step go forward and backward in as few passes of at most so many tokens
    (padding included) as there can be, instead of batch by batch: same loss and gradients within rounding.
    auto: batch by batch on the CPU; on a GPU, what its memory takes where that is known."""
    learning_rate: float = _option(number, 1e-4)
    """Its highest value."""
    num_train_epochs: float = _option(positive, 3.0)
    """How often the data are gone through."""
    max_steps: int = _option(steps, -1)
    """Optimizer steps; -1: as many as num_train_epochs need."""
    lr_scheduler_type: str = _option(one_of(*SCHEDULERS), "cosine")
    """How the learning rate falls."""
    warmup_ratio: float = _option(share(), 0.0)
    """The share of the steps in which the learning rate rises."""
    warmup_steps: int = _option(whole(0), 0)
    """The same as a number of steps."""
    optim: str = _option(one_of(*OPTIMIZERS), "adamw_torch_fused")
    """The optimizer."""
    adam_beta1: float = _option(share(), 0.9)
    """Decay of AdamW's first moment."""
    adam_beta2: float = _option(share(), 0.999)
    """Decay of AdamW's second moment."""
    adam_epsilon: float = _option(positive, 1e-8)
    """AdamW's epsilon."""
    weight_decay: float = _option(number, 0.0)
    """Decay of the trained weights."""
    max_grad_norm: float = _option(number, 1.0)
    """Gradients are scaled down to this norm; 0: never."""
    neftune_noise_alpha: float | None = _option(positive, None)
    """NEFTune: noise on the embeddings while training."""
    seed: int = _option(whole(0), 42)
    """Decides LoRA's start, dropout and the order of the data."""
    bf16: bool = _option(flag, True)
    """Non-expert weights in bfloat16 (true) or float32 (false); experts keep the checkpoint's storage."""
    pure_bf16: bool = _option(flag, False)
    """The trained LoRA weights are bfloat16 as well, instead of float32."""
    disable_gradient_checkpointing: bool = _option(flag, False)
    """Keep what lies between the layers instead of computing it again: faster, needs more GPU memory."""
    use_cpu: bool = _option(flag, False)
    """Stay on the CPU though there is a GPU."""
    ddp_timeout: int = _option(whole(1), 1800)
    """Seconds that processes wait for each other."""

    # prediction
    max_new_tokens: int = _option(whole(1), 1024)
    """do_predict: tokens of an answer, at most."""
    do_sample: bool = _option(flag, True)
    """do_predict: false takes the likeliest token each time."""
    temperature: float = _option(number, 0.95)
    """do_predict: below 1 makes likely tokens likelier; 0 is the same as do_sample: false."""
    top_p: float = _option(fraction, 0.7)
    """do_predict: sample among the likeliest tokens that have this probability together."""
    top_k: int = _option(whole(0), 50)
    """do_predict: sample among so many of the likeliest tokens; 0: among all."""

    # KTransformers
    use_kt: bool = _option(
        flag, True, "Without CPU experts ktbridge adds nothing: train with PEFT or LLaMA-Factory."
    )
    """true: the experts on the CPU are what this is for."""
    kt_cpu_activation: str | None = _option(one_of("retain", "recompute"), None)
    """What the experts' forward keeps: retain (default) is faster, recompute needs less memory; same
    results."""
    kt_optimize_rule: str | None = _option(text, None)
    """A rule file of KTransformers' older examples: it gives the experts' backend and the
    layers' devices."""
    kt_config: KtConfig = field(default_factory=KtConfig)
    """The block above."""

    device_rules: tuple[tuple[str, str], ...] = ()
    """Read from kt_optimize_rule: pairs of a regular expression and a device; the first that is found in a
    module's name wins."""
    notes: tuple[Problem, ...] = field(default=(), compare=False)
    """Warnings about keys that mean nothing here: nothing a run's results depend on."""

    @property
    def alpha(self) -> float:
        """Alpha of the non-expert LoRA."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def expert_rank(self) -> int:
        """Rank of the expert LoRA."""
        return self.kt_config.kt_lora_rank or self.lora_rank

    @property
    def expert_alpha(self) -> float:
        """Alpha of the expert LoRA; KTransformers' default is twice a rank of their own."""
        own = self.kt_config
        if own.kt_lora_alpha is not None:
            return own.kt_lora_alpha
        return self.alpha if own.kt_lora_rank is None else 2.0 * own.kt_lora_rank

    @property
    def activation(self) -> str:
        """What the experts' forward keeps: "retain" or "recompute"."""
        return self.kt_cpu_activation or self.kt_config.expert_activation

    @property
    def attn_implementation(self) -> str | None:
        """``from_pretrained``'s argument of this name; None leaves the choice to transformers."""
        return ATTENTION[self.flash_attn]

    @property
    def warmup(self) -> float:
        """transformers' ``warmup_steps``: a number of steps, or below 1 a share of them."""
        return self.warmup_steps or self.warmup_ratio

    @property
    def reporters(self) -> list[str]:
        """transformers' ``report_to``."""
        return [self.report_to] if isinstance(self.report_to, str) else list(self.report_to)


def options(cls: type) -> dict[str, Field]:
    """The keys of ``KtConfig`` or ``TrainConfig`` that a file may set, in order."""
    return {item.name: item for item in fields(cls) if "parse" in item.metadata}
