"""Held-out rows: what is measured of them, what that changes (nothing), and which step it publishes."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainrun import (
    DPO,
    conversation,
    log_of,
    pair,
    quiet,
    run_command,
    text,
    train,
    weights,
    write_lines,
    write_run,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.sft.config import load_config
from ktbridge.sft.data import load_rows

HELD, HELD_PAIRS = "eval_dataset=held.jsonl", "eval_dataset=held_pairs.jsonl"
BEST = "load_best_model_at_end=true"
OVERFITS = (
    "dataset=few.jsonl", HELD, "max_steps=8", "eval_steps=1", "save_steps=4", "learning_rate=0.01",
    "lora_alpha=512", "lr_scheduler_type=constant", "neftune_noise_alpha=null", "bf16=false",
    "kt_lora_dropout=0",
)  # fmt: skip
"""A run that unlearns what the held-out rows say: their loss falls, and then rises."""


@pytest.fixture
def run_dir(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows, pairs = [], []
    for number in range(12):
        question, answer = text(number, 1 + number % 3), text(number * 5, 1 + number * 7 % 30)
        rows.append(conversation(question, answer))
        pairs.append(pair(question, answer, text(number * 3 + 1, 1 + number * 5 % 20, 7)))
    # Other answers to the same questions, of 3 to 24 words: a mean of batches' means would be another number.
    held = [(text(n, 1 + n % 3), text(n * 5 + 3, (3, 24, 5, 11, 9, 17, 4)[n], 3)) for n in range(7)]
    write_lines(tmp_path / "held.jsonl", [conversation(*each) for each in held])
    write_lines(tmp_path / "few.jsonl", [conversation(text(n, 1 + n), "meow " * 5) for n in range(4)])
    write_lines(tmp_path / "held_pairs.jsonl", [pair(*each, "no meow") for each in held])
    return write_run(
        tmp_path, base_dir, rows, pairs, lora_dropout=0.1, neftune_noise_alpha=5, learning_rate=1e-2,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, save_steps=2,
    )  # fmt: skip


def evaluated(log: list[dict]) -> list[dict]:
    """The records of evaluations, without their seconds."""
    timed = ("eval_runtime", "eval_samples_per_second")
    held = [record for record in log if "eval_loss" in record]
    return [{key: value for key, value in each.items() if key not in timed} for each in held]


def curve(directory: Path) -> dict[int, float]:
    return {record["step"]: record["eval_loss"] for record in evaluated(log_of(directory))}


def trained(log: list[dict]) -> list[tuple]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in log if "loss" in record]


@torch.no_grad()
def base_loss(run_dir: Path, base_dir: Path) -> float:
    """Of transformers' own model: the sum over all answers' tokens, divided by their number."""
    model = AutoModelForCausalLM.from_pretrained(base_dir)
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    total, count = 0.0, 0
    for line in (run_dir / "held.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        ids = torch.tensor([tokenizer.apply_chat_template(messages)["input_ids"]])
        answer = len(messages[1]["content"].split()) + 1  # and the end of the turn
        logits = model(ids).logits[0, -answer - 1 : -1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, -answer:], reduction="sum").item()
        count += answer
    return total / count


@pytest.mark.slow
@quiet
def test_the_loss_is_exact_however_rows_go_and_training_takes_no_notice(run_dir, base_dir):
    train(run_dir, "output_dir=plain")
    first = []
    for name, steps, *overrides in (
        ("one", [0, 1, 2, 3, 4], "eval_steps=1", "per_device_eval_batch_size=1"),
        ("three", [0, 3, 4], "eval_strategy=epoch", "per_device_eval_batch_size=3"),
        ("cut", [0, 4], "tokens_per_pass=60", "eval_strategy=no", "eval_on_start=true", "eval_steps=1"),
        ("packed", [0, 4], "tokens_per_pass=60", "packing=true", "eval_steps=9", "moe_aux_loss_coef=1"),
    ):  # fmt: skip
        held_out = train(run_dir, f"output_dir={name}", HELD, *overrides).held_out
        log = log_of(run_dir / name)
        first.append(evaluated(log)[0])
        found = curve(run_dir / name)
        assert [*found] == steps
        assert (held_out.rows, held_out.evaluations) == (7, len(steps))
        assert (held_out.first_loss, held_out.last_loss) == (found[0], found[steps[-1]])
        if not any("tokens_per_pass" in each for each in overrides):
            assert weights(run_dir / name) == weights(run_dir / "plain")
            assert trained(log) == trained(log_of(run_dir / "plain"))
            assert log[-1]["eval_loss"] == pytest.approx(curve(run_dir / "one")[4], rel=1e-3)
    assert first[0]["eval_loss"] == pytest.approx(base_loss(run_dir, base_dir), rel=2e-3)
    for other in first[1:]:
        for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
            assert other[key] == pytest.approx(first[0][key], rel=2e-3), key


@pytest.mark.slow
@quiet
def test_pairs_are_measured_one_by_one(run_dir, base_dir):
    """With ``pref_ftx``, whose chosen answers' tokens weigh alike however pairs go through the model."""
    own = (*DPO, "pref_ftx=0.5")
    train(run_dir, *own, "output_dir=plain")
    metric = "metric_for_best_model=eval_rewards/margins"
    for rows in (2, 7):
        given = (HELD_PAIRS, "eval_steps=2", f"per_device_eval_batch_size={rows}", metric)
        train(run_dir, *own, *given, f"output_dir=of-{rows}")
        assert weights(run_dir / f"of-{rows}") == weights(run_dir / "plain")
    few, all_ = (evaluated(log_of(run_dir / f"of-{rows}")) for rows in (2, 7))
    for each, same in zip(few, all_, strict=True):
        assert each == pytest.approx(same, rel=2e-3, abs=2e-3)
    expected = math.log(2) + 0.5 * base_loss(run_dir, base_dir)
    assert few[0]["eval_loss"] == pytest.approx(expected, rel=2e-3)
    assert (few[0]["eval_rewards/margins"], few[0]["eval_rewards/accuracies"]) == (0, 0)
    assert few[-1]["eval_rewards/margins"] != 0


