"""The proof's peer: Hugging Face's Trainer and PEFT alone on the same rows, settings and seed.

    hf_peer.py CONFIG OUTPUT [KEY=VALUE …]     # as for `ktbridge train`; OUTPUT: a directory to write

Experts are transformers' own, with PEFT's LoRA on their fused parameters (``target_parameters``). The rows,
tokens and labels are the ones that ktbridge reads; nothing else of it computes here. OUTPUT gets the PEFT
adapter, and losses.json with each step's loss, the seconds and the number of trained parameters.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ktbridge.machine import read_machine
from ktbridge.sft.config import load_config
from ktbridge.sft.prepare import prepare

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def main(path: str, output: str, *changes: str) -> None:
    own = [
        f"output_dir={output}.ktbridge",
        "resume_from_checkpoint=false",
    ]  # nothing is written there
    ready = prepare(load_config(Path(path), [*changes, *own]))
    config = ready.config
    torch.set_num_threads(read_machine().usable_cores)
    set_seed(config.seed)
    dtype = torch.bfloat16 if config.in_bfloat16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(ready.base, dtype=dtype)
    model.config.use_cache = False
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=ATTENTION,
        target_parameters=EXPERTS,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    arguments = TrainingArguments(
        output_dir=str(Path(output).with_suffix(".work")),
        per_device_train_batch_size=config.per_device_train_batch_size,
        num_train_epochs=config.num_train_epochs,
        max_steps=config.max_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    collator = DataCollatorForSeq2Seq(ready.tokenizer, label_pad_token_id=-100)
    trainer = Trainer(model, arguments, collator, train_dataset=ready.fitted.dataset)
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    model.save_pretrained(output)
    losses = [[each["step"], each["loss"]] for each in trainer.state.log_history if "loss" in each]
    told = {
        "losses": losses,
        "seconds": seconds,
        "trained": trained,
        "steps": trainer.state.global_step,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }
    (Path(output) / "losses.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
