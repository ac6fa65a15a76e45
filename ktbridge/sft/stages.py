"""The stages: trl's SFTTrainer, DPOTrainer and KTOTrainer as ``RunTrainer`` changes them; their arguments.

A stage defines what a row of its batches is, and the weight of a micro-batch in a step's loss.
``trainer_arguments`` translates a configuration into what transformers' and trl's trainers take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import TrainingArguments
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from ktbridge.sft.compat import on_one_gpu
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.images import Vision
from ktbridge.sft.data.tokenize import IMAGE_NUMBERS
from ktbridge.sft.launch import world
from ktbridge.sft.microbatch import Batch, Collated, CollatedRow, Example
from ktbridge.sft.progress import MADE_HERE
from ktbridge.sft.trainer import RunTrainer

CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)
"""Name of the trainers' switch: transformers 5.20 renamed it, and warns of the old one."""


class SftTrainer(RunTrainer, SFTTrainer):
    """Rows have ``input_ids`` and ``labels``, lists of token ids; labels are −100 where nothing is learned.

    The loss is summed over an optimizer step's trained tokens and divided by their number, so rows of unequal
    lengths weigh the same however they are spread over batches and accumulation.
    """

    loss_by_token = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Trainer counts a step's tokens only for models whose own loss would take the number; trl's loss,
        # which is used here, takes it for every model.
        self.model_accepts_loss_kwargs = True
        self._vision: Vision | None = None

    def set_image_processor(self, vision: Vision) -> None:
        """Read images by their numbers in the column ``IMAGE_NUMBERS``: a micro-batch reads its own."""
        self._vision = vision
        self.data_collator = partial(_with_numbers, self.data_collator)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        if self._vision is None:
            return super()._prepare_inputs(inputs)
        given = {key: value for key, value in inputs.items() if key != IMAGE_NUMBERS}
        numbers = [number for row in inputs[IMAGE_NUMBERS] for number in row]
        shown = [self._vision.images[number] for number in numbers]
        return super()._prepare_inputs(given | self._vision.inputs(inputs["input_ids"], shown))

    @staticmethod
    def rows(examples: Sequence[Example]) -> list[CollatedRow]:
        """The examples; of packed ones, the conversations in them."""
        return [row for each in examples for row in _conversations(each)]

    def is_packed(self) -> bool:
        return bool(self.padding_free)

    def amount(self, rows: Collated) -> int:
        return sum(row.trained for row in rows)

    @contextmanager
    def scaled_for_microbatch(self, rows: Collated, step: Collated) -> Iterator[None]:
        """Scale the routers' loss, a mean over a micro-batch's tokens; trl's own is the step's term already.

        trl divides the routers' loss by the number of a step's batches: here the inverse of the weight.
        """
        trainer: Any = self
        before, weight = self.current_gradient_accumulation_steps, self.amount(rows) / max(self.trained, 1)
        trainer.current_gradient_accumulation_steps = 1 / weight if weight else float("inf")
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps = before


def _with_numbers(collate: Callable[..., Batch], examples: list[Batch]) -> Batch:
    """A batch beside the numbers of its rows' images."""
    return {**collate(examples), IMAGE_NUMBERS: [each.get(IMAGE_NUMBERS, []) for each in examples]}


def _conversations(example: Example) -> Iterator[CollatedRow]:
    ids = example["input_ids"]
    labels = example.get("labels", ids)
    beside = {IMAGE_NUMBERS: example[IMAGE_NUMBERS]} if IMAGE_NUMBERS in example else {}
    bounds = accumulate(example.get("seq_lengths", [len(ids)]), initial=0)
    for first, end in pairwise(bounds):
        own = labels[first:end]
        trained = len(own) - 1 - own[1:].count(-100)  # the first token is never predicted
        features = {"input_ids": ids[first:end], "labels": own, **beside}
        yield CollatedRow(features, end - first, trained, end - first)


