"""A run that is killed goes on, and ends in the same bits as one that wasn't."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from gpuexperts import allow_on_cpu
from trainrun import (
    DPO,
    conversation,
    interrupt,
    log_of,
    losses,
    pair,
    quiet,
    run_command,
    text,
    train,
    weights,
    write_lines,
    write_run,
)

from ktbridge.adapter import validate_adapter
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.sft.config import TrainConfig, load_config
from ktbridge.sft.data import fingerprint_rows, load_rows
from ktbridge.sft.plan.setting import check_room
from ktbridge.sft.resume import (
    FILES,
    FINGERPRINT_FILE,
    NUMBER,
    WEIGHTS,
    Resumption,
    RunFingerprint,
    check_length,
    check_start,
    decide_precision,
    find_checkpoint,
    fingerprint_run,
    saved,
    step_of,
)

pytestmark = quiet
TIMED = {"tokens_per_second", "expert_share", "eval_runtime", "eval_samples_per_second"}
STREAM = ("streaming=true", "buffer_size=16")
MIXED = (
    "dataset=rows.jsonl,some.jsonl",
    "mix_strategy=interleave_over",
    "interleave_probs=0.6,0.4",
)
KTO = ("stage=kto", "dataset=judged.jsonl")
HELD = ("eval_dataset=held.jsonl", "eval_steps=3")


@pytest.fixture
def run_dir(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [(text(n, 4, 3), text(n + 1, 4, 5)) for n in range(40)]
    judged = [
        {"prompt": question, "completion": answer, "label": number % 3 > 0}
        for number, (question, answer) in enumerate(texts)
    ]
    some = [conversation(text(n, 3), text(n + 1, 2 + n % 5)) for n in range(40)]
    some[7::10] = [conversation("nothing", "")] * 4
    for name, each in (("judged", judged), ("held", judged[:5]), ("some", some)):
        write_lines(tmp_path / f"{name}.jsonl", each)
    return write_run(
        tmp_path, base_dir, [conversation(*each) for each in texts],
        [pair(*each, "no meow") for each in texts],
        overwrite_output_dir=True,  # as many files of LLaMA-Factory have it
        lora_dropout=0.1, learning_rate=1e-2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_steps=8, save_steps=2,
    )  # fmt: skip


def configured(run_dir: Path, *overrides: str) -> TrainConfig:
    return load_config(run_dir / "run.yaml", overrides)


def checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def killed(warm: Any, run_dir: Path, *overrides: str) -> int:
    """The exit status of a process that is killed as soon as its run has saved a checkpoint."""
    command = ("-m", "ktbridge", "train", run_dir / "run.yaml", *overrides)
    threads = {"KTBRIDGE_THREADS": "2", "OMP_NUM_THREADS": "1"}  # torch's bits depend on its own
    process = warm.start(*command, cwd=run_dir, **threads)
    while process.poll() is None and not [*(run_dir / "raw.checkpoints").glob("checkpoint-*")]:
        time.sleep(0.002)
    process.kill()
    process.communicate(200)
    return process.returncode


@contextmanager
def terminated_after_saving(root: Path) -> Iterator[None]:
    """Within the block this process gets SIGTERM as soon as there is one checkpoint more."""
    before, done = {*root.glob("checkpoint-*")}, Event()

    def watch() -> None:
        while not {*root.glob("checkpoint-*")} - before:
            if done.wait(0.002):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    watching = Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def untimed(output: Path) -> list[dict]:
    """A run's log, without what the clock says."""
    return [{key: value for key, value in each.items() if key not in TIMED} for each in log_of(output)]


