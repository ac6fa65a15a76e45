"""A Trainer of a user's own with a GPU: everything but the experts moves there, in both orders with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tinymoe import tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from ktbridge.adapter import validate_adapter
from ktbridge.sft import RawAdapterCallback, expert_layers, load_raw_adapter, wrap_experts

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' advice
IDS = torch.arange(80).reshape(4, 20) % 64
LORA = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("wrap_first", [True, False])
def test_a_trainer_moves_all_but_the_experts_and_resumes(wrap_first, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)

    def fit(name: str, resume: Path | None) -> Any:
        torch.manual_seed(0)
        model = load()
        if wrap_first:
            model = get_peft_model(wrap_experts(model), LORA)
        else:
            model = wrap_experts(get_peft_model(model, LORA))
        rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in IDS.tolist()])
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name), max_steps=4, save_steps=2, learning_rate=1e-2,
            per_device_train_batch_size=2, report_to=[], bf16=True,
        )  # fmt: skip
        arguments._n_gpu = 1  # Trainer's DataParallel can't have parameters on the CPU
        callbacks = [RawAdapterCallback()]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return model

    model = fit("run", None)
    assert next(model.parameters()).is_cuda
    for layer in expert_layers(model).values():
        for parameter in layer.parameters():
            assert (parameter.device.type, parameter.dtype) == ("cpu", torch.float32)
            assert parameter.any()
    resumed = fit("again", tmp_path / "run" / "checkpoint-2")
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert validate_adapter([tmp_path / "run" / "raw_adapter"]).ok
    loaded = load_raw_adapter(load(), tmp_path / "run" / "raw_adapter").to("cuda")
    tokens = IDS.to("cuda")
    with torch.no_grad():
        model.eval()
        tuned, again = model(tokens).logits.float(), loaded(tokens).logits.float()
        with loaded.disable_adapter():
            base = loaded(tokens).logits.float()
    assert (again - tuned).norm() < 0.1 * (base - tuned).norm()