@contextmanager
def as_base(model: PeftModel) -> Iterator[None]:
    """Context: a wrapped PeftModel acts as the base alone: neither LoRA, no dropout, no noise."""
    training = model.training
    model.eval()
    try:
        with model.disable_adapter():  # the experts' LoRA, too
            yield
    finally:
        model.train(training)


class DpoTrainer(RunTrainer, DPOTrainer):
    """trl's DPOTrainer with ``as_base`` for its reference.

    Rows have ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, lists of token ids.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _reference_from_the_batch(self)

    def _prepare_dataset(self, dataset: Any, *_: object) -> Any:
        """The rows as they are: trl would tokenize texts."""
        return dataset

    def compute_loss(
        self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, object]:
        chosen, rejected = self.reference_logps(model, inputs)
        filled = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        loss = super().compute_loss(model, filled, *args, **kwargs)
        sizes = [len(batch["input_ids"]) for batch in self.runner.batches if self.runner.tokens is None]
        if not model.training or len({*sizes}) < 2 or not isinstance(loss, torch.Tensor):
            return loss
        # Each pair of a step counts alike, as in micro-batches: an epoch's last batch may have fewer.
        return loss * (len(inputs["input_ids"]) * len(sizes) / sum(sizes))

    @torch.no_grad()
    def reference_logps(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's log-probabilities of the B chosen and the B rejected answers, each [B]."""
        with as_base(self.accelerator.unwrap_model(model)):
            chosen, rejected = answers_logps(model, inputs).chunk(2)
        return chosen, rejected

    @staticmethod
    def rows(examples: Sequence[Example]) -> list[CollatedRow]:
        return [_pair(each) for each in examples]

    @contextmanager
    def scaled_for_microbatch(self, rows: Collated, step: Collated) -> Iterator[None]:
        """Scale trl's loss, a mean over pairs, and for ``pref_ftx`` one over the chosen answers' tokens."""
        weight = self.loss_weight(rows, step)
        tokens = sum(row.trained for row in rows) / self.trained
        trainer: Any = self
        before = self.current_gradient_accumulation_steps, self.loss_weights
        trainer.current_gradient_accumulation_steps = 1 / weight  # what the loss is divided by
        self.loss_weights = [
            each * tokens / weight if kind == "sft" else each
            for kind, each in zip(self.loss_types, self.loss_weights, strict=True)
        ]
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps, self.loss_weights = before


class MismatchedAnswers(DataCollatorForUnpairedPreference):
    """trl's collator, which also puts each row's prompt before the answer of the row before it in the batch.

    How far the model has left the base is measured on these (arXiv:2402.01306, section 4).
    """

    def torch_call(self, examples: list[Batch]) -> Batch:
        before = [examples[-1], *examples[:-1]]
        return super().torch_call(
            [
                {**each, "KL_completion_ids": other["completion_ids"]}
                for each, other in zip(examples, before, strict=True)
            ]
        )