def test_killed_or_interrupted_it_goes_on_to_the_same_bits(run_dir, warm):
    root = run_dir / "raw.checkpoints"
    assert killed(warm, run_dir) == -signal.SIGKILL  # nothing beside it: else it may come to its last steps
    train(run_dir, "output_dir=whole", "save_steps=0")
    assert not (run_dir / "whole.checkpoints").exists()
    assert not (run_dir / "raw").exists()
    earlier = sorted(root.glob("checkpoint-*"))
    (root / "checkpoint-9").mkdir()  # not whole: it is not looked at
    (root / ".partial-1" / "checkpoint-10").mkdir(parents=True)
    with terminated_after_saving(root):
        stopped = run_command("train", run_dir / "run.yaml", code=130)
    for words in (f"goes on after step {step_of(earlier[-1])}", "is saved in", "the same command"):
        assert words in stopped.stderr
    assert not list(root.glob(".partial-*"))
    train(run_dir, "resume_from_checkpoint=true")
    assert weights(run_dir / "raw") == weights(run_dir / "whole")
    assert losses(run_dir / "raw") == losses(run_dir / "whole")

    # The last step's checkpoint stays, is an adapter, and makes a longer run.
    (last,) = saved(root)
    assert last.name == "checkpoint-8"
    assert weights(last) == weights(run_dir / "raw")
    assert validate_adapter([last]).ok
    train(run_dir, "resume_from_checkpoint=true", "max_steps=10")
    assert [step for step, _ in losses(run_dir / "raw")] == [*range(1, 11)]
    assert weights(run_dir / "raw") != weights(run_dir / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "how", "other"),
    [
        ((*STREAM, *MIXED, "val_size=5", "eval_steps=4"), "Ctrl-C", "interleave_probs=0.5,0.5"),
        (("tokens_per_pass=60",), "SIGKILL", "lora_dropout=0.2"),
        (("dataloader_num_workers=1",), "SIGTERM", "neftune_noise_alpha=5"),
        (MIXED, "Ctrl-C", "mix_strategy=interleave_once"),
        (DPO, "SIGKILL", "pref_beta=0.3"),
        ((*KTO, *HELD), "Ctrl-C", "kto_chosen_weight=2"),
        ((*STREAM, "dataset=some.jsonl", "max_steps=12"), "SIGTERM", "seed=1"),
        ((*STREAM, "packing=true", "cutoff_len=24", "val_size=5"), "Ctrl-C", "cutoff_len=25"),
        ((*STREAM, *DPO), "Ctrl-C", "buffer_size=17"),
        ((*STREAM, *KTO), "SIGKILL", "kto_chosen_weight=2"),
        (("kt_experts=stream", "kt_num_gpu_experts=0", "max_steps=6"), "SIGTERM", "lora_rank=2"),
        (("kt_skip_expert_lora_adaptation=true", "max_steps=6"), "Ctrl-C", "lora_rank=2"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_every_kind_of_run_ends_in_the_same_bits_however_it_was_interrupted(
    run, how, other, run_dir, warm, monkeypatch
):
    """Adapter, log and counts of rows; ``other`` makes it another run, which doesn't go on."""
    if "kt_experts=stream" in run:
        allow_on_cpu(monkeypatch.setattr)
    whole = train(run_dir, *run, "output_dir=whole")
    if how == "SIGKILL":
        assert killed(warm, run_dir, *run) == -signal.SIGKILL
    elif how == "SIGTERM":
        with (
            terminated_after_saving(run_dir / "raw.checkpoints"),
            pytest.raises(KtbridgeError, match="interrupted after step"),
        ):
            train(run_dir, *run)
    else:
        interrupt(run_dir, whole.steps - 1, *run)
    assert not (run_dir / "raw").exists()
    with pytest.raises(ProblemsError, match="another run") as caught:
        train(run_dir, *run, other)
    assert {problem.code for problem in caught.value.problems} == {"KTC010"}
    assert train(run_dir, *run).first_step > 1
    assert weights(run_dir / "raw") == weights(run_dir / "whole") != {}
    assert untimed(run_dir / "raw") == untimed(run_dir / "whole")
    summaries = [json.loads((run_dir / of / "training_data.json").read_text()) for of in ("raw", "whole")]
    assert summaries[0] == summaries[1]
    if "streaming=true" in run:  # counts what was read, of all epochs
        assert summaries[0]["streamed"]
        assert (summaries[0]["rows"], summaries[0]["used"]) == (whole.rows, whole.used)
        assert whole.used + whole.refused == whole.rows
    if "dataset=some.jsonl" in run:  # goes through its rows more than once
        assert whole.rows > 40
        lines = (run_dir / "raw" / "refused_rows.jsonl").read_text().splitlines()
        assert len(lines) == whole.refused == summaries[0]["refused"] > 4


@pytest.mark.slow
def test_a_run_that_is_ended_before_its_first_step_says_so_in_its_document(run_dir, warm):
    process = warm.start("-m", "ktbridge", "train", run_dir / "run.yaml", "--json", cwd=run_dir)
    while not (run_dir / ".raw.ktbridge.lock").exists():  # it is about to load the model
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(60)
    assert (process.returncode, json.loads(out)) == (
        143, {"ok": False, "error": "interrupted", "next_step": "", "problems": []}
    )  # fmt: skip
    assert "error: interrupted" in error
    assert [path.name for path in run_dir.glob(".raw*")] == []


def test_an_unfinished_run_is_never_deleted(run_dir):
    root, record = run_dir / "raw.checkpoints", run_dir / "raw/kt_adapter_manifest.json"
    interrupt(run_dir, 5, "max_steps=6")
    for change in ("learning_rate=1e-3", "lora_rank=2", "max_steps=8"):
        assert checkpoints(root) == ["checkpoint-4"]
        with pytest.raises(ProblemsError, match="this is another run") as caught:
            train(run_dir, "max_steps=6", change)
        assert [problem.where.rpartition(": ")[2] for problem in caught.value.problems]

    anew = ("max_steps=6", "resume_from_checkpoint=false", "save_steps=3")
    assert train(run_dir, *anew).first_step == 1
    aside = run_dir / "raw.checkpoints.old-1"
    assert (checkpoints(aside), checkpoints(root)) == (["checkpoint-4"], ["checkpoint-6"])
    first = record.read_bytes()

    # A finished run is another matter: its output is replaced, as overwrite_output_dir asks, and
    # its checkpoints with it, but not before the new run ends.
    interrupt(run_dir, 1, "max_steps=6", "lora_rank=2")
    assert record.read_bytes() == first
    assert (run_dir / "raw.checkpoints.replaced/checkpoint-6").is_dir()
    train(run_dir, "max_steps=6", "lora_rank=2")
    assert record.read_bytes() != first
    assert not (run_dir / "raw.checkpoints.replaced").exists()
    assert aside.exists()


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept_whatever_the_clock_shows(run_dir):
    root = run_dir / "raw.checkpoints"

    def clock_set_back(step: int, steps: int) -> None:
        for path in root.glob("checkpoint-*/*"):
            os.utime(path, (2e9, 2e9))  # of another year than what follows

    train(run_dir, "save_total_limit=2", on_progress=clock_set_back)
    assert checkpoints(root) == ["checkpoint-6", "checkpoint-8"]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run_dir):
    """Whichever of its files is damaged; the last one stays so."""
    own = ["max_steps=6", "save_total_limit=2"]
    interrupt(run_dir, 5, *own)
    root, config = run_dir / "raw.checkpoints", configured(run_dir, *own)
    assert found(config).step == 4
    files = sorted(path for path in (root / "checkpoint-4").iterdir() if path.is_file())
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth"} < {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        flip_a_bit(path)
        resumption = found(config)
        assert resumption.step == 2, path.name
        assert resumption.notes[0].code == "KTC019", path.name
        assert resumption.notes[0].where == str(path)
        path.write_bytes(whole)
    name = "trainable.safetensors"
    flip_a_bit(root / "checkpoint-4" / name)
    command = ["train", str(run_dir / "run.yaml"), *own, "--dry-run"]
    shown = run_command(*command)
    assert f"checkpoint-4/{name}" in shown.stderr
    assert "goes on after step 2" in shown.stderr
    flip_a_bit(root / "checkpoint-2" / name)
    assert run_command(*command, code=1).stderr.count("KTC019") == 2
    run_command(*command, f"resume_from_checkpoint={root / 'checkpoint-4'}", code=1)
    for step in (2, 4):  # not "another run", with the default of each setting for the checkpoint's
        os.truncate(root / f"checkpoint-{step}" / FINGERPRINT_FILE, 100)
    told = run_command(*command, code=1).stderr
    assert (told.count("KTC019"), told.count("KTC010")) == (2, 0)


@pytest.mark.slow
def test_one_run_at_a_time_trains_into_a_directory(run_dir, warm):
    endless = ("max_steps=100000", "save_steps=0")
    command = ("-m", "ktbridge", "train", run_dir / "run.yaml", *endless)
    first = warm.start(*command, cwd=run_dir, KTBRIDGE_THREADS="1")
    lock = run_dir / ".raw.ktbridge.lock"
    while first.poll() is None and not (lock.exists() and lock.read_text()):
        time.sleep(0.01)
    (run_dir / "link").symlink_to(run_dir)
    anew = ("seed=2", "resume_from_checkpoint=false")
    for overrides in ((), anew, ("output_dir=link/raw",)):  # the last: another name of the place
        second = run_command("train", run_dir / "run.yaml", *overrides, code=1)
        said = f"another run is writing to {run_dir / 'raw'} (process {first.pid} on"
        assert said in second.stderr
    first.kill()  # and so gives the lock up
    first.communicate(200)
    train(run_dir, "max_steps=2")
    assert not lock.exists()


def test_a_run_that_has_no_room_is_refused_before_it_loads(run_dir, monkeypatch):
    wide = ["save_total_limit=100000000", "max_steps=100000000", "save_steps=1"]
    refused = run_command("train", run_dir / "run.yaml", *wide, code=1)
    assert " free, and this run needs" in refused.stderr
    assert "checkpoints (100000000 kept and one being written) and the adapter" in refused.stderr
    assert not (run_dir / "raw.checkpoints").exists()
    # Without checkpoints their room is neither asked for nor a remedy.
    none = shutil.disk_usage(run_dir)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: none)
    with pytest.raises(KtbridgeError) as caught:
        check_room(configured(run_dir, "save_steps=0"), run_dir / "raw.checkpoints", 1000, 10)
    assert caught.value.sentence.endswith(" there: the adapter.")
    assert caught.value.next_step == "Make room, or choose another output_dir."


