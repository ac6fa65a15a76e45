"""Passes by tokens: the results of batches as spelled, whatever was spelled, and memory that is too small."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import trainrun
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from trainrun import DPO, conversation, log_of, pair, quiet, run_command, text, write_run
from transformers import Trainer
from trl.trainer import dpo_trainer, sft_trainer

from ktbridge.errors import KtbridgeError
from ktbridge.sft import expert_device, stages
from ktbridge.sft.placement import pack_joined_rows, pack_padded_rows
from ktbridge.sft.progress import Diverged
from ktbridge.sft.trainer import without_walks

ROWS = 10
"""Of which a step takes 4, so that the last of an epoch is smaller."""
AGAIN = ("overwrite_output_dir=true", "resume_from_checkpoint=false")
BY_TOKEN = ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected")
"""Means over a batch's tokens, which trl averages over batches whatever their tokens are."""


class Outcome(NamedTuple):
    """What a run logged, and all that it trained after its first step and its last; shapes of token ids."""

    log: list[dict[str, Any]]
    first: dict[str, torch.Tensor]
    last: dict[str, torch.Tensor]
    widths: list[tuple[int, ...]]


@pytest.fixture
def run_dir(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows, pairs = [], []
    for number in range(ROWS):
        question = text(number * 5, 1 + number % 3, 7)
        answer = text(number * 5 + 5, 1 + (number * number * 7) % 40, 7)
        rows.append(conversation(question, answer))
        pairs.append(pair(question, answer, text(number * 5 + 10, 1 + number * 3 % 20, 7)))
    return write_run(
        tmp_path, base_dir, rows, pairs,
        optim="sgd",  # Adam makes much of the rounding of a gradient that is nearly 0
        lr_scheduler_type="constant", learning_rate=0.5, max_grad_norm=0, num_train_epochs=2,
        save_steps=1, save_total_limit=9, per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip


@pytest.fixture
def train(run_dir, monkeypatch):
    """A whole run in this process: ``train(name, *overrides)``."""
    widths: list[tuple[int, ...]] = []
    for cls in set(stages.STAGES.values()):
        watch(monkeypatch, cls, lambda trainer, ids: widths.append(tuple(ids.shape)))

    def run(name: str, *overrides: str, **options: Any) -> Outcome:
        widths.clear()
        trainrun.train(run_dir, f"output_dir={name}", *overrides, **options)
        return Outcome(log_of(run_dir / name), *ends(run_dir, name), widths.copy())

    return run


def watch(monkeypatch: pytest.MonkeyPatch, cls: Any, look: Any) -> None:
    """Have ``look(trainer, token ids)`` called when a loss is there; it may raise, or return a factor."""
    compute_loss = cls.compute_loss

    def watched(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(self, model, inputs, *args, **kwargs)
        factor = look(self, inputs["input_ids"])
        return loss if factor is None else loss * factor

    monkeypatch.setattr(cls, "compute_loss", watched)


def ends(run_dir: Path, name: str) -> list[dict[str, torch.Tensor]]:
    """What a run's first and last checkpoints hold."""
    places = sorted((run_dir / f"{name}.checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    return [load_file(places[place] / "trainable.safetensors") for place in (0, -1)]


def assert_same(found: Outcome, expected: Outcome, but: tuple[str, ...] = ()) -> None:
    """Logs and trained tensors within rounding, counted tokens exactly.

    The experts compute in bfloat16, so a rounding of the first step is larger in those that follow.
    """
    assert len(found.log) == len(expected.log) > 1
    for key in expected.log[0].keys() - {"tokens_per_second", "expert_share", "epoch", *but}:
        ours, theirs = ([record[key] for record in each.log] for each in (found, expected))
        exact = key == "num_input_tokens_seen"
        assert ours == (theirs if exact else pytest.approx(theirs, rel=5e-4, abs=2e-5)), key
    assert any(".kt." in name for name in found.last)
    for ours, theirs, most in (
        (found.first, expected.first, 1e-4),
        (found.last, expected.last, 2e-3),
    ):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert value.any(), name
            assert (ours[name] - value).norm() <= most * value.norm(), name


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    ("stage", "least"),
    [((), 60), (DPO, 120), ((*DPO, "pref_ftx=0.5"), 120)],
    ids=["sft", "dpo", "ftx"],
)
def test_passes_give_what_batches_as_spelled_do(train, stage, least):
    """Losses, gradients' norms and all that is trained, of two epochs whose last steps are smaller."""
    spelled = {
        batch: (f"per_device_train_batch_size={batch}", f"gradient_accumulation_steps={4 // batch}")
        for batch in (1, 2, 4)
    }
    whole = train("whole", *stage, *spelled[4])
    assert {rows for rows, _ in whole.widths} == ({4, 2} if not stage else {8, 4})
    for batch, tokens in ((1, 10**6), (2, 10**6), (2, least), (1, 1)):
        found = train("passes", *stage, *spelled[batch], f"tokens_per_pass={tokens}", *AGAIN)
        if tokens == 10**6:
            assert found.widths == whole.widths
            assert_same(found, whole)
            continue
        assert len(found.widths) > len(whole.widths)
        one = 1 + bool(stage)
        assert all(rows * width <= tokens or rows == one for rows, width in found.widths)
        sizes = [sum(rows * width for rows, width in run.widths) for run in (found, whole)]
        assert sizes[0] < 0.8 * sizes[1]  # padding with them
        assert_same(found, whole, BY_TOKEN if stage else ())
    if "pref_ftx=0.5" not in stage:  # which batches as spelled weigh by batch
        for batch in (1, 2):
            assert_same(train("spelled", *stage, *spelled[batch], *AGAIN), whole, BY_TOKEN)


@pytest.mark.slow
@quiet
def test_packed_conversations_go_in_passes_by_themselves(train):
    packed = ("packing=true", "per_device_train_batch_size=1", "num_train_epochs=3")
    spelled = train("spelled", *packed)
    for tokens in (10**6, 70, 25):
        found = train("passes", *packed, f"tokens_per_pass={tokens}", *AGAIN)
        if tokens == 10**6:
            assert len(found.widths) == len(found.log)  # one pass a step
        else:
            assert any(width < tokens for _, width in found.widths)
        assert_same(found, spelled, BY_TOKEN)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("more", [(), ("packing=true",), DPO, ("streaming=true", "max_steps=4")])
def test_rows_are_collated_once_in_the_micro_batches_that_compute(train, monkeypatch, more):
    made: list[int] = []
    for cls in (sft_trainer.DataCollatorForLanguageModeling, dpo_trainer.DataCollatorForPreference):
        own = cls.torch_call
        counted = lambda self, rows, own=own: made.append(len(rows)) or own(self, rows)  # noqa: E731
        monkeypatch.setattr(cls, "torch_call", counted)
    found = train("once", "tokens_per_pass=60", *more)
    assert len(made) == len(found.widths) > len(found.log)


@pytest.mark.slow
@quiet
def test_what_began_in_batches_goes_on_in_micro_batches_and_the_other_way_round(train, run_dir):
    spelled = train("spelled", "max_steps=5")
    for name, first, then in (("a", "auto", "60"), ("b", "60", "auto")):
        own = ("max_steps=5", f"output_dir={name}", f"tokens_per_pass={first}")
        trainrun.interrupt(run_dir, 2, *own)
        mixed = train(name, "max_steps=5", f"tokens_per_pass={then}")
        assert_same(mixed, spelled, BY_TOKEN)


@pytest.fixture
def room_for(monkeypatch):
    """Lets losses find no memory for more tokens than it is given; returns the steps and sizes asked for."""
    calls: list[tuple[int, int]] = []

    def limit(tokens: int) -> list[tuple[int, int]]:
        def small(trainer: Any, ids: torch.Tensor) -> None:
            calls.append((trainer.state.global_step, ids.numel()))
            if ids.numel() > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

        monkeypatch.setattr(stages.SftTrainer, "compute_loss", plain)
        watch(monkeypatch, stages.SftTrainer, small)
        return calls

    plain = stages.SftTrainer.compute_loss
    return limit


@quiet
def test_memory_that_is_too_small_takes_fewer_rows_and_repeats_the_step(train, run_dir, room_for):
    expected = train("whole", "max_steps=2")
    calls = room_for(50)
    command = ["train", str(run_dir / "run.yaml"), "--json", "max_steps=2", "tokens_per_pass=5000"]
    done = run_command(*command)
    # Rows of 40, 22, 20 and 18 tokens: one micro-batch; two, of which the first makes its gradients; three.
    assert [size for step, size in calls if step == 0] == [160, 40, 66, 40, 22, 40]
    assert max(size for step, size in calls if step) <= 50  # remembered
    (note,) = (note for note in json.loads(done.stdout)["notes"] if note["code"] == "KTC023")
    assert note["where"] == "step 1: tokens_per_pass"
    assert "in a micro-batch of 66 tokens; from here on it is 44" in note["found"]
    assert done.stderr.count("warning KTC023") == 1
    found = Outcome(log_of(run_dir / "raw"), *ends(run_dir, "raw"), [])
    assert_same(found, expected, BY_TOKEN)


@quiet
def test_experts_give_back_memory_before_rows_are_left_out_and_a_row_too_long_ends_the_run(run_dir, room_for):
    asked: list[int] = []

    def shrink(_: Any, short: int) -> str:
        asked.append(short)
        room_for(50 * len(asked))
        return f"slot {len(asked)}"

    room_for(50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_device.ExpertDevice, "shrink", shrink)
        result = trainrun.train(run_dir, "tokens_per_pass=5000", "max_steps=2", "output_dir=gave")
    assert asked == [1 << 30] * 4
    (note,) = (note for note in result.notes if note.code == "KTC023")
    assert "given back: slot 1, slot 2, slot 3, slot 4" in note.found
    assert result.tokens_per_pass == 5000

    room_for(30)
    with pytest.raises(KtbridgeError, match="the GPU ran out of memory in step 1") as caught:
        trainrun.train(run_dir, "tokens_per_pass=100", "output_dir=other")
    assert "cutoff_len (a row alone was too much)" in caught.value.next_step


@pytest.mark.quick("tokens")
@quiet
@pytest.mark.parametrize("tokens", ["", "tokens_per_pass=70"], ids=["batches", "tokens"])
def test_a_loss_that_is_not_finite_ends_its_step_before_the_weights_change(
    train, run_dir, monkeypatch, tokens
):
    seen: list[tuple[int, Any]] = []

    def poisoned(trainer: Any, ids: torch.Tensor) -> float:
        step = trainer.state.global_step
        seen.append((step, trainer.model))
        first = [each for each, _ in seen].count(1) == 1  # of the second step's micro-batches
        return float("nan") if first and step == 1 else 1.0

    watch(monkeypatch, stages.SftTrainer, poisoned)
    with pytest.raises(Diverged, match=r"the loss became nan at step 2; .*checkpoint-1\."):
        train("raw", *([tokens] if tokens else []))
    assert not (run_dir / "raw").exists()
    assert [step for step, _ in seen].count(1) > 1  # the poisoned one was not the last
    saved = load_file(run_dir / "raw.checkpoints/checkpoint-1/trainable.safetensors")
    now = {name: p for name, p in seen[-1][1].named_parameters() if p.requires_grad}
    assert now.keys() == saved.keys()
    assert all(torch.equal(now[name], saved[name]) for name in saved)


@pytest.mark.slow
@quiet
def test_a_step_waits_for_its_numbers_once(make, monkeypatch):
    """A count of tokens for each batch, and batches on the GPU, would be as many waits and transfers."""
    trainer = make(max_steps=4)
    assert trainer.get_train_dataloader().device is None
    gathered: list[int] = []
    gather, track = trainer.accelerator.gather, Trainer._track_num_input_tokens

    def counted(self: Any, inputs: Any) -> None:
        with monkeypatch.context() as patch:
            noted = lambda n: gathered.append(int(n)) or gather(n)  # noqa: E731
            patch.setattr(self.accelerator, "gather", noted)
            track(self, inputs)

    monkeypatch.setattr(Trainer, "_track_num_input_tokens", counted)
    trainer.train()
    assert len(gathered) == 4
    assert sum(gathered) == trainer.state.num_input_tokens_seen
    assert trainer.throughput.steady > 0


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put ``rows`` into passes."""
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [rows[0], *rest[place]], *rest[place + 1 :]]


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 120))
def test_a_cut_has_the_fewest_passes_and_of_those_the_least_padding(lengths, most):
    def cost(passes: list[list[int]]) -> tuple[int, int]:
        sizes = [max(lengths[row] for row in each) * len(each) for each in passes]
        fits = all(size <= most or len(each) == 1 for size, each in zip(sizes, passes, strict=True))
        return (len(passes), sum(sizes)) if fits else (99, 0)

    found = pack_padded_rows(lengths, most)
    assert sorted(row for each in found for row in each) == list(range(len(lengths)))
    assert cost(found) == min(map(cost, partitions(list(range(len(lengths))))))
    assert max(lengths) == lengths[found[0][0]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 120))
def test_a_fill_keeps_the_limit_and_leaves_no_two_passes_half_empty(lengths, most):
    found = pack_joined_rows(lengths, most)
    assert sorted(row for each in found for row in each) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in each) for each in found]
    assert all(size <= most or len(each) == 1 for size, each in zip(sizes, found, strict=True))
    assert sum(2 * size <= most for size in sizes) <= 1


def test_modes_and_gradients_of_a_run_are_set_without_a_walk_in_each_step():
    class Within:
        """accelerate's optimizer between two steps: it leaves gradients."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def zero_grad(self, set_to_none: bool = True) -> None:
            pass

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    wrapped = SimpleNamespace(model=model, optimizer=Within(torch.optim.SGD(model.parameters())))
    frozen = gc.get_freeze_count()
    with without_walks(wrapped):
        assert gc.get_freeze_count() > frozen
        for mode in (True, False, True):
            model.train() if mode else model.eval()
            assert {each.training for each in model.modules()} == {mode}
        model[1].eval()
        assert not model.train()[1].training  # nobody walked
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad(set_to_none=True)
        assert all(each.grad is None for each in model.parameters())
    assert model.train()[1].training
    assert gc.get_freeze_count() == 0
