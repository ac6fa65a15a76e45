"""`tokenized_path`: rows kept as tokens are used where nothing that they were made of has changed."""

import json
import os
from dataclasses import replace
from datetime import date, timedelta

import pytest
from findings import codes
from trainrun import conversation, quiet, text, train, write_lines, write_run

from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.sft.config import TrainConfig, load_config
from ktbridge.sft.config.fields import options
from ktbridge.sft.data import cache, describe_rows
from ktbridge.sft.data.cache import MANIFEST, cache_inputs
from ktbridge.sft.prepare import prepare

pytestmark = quiet
HELD = "val_size=3"


@pytest.fixture
def run_dir(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    base.mkdir()
    for file in base_dir.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    rows = [conversation(text(n, 3), text(n + 1, 2 + n % 5)) for n in range(20)]
    write_lines(tmp_path / "other.jsonl", rows[:7])
    return write_run(
        tmp_path, base, [*rows, conversation("nothing", ""), conversation("half \ud800", "x")],
        tokenized_path="kept", max_steps=2, save_steps=0,
        kt_config={"kt_num_threads": 2}, mix_strategy="interleave_over",
        dataset="rows.jsonl,other.jsonl", per_device_train_batch_size=2,
    )  # fmt: skip


def save(ready, on_note=None):
    store, rows = ready.to_cache
    store.save(rows, on_note)


def start(run_dir, *overrides):
    """What a start finds: its codes of kept rows, and the rows; these are kept as a run keeps them."""
    ready = prepare(load_config(run_dir / "run.yaml", [HELD, *overrides]))
    if ready.to_cache:
        told = []
        save(ready, told.append)
        assert codes(told) == {"KTD043"}
    return {code for code in codes(ready.notes) if code.startswith("KTD04")}, ready


def same(one, other):
    for part in ("fitted", "held_out"):
        ours, theirs = getattr(one, part), getattr(other, part)
        if ours is theirs is None:
            continue
        assert ours.dataset[:] == theirs.dataset[:]
        assert replace(ours, dataset=None) == replace(theirs, dataset=None)
        assert describe_rows(ours) == describe_rows(theirs)
    assert one.fingerprint == other.fingerprint


@pytest.mark.slow
def test_a_second_start_has_the_same_rows_and_trains_the_same(run_dir):
    told = []
    train(run_dir, HELD, "output_dir=first", on_note=told.append)
    assert "KTD043" in codes(told)
    files = {path.name for path in (run_dir / "kept").iterdir()}
    assert files == {MANIFEST, "train.arrow", "held_out.arrow"}
    (found, ready), (nothing, plain) = start(run_dir), start(run_dir, "tokenized_path=null")
    assert (found, nothing, ready.to_cache) == ({"KTD043"}, set(), None)
    same(ready, plain)
    assert len(ready.fitted.refused) == 2
    train(run_dir, HELD, "output_dir=second")
    assert {path.name for path in (run_dir / "kept").iterdir()} == files
    for name in ("fused_expert_lora.safetensors", "training_data.json", "refused_rows.jsonl"):
        assert (run_dir / "first" / name).read_bytes() == (run_dir / "second" / name).read_bytes()


def test_whatever_rows_are_made_of_makes_them_anew(run_dir):
    assert start(run_dir)[0] == set()
    assert start(run_dir, "learning_rate=0.5", "max_steps=1", "save_steps=3")[0] == {"KTD043"}
    for changed in ("cutoff_len=16", "seed=1", "packing=true", "val_size=2", "max_samples=9"):
        assert start(run_dir, changed)[0] == {"KTD041"}, changed
    start(run_dir)
    rows, template = run_dir / "rows.jsonl", run_dir / "base" / "chat_template.jinja"
    before = rows.stat()
    rows.write_text(rows.read_text().replace("who", "are", 1))  # as many bytes, and the time put back
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    found, ready = start(run_dir)
    assert found == {"KTD041"}
    assert "dataset 1" in next(n.found for n in ready.notes if n.code == "KTD041")
    assert start(run_dir)[0] == {"KTD043"}
    template.open("a").write(" ")
    assert start(run_dir)[0] == {"KTD041"}
    assert start(run_dir, "overwrite_cache=true")[0] == {"KTD041"}


def test_every_setting_counts_that_rows_may_depend_on(run_dir, base_dir):
    config = load_config(run_dir / "run.yaml")
    keys = cache_inputs(config, base_dir).keys()
    assert {key for key, option in options(TrainConfig).items() if option.rows} <= keys
    assert {"cutoff_len", "seed", "tokenizer", "version of jinja2", "dataset 2"} <= keys
    assert not {"learning_rate", "output_dir"} & keys


def test_rows_that_change_while_they_are_read_are_not_kept(run_dir):
    ready = prepare(load_config(run_dir / "run.yaml"))
    with (run_dir / "rows.jsonl").open("a") as file:
        file.write("\n")
    save(ready)
    assert not (run_dir / "kept").exists()
    assert start(run_dir)[0] == set()


@pytest.mark.parametrize("name", [MANIFEST, "train.arrow", "held_out.arrow"])
def test_damaged_files_are_noticed_and_made_anew(run_dir, name):
    plain = start(run_dir)[1]
    path = run_dir / "kept" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)
    found, ready = start(run_dir)
    assert found == {"KTD042"}
    same(ready, plain)
    assert start(run_dir)[0] == {"KTD043"}