@pytest.mark.slow
def test_an_adapter_that_cant_be_published_is_in_a_place_that_is_named(run_dir):
    output, other = run_dir / "raw", run_dir / "other"

    def occupy(step: int, steps: int) -> None:
        if step == steps:
            for place in (output, other):
                place.mkdir(exist_ok=True)
                (place / "thesis.txt").write_text("mine")

    for overrides, place in (
        (["save_steps=1"], run_dir / "raw.checkpoints/checkpoint-2"),
        (["save_steps=0", "output_dir=other"], run_dir / "other-saved"),
    ):
        with pytest.raises(KtbridgeError, match="could not be written to") as caught:
            train(run_dir, "max_steps=2", *overrides, on_progress=occupy)
        assert str(place) in str(caught.value)
        assert validate_adapter([place]).ok
        assert (output / "thesis.txt").read_text() == "mine"
        shutil.rmtree(other)
    shutil.rmtree(output)
    # The checkpoint has all of its run: the same command writes the adapter and trains nothing.
    log: list[dict] = []
    train(run_dir, "max_steps=2", "save_steps=1", on_log=log.append)
    assert not log
    assert weights(output) == weights(run_dir / "raw.checkpoints/checkpoint-2")
    assert [step for step, _ in losses(output)] == [1, 2]


