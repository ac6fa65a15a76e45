"""The keys that mean something, by LLaMA-Factory's names, and those of the ``kt_config`` block.

One field is a key: its kind, its default, what a resumed run may change, whether rows depend on it, since
when it is known, and what it does. ``python scripts/make_rules.py`` writes docs/train.md's tables of them.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Annotated

from ktbridge.adapter.formats import READABLE
from ktbridge.errors import Problem
from ktbridge.sft.config.fields import (
    BelowHalf,
    Bytes,
    Count,
    CountOrAll,
    CountOrAuto,
    ExpertRank,
    ExpertsOnGpu,
    Flag,
    FlagOrAuto,
    FlagOrPath,
    Fraction,
    Fractions,
    Number,
    Positive,
    ScheduleValues,
    Share,
    ShareOrWhole,
    Text,
    Texts,
    UpTo4096,
    Whole,
    one_of,
    option,
    some_of,
)

SCHEDULERS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "linear": (),
    "constant": (),
    "constant_with_warmup": (),
    "polynomial": ("lr_end", "power"),
    "cosine_with_restarts": ("num_cycles",),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps", "num_stable_steps", "min_lr_ratio", "num_cycles", "warmup_type", "decay_type",
    ),
}  # fmt: skip
"""transformers' schedules -> the ``lr_scheduler_kwargs`` that each takes."""
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "rmsprop", "adagrad")
_ANSWERS = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
METRICS = {
    **dict.fromkeys(("sft", "pt"), ("loss", "mean_token_accuracy", "entropy")),
    "dpo": ("loss", "rewards/accuracies", "rewards/margins", *_ANSWERS),
    "kto": ("loss", "kl", *_ANSWERS),
}
"""What is measured of held-out rows, by stage; in records of the log each begins with eval_."""
ATTENTION = {
    "auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}  # fmt: skip
"""LLaMA-Factory's names of attention -> transformers'."""


STORAGE_BACKENDS = (
    "AMXBF16", "AMXINT8", "AMXINT4", "AMXINT4_KGroup", "AMXFP8", "BF16", "INT8", "FP8", "RAWINT4",
    "MXFP4", "TORCH", "llamafile", "AMXBF16_SkipLoRA", "AMXINT8_SkipLoRA", "AMXINT4_SkipLoRA",
)  # fmt: skip
"""KTransformers' names of backends: each stands for a storage of the experts and a kernel for it."""
QUANTIZING = {"AMXINT8": "int8", "INT8": "int8", "AMXINT4": "int4", "AMXINT4_KGroup": "int4"}
"""Of these, those that quantize bfloat16 experts, and to what."""


@dataclass(frozen=True)
class KtConfig:
    """The ``kt_config`` block: how the experts run. Its keys may also stand outside the block."""

    kt_backend: Annotated[str, one_of("auto", *STORAGE_BACKENDS)] = option(
        "auto",
        rows=False,
        hint="Leave it out: ktbridge's own kernels compute the experts; the backend kt-kernel is gone since "
        "0.7.",
    )
    """A storage of the experts by KTransformers' name, computed by our kernels: AMXINT8, INT8, AMXINT4 and
    AMXINT4_KGroup are kt_expert_weight_format: int8 or int4; auto and the others read experts as the
    checkpoint stores them. AMXBF16, AMXINT8 and AMXINT4 with _SkipLoRA at the end also do what
    kt_skip_expert_lora_adaptation does."""
    kt_num_threads: UpTo4096 = option(0, "free", rows=False, each_host=True)
    """Kernel threads; 0 takes KTBRIDGE_THREADS, else the physical cores this process may use."""
    kt_weight_path: Text | None = option(None, "adapter", rows=False, each_host=True)
    """A safetensors checkpoint to take the experts from, such as one of scripts/quantize_experts.py;
    default: model_name_or_path. Files in KTransformers' own order aren't read."""
    kt_expert_weight_format: (
        Annotated[str, one_of("bf16", "int8", "fp8", "int4", "rawint4", "mxfp4")] | None
    ) = option(None, rows=False)
    """int8, int4: experts in BF16, F16 or F32 are quantized once, before the first run, beside the checkpoint
    or where KTBRIDGE_CACHE says. All else: as the checkpoint stores them."""
    kt_experts: Annotated[str, one_of("auto", "cpu", "stream", "hybrid", "resident")] = option(
        "auto", "free", rows=False, since="0.6.0"
    )
    """What computes the routed experts. auto: without a GPU our kernels on the CPU, with one the fastest that
    fits its memory, by times measured at the start. cpu: the kernels. stream: the GPU, to which each layer's
    weights are transferred from the checkpoint in RAM. resident: the GPU, which keeps them all. hybrid: what
    stream is, since 0.7."""
    kt_gpu_memory: Bytes | None = option(None, "free", rows=False, each_host=True, since="0.6.0")
    """GPU memory that the run may take in all, as 24GB; default: what is free."""
    kt_num_gpu_experts: ExpertsOnGpu = option(None, "free", rows=False, since="0.6.0")
    """How many of each layer's experts the GPU keeps, as so many whole layers; default: what fits."""
    kt_lora_rank: ExpertRank | None = option(None, "adapter", rows=False)
    """Rank of the expert LoRA; default: lora_rank."""
    kt_lora_alpha: Positive | None = option(None, "adapter", rows=False)
    """Alpha of the expert LoRA; default: twice kt_lora_rank where that is given, else lora_alpha."""
    kt_lora_dropout: Share | None = option(None, rows=False, since="0.6.0")
    """Dropout of the expert LoRA's inputs; default: lora_dropout."""
    kt_skip_expert_lora_adaptation: Flag = option(False, "adapter", rows=False, since="0.6.0")
    """true: no expert LoRA is made; attention and what else lora_target names are trained alone."""
    expert_activation: Annotated[str, one_of("retain", "recompute")] = option("retain", "free", rows=False)
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
        """int8 or int4 where the experts shall be quantized to it; None: as the checkpoint has them."""
        asked = self.kt_expert_weight_format
        if asked is None:
            return QUANTIZING.get(self.backend)
        return asked if asked in QUANTIZING.values() else None


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Field names and meanings are LLaMA-Factory's."""

    # model
    model_name_or_path: Text = option(resume="free", rows=False, each_host=True)
    """The base model: a directory, or org/name or org/name@revision on the Hub, which is downloaded unless
    the Hub cache has it."""
    dataset: Texts = option(resume="free", rows=False, each_host=True)
    """JSON, JSONL, Parquet or CSV files, relative to the configuration file, names in dataset_info.json, or
    org/name on the Hub; comma-separated or a list. Not needed without do_train."""
    output_dir: Text = option(resume="free", rows=False, each_host=True)
    """Where the adapter, the log and the loss plot appear when the run is finished, and predictions."""
    model_revision: Text | None = option(None, "free", rows=False, each_host=True, since="0.6.0")
    """Branch, tag or commit of a model on the Hub; default: main."""
    adapter_name_or_path: Text | None = option(None, "free", rows=False, each_host=True)
    """An adapter to go on training from, instead of a new LoRA, or with do_predict the one that answers: in
    any format that `ktbridge convert` reads."""
    adapter_format: Annotated[str, one_of("auto", *READABLE)] = option("auto", rows=False, since="0.6.1")
    """Its format where that is ambiguous, as `ktbridge convert --from` has it; --from sets it, too."""
    flash_attn: Annotated[str, one_of(*ATTENTION)] = option("auto", rows=False)
    """Attention of transformers: its own choice, eager (disabled), sdpa or flash-attention (fa2, fa3)."""

    # method
    stage: Annotated[str, one_of("sft", "pt", "dpo", "kto")] = option(
        "sft", hint="ktbridge train does these."
    )
    """sft: imitate the answers; pt: continue raw text; dpo: prefer the chosen answer to the rejected one;
    kto: learn from answers that are each judged good or bad."""
    finetuning_type: Annotated[str, one_of("lora")] = option(
        "lora", rows=False, hint="The base's weights are mapped read-only: train LoRA."
    )
    """Only LoRA is trained."""
    do_train: Flag = option(True, rows=False)
    """Train. Left out it is false where do_predict is true."""
    do_predict: Flag = option(False, "free", since="0.6.0")
    """Answer the rows of eval_dataset (docs/predict.md), after training with the trained adapter."""
    predict_with_generate: Flag = option(
        True, "free", since="0.6.0", hint="do_predict writes answers and their metrics."
    )
    """do_predict: false is an error, as there is no other way to predict."""
    lora_rank: Count = option(8, "adapter", rows=False)
    """Rank of the non-expert LoRA, and of the experts' unless kt_lora_rank is given."""
    lora_alpha: Positive | None = option(None, "adapter", rows=False, hint="Leave it out: twice the rank.")
    """Default: twice the rank."""
    lora_dropout: Share = option(0.0, rows=False)
    """sft: dropout of LoRA's inputs in training; of the experts' too unless kt_lora_dropout is given."""
    use_rslora: Flag = option(False, "adapter", rows=False, since="0.6.0")
    """rsLoRA: both LoRAs are scaled by alpha / √rank instead of alpha / rank. The adapter has plain LoRA's
    lora_alpha for the same scale, alpha · √rank, as every engine reads it."""
    lora_target: Texts = option(("all",), rows=False)
    """Module names for the non-expert LoRA, or "all": every linear module outside the experts; "experts":
    none, so that the routed experts are trained alone."""
    moe_aux_loss_coef: Number | None = option(None, rows=False, since="0.6.0")
    """Weight of the model's own loss on unbalanced routing, added to the loss; default and 0: none. It is
    made of the tokens of one pass together, so how a step is cut into passes changes it."""
    pref_beta: Positive = option(0.1, rows=False)
    """dpo, kto: how far the policy may leave the base."""
    pref_loss: Annotated[str, one_of("sigmoid", "hinge", "ipo")] = option("sigmoid", rows=False)
    """dpo: the loss on a pair."""
    dpo_label_smoothing: BelowHalf = option(0.0, rows=False)
    """dpo, sigmoid: the share of pairs assumed to be the wrong way round."""
    pref_ftx: Number = option(0.0, rows=False)
    """dpo, kto: weight of the ordinary loss on the chosen or good answers, added to the other."""
    kto_chosen_weight: Number = option(1.0, rows=False, since="0.6.0")
    """kto: weight of the loss on good answers."""
    kto_rejected_weight: Number = option(1.0, rows=False, since="0.6.0")
    """kto: weight of the loss on bad answers."""

    # data
    dataset_dir: Text | None = option(None, "free", rows=False, each_host=True)
    """The directory of dataset_info.json; default: "data" beside the configuration or in the current
    directory."""
    eval_dataset: Texts = option((), "free", rows=False, each_host=True, since="0.6.0")
    """Held-out rows: files or names as in dataset. They are never trained on."""
    val_size: ShareOrWhole = option(0.0, "free", since="0.6.0")
    """Instead of eval_dataset: how many rows of dataset are held out, or below 1 the share of them. Which
    ones, seed decides."""
    template: Text | None = option(None, "free", rows=False, each_host=True)
    """LLaMA-Factory's name of a template. Conversations are written with the tokenizer's own chat template; a
    note says where that one differs."""
    cutoff_len: Count = option(2048)
    """Tokens of a conversation, at most; the rest is cut off and counted. pt: of a piece of a text."""
    media_dir: Text | None = option(None, "free", each_host=True, since="0.6.0")
    """Where images are that rows name by relative paths; default: beside the file of the rows and in
    dataset_dir."""
    image_max_pixels: Count | None = option(None, since="0.6.0")
    """An image of more pixels is made smaller, as in LLaMA-Factory; default: the model's own processor
    decides."""
    image_min_pixels: Count | None = option(None, since="0.6.0")
    """An image of fewer pixels is made larger; default: the model's own processor decides."""
    max_samples: Count | None = option(None)
    """Rows of each dataset, at most."""
    mix_strategy: Annotated[
        str, one_of("concat", "interleave_under", "interleave_over", "interleave_once")
    ] = option("concat", since="0.6.0")
    """How several datasets make an epoch. concat, interleave_once: each row once; interleave_under: in
    proportion, until one of them has no row left; interleave_over: until all of them were gone through, rows
    of the shorter ones coming again."""
    interleave_probs: Fractions = option((), since="0.6.0")
    """interleave_*: each dataset's share, in their order, as 0.7,0.3; default: they take turns."""
    packing: Flag = option(False)
    """sft, pt: several conversations or texts fill one row of cutoff_len tokens; pt: the default is true."""
    neat_packing: Flag = option(False)
    """Packing where conversations in a row don't see each other; implies packing."""
    strict_data: Flag = option(False, "free", each_host=True)
    """Refuse the run if any row can't be used, instead of listing it in a file."""
    allow_refused_rows: Flag = option(False, "free", each_host=True, since="0.6.0")
    """Train though more than half of the rows can't be used."""
    split_turns: Flag = option(True, since="0.6.0")
    """sft: an answer that the chat template rewrites once more follows (Qwen3 drops its thoughts) is trained
    in a sequence of its own, as it is served. false: one sequence per conversation."""
    enable_thinking: FlagOrAuto | None = option(None, since="0.6.0")
    """What a server is told of thinking when it is asked for these answers. Left out: nothing; false:
    thoughts are taken out of the rows; auto: true for an answer with thoughts, false for one without."""
    train_on_prompt: Flag = option(False, since="0.6.0")
    """sft: the loss counts every token, prompts and tool results, too."""
    mask_history: Flag = option(False, since="0.6.0")
    """sft: only the last answer of a conversation is learned."""
    streaming: Flag = option(False, since="0.6.0")
    """Read, check and tokenize rows while the run goes, in bounded memory; needs max_steps."""
    buffer_size: Count = option(16384, since="0.6.0")
    """streaming: rows from which the next one is drawn at random."""
    tokenized_path: Text | None = option(None, "free", rows=False, each_host=True, since="0.6.0")
    """A directory where the rows are kept as tokens. A run on the same rows, tokenizer and settings begins
    with them; where anything differs, they are made and kept anew."""
    overwrite_cache: Flag = option(False, "free", rows=False, each_host=True, since="0.6.0")
    """Make the rows in tokenized_path anew in any case."""
    identity_name: Text | None = option(None, since="0.6.0")
    """What {{name}} in rows stands for, as in LLaMA-Factory's identity.json; without it such rows are
    refused."""
    identity_author: Text | None = option(None, since="0.6.0")
    """The same for {{author}}."""
    dataloader_num_workers: UpTo4096 = option(0, "free", rows=False, each_host=True)
    """Processes that make batches; 0: this one."""

    # output
    logging_steps: Count = option(10, "free", rows=False)
    """Steps between two records of the log."""
    logging_dir: Text | None = option(None, "free", rows=False, each_host=True)
    """Where tensorboard writes."""
    report_to: Annotated[
        str | tuple[str, ...], some_of("none", "tensorboard", "wandb", "mlflow", "swanlab")
    ] = option("none", "free", rows=False, each_host=True)
    """tensorboard, wandb, mlflow, swanlab, or some of them (a list); they must be installed."""
    run_name: Text | None = option(None, "free", rows=False, each_host=True)
    """The run's name for what report_to names."""
    plot_loss: Flag = option(True, "free", rows=False, each_host=True)
    """Draw training_loss.png."""
    save_steps: Whole = option(500, "free", rows=False)
    """Steps between checkpoints, in OUTPUT_DIR.checkpoints; the last step has one too. Each is an adapter
    that converts and serves, and a run can go on from it. 0: none."""
    save_total_limit: Count = option(1, "free", rows=False, each_host=True)
    """How many checkpoints are kept, while the run goes and after it."""
    save_only_model: Flag = option(False, "free", rows=False)
    """Checkpoints without the optimizer's state: smaller, but no run can go on from one."""
    overwrite_output_dir: Flag = option(False, "free", rows=False, each_host=True)
    """Replace a finished output_dir when the run ends. An unfinished run is not touched by it."""
    resume_from_checkpoint: FlagOrPath | None = option(None, "free", rows=False, each_host=True)
    """Left out: an unfinished run of the same configuration goes on. true: go on from the last checkpoint,
    also with another learning rate or length; a path: from that one. false: start anew; earlier
    checkpoints are kept under another name."""

    # held-out rows
    do_eval: Flag = option(True, "free", since="0.6.0")
    """false: held-out rows are kept from training and not evaluated."""
    eval_strategy: Annotated[str, one_of("steps", "epoch", "no")] | None = option(
        None, "free", rows=False, since="0.6.0"
    )
    """When held-out rows are evaluated: steps, epoch or no. The last step always is. Left out: every
    eval_steps, and without these ten times in the run."""
    eval_steps: ShareOrWhole | None = option(None, "free", rows=False, since="0.6.0")
    """Steps between evaluations, or below 1 a share of the run's; eval_strategy: steps without it takes
    logging_steps."""
    eval_on_start: Flag | None = option(None, "free", rows=False, since="0.6.0")
    """Evaluate before the first step, too; default: true, but false with eval_strategy: no."""
    metric_for_best_model: Text | None = option(None, "free", rows=False, since="0.6.0")
    """What makes a step the best one. sft: loss (default), mean_token_accuracy, entropy; dpo: loss,
    rewards/accuracies, rewards/margins and others of the log's, with or without eval_ in front."""
    greater_is_better: Flag | None = option(None, "free", rows=False, since="0.6.0")
    """Whether the best is the greatest; default: false for the loss, true for any other."""
    load_best_model_at_end: Flag = option(False, "free", rows=False, since="0.6.0")
    """output_dir gets the adapter of the best evaluated step instead of the last one's. Each best so far is
    saved, whatever save_steps is, and kept beside what save_total_limit keeps."""
    early_stopping_steps: Whole = option(0, "free", rows=False, since="0.6.0")
    """End the run after so many evaluations in a row without a new best; 0: never."""

    # training
    per_device_train_batch_size: Count = option(1, rows=False)
    """Conversations (dpo: pairs) in one forward and backward; kto: at least 2."""
    per_device_eval_batch_size: Count = option(8, "free", rows=False, since="0.6.0")
    """Conversations (dpo: pairs) that are evaluated or predicted at once."""
    gradient_accumulation_steps: Count = option(1, rows=False)
    """Batches in one optimizer step."""
    tokens_per_pass: CountOrAuto = option("auto", "free", rows=False, since="0.6.0")
    """The rows of an optimizer step go forward and backward in as few passes of at most so many tokens
    (padding included) as there can be, instead of batch by batch: same loss and gradients within rounding.
    auto: batch by batch on the CPU; on a GPU, what its memory takes where that is known."""
    learning_rate: Number = option(1e-4, "noted", rows=False)
    """Its highest value."""
    loraplus_lr_ratio: Positive | None = option(None, rows=False, since="0.6.0")
    """LoRA+: the learning rate of each B is so many times that of its A, which learning_rate is; default: the
    same."""
    num_train_epochs: Positive = option(3.0, "noted", rows=False)
    """How often the data are gone through."""
    max_steps: CountOrAll = option(-1, "noted", rows=False)
    """Optimizer steps; -1: as many as num_train_epochs need."""
    lr_scheduler_type: Annotated[str, one_of(*SCHEDULERS)] = option("cosine", "noted", rows=False)
    """How the learning rate falls."""
    lr_scheduler_kwargs: ScheduleValues | None = option(None, "noted", rows=False, since="0.6.1")
    """What the schedule takes besides, as in transformers: cosine_with_min_lr min_lr or min_lr_rate,
    polynomial lr_end and power, warmup_stable_decay num_decay_steps."""
    warmup_ratio: Share = option(0.0, "noted", rows=False)
    """The share of the steps in which the learning rate rises."""
    warmup_steps: ShareOrWhole = option(0, "noted", rows=False)
    """The same as a number of steps; below 1 it is a share, too."""
    optim: Annotated[str, one_of(*OPTIMIZERS)] = option("adamw_torch_fused", rows=False)
    """The optimizer."""
    adam_beta1: Share = option(0.9, rows=False)
    """Decay of AdamW's first moment."""
    adam_beta2: Share = option(0.999, rows=False)
    """Decay of AdamW's second moment."""
    adam_epsilon: Positive = option(1e-8, rows=False)
    """AdamW's epsilon."""
    weight_decay: Number = option(0.0, rows=False)
    """Decay of the trained weights."""
    max_grad_norm: Number = option(1.0, "noted", rows=False)
    """Gradients are scaled down to this norm; 0: never."""
    neftune_noise_alpha: Positive | None = option(None, rows=False)
    """NEFTune: noise on the embeddings while training."""
    seed: Whole = option(42)
    """Decides LoRA's start, dropout and the order of the data."""
    bf16: FlagOrAuto = option("auto", rows=False)
    """Non-expert weights in bfloat16 (true) or float32 (false); experts keep the checkpoint's storage. auto:
    bfloat16 on GPUs and on CPUs with BF16 instructions (AVX512_BF16, AMX), else float32, which is faster."""
    pure_bf16: Flag = option(False, rows=False)
    """The trained LoRA weights are bfloat16 as well, instead of float32."""
    disable_gradient_checkpointing: Flag = option(False, "free", rows=False)
    """Keep what lies between the layers instead of computing it again: faster, needs more GPU memory."""
    enable_liger_kernel: Flag = option(True, "free", rows=False, since="0.7.0")
    """On a GPU, with the package liger-kernel installed: it computes the norms, in one launch instead of
    eight. false: transformers' own."""
    use_cpu: Flag = option(False, "free", rows=False)
    """Stay on the CPU though there is a GPU."""
    ddp_timeout: Count = option(1800, "free", rows=False, each_host=True)
    """Seconds that processes wait for each other."""

    # prediction
    max_new_tokens: Count = option(1024, "free", since="0.6.0")
    """do_predict: tokens of an answer, at most."""
    do_sample: Flag = option(True, "free", since="0.6.0")
    """do_predict: false takes the likeliest token each time."""
    temperature: Number = option(0.95, "free", since="0.6.0")
    """do_predict: below 1 makes likely tokens likelier; 0 is the same as do_sample: false."""
    top_p: Fraction = option(0.7, "free", since="0.6.0")
    """do_predict: sample among the likeliest tokens that have this probability together."""
    top_k: Whole = option(50, "free", since="0.6.0")
    """do_predict: sample among so many of the likeliest tokens; 0: among all."""

    # KTransformers
    use_kt: Flag = option(
        True, rows=False, hint="Without CPU experts ktbridge adds nothing: train with PEFT or LLaMA-Factory."
    )
    """Must be true. `kt_experts` says where the experts are computed."""
    kt_cpu_activation: Annotated[str, one_of("retain", "recompute")] | None = option(None, "free", rows=False)
    """What the experts' forward keeps: retain (default) is faster, recompute needs less memory; same
    results."""
    kt_config: KtConfig = field(default_factory=KtConfig)
    """The block above."""

    notes: tuple[Problem, ...] = field(default=(), compare=False)
    """Warnings about keys that mean nothing here: nothing a run's results depend on."""

    @property
    def alpha(self) -> float:
        """Alpha of the non-expert LoRA, scaled by alpha / rank."""
        given = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return stabilised(given, self.lora_rank) if self.use_rslora else given

    @property
    def expert_rank(self) -> int:
        """Rank of the expert LoRA; 0 where none is trained."""
        if self.kt_config.experts_frozen:
            return 0
        return self.kt_config.kt_lora_rank or self.lora_rank

    @property
    def expert_alpha(self) -> float:
        """Alpha of the expert LoRA, alike; KTransformers' default is twice a rank of their own."""
        own = self.kt_config
        given = own.kt_lora_alpha
        if given is None:
            if own.kt_lora_rank is None:
                return self.alpha
            given = 2.0 * own.kt_lora_rank
        return stabilised(given, self.expert_rank) if self.use_rslora else given

    @property
    def expert_dropout(self) -> float:
        """Dropout of the expert LoRA's inputs. With a reference there is none: both must see the same."""
        own = self.kt_config.kt_lora_dropout
        return 0.0 if self.forwards_alone else self.lora_dropout if own is None else own

    @property
    def forwards_alone(self) -> int:
        """Forwards of a pass that no backward follows; 0 where answers aren't compared with the base's.

        dpo: the reference's. kto: the reference's, and both models' on the mismatched answers.
        """
        return {"dpo": 1, "kto": 3}.get(self.stage, 0)

    @property
    def activation(self) -> str:
        """Return what the experts' forward keeps: "retain" or "recompute"."""
        return self.kt_cpu_activation or self.kt_config.expert_activation

    @property
    def in_bfloat16(self) -> bool:
        """``bf16``, which ``decide_precision`` has decided. Raises ValueError where it is still auto."""
        if not isinstance(self.bf16, bool):
            raise ValueError("bf16 is auto: decide_precision comes first")
        return self.bf16

    @property
    def attn_implementation(self) -> str | None:
        """``from_pretrained``'s argument of this name; None leaves the choice to transformers."""
        return ATTENTION[self.flash_attn]

    @property
    def holds_out(self) -> bool:
        """Return whether there are held-out rows."""
        return bool(self.eval_dataset or self.val_size)

    @property
    def evaluates(self) -> bool:
        """Return whether there are held-out rows, and the run evaluates them."""
        return self.do_eval and self.holds_out

    @property
    def evaluates_first(self) -> bool:
        """Return whether held-out rows are evaluated before the first step."""
        wanted = self.eval_strategy != "no" if self.eval_on_start is None else self.eval_on_start
        return self.evaluates and wanted

    @property
    def metric(self) -> str:
        """One of ``METRICS``: what makes a step the best one."""
        return (self.metric_for_best_model or "loss").removeprefix("eval_")

    @property
    def greater(self) -> bool:
        """Return whether the best ``metric`` is the greatest."""
        return self.metric != "loss" if self.greater_is_better is None else self.greater_is_better

    @property
    def warmup(self) -> float:
        """transformers' ``warmup_steps``: a number of steps, or below 1 a share of them."""
        return self.warmup_steps or self.warmup_ratio

    @property
    def reporters(self) -> list[str]:
        """transformers' ``report_to``."""
        return [self.report_to] if isinstance(self.report_to, str) else list(self.report_to)


def stabilised(alpha: float, rank: int) -> float:
    """The alpha whose alpha / rank is rsLoRA's scale of ``alpha``, alpha / √rank (arXiv:2312.03732).

    Rounded to float32, so that GGUF holds it as exactly as JSON does.
    """
    return ctypes.c_float(alpha * math.sqrt(rank)).value
