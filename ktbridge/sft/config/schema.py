"""The keys that mean something, by LLaMA-Factory's names, with their defaults and what each does.

docs/train.md has them as a table, with those of the ``kt_config`` block."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ktbridge.adapter.dialects import READABLE
from ktbridge.errors import Problem
from ktbridge.sft.config.kt_schema import KtConfig
from ktbridge.sft.config.values import (
    flag,
    flag_or_auto,
    flag_or_path,
    fraction,
    number,
    one_of,
    option,
    positive,
    reporters,
    schedule_values,
    share,
    share_or_whole,
    shares,
    steps,
    strategy,
    text,
    texts,
    whole,
    whole_or_auto,
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


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Field names and meanings are LLaMA-Factory's."""

    # model
    model_name_or_path: str = option(text)
    """The base model: a directory, or org/name or org/name@revision on the Hub, which is downloaded unless
    the Hub cache has it."""
    dataset: tuple[str, ...] = option(texts)
    """JSON, JSONL, Parquet or CSV files, relative to the configuration file, names in dataset_info.json, or
    org/name on the Hub; comma-separated or a list. Not needed without do_train."""
    output_dir: str = option(text)
    """Where the adapter, the log and the loss plot appear when the run is finished, and predictions."""
    model_revision: str | None = option(text, None)
    """Branch, tag or commit of a model on the Hub; default: main."""
    adapter_name_or_path: str | None = option(text, None)
    """An adapter to go on training from, instead of a new LoRA, or with do_predict the one that answers: in
    any format that `ktbridge convert` reads."""
    adapter_format: str = option(one_of("auto", *READABLE), "auto")
    """Its format where that is ambiguous, as `ktbridge convert --from` has it; --from sets it, too."""
    flash_attn: str = option(one_of(*ATTENTION), "auto")
    """Attention of transformers: its own choice, eager (disabled), sdpa or flash-attention (fa2,
    fa3)."""

    # method
    stage: str = option(one_of("sft", "pt", "dpo", "kto"), "sft", "ktbridge train does these.")
    """sft: imitate the answers; pt: continue raw text; dpo: prefer the chosen answer to the rejected one;
    kto: learn from answers that are each judged good or bad."""
    finetuning_type: str = option(
        one_of("lora"), "lora", "The base's weights are mapped read-only: train LoRA."
    )
    """Only LoRA is trained."""
    do_train: bool = option(flag, True)
    """Train. Left out it is false where do_predict is true."""
    do_predict: bool = option(flag, False)
    """Answer the rows of eval_dataset (docs/predict.md), after training with the trained adapter."""
    predict_with_generate: bool = option(flag, True, "do_predict writes answers and their metrics.")
    """do_predict: false is an error, as there is no other way to predict."""
    lora_rank: int = option(whole(1), 8)
    """Rank of the non-expert LoRA, and of the experts' unless kt_lora_rank is given."""
    lora_alpha: float | None = option(number, None)
    """Default: twice the rank."""
    lora_dropout: float = option(share(), 0.0)
    """sft: dropout of LoRA's inputs in training; of the experts' too unless kt_lora_dropout is given."""
    use_rslora: bool = option(flag, False)
    """rsLoRA: both LoRAs are scaled by alpha / √rank instead of alpha / rank. The adapter has plain LoRA's
    lora_alpha for the same scale, alpha · √rank, as every engine reads it."""
    lora_target: tuple[str, ...] = option(texts, ("all",))
    """Module names for the non-expert LoRA, or "all": every linear module outside the experts; "experts":
    none, so that the routed experts are trained alone."""
    moe_aux_loss_coef: float | None = option(number, None)
    """Weight of the model's own loss on unbalanced routing, added to the loss; default and 0: none. It is
    made of the tokens of one pass together, so how a step is cut into passes changes it."""
    pref_beta: float = option(positive, 0.1)
    """dpo, kto: how far the policy may leave the base."""
    pref_loss: str = option(one_of("sigmoid", "hinge", "ipo"), "sigmoid")
    """dpo: the loss on a pair."""
    dpo_label_smoothing: float = option(share(0.5), 0.0)
    """dpo, sigmoid: the share of pairs assumed to be the wrong way round."""
    pref_ftx: float = option(number, 0.0)
    """dpo, kto: weight of the ordinary loss on the chosen or good answers, added to the other."""
    kto_chosen_weight: float = option(number, 1.0)
    """kto: weight of the loss on good answers."""
    kto_rejected_weight: float = option(number, 1.0)
    """kto: weight of the loss on bad answers."""

    # data
    dataset_dir: str | None = option(text, None)
    """The directory of dataset_info.json; default: "data" beside the configuration or in the current
    directory."""
    eval_dataset: tuple[str, ...] = option(texts, ())
    """Held-out rows: files or names as in dataset. They are never trained on."""
    val_size: float = option(share_or_whole, 0.0)
    """Instead of eval_dataset: how many rows of dataset are held out, or below 1 the share of them. Which
    ones, seed decides."""
    template: str | None = option(text, None)
    """LLaMA-Factory's name of a template. Conversations are written with the tokenizer's own chat template; a
    note says where that one differs."""
    cutoff_len: int = option(whole(1), 2048)
    """Tokens of a conversation, at most; the rest is cut off and counted. pt: of a piece of a text."""
    media_dir: str | None = option(text, None)
    """Where images are that rows name by relative paths; default: beside the file of the rows and in
    dataset_dir."""
    image_max_pixels: int | None = option(whole(1), None)
    """An image of more pixels is made smaller, as in LLaMA-Factory; default: the model's own processor
    decides."""
    image_min_pixels: int | None = option(whole(1), None)
    """An image of fewer pixels is made larger; default: the model's own processor decides."""
    max_samples: int | None = option(whole(1), None)
    """Rows of each dataset, at most."""
    mix_strategy: str = option(
        one_of("concat", "interleave_under", "interleave_over", "interleave_once"), "concat"
    )
    """How several datasets make an epoch. concat, interleave_once: each row once; interleave_under: in
    proportion, until one of them has no row left; interleave_over: until all of them were gone through, rows
    of the shorter ones coming again."""
    interleave_probs: tuple[float, ...] = option(shares, ())
    """interleave_*: each dataset's share, in their order, as 0.7,0.3; default: they take turns."""
    packing: bool = option(flag, False)
    """sft, pt: several conversations or texts fill one row of cutoff_len tokens; pt: the default is true."""
    neat_packing: bool = option(flag, False)
    """Packing where conversations in a row don't see each other; implies packing."""
    strict_data: bool = option(flag, False)
    """Refuse the run if any row can't be used, instead of listing it in a file."""
    allow_refused_rows: bool = option(flag, False)
    """Train though more than half of the rows can't be used."""
    split_turns: bool = option(flag, True)
    """sft: an answer that the chat template rewrites once more follows (Qwen3 drops its thoughts) is trained
    in a sequence of its own, as it is served. false: one sequence per conversation."""
    enable_thinking: bool | str | None = option(flag_or_auto, None)
    """What a server is told of thinking when it is asked for these answers. Left out: nothing; false:
    thoughts are taken out of the rows; auto: true for an answer with thoughts, false for one without."""
    train_on_prompt: bool = option(flag, False)
    """sft: the loss counts every token, prompts and tool results, too."""
    mask_history: bool = option(flag, False)
    """sft: only the last answer of a conversation is learned."""
    streaming: bool = option(flag, False)
    """Read, check and tokenize rows while the run goes, in bounded memory; needs max_steps."""
    buffer_size: int = option(whole(1), 16384)
    """streaming: rows from which the next one is drawn at random."""
    tokenized_path: str | None = option(text, None)
    """A directory where the rows are kept as tokens. A run on the same rows, tokenizer and settings begins
    with them; where anything differs, they are made and kept anew."""
    overwrite_cache: bool = option(flag, False)
    """Make the rows in tokenized_path anew in any case."""
    identity_name: str | None = option(text, None)
    """What {{name}} in rows stands for, as in LLaMA-Factory's identity.json; without it such rows are
    refused."""
    identity_author: str | None = option(text, None)
    """The same for {{author}}."""
    dataloader_num_workers: int = option(whole(0, 4096), 0)
    """Processes that make batches; 0: this one."""

    # output
    logging_steps: int = option(whole(1), 10)
    """Steps between two records of the log."""
    logging_dir: str | None = option(text, None)
    """Where tensorboard writes."""
    report_to: str | tuple[str, ...] = option(
        reporters("none", "tensorboard", "wandb", "mlflow", "swanlab"), "none"
    )
    """tensorboard, wandb, mlflow, swanlab, or some of them (a list); they must be installed."""
    run_name: str | None = option(text, None)
    """The run's name for what report_to names."""
    plot_loss: bool = option(flag, True)
    """Draw training_loss.png."""
    save_steps: int = option(whole(0), 500)
    """Steps between checkpoints, in OUTPUT_DIR.checkpoints; the last step has one too. Each is an adapter
    that converts and serves, and a run can go on from it. 0: none."""
    save_total_limit: int = option(whole(1), 1)
    """How many checkpoints are kept, while the run goes and after it."""
    save_only_model: bool = option(flag, False)
    """Checkpoints without the optimizer's state: smaller, but no run can go on from one."""
    overwrite_output_dir: bool = option(flag, False)
    """Replace a finished output_dir when the run ends. An unfinished run is not touched by it."""
    resume_from_checkpoint: bool | str | None = option(flag_or_path, None)
    """Left out: an unfinished run of the same configuration goes on. true: go on from the last checkpoint,
    also with another learning rate or length; a path: from that one. false: start anew; earlier
    checkpoints are kept under another name."""

    # held-out rows
    do_eval: bool = option(flag, True)
    """false: held-out rows are kept from training and not evaluated."""
    eval_strategy: str | None = option(strategy, None)
    """When held-out rows are evaluated: steps, epoch or no. The last step always is. Left out: every
    eval_steps, and without these ten times in the run."""
    eval_steps: float | None = option(share_or_whole, None)
    """Steps between evaluations, or below 1 a share of the run's; eval_strategy: steps without it takes
    logging_steps."""
    eval_on_start: bool | None = option(flag, None)
    """Evaluate before the first step, too; default: true, but false with eval_strategy: no."""
    metric_for_best_model: str | None = option(text, None)
    """What makes a step the best one. sft: loss (default), mean_token_accuracy, entropy; dpo: loss,
    rewards/accuracies, rewards/margins and others of the log's, with or without eval_ in front."""
    greater_is_better: bool | None = option(flag, None)
    """Whether the best is the greatest; default: false for the loss, true for any other."""
    load_best_model_at_end: bool = option(flag, False)
    """output_dir gets the adapter of the best evaluated step instead of the last one's. Each best so far is
    saved, whatever save_steps is, and kept beside what save_total_limit keeps."""
    early_stopping_steps: int = option(whole(0), 0)
    """End the run after so many evaluations in a row without a new best; 0: never."""

    # training
    per_device_train_batch_size: int = option(whole(1), 1)
    """Conversations (dpo: pairs) in one forward and backward; kto: at least 2."""
    per_device_eval_batch_size: int = option(whole(1), 8)
    """Conversations (dpo: pairs) that are evaluated or predicted at once."""
    gradient_accumulation_steps: int = option(whole(1), 1)
    """Batches in one optimizer step."""
    tokens_per_pass: int | str = option(whole_or_auto, "auto")
    """The rows of an optimizer step go forward and backward in as few passes of at most so many tokens
    (padding included) as there can be, instead of batch by batch: same loss and gradients within rounding.
    auto: batch by batch on the CPU; on a GPU, what its memory takes where that is known."""
    learning_rate: float = option(number, 1e-4)
    """Its highest value."""
    loraplus_lr_ratio: float | None = option(positive, None)
    """LoRA+: the learning rate of each B is so many times that of its A, which learning_rate is; default: the
    same."""
    num_train_epochs: float = option(positive, 3.0)
    """How often the data are gone through."""
    max_steps: int = option(steps, -1)
    """Optimizer steps; -1: as many as num_train_epochs need."""
    lr_scheduler_type: str = option(one_of(*SCHEDULERS), "cosine")
    """How the learning rate falls."""
    lr_scheduler_kwargs: Mapping[str, float | str] | None = option(schedule_values, None)
    """What the schedule takes besides, as in transformers: cosine_with_min_lr min_lr or min_lr_rate,
    polynomial lr_end and power, warmup_stable_decay num_decay_steps."""
    warmup_ratio: float = option(share(), 0.0)
    """The share of the steps in which the learning rate rises."""
    warmup_steps: float = option(share_or_whole, 0)
    """The same as a number of steps; below 1 it is a share, too."""
    optim: str = option(one_of(*OPTIMIZERS), "adamw_torch_fused")
    """The optimizer."""
    adam_beta1: float = option(share(), 0.9)
    """Decay of AdamW's first moment."""
    adam_beta2: float = option(share(), 0.999)
    """Decay of AdamW's second moment."""
    adam_epsilon: float = option(positive, 1e-8)
    """AdamW's epsilon."""
    weight_decay: float = option(number, 0.0)
    """Decay of the trained weights."""
    max_grad_norm: float = option(number, 1.0)
    """Gradients are scaled down to this norm; 0: never."""
    neftune_noise_alpha: float | None = option(positive, None)
    """NEFTune: noise on the embeddings while training."""
    seed: int = option(whole(0), 42)
    """Decides LoRA's start, dropout and the order of the data."""
    bf16: bool | str = option(flag_or_auto, "auto")
    """Non-expert weights in bfloat16 (true) or float32 (false); experts keep the checkpoint's storage. auto:
    bfloat16 on GPUs and on CPUs with BF16 instructions (AVX512_BF16, AMX), else float32, which is faster."""
    pure_bf16: bool = option(flag, False)
    """The trained LoRA weights are bfloat16 as well, instead of float32."""
    disable_gradient_checkpointing: bool = option(flag, False)
    """Keep what lies between the layers instead of computing it again: faster, needs more GPU memory."""
    enable_liger_kernel: bool = option(flag, True)
    """On a GPU, with the package liger-kernel installed: it computes the norms, in one launch instead of
    eight. false: transformers' own."""
    use_cpu: bool = option(flag, False)
    """Stay on the CPU though there is a GPU."""
    ddp_timeout: int = option(whole(1), 1800)
    """Seconds that processes wait for each other."""

    # prediction
    max_new_tokens: int = option(whole(1), 1024)
    """do_predict: tokens of an answer, at most."""
    do_sample: bool = option(flag, True)
    """do_predict: false takes the likeliest token each time."""
    temperature: float = option(number, 0.95)
    """do_predict: below 1 makes likely tokens likelier; 0 is the same as do_sample: false."""
    top_p: float = option(fraction, 0.7)
    """do_predict: sample among the likeliest tokens that have this probability together."""
    top_k: int = option(whole(0), 50)
    """do_predict: sample among so many of the likeliest tokens; 0: among all."""

    # KTransformers
    use_kt: bool = option(
        flag, True, "Without CPU experts ktbridge adds nothing: train with PEFT or LLaMA-Factory."
    )
    """Must be true. `kt_experts` says where the experts are computed."""
    kt_cpu_activation: str | None = option(one_of("retain", "recompute"), None)
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
    def evaluates(self) -> bool:
        """Return whether there are held-out rows, and the run evaluates them."""
        return self.do_eval and bool(self.eval_dataset or self.val_size)

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