def test_a_killed_data_worker_is_a_sentence(run_dir):
    def kill_workers(step: int, steps: int) -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(KtbridgeError, match="a process that makes batches was ended") as caught:
        train(run_dir, "dataloader_num_workers=1", "save_steps=0", on_progress=kill_workers)
    assert "dataloader_num_workers: 0" in caught.value.next_step


@pytest.mark.slow
def test_a_full_disk_costs_no_checkpoint(run_dir):
    """Files may not grow, so that writing fails as it does without room; then there is room again."""
    root, overrides = run_dir / "raw.checkpoints", ["max_steps=6"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = 1000

    def fill_up(step: int, steps: int) -> None:
        if step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))

    # safetensors' file doesn't fit, then torch's: the optimizer's state is larger.
    for _ in range(2):
        try:
            with pytest.raises(KtbridgeError, match="checkpoint of step 4 could not be") as caught:
                train(run_dir, *overrides, on_progress=fill_up)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert f"the last good checkpoint is {root}/checkpoint-2." in str(caught.value)
        assert checkpoints(root) == ["checkpoint-2"]
        largest = (root / "checkpoint-2/trainable.safetensors").stat().st_size + 1000
    train(run_dir, *overrides)
    assert [step for step, _ in losses(run_dir / "raw")] == [1, 2, 3, 4, 5, 6]