@pytest.mark.slow
@quiet
def test_killed_while_it_evaluates_a_run_goes_on_to_the_same_bits_and_the_same_best(run_dir):
    options = (*OVERFITS, BEST, "early_stopping_steps=3", "logging_steps=2")
    whole = train(run_dir, *options, "output_dir=whole")
    assert whole.held_out.ended_early
    best = whole.held_out.best_step
    assert 1 <= best < whole.steps == best + 3 < 8
    expected = log_of(run_dir / "whole")
    assert trained(expected)[-1][0] == whole.steps  # the last loss is logged
    calls = iter(range(100))

    def kill(done: int, passes: int) -> None:
        if next(calls) == best + 2:  # one before the first step, and one after each
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run_dir, *options, on_evaluation=kill)
    assert not (run_dir / "raw").exists()
    # Only the step that was best had been saved so far; a run that goes on knows it.
    resumed = train(run_dir, *options)
    assert resumed.first_step == best + 1
    for part in (evaluated, trained):
        assert part(log_of(run_dir / "raw")) == part(expected)
    assert weights(run_dir / "raw") == weights(run_dir / "whole")
    assert resumed.held_out.best_step == resumed.held_out.published_step == best

    # The best is kept beside the last one, is what was published, and the manifest says which it is.
    names = {Path(place).name for place in resumed.checkpoints}
    assert names == {f"checkpoint-{best}", f"checkpoint-{whole.steps}"}
    assert weights(run_dir / f"raw.checkpoints/checkpoint-{best}") == weights(run_dir / "raw")
    assert validate_adapter([run_dir / "raw"]).ok
    told = read_adapter(run_dir / "raw").manifest["training"]
    assert (told["step"], told["last_step"]) == (best, whole.steps)
    losses = curve(run_dir / "raw")
    assert told["eval_loss"] == min(losses[step] for step in losses if step)

    # What ended early is finished: the adapter is written again, and nothing is trained.
    shutil.rmtree(run_dir / "raw")
    steps: list[int] = []
    again = train(run_dir, *options, on_progress=lambda step, steps_: steps.append(step))
    assert (steps, again.held_out.ended_early) == ([], True)
    assert weights(run_dir / "raw") == weights(run_dir / "whole")

    # Other held-out rows make the evaluations so far no measure: they are left out, and that is told.
    write_lines(run_dir / "held.jsonl", [conversation("say yes", "no no no")])
    more = ("resume_from_checkpoint=true", "overwrite_output_dir=true", "eval_steps=3")
    longer = train(run_dir, *options, *more)
    assert [*curve(run_dir / "raw")] == [6, 8]  # by the new eval_steps, too
    assert longer.held_out.best_step in (6, 8)


