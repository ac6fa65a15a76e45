"""What dtype a run has outside its experts: one decision for `plan` and `train`, said once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planshapes import plan_run
from trainrun import conversation, train, write_run

from ktbridge import kernel_choice
from ktbridge.errors import ProblemsError
from ktbridge.machine import read_machine
from ktbridge.sft.config import load_config
from ktbridge.sft.model import load_trainable
from ktbridge.sft.plan.inputs import TargetMachine
from ktbridge.sft.prepare import prepare
from ktbridge.sft.resume import FINGERPRINT_FILE, decide_precision

GB = 10**9
PLAIN, BF16 = ("avx2", "fma"), ("avx2", "fma", "avx512f", "avx512_bf16")


@pytest.fixture
def run_yaml(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KTBRIDGE_ISA", raising=False)
    rows = [conversation("who are you ?", "i am a cat")] * 6
    sizes = {"per_device_train_batch_size": 2, "max_steps": 2, "save_steps": 1}
    return write_run(tmp_path, base_dir, rows, bf16="auto", **sizes) / "run.yaml"


@pytest.fixture
def on_cpu(monkeypatch):
    """Make this machine's CPU one with the given flags."""

    def given(flags: tuple[str, ...]) -> None:
        machine = replace(read_machine(), isa=flags)
        monkeypatch.setattr(kernel_choice, "read_machine", lambda: machine)

    return given


@pytest.mark.parametrize(
    ("flags", "isa", "given", "cuda", "expected", "codes"),
    [
        (PLAIN, None, [], False, False, ["KTC027"]),
        (PLAIN, None, [], True, True, []),
        (PLAIN, None, ["bf16=true"], False, True, ["KTC028"]),
        (PLAIN, None, ["bf16=true"], True, True, []),
        (PLAIN, None, ["bf16=false"], False, False, []),
        (PLAIN, None, ["pure_bf16=true"], False, True, ["KTC028"]),
        (BF16, None, [], False, True, []),
        (BF16, "auto", ["bf16=true"], False, True, []),
        (BF16, "avx2", [], False, False, ["KTC027"]),
    ],
)
def test_the_default_is_the_fast_one(run_yaml, on_cpu, monkeypatch, flags, isa, given, cuda, expected, codes):
    on_cpu(flags)
    if isa:
        monkeypatch.setenv("KTBRIDGE_ISA", isa)
    decided, notes = decide_precision(load_config(run_yaml, given), cuda)
    assert decided.in_bfloat16 is expected
    assert [note.code for note in notes] == codes


@pytest.mark.parametrize(("flags", "dtype"), [(PLAIN, torch.float32), (BF16, torch.bfloat16)])
def test_plan_and_train_take_the_same_dtype_and_say_so_once(run_yaml, on_cpu, flags, dtype):
    on_cpu(flags)
    config = load_config(run_yaml, ["use_cpu=true"])
    plan = plan_run(config, TargetMachine(None, 64 * GB, 100 * GB, cores=2), measure=False)
    ready = prepare(config)
    model = load_trainable(ready.config, ready.base)
    assert model.get_input_embeddings().weight.dtype == dtype
    outside = next(part for part in plan.parts if part.what.startswith("attention, embeddings"))
    assert ("float32" in outside.how) == (dtype == torch.float32)
    said = dtype == torch.float32
    assert sum("no BF16 instructions" in note for note in plan.notes) == said
    assert [note.code for note in ready.notes].count("KTC027") == said


@pytest.mark.slow
def test_a_resumed_run_keeps_the_dtype_of_its_checkpoint(run_yaml, on_cpu):
    on_cpu(BF16)
    train(run_yaml.parent)
    record = Path("raw.checkpoints") / "checkpoint-2" / FINGERPRINT_FILE
    assert json.loads(record.read_text())["bf16"] is True
    on_cpu(PLAIN)
    longer = ["resume_from_checkpoint=true", "overwrite_output_dir=true", "max_steps=3"]
    ready = prepare(load_config(run_yaml, longer))
    assert (ready.resumption.step, ready.config.in_bfloat16) == (2, True)
    codes = {note.code for note in ready.notes}
    assert codes & {"KTC027", "KTC028", "KTC029"} == {"KTC029"}
    with pytest.raises(ProblemsError) as caught:
        prepare(load_config(run_yaml, [*longer, "bf16=false"]))
    (one,) = caught.value.problems
    assert (one.code, one.where.rpartition(": ")[2]) == ("KTC010", "bf16")
    fresh = ["resume_from_checkpoint=false", "overwrite_output_dir=true"]
    assert not prepare(load_config(run_yaml, fresh)).config.in_bfloat16