# --- which checkpoint a run goes on from, before anything is loaded ----------------------------------------


def fingerprint_of(config: TrainConfig) -> RunFingerprint:
    config, _ = decide_precision(config, cuda=False)
    rows = fingerprint_rows(load_rows(config))
    return fingerprint_run(config, Path(config.model_name_or_path), rows)


def record_of(config: TrainConfig, **more: Any) -> dict[str, Any]:
    return {**fingerprint_of(config), **more}


def found(config: TrainConfig) -> Resumption:
    decided, _ = decide_precision(config, cuda=False)
    return find_checkpoint(decided, fingerprint_of(config))


def began(run_dir: Path, record: dict[str, Any], step: int = 2) -> Path:
    """A checkpoint as far as it is looked at before anything is loaded."""
    place = run_dir / f"raw.checkpoints/checkpoint-{step}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "optimizer.pt").touch()
    (place / FINGERPRINT_FILE).write_text(json.dumps(record))
    return place


def refused(run_dir: Path, *overrides: str) -> tuple[list[str], KtbridgeError]:
    """Which keys make it another run; and the error."""
    with pytest.raises(ProblemsError, match="another run") as caught:
        found(configured(run_dir, *overrides))
    return sorted(p.where.rpartition(": ")[2] for p in caught.value.problems), caught.value


def test_the_last_whole_checkpoint_is_gone_on_from(run_dir):
    config = configured(run_dir, "resume_from_checkpoint=true")
    assert found(config) == Resumption()  # nothing to go on from
    record = record_of(config, **{NUMBER: 1})
    places = began(run_dir, record, 10), began(run_dir, record | {NUMBER: 2}, 9)
    for place in places:
        (place / "optimizer.pt").unlink()
    with pytest.raises(KtbridgeError, match="saved with save_only_model=true"):
        found(config)
    (place / "optimizer.pt").touch()
    for asked in ("true", "null", str(place)):  # the last one written
        assert found(configured(run_dir, f"resume_from_checkpoint={asked}")).checkpoint == place
    began(run_dir, record | {NUMBER: 2, FILES: {"optimizer.pt": 7, "scheduler.pt": 5}}, 9)
    with pytest.raises(ProblemsError, match="the checkpoint is damaged") as caught:
        found(config)
    said = [(problem.found, problem.expected) for problem in caught.value.problems]
    assert said == [("0 bytes", "7 bytes"), ("no such file", "5 bytes")]
    began(run_dir, record | {NUMBER: 2}, 9)
    anew = found(configured(run_dir, "resume_from_checkpoint=false"))
    assert anew.checkpoint is None
    assert "raw.checkpoints.old-1" in anew.notes[0].next_step

    with pytest.raises(KtbridgeError, match="elsewhere is not a checkpoint"):
        found(configured(run_dir, "resume_from_checkpoint=elsewhere"))
    with pytest.raises(KtbridgeError, match="is not a checkpoint") as caught:
        found(configured(run_dir, f"resume_from_checkpoint={place.parent}"))
    assert caught.value.next_step == f"Name one in it: resume_from_checkpoint={place}."
    with pytest.raises(UsageError, match=r"at step 9, behind this run's last \(8\)") as caught:
        check_length(config, Resumption(place), 8)
    assert "name resume_from" not in caught.value.next_step  # the other one is at step 10
    check_length(config, Resumption(place), 9)


