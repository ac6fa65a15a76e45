"""The proof's peer: Hugging Face's Trainer and PEFT alone on the same rows, settings and seed.

    hf_peer.py CONFIG OUTPUT [KEY=VALUE …]     # as for `ktbridge train`; OUTPUT: a directory to write

Experts are transformers' own, with PEFT's LoRA on their fused parameters (``target_parameters``). The rows,
tokens and labels are the ones that ktbridge reads; nothing else of it computes here. OUTPUT gets the PEFT
adapter, and losses.json with each step's loss, the seconds and the number of trained parameters.

The peer computes as is fastest for it on this machine. Where ktbridge chooses bfloat16, each of PRECISIONS
trains a few steps on the same first rows, and the fastest one is taken; their first losses, which are the
base's, have to agree. Elsewhere, on CPUs without BF16 instructions, only float32 comes into question.

What else could be set was measured by turns in one process, steps of this proof on 2 AVX2 cores in float32.
Experts are transformers' own choice, ``grouped_mm``. ``eager`` takes 1.08 times as long, as each expert's
gradient is put into one of all experts' size; ``batched_mm``, which copies an expert for each token's choice
of it, 14 times. Activation checkpointing takes 1.2 times as long and one thread 1.6 times; rows without
padding (``DataCollatorWithFlattening``) win nothing. Idle threads of OpenMP sleep soon, as in ktbridge:
beside other processes steps took 0.5 to 0.9 times as long as with threads that poll, or nearly as long at
their fastest (0.95 to 1.2); a machine without others wasn't there to compare (GOMP_SPINCOUNT, if set, stays).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ktbridge.sft  # noqa: F401  # before torch: it lets OpenMP's idle threads sleep, the peer's too

# isort: split
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ktbridge.machine import read_machine
from ktbridge.sft.config import load_config
from ktbridge.sft.prepare import Prepared, prepare

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Precision(NamedTuple):
    """Dtype of stored weights; with ``autocast`` (Trainer's ``bf16``) products are in bfloat16."""

    dtype: torch.dtype
    autocast: bool = False


FLOAT32 = "float32"
PRECISIONS = {
    "bfloat16": Precision(torch.bfloat16),
    FLOAT32: Precision(torch.float32),
    "float32 under bfloat16 autocast": Precision(torch.float32, True),
}
TRIED_STEPS = 3
"""Steps that each precision is tried for; the first, in which memory is touched, doesn't count."""
SAME_LOSS = 0.01


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.monotonic() - self._began)


def make_trainer(ready: Prepared, work: str, precision: Precision, max_steps: int) -> Trainer:
    """The peer with a new adapter; the same one for a seed, whatever was trained before."""
    config = ready.config
    set_seed(config.seed)
    model = AutoModelForCausalLM.from_pretrained(ready.base, dtype=precision.dtype)
    model.config.use_cache = False
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=ATTENTION,
        target_parameters=EXPERTS,
        task_type="CAUSAL_LM",
    )
    arguments = TrainingArguments(
        output_dir=work,
        per_device_train_batch_size=config.per_device_train_batch_size,
        num_train_epochs=config.num_train_epochs,
        max_steps=max_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        bf16=precision.autocast,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    collator = DataCollatorForSeq2Seq(ready.tokenizer, label_pad_token_id=-100)
    model = get_peft_model(model, lora)
    return Trainer(model, arguments, collator, train_dataset=ready.fitted.dataset)


def losses_of(trainer: Trainer) -> list[tuple[int, float]]:
    """Each step's number and loss."""
    return [(each["step"], each["loss"]) for each in trainer.state.log_history if "loss" in each]


def try_precisions(ready: Prepared, work: str) -> dict[str, dict[str, float]]:
    """Return for each of PRECISIONS the seconds of its fastest step, and its first loss.

    Raises SystemExit where the first losses are of different models.
    """
    tried = {}
    for name, precision in PRECISIONS.items():
        trainer, clock = make_trainer(ready, work, precision, TRIED_STEPS), Clock()
        trainer.add_callback(clock)
        trainer.train()
        tried[name] = {
            "seconds_a_step": min(clock.seconds[1:]),
            "first_loss": losses_of(trainer)[0][1],
        }
        del trainer
        gc.collect()  # a model and its trainer hold each other
    first = [each["first_loss"] for each in tried.values()]
    if max(first) - min(first) > SAME_LOSS * min(first):
        sys.exit(f"the first losses differ, so these are not the same model: {tried}")
    return tried


def main(path: str, output: str, *changes: str) -> None:
    own = [
        f"output_dir={output}.ktbridge",
        "resume_from_checkpoint=false",
    ]  # nothing is written there
    ready = prepare(load_config(Path(path), [*changes, *own]))
    torch.set_num_threads(read_machine().usable_cores)
    work = str(Path(output).with_suffix(".work"))
    tried = try_precisions(ready, work) if ready.config.in_bfloat16 else {}
    name = min(tried, key=lambda name: tried[name]["seconds_a_step"], default=FLOAT32)
    trainer = make_trainer(ready, work, PRECISIONS[name], ready.config.max_steps)
    model = trainer.model
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    model.save_pretrained(output)
    told = {
        "losses": losses_of(trainer),
        "seconds": seconds,
        "trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "steps": trainer.state.global_step,
        "precision": name,
        "tried": tried,
        "experts": model.config._experts_implementation,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }
    (Path(output) / "losses.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