def test_a_directory_of_something_else_is_left_alone(run_dir):
    (run_dir / "kept").mkdir()
    (run_dir / "kept" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    with pytest.raises(KtbridgeError, match="something else than rows kept by ktbridge"):
        start(run_dir)
    (run_dir / "file").write_text("")
    with pytest.raises(KtbridgeError, match="is no directory"):
        start(run_dir, "tokenized_path=file")


def test_a_dataset_that_is_not_there_is_told_and_not_left_out(run_dir):
    entry = {"file_name": "rows.jsonl", "formatting": "openai", "columns": {"messages": "messages"}}
    (run_dir / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    given = ("dataset_dir=.", "mix_strategy=concat")
    start(run_dir, *given)
    assert start(run_dir, *given)[0] == {"KTD043"}
    for names in ("rows.jsonl,other.jsonl,mein", "rows.jsonl,mein,other.jsonl"):
        with pytest.raises(ProblemsError) as caught:
            start(run_dir, *given, f"dataset={names}")
        assert codes(caught) == {"KTD002"}
    named = [*given, "val_size=0", "eval_dataset=other.jsonl"]
    assert start(run_dir, *named)[1].held_out.used == 7
    assert start(run_dir, *named)[0] == {"KTD043"}
    with pytest.raises(ProblemsError):
        start(run_dir, *named, "eval_dataset=other.jsonl,mein")


def test_rows_are_not_kept_whose_images_may_be_put_right_later(run_dir):
    row = {**conversation("<image> who", "me"), "images": ["x.png"]}
    write_lines(run_dir / "other.jsonl", [row, *[conversation("who", "me")] * 3])
    told = []
    ready = prepare(load_config(run_dir / "run.yaml"))
    save(ready, told.append)
    assert "1 are refused for their images" in told[0].found
    assert not (run_dir / "kept").exists()


def test_a_template_that_writes_the_date_makes_rows_anew_each_day(run_dir, monkeypatch):
    template = run_dir / "base" / "chat_template.jinja"
    assert "date" not in cache_inputs(load_config(run_dir / "run.yaml"), template.parent)
    with template.open("a") as file:
        file.write('{%- if false %}{{ strftime_now("%d") }}{% endif %}')
    start(run_dir)
    assert start(run_dir)[0] == {"KTD043"}

    class Tomorrow(date):
        @classmethod
        def today(cls):
            return date.today() + timedelta(days=1)

    monkeypatch.setattr(cache, "date", Tomorrow)
    found, ready = start(run_dir)
    assert found == {"KTD041"}
    assert any(note.found == "kept of another date" for note in ready.notes)


def test_rows_that_another_run_puts_there_meanwhile_are_not_taken_for_these(run_dir, monkeypatch):
    """Between the manifest's reading and the files' another run replaces the directory."""
    plain = start(run_dir, "val_size=0")[1]
    whole = cache.digests.is_whole

    def replaced(path, *expected):
        found = whole(path, *expected)
        monkeypatch.setattr(cache.digests, "is_whole", whole)
        start(run_dir, "val_size=0", "cutoff_len=16")
        return found

    monkeypatch.setattr(cache.digests, "is_whole", replaced)
    found, ready = start(run_dir, "val_size=0")
    assert found == {"KTD041"}
    same(ready, plain)
