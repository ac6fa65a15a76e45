"""`ktbridge train` with attention on the GPU: a whole run, and one that is stopped and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from manyranks import EXAMPLES
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import DPO, ROWS, conversation, log_of, pair, train, write_lines, write_run
from visionmoe import colour_rows, vision_base

from ktbridge.adapter import validate_adapter
from ktbridge.errors import KtbridgeError, UsageError

# trl's and transformers' advice, which `ktbridge train` silences too
pytestmark = pytest.mark.filterwarnings("ignore")
ANSWERS = ("no", "a cat model", "you are a cat hello who", "the sky is blue meow nya yes")


@pytest.fixture
def run_dir(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    held = [conversation("say", answer) for answer in ANSWERS]
    write_lines(tmp_path / "held.jsonl", held)
    write_lines(tmp_path / "held_pairs.jsonl", [pair("say", answer, "meow") for answer in ANSWERS])
    return write_run(
        tmp_path, tmp_path / "base", [conversation(*turns) for turns in ROWS * 8],
        [pair(*turns, "no") for turns in ROWS * 8], bf16="auto", learning_rate=1e-2,
        per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=12, save_steps=3,
    )  # fmt: skip


def losses(directory: Path, key: str = "loss") -> list[float]:
    return [record[key] for record in log_of(directory) if key in record]


PLACES = {
    "cpu": ("kt_experts=cpu",),
    "stream": ("kt_experts=stream", "kt_num_gpu_experts=0"),
    "resident": ("kt_experts=resident",),
}
"""What a configuration says for experts there; so small a model is resident unless none of it may be."""


def test_a_run_learns_on_the_gpu_as_it_does_on_the_cpu(run_dir):
    command = [sys.executable, "-m", "ktbridge", "train", str(run_dir / "run.yaml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == 12
    assert result["last_loss"] < 0.85 * result["first_loss"]
    assert result["peak_gpu_bytes"] > 0
    assert 0 <= result["expert_share"] < 1
    assert validate_adapter([run_dir / "raw"]).ok

    on_cpu = train(run_dir, "use_cpu=true", f"output_dir={run_dir / 'cpu'}")
    assert on_cpu.first_loss == pytest.approx(result["first_loss"], rel=2e-2)
    assert losses(run_dir / "cpu") == pytest.approx(losses(run_dir / "raw"), rel=0.1)


@pytest.mark.parametrize("experts", [*PLACES])
def test_images_are_learned_as_on_the_cpu(run_dir, experts):
    base = vision_base(run_dir / "seeing", "qwen3_vl_moe")
    write_lines(run_dir / "rows.jsonl", colour_rows(run_dir, range(0, 24, 4)))
    own = (f"model_name_or_path={base}", "cutoff_len=128", "gradient_accumulation_steps=1")
    found = train(run_dir, *own, *PLACES[experts])
    assert found.experts == experts
    on_cpu = train(run_dir, *own, "use_cpu=true", f"output_dir={run_dir / 'cpu'}")
    assert on_cpu.last_loss < 0.7 * on_cpu.first_loss
    assert losses(run_dir / "cpu") == pytest.approx(losses(run_dir / "raw"), rel=0.1)


@pytest.mark.parametrize("experts", [*PLACES])
@pytest.mark.parametrize("stage", [(), DPO])
def test_a_run_that_was_stopped_goes_on(run_dir, stage, experts):
    stage = (*stage, *PLACES[experts])
    whole = train(run_dir, *stage, f"output_dir={run_dir / 'whole'}")
    assert whole.experts == experts

    def stop(step: int, steps: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KtbridgeError, match="interrupted after step"):
        train(run_dir, *stage, on_progress=stop)
    assert not (run_dir / "raw").exists()
    result = train(run_dir, *stage, "resume_from_checkpoint=true")
    assert result.steps == 12
    assert validate_adapter([run_dir / "raw"]).ok
    # A GPU adds up in no fixed order; weights or moments that were lost would be seen.
    assert losses(run_dir / "raw") == pytest.approx(losses(run_dir / "whole"), rel=5e-2)


def test_wherever_experts_are_computed_a_run_learns_the_same(run_dir):
    results = {}
    for experts, options in {**PLACES, "auto": ("kt_experts=auto",)}.items():
        output = run_dir / experts
        found = train(run_dir, *options, f"output_dir={output}")
        results[experts] = losses(output)
        assert found.experts == experts or experts == "auto"
        assert bool(found.tokens_per_pass) == (experts != "cpu")
        assert any(note.code == "KTC024" for note in found.notes) == (experts != "cpu")
        assert validate_adapter([output]).ok
    for experts, found in results.items():
        assert found[0] == pytest.approx(results["cpu"][0], rel=1e-2), experts
        assert found == pytest.approx(results["cpu"], rel=0.1), experts
    few = train(run_dir, *PLACES["stream"], "tokens_per_pass=32", f"output_dir={run_dir / 'few'}")
    assert few.tokens_per_pass == 32
    assert losses(run_dir / "few") == pytest.approx(results["stream"], rel=0.05)


@pytest.mark.parametrize("stage", [(), DPO], ids=["sft", "dpo"])
def test_held_out_rows_measure_the_same_wherever_experts_are_computed(run_dir, stage):
    """And training takes no notice: losses are those of a run without them."""
    held = f"eval_dataset=held{'_pairs' if stage else ''}.jsonl"
    more = (held, "eval_steps=1", "per_device_eval_batch_size=3", "load_best_model_at_end=true")
    own = (*stage, "max_steps=6")
    expected = train(run_dir, *own, *more, *PLACES["cpu"], f"output_dir={run_dir / 'cpu'}")
    assert expected.held_out.rows == 4
    for place in ("stream", "resident"):
        found = train(run_dir, *own, *more, *PLACES[place], f"output_dir={run_dir / place}")
        assert found.experts == place
        on_cpu, here = (losses(run_dir / each, "eval_loss") for each in ("cpu", place))
        assert len(here) == 7
        assert here[0] == pytest.approx(on_cpu[0], rel=1e-2)
        assert here == pytest.approx(on_cpu, rel=0.1)
        train(run_dir, *own, *PLACES[place], f"output_dir={run_dir / f'{place}-plain'}")
        # A GPU adds up in no fixed order, so not the same bits.
        plain = losses(run_dir / f"{place}-plain")
        assert losses(run_dir / place) == pytest.approx(plain, rel=2e-2)
        assert validate_adapter([run_dir / place]).ok


def test_an_evaluation_that_memory_is_too_small_for_goes_in_smaller_passes(run_dir, monkeypatch):
    from ktbridge.sft.stages import SftTrainer

    more = ("eval_dataset=held.jsonl", "max_steps=2", "eval_steps=1", *PLACES["stream"])
    train(run_dir, *more, f"output_dir={run_dir / 'whole'}")
    compute_loss = SftTrainer.compute_loss

    def small(self, model, inputs, *args, **kwargs):
        rows = len(inputs["input_ids"])
        held = torch.empty(1 << 46, device="cuda") if rows > 2 and not self.model.training else None
        del held
        return compute_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(SftTrainer, "compute_loss", small)
    result = train(run_dir, *more)
    assert any(note.where.startswith("evaluation after step 0") for note in result.notes)
    whole = losses(run_dir / "whole", "eval_loss")
    assert losses(run_dir / "raw", "eval_loss") == pytest.approx(whole, rel=2e-2)


def test_a_budget_that_is_too_small_is_refused_before_training(run_dir):
    with pytest.raises(UsageError, match="GPU memory"):
        train(run_dir, "kt_experts=stream", "kt_gpu_memory=0.81GB")


@pytest.mark.parametrize("method", ["ddp", "fsdp2"])
def test_two_gpus_with_their_own_streams_learn_as_one_does(run_dir, method):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    more = ("kt_experts=stream", "kt_num_gpu_experts=0", "max_steps=4", "max_grad_norm=0.05")
    batches = ("per_device_train_batch_size=8", "gradient_accumulation_steps=1")
    alone = train(run_dir, *more, *batches, f"output_dir={run_dir / 'alone'}")
    assert alone.experts == "stream"
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"),
        *("--config_file", str(EXAMPLES / f"{method}.yaml"), "-m", "ktbridge", "train"),
        *(str(run_dir / "run.yaml"), "--json", *more, "per_device_train_batch_size=4"),
        *("gradient_accumulation_steps=1", f"output_dir={run_dir / method}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["experts"] == "stream"
    for key in ("loss", "grad_norm"):
        one, two = (losses(run_dir / name, key) for name in ("alone", method))
        assert two == pytest.approx(one, rel=0.05), key
    assert validate_adapter([run_dir / method]).ok