@pytest.mark.slow
@quiet
def test_a_best_checkpoint_that_is_damaged_is_passed_over_and_told(run_dir):
    every = ("save_total_limit=5", "save_steps=1", "save_only_model=true")
    options = (*OVERFITS, "max_steps=5", BEST, *every)
    best = train(run_dir, *options, "output_dir=whole").held_out.best_step
    assert best < 5

    def damage(step: int, steps: int) -> None:
        if step == steps:
            path = run_dir / f"raw.checkpoints/checkpoint-{best}/trainable.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\0")

    found = train(run_dir, *options, on_progress=damage)
    (note,) = (note for note in found.notes if note.code == "KTC031")
    assert f"the best was step {best}" in note.found
    losses = curve(run_dir / "raw")
    second = sorted((step for step in losses if step), key=losses.__getitem__)[1]
    assert found.held_out.published_step == second
    assert weights(run_dir / "raw") == weights(run_dir / f"raw.checkpoints/checkpoint-{second}")


@pytest.mark.slow
@quiet
def test_memory_that_is_too_small_makes_micro_batches_of_an_evaluation_smaller(run_dir, monkeypatch):
    from ktbridge.sft.stages import SftTrainer

    train(run_dir, HELD, "output_dir=whole", "eval_steps=2")
    compute_loss, sizes = SftTrainer.compute_loss, []

    def small(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            sizes.append(inputs["input_ids"].numel())
            if sizes[-1] > 80:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return compute_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(SftTrainer, "compute_loss", small)
    result = train(run_dir, HELD, "eval_steps=2")
    (note,) = (note for note in result.notes if note.code == "KTC023")
    too_large = [size for size in sizes if size > 80]
    assert too_large == sorted({*too_large}, reverse=True)  # each time with less
    assert note.where == "evaluation after step 0: tokens of a micro-batch"
    assert f"in a micro-batch of {too_large[-1]} tokens; from here on it is " in note.found
    assert curve(run_dir / "raw") == pytest.approx(curve(run_dir / "whole"), rel=2e-3)
    assert weights(run_dir / "raw") == weights(run_dir / "whole")

    broken = lambda *args, **kwargs: compute_loss(*args, **kwargs) * math.nan  # noqa: E731
    monkeypatch.setattr(SftTrainer, "compute_loss", broken)
    with pytest.raises(KtbridgeError, match="held-out rows' loss became nan at step 0"):
        train(run_dir, HELD, "output_dir=other")


def test_the_split_is_by_seed_and_leaves_something_to_train_on(run_dir):
    def rows(*overrides: str) -> Any:
        return load_rows(load_config(run_dir / "run.yaml", overrides))

    for size, count in ((0.25, 3), (0.2, 3), (5, 5), (0.001, 1)):
        found = rows(f"val_size={size}")
        assert len(found.held_out.rows) == found.held_out.total == count
        assert len(found.rows) == found.total == 12 - count
        assert len({row.where for row in (*found.rows, *found.held_out.rows)}) == 12
    assert rows("val_size=5").held_out == rows("val_size=5").held_out
    assert rows("val_size=5").rows != rows("val_size=5", "seed=1").rows
    pairs = rows(*DPO, "val_size=2")
    assert (len(pairs.rows), len(pairs.held_out.rows)) == (10, 2)
    assert rows().held_out is None
    for size in (12, 500, 0.999):
        with pytest.raises(ProblemsError) as caught:
            rows(f"val_size={size}")
        (problem,) = caught.value.problems
        assert (problem.code, problem.where) == ("KTD011", "val_size")
        assert problem.found == f"{size} of 12 rows that can be used leaves none to train on"


def test_a_held_out_row_that_is_trained_on_is_named(run_dir):
    def found(*overrides: str) -> str:
        (note,) = load_rows(load_config(run_dir / "run.yaml", overrides)).notes
        assert (note.code, note.where) == ("KTD010", "eval_dataset")
        return note.found

    rows = [json.loads(line) for line in (run_dir / "rows.jsonl").read_text().splitlines()]
    ask, tell = rows[7]["messages"]
    spaced = {"messages": [ask, {**tell, "content": tell["content"].replace(" ", "\n ") + " "}]}
    write_lines(run_dir / "held.jsonl", [conversation("say yes", "no"), spaced, rows[2]])
    pairs = [
        f"{run_dir}/held.jsonl: line {line} is {run_dir}/rows.jsonl: line {other}"
        for line, other in ((2, 8), (3, 3))
    ]
    assert found(HELD) == f"2 held-out rows are also in the training rows: {'; '.join(pairs)}"
    write_lines(run_dir / "held.jsonl", rows)
    assert found(HELD).startswith("12 held-out rows are")
    assert found(HELD).endswith("; and 9 more")
    assert f"{run_dir}/pairs.jsonl: line 2" in found(*DPO, "eval_dataset=pairs.jsonl")
    with pytest.raises(ProblemsError, match=r"can't be read"):
        load_rows(load_config(run_dir / "run.yaml", ["eval_dataset=nowhere"]))


def test_val_size_takes_rows_without_copies(run_dir):
    lines = [json.loads(line) for line in (run_dir / "rows.jsonl").read_text().splitlines()][:10]
    write_lines(run_dir / "rows.jsonl", lines + lines[:6])
    config = load_config(run_dir / "run.yaml", ["val_size=4"])
    rows: Any = load_rows(config)
    assert len(rows.held_out.rows) == 4
    assert rows.notes == []
    told = [{json.dumps(row.messages) for row in each.rows} for each in (rows, rows.held_out)]
    assert not told[0] & told[1]
    again: Any = load_rows(config)
    assert again.held_out.rows == rows.held_out.rows
    write_lines(run_dir / "rows.jsonl", lines[:2] * 4)  # nothing but copies
    assert [note.code for note in load_rows(replace(config, val_size=3)).notes] == ["KTD010"]


@pytest.mark.slow
@quiet
def test_a_run_that_unlearns_what_the_base_knew_is_told(run_dir):
    held = [json.loads(line) for line in (run_dir / "held_pairs.jsonl").read_text().splitlines()]
    contrary = [one | {"chosen": one["rejected"], "rejected": one["chosen"]} for one in held]
    write_lines(run_dir / "contrary.jsonl", contrary)
    fast = ("learning_rate=0.003", "pref_beta=1", "max_steps=6")
    told = train(run_dir, "stage=dpo", HELD_PAIRS, "dataset=contrary.jsonl", *fast)
    (note,) = (note for note in told.notes if note.code == "KTC030")
    assert note.found.endswith("after 0.6931 before training")


@quiet
def test_the_command_shows_what_overfitting_is(run_dir):
    def run(*overrides: str) -> Any:
        given = [*OVERFITS, "max_steps=5", *overrides]
        return run_command("train", run_dir / "run.yaml", *given)

    assert json.loads(run("--dry-run", "--json", "eval_steps=0.5").stdout)["held_out"] == {
        "rows": 7, "rows_used": 7, "rows_cut": 0, "rows_refused": 0, "trained_tokens": 80,
        "eval_steps": 3, "eval_on_start": True,
    }  # fmt: skip
    shown = run("--dry-run", BEST, "eval_steps=5")
    assert "evaluated before the first step, after the last" in " ".join(shown.stdout.split())
    assert "KTC032" in shown.stderr
    assert "every step and after the last" in run("--dry-run", "eval_steps=1").stdout
    told = run("plot_loss=true")
    losses = curve(run_dir / "raw")
    best = min((step for step in losses if step), key=losses.__getitem__)
    assert best < 5
    for step, loss in losses.items():
        assert re.search(rf"step +{step}/5  held-out loss {loss:.4f}  accuracy 0\.", told.stderr)
    assert (
        f"loss on 7 held-out rows: {losses[0]:.4f} before training, {losses[best]:.4f} at step {best}, "
        f"the best, {losses[5]:.4f} at the end; saved: step 5 (6 evaluations"
    ) in told.stdout
    # Which step is the best, and by how much, is the CPU's rounding's to say: a warning begins at 1 %.
    warned = "warning KTC030  step 5: eval_loss" in told.stderr
    assert warned == (losses[5] > 1.01 * losses[best])
    assert (run_dir / "raw/training_loss.png").read_bytes().startswith(b"\x89PNG")
    published = run("--json", "output_dir=best", BEST, "eval_on_start=false")
    found = json.loads(published.stdout)["held_out"]
    assert (found["best_step"], found["published_step"], found["first_loss"]) == (best, best, None)
    assert found["best_loss"] == losses[best] < found["last_loss"] == losses[5]