class KtoTrainer(RunTrainer, KTOTrainer):
    """trl's KTOTrainer with ``as_base`` for its reference, and with batches drawn anew in each epoch.

    Rows have ``prompt_ids``, ``completion_ids`` and ``label``, true for a good answer. The loss of a row
    depends on its batch, by the estimate of KL (policy || base) there, so batches stay as configured.
    """

    def __init__(self, **kwargs: Any) -> None:
        tokenizer = kwargs["processing_class"]
        pad = tokenizer.eos_token_id if tokenizer.pad_token is None else tokenizer.pad_token_id
        super().__init__(**kwargs, data_collator=MismatchedAnswers(pad_token_id=pad))
        _reference_from_the_batch(self)
        # trl pairs rows once and must keep their order; our collator pairs those of each batch.
        self.args.train_sampling_strategy = "random"

    def _prepare_dataset(self, dataset: Any, *_: object) -> Any:
        """The rows as they are: trl would tokenize texts, and pair them."""
        return dataset

    def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        bare = self.accelerator.unwrap_model(model)
        with torch.no_grad(), as_base(bare):
            filled = {
                **inputs,
                "ref_logps": answers_logps(model, inputs),
                "ref_KL_logps": answers_logps(model, inputs, "KL_"),
            }
        last: list[torch.Tensor] = []
        handle = bare.register_forward_hook(lambda _, __, out: last.append(out.log_probs))
        try:
            loss: torch.Tensor = super().compute_loss(model, filled, *args, **kwargs)
        finally:
            handle.remove()
        good = inputs["label"].bool()
        if self.ftx and good.any():  # trl has no such term here, as it has for pairs
            counts = inputs["completion_mask"][good, 1:].sum()
            loss = loss - self.ftx * last[-1][good].sum() / counts
        return loss

    @staticmethod
    def rows(examples: Sequence[Example]) -> list[CollatedRow]:
        """The examples by their lengths alone: they are never put together anew."""
        found = []
        for each in examples:
            answer = len(each["completion_ids"])
            tokens = len(each["prompt_ids"]) + answer
            found.append(CollatedRow({}, tokens, answer, tokens, bool(each["label"])))
        return found

    def metric_weight(self, name: str, rows: Collated, step: Collated) -> float:
        """Return the weight in a mean over the good or the bad answers, for metrics of these alone."""
        kind = name.rpartition("/")[2]
        if kind not in ("chosen", "rejected"):
            return self.loss_weight(rows, step)
        of = sum(row.good == (kind == "chosen") for row in step)
        return sum(row.good == (kind == "chosen") for row in rows) / of if of else 0.0


def _reference_from_the_batch(trainer: Any) -> None:
    """Have trl take the reference's log-probabilities from the batch, where ``compute_loss`` puts them."""
    if "ref" in trainer.model.peft_config:
        # trl's frozen copy of PEFT's LoRA, which lacks the experts'
        trainer.model.delete_adapter("ref")
    trainer.precompute_ref_logps = True


def answers_logps(model: nn.Module, inputs: Batch, prefix: str = "") -> torch.Tensor:
    """Log-probabilities [B] of the answers of B sequences: tensors ``PREFIXinput_ids`` and its masks."""
    ids, answer = inputs[f"{prefix}input_ids"], inputs[f"{prefix}completion_mask"]
    out = model(
        input_ids=ids,
        attention_mask=inputs[f"{prefix}attention_mask"],
        labels=ids.masked_fill(answer == 0, -100),
        use_cache=False,
        fused_lm_head=True,  # trl's: log_probs [B, T - 1], 0 outside the answers
    )
    logps: torch.Tensor = out.log_probs.sum(dim=1)
    return logps