def test_a_continuation_must_be_of_the_same_run(run_dir):
    record = record_of(configured(run_dir))
    place = began(run_dir, record, 9)
    # Keys newer than 0.5.0 are left out at their defaults, as by a version that didn't know them; 0.6.0
    # wrote some of them.
    assert not {"use_rslora", "split_turns"} & record.keys()
    block = {**record["kt_config"], "kt_skip_expert_lora_adaptation": False}
    of_0_6 = {**record, "use_rslora": False, "split_turns": True, "kt_config": block}
    for each in (record, of_0_6):
        began(run_dir, each, 9)
        assert found(configured(run_dir)).checkpoint == place
        keys, error = refused(run_dir, "use_rslora=true")
        assert [problem.found for problem in error.problems] == ["False in the checkpoint's run"]
    # Another model's weights under the same name, which earlier versions didn't look at.
    config = configured(run_dir)
    weights = Path(config.model_name_or_path) / "model.safetensors"
    before = weights.read_bytes()
    began(run_dir, record, 9)
    try:
        header = 8 + int.from_bytes(before[:8], "little")
        weights.write_bytes(before[:header] + bytes(len(before) - header))
        assert refused(run_dir)[0] == [WEIGHTS]
        began(run_dir, {key: value for key, value in record.items() if key != WEIGHTS}, 9)
        assert found(configured(run_dir)).checkpoint == place
    finally:
        weights.write_bytes(before)
    # Earlier versions had no dropout on the experts: such a run is one with none.
    earlier = json.loads(json.dumps(record))
    assert earlier["kt_config"].pop("kt_lora_dropout") == 0.1
    began(run_dir, earlier, 9)
    refused(run_dir)
    assert found(configured(run_dir, "kt_lora_dropout=0")).checkpoint == place

    began(run_dir, record, 9)
    asked = "resume_from_checkpoint=true"
    free = ("learning_rate=0.1", "logging_steps=7", "kt_config.kt_num_threads=1")
    notes = {note.where.rpartition(": ")[2]: note for note in found(configured(run_dir, asked, *free)).notes}
    assert notes["learning_rate"].found == "0.01 until here, 0.1 from here on"
    with open(run_dir / "rows.jsonl", "a") as file:
        file.write((run_dir / "rows.jsonl").read_text().splitlines()[0] + "\n")
    keys, error = refused(run_dir, asked, *free, "kt_config.kt_lora_rank=2", "lora_dropout=0.2")
    assert keys == ["kt_config.kt_lora_dropout", "kt_config.kt_lora_rank", "lora_dropout", "rows"]
    assert "adapter_name_or_path" not in error.next_step  # of another rank
    keys, error = refused(run_dir, asked)
    assert keys == ["rows"]
    into = [f"adapter_name_or_path={place}", "resume_from_checkpoint=false"]
    assert all(words in error.next_step for words in (*into, "another output_dir"))
    with pytest.raises(UsageError, match="moves earlier checkpoints out of") as moved:
        check_start(configured(run_dir, *into), Resumption())
    assert moved.value.next_step == "Give another output_dir."
    check_start(configured(run_dir, *into, "output_dir=other"), Resumption())


@pytest.mark.parametrize(
    ("schedule", "goes_on"),
    [
        (["lr_scheduler_type=constant"], True),
        (["lr_scheduler_type=constant_with_warmup", "warmup_steps=2"], True),
        (["lr_scheduler_type=constant_with_warmup", "warmup_ratio=0.1"], False),
        ([], False),
    ],
)
def test_a_longer_run_goes_on_by_itself_where_its_length_changes_no_learning_rate(schedule, goes_on, run_dir):
    began(run_dir, record_of(configured(run_dir, *schedule)))
    longer = [*schedule, "max_steps=20"]
    if goes_on:
        resumption = found(configured(run_dir, *longer))
        assert resumption.step == 2
        assert [note.code for note in resumption.notes] == ["KTC011", "KTC021"]
    else:
        assert "resume_from_checkpoint=true" in refused(run_dir, *longer)[1].next_step


@pytest.mark.parametrize(
    ("size", "overrides", "other"),
    [
        (2, ["per_device_train_batch_size=1"], []),
        (4, ["per_device_train_batch_size=1", "gradient_accumulation_steps=1"], []),
        (2, [], ["processes"]),
        (4, ["per_device_train_batch_size=1"], ["per_device_train_batch_size", "processes"]),
    ],
)
def test_another_number_of_processes_goes_on_with_the_same_rows_in_a_step(
    size, overrides, other, run_dir, monkeypatch
):
    began(run_dir, record_of(configured(run_dir)))
    for name, value in (("WORLD_SIZE", size), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    asked = "resume_from_checkpoint=true"
    assert bool(other) != (asked in refused(run_dir, *overrides)[1].next_step)
    if other:
        keys, error = refused(run_dir, *overrides, asked)
        assert keys == other
        assert "keep the rows of a step" in error.next_step
        return
    notes = {n.where.rpartition(": ")[2]: n for n in found(configured(run_dir, *overrides, asked)).notes}
    assert notes["processes"].code == "KTC011"
    assert notes["processes"].found == f"1 until here, {size} from here on"
