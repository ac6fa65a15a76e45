"""`streaming`: rows are read while the run goes; how it goes on is in test_resume.py."""

import json

import pytest
from findings import codes
from trainrun import conversation, interrupt, quiet, text, train, write_lines, write_run

from ktbridge.errors import ProblemsError
from ktbridge.sft.config import load_config
from ktbridge.sft.data import RowStream, describe_rows
from ktbridge.sft.prepare import prepare

pytestmark = quiet


@pytest.fixture
def run_dir(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [conversation(text(n, 3), text(n + 1, 2 + n % 5)) for n in range(400)]
    rows[7::10] = [conversation("nothing", "")] * 40
    write_lines(tmp_path / "more.jsonl", [conversation(text(n, 2), "meow") for n in range(30)])
    return write_run(
        tmp_path, base_dir, rows, streaming=True, buffer_size=64, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, max_steps=50, save_steps=5, lora_dropout=0.1,
        learning_rate=1e-3, kt_config={"kt_num_threads": 2}, logging_steps=1,
    )  # fmt: skip


def test_each_epoch_has_every_row_once_in_another_order(run_dir):
    config = load_config(run_dir / "run.yaml")
    drawn = RowStream(config)._draw_rows()
    epochs = [[next(drawn)[1].where for _ in range(400)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == 400
    assert epochs[0] != epochs[1]
    ready = prepare(load_config(run_dir / "run.yaml", ["val_size=30"]))
    held = ready.stream._held_places
    assert (ready.held_out.used, len(held)) == (30, 30)
    drawn = ready.stream._draw_rows()
    assert not held & {next(drawn)[1].where for _ in range(740)}
    assert describe_rows(ready.fitted).startswith("used 2")
    assert "of the first 256 rows" in describe_rows(ready.fitted)


@pytest.mark.slow
def test_a_stream_that_goes_bad_ends_the_run_with_its_rows_named(run_dir):
    good = [conversation(text(n, 3), "meow") for n in range(300)]
    write_lines(run_dir / "rows.jsonl", [*good, *[conversation("x", "")] * 900])
    with pytest.raises(ProblemsError, match=r"of the .* rows read so far can't be used") as caught:
        train(run_dir)
    assert codes(caught) == {"KTD001"}
    assert not (run_dir / "raw").exists()
    assert [*(run_dir / "raw.checkpoints").glob("checkpoint-*")]
    told = []
    many = ("allow_refused_rows=true", "max_steps=70", "resume_from_checkpoint=false")
    train(run_dir, *many, on_note=told.append)
    assert "KTD008" in codes(told)
    with pytest.raises(ProblemsError):
        train(run_dir, "strict_data=true", "output_dir=strict")


@pytest.mark.slow
def test_what_needs_all_rows_at_once_is_refused(run_dir):
    with pytest.raises(ProblemsError) as caught:
        load_config(
            run_dir / "run.yaml",
            ["max_steps=-1", "val_size=0.1", "tokenized_path=kept", "dataloader_num_workers=2",
             "eval_strategy=epoch"],
        )  # fmt: skip
    assert codes(caught) == {"KTC082"}
    assert len(caught.value.problems) == 5
    (run_dir / "list.json").write_text(json.dumps([conversation("a", "b")]))
    with pytest.raises(ProblemsError) as caught:
        prepare(load_config(run_dir / "run.yaml", ["dataset=list.json"]))
    assert codes(caught) == {"KTD044"}
    lines = (run_dir / "rows.jsonl").read_text()
    interrupt(run_dir, 6)
    (run_dir / "rows.jsonl").write_text(lines.replace("who", "are", 1))
    with pytest.raises(ProblemsError, match="another run") as caught:
        train(run_dir)
    assert [one.where.rpartition(": ")[2] for one in caught.value.problems] == ["rows"]


def test_an_empty_file_and_one_that_changes_are_told(run_dir):
    (run_dir / "empty.jsonl").write_text("\n")
    with pytest.raises(ProblemsError) as caught:
        prepare(load_config(run_dir / "run.yaml", ["dataset=rows.jsonl,empty.jsonl"]))
    assert codes(caught) == {"KTD044"}
    assert [one.found for one in caught.value.problems] == ["no row"]
    with pytest.raises(ProblemsError) as caught:
        prepare(load_config(run_dir / "run.yaml", ["dataset=more.jsonl", "val_size=30"]))
    assert codes(caught) == {"KTD011"}

    def shorten(done, steps):
        rows = run_dir / "more.jsonl"
        rows.write_text("".join(rows.open().readlines()[:-1]))

    told = []
    short = ("dataset=more.jsonl", "max_steps=2", "save_steps=0")
    train(run_dir, *short, on_note=told.append)
    assert "KTD061" not in codes(told)
    train(run_dir, *short, "output_dir=other", on_note=told.append, on_progress=shorten)
    assert [note.where for note in told if note.code == "KTD061"] == [str(run_dir / "more.jsonl")]