def _pair(example: Example) -> CollatedRow:
    features = {name: example[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")}
    prompt, chosen, rejected = (len(each) for each in features.values())
    tokens = 2 * (prompt + max(chosen, rejected))
    # The first token of all is never predicted, though an answer without a prompt may begin with it.
    return CollatedRow(features, tokens, chosen - (not prompt), 2 * prompt + chosen + rejected)


STAGES: dict[str, type[RunTrainer]] = {
    "sft": SftTrainer, "pt": SftTrainer, "dpo": DpoTrainer, "kto": KtoTrainer,
}  # fmt: skip
LOSSES = {
    "sft": "loss per assistant token (nats)",
    "pt": "loss per token (nats)",
    "dpo": "loss per pair (nats)",
    "kto": "loss per answer (0 to its weight)",
}


# Arguments

_SAME_NAME = (
    "run_name", "seed", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "max_steps", "learning_rate", "lr_scheduler_type", "optim", "adam_beta1", "adam_beta2", "adam_epsilon",
    "weight_decay", "max_grad_norm", "neftune_noise_alpha", "dataloader_num_workers", "logging_steps",
    "save_only_model", "ddp_timeout",
)  # fmt: skip
"""Keys of the configuration that transformers has by the same names."""
_AMONG_SEVERAL = {
    "average_tokens_across_devices": True,  # a token weighs the same on every rank
    "log_level_replica": "error",
    "ddp_broadcast_buffers": False,  # buffers here never change
    "ddp_find_unused_parameters": False,  # LoRA is on decoder layers only, which all run
}


def trainer_arguments(
    config: TrainConfig,
    device: torch.device,
    scratch: str,
    packed: bool = False,
    eval_steps: int = 0,
    images: bool = False,
) -> SFTConfig | DPOConfig | KTOConfig:
    """Return the arguments of the stage's trainer; ``scratch`` is the output_dir that it requires.

    ``packed``: a row of the dataset holds several conversations, which must not attend to each other.
    ``eval_steps``: between evaluations of held-out rows; 0: none. ``images``: rows have a column of them.
    """
    arguments: SFTConfig | DPOConfig | KTOConfig
    common = _common(config, device, scratch, eval_steps)
    if config.stage == "dpo":
        losses = pair_losses(config)
        arguments = DPOConfig(
            **common,
            beta=config.pref_beta,
            loss_type=list(losses),
            loss_weights=list(losses.values()),
            label_smoothing=config.dpo_label_smoothing,
        )
    elif config.stage == "kto":
        arguments = KTOConfig(
            **common,
            beta=config.pref_beta,
            desirable_weight=config.kto_chosen_weight,
            undesirable_weight=config.kto_rejected_weight,
        )
    else:
        arguments = SFTConfig(**common, padding_free=packed, remove_unused_columns=not images)
        if packed:
            arguments.include_num_input_tokens_seen = "all"  # there is no padding to exclude
    if device.type == "cuda":
        on_one_gpu(arguments)
    return arguments


def pair_losses(config: TrainConfig) -> dict[str, float]:
    """Return trl's losses on a pair, each with its weight, as the options of ``dpo`` ask for.

    With x = β · (the chosen answer's log-ratio − the rejected one's), A = −log σ(x), B = −log σ(−x) and
    smoothing ε, LLaMA-Factory's loss is (1 − ε) A + ε B. trl's "sigmoid" is A, its "robust" is
    ((1 − ε) A − ε B) / (1 − 2ε); 2 (1 − ε) of the one less (1 − 2ε) of the other is the same.
    """
    smoothing = config.dpo_label_smoothing
    losses = {config.pref_loss: 1.0}
    if smoothing:
        losses = {"sigmoid": 2 * (1 - smoothing), "robust": -(1 - 2 * smoothing)}
    if config.pref_ftx:
        losses["sft"] = config.pref_ftx
    return losses


def _common(config: TrainConfig, device: torch.device, scratch: str, eval_steps: int) -> dict[str, Any]:
    return {
        **{name: getattr(config, name) for name in _SAME_NAME},
        **(_AMONG_SEVERAL if world().size > 1 else {}),
        "output_dir": scratch,
        "max_length": None,  # rows come cut to cutoff_len
        "lr_scheduler_kwargs": dict(config.lr_scheduler_kwargs or {}),
        "warmup_steps": config.warmup,
        # The load-balancing loss is for a router that learns from the start; as in LLaMA-Factory it is off
        # where it isn't asked for, so that batches of any size add up to the same gradients.
        "router_aux_loss_coef": config.moe_aux_loss_coef or 0.0,
        # data
        "dataloader_pin_memory": device.type == "cuda",
        # log
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # the filter would log a loss of 0 instead of nan
        "include_num_input_tokens_seen": "non_padding",
        "report_to": [name for name in config.reporters if name not in MADE_HERE] or "none",
        "disable_tqdm": True,
        # held-out rows: the best step is saved and loaded by Checkpoints, see HeldOutCallback
        "eval_strategy": "steps" if eval_steps else "no",
        "eval_steps": eval_steps or None,
        "metric_for_best_model": config.metric,
        "greater_is_better": config.greater,
        # checkpoints: older ones are deleted when a newer one is complete, see Checkpoints
        "save_strategy": "steps" if config.save_steps else "no",
        "save_steps": config.save_steps or 500,
        "save_total_limit": None,
        # device and precision
        "use_cpu": device.type == "cpu",
        "bf16": False,  # the weights are loaded in the dtype asked for; autocast would add a third
        CHECKPOINTING: False,  # Trainer's would run the experts twice: see checkpointing
    }
