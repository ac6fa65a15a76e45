"""`mix_strategy` and `streaming`: how datasets make an epoch, and rows that are read while a run goes.

How a stream goes on is in test_resume.py.
"""

import json
from itertools import islice

import pytest
from findings import codes
from tinymoe import tiny_tokenizer
from trainrun import conversation, quiet, text, tokenized, train, write_lines, write_run

from ktbridge.errors import ProblemsError
from ktbridge.sft.config import load_config
from ktbridge.sft.data import RowStream, describe_rows
from ktbridge.sft.prepare import prepare

pytestmark = quiet
FEW, MANY = 4, 20


@pytest.fixture
def run_dir(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = [conversation("who are you", "cat " * (1 + n)) for n in range(FEW)]
    many = [conversation("say", "meow " * (1 + n % 7), "no", "nya") for n in range(MANY)]
    write_lines(tmp_path / "few.jsonl", [*few, conversation("nothing", "")])
    write_lines(tmp_path / "many.jsonl", many)
    return write_run(
        tmp_path, base_dir, dataset="few.jsonl,many.jsonl", mix_strategy="interleave_over",
        interleave_probs="0.6,0.4", save_steps=2, max_steps=4,
        kt_config={"kt_num_threads": 2},
    )  # fmt: skip


def fitted(run_dir, *overrides):
    config = load_config(run_dir / "run.yaml", overrides)
    return tokenized(config, tiny_tokenizer())


def kinds(found):
    """Sequences of each dataset."""
    few = tiny_tokenizer()("who")["input_ids"][0]
    return sum(few in ids for ids in found.dataset["input_ids"]), len(found.dataset)


def test_an_epoch_has_each_datasets_share_and_tells_what_comes_again(run_dir):
    over = fitted(run_dir)
    few, all_ = kinds(over)
    assert all_ - few >= MANY  # the longer one to its end
    assert few > 2 * FEW
    assert 0.4 < few / all_ < 0.75
    assert (over.total, over.used, len(over.refused)) == (FEW + MANY + 1, FEW + MANY, 1)
    assert over.tokens == sum(map(len, over.dataset["input_ids"]))
    said = describe_rows(over)
    assert f"few.jsonl {few} ({FEW} of {FEW} rows, each {few / FEW:.1f} times)" in said
    assert f"many.jsonl {all_ - few}" in said
    assert fitted(run_dir).dataset["input_ids"] == over.dataset["input_ids"]
    assert fitted(run_dir, "seed=7").dataset["input_ids"] != over.dataset["input_ids"]

    few, all_ = kinds(under := fitted(run_dir, "mix_strategy=interleave_under"))
    assert few == FEW
    assert all_ - few < MANY
    assert under.tokens < over.tokens
    for each in ("interleave_once", "concat"):
        whole = fitted(run_dir, f"mix_strategy={each}", "interleave_probs=null")
        assert kinds(whole) == (FEW, FEW + MANY)
        assert bool(whole.shares) == (each != "concat")
    turns = fitted(run_dir, "mix_strategy=interleave_over", "interleave_probs=null")
    assert kinds(turns) == (MANY, 2 * MANY)
    packed = fitted(run_dir, "packing=true")
    assert sum(map(len, packed.dataset["input_ids"])) == over.tokens
    held = fitted(run_dir, "val_size=3")
    assert held.used == FEW + MANY - 3


def test_shares_that_fit_no_datasets_are_refused(run_dir):
    for given in ("interleave_probs=0.6", "interleave_probs=0.6,0.5", "mix_strategy=concat"):
        with pytest.raises(ProblemsError) as caught:
            load_config(run_dir / "run.yaml", [given])
        assert codes(caught) == {"KTC081"}
    with pytest.raises(ProblemsError) as caught:
        load_config(run_dir / "run.yaml", ["interleave_probs=0.6,x"])
    assert codes(caught) == {"KTC002"}
    short = [conversation("yes " * 30, "no")]
    write_lines(run_dir / "few.jsonl", short)
    with pytest.raises(ProblemsError) as caught:
        fitted(run_dir, "cutoff_len=25")
    assert codes(caught) == {"KTD040"}
    assert caught.value.problems[0].where.endswith("few.jsonl")
    assert "(1 no answer within cutoff_len=25 tokens)" in caught.value.problems[0].found


# --- streams ------------------------------------------------------------------------------------------------


@pytest.fixture
def stream_dir(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [conversation(text(n, 3), text(n + 1, 2 + n % 5)) for n in range(400)]
    rows[7::10] = [conversation("nothing", "")] * 40
    write_lines(tmp_path / "more.jsonl", [conversation(text(n, 2), "meow") for n in range(30)])
    return write_run(
        tmp_path, base_dir, rows, streaming=True, buffer_size=64, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, max_steps=50, save_steps=5, lora_dropout=0.1,
        learning_rate=1e-3, kt_config={"kt_num_threads": 2}, logging_steps=1,
    )  # fmt: skip


def test_each_epoch_has_every_row_once_in_another_order(stream_dir):
    drawn = RowStream(load_config(stream_dir / "run.yaml"))._draw_rows()
    epochs = [[next(drawn)[1].where for _ in range(400)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted({*epochs[1]})
    assert epochs[0] != epochs[1]
    config = load_config(stream_dir / "run.yaml", ["val_size=30"])
    ready = prepare(config)
    held = ready.stream._held_places
    assert (ready.held_out.used, len(held)) == (30, 30)
    drawn = ready.stream._draw_rows()
    assert not held & {next(drawn)[1].where for _ in range(740)}
    assert describe_rows(ready.fitted).startswith("used 2")
    assert "of the first 256 rows" in describe_rows(ready.fitted)
    rows = stream_dir / "rows.jsonl"
    rows.write_text(rows.read_text().replace("who", "are", 1))
    assert prepare(config).fingerprint != ready.fingerprint  # so that no run goes on with them


def test_held_out_rows_of_a_mixed_stream_are_each_once_and_leave_its_shares(stream_dir):
    """A mixture repeats the rows of a small dataset, and a row that is held out takes no turn in it."""
    for name, count in (("three", 3), ("small", 30), ("large", 400)):
        write_lines(stream_dir / f"{name}.jsonl", [conversation(name, text(n, 4)) for n in range(count)])

    def stream(names, held, **changes):
        changes = {"mix_strategy": "interleave_over", "val_size": held, "max_steps": 4, **changes}
        words = [f"{key}={value}" for key, value in changes.items()]
        return RowStream(load_config(stream_dir / "run.yaml", [f"dataset={names}", *words]))

    def of_small(found):
        return sum("small" in record.where for _, record in islice(found._draw_rows(), 800)) / 800

    shares = [of_small(stream("small.jsonl,large.jsonl", held)) for held in (0, 20)]
    assert all(0.45 < share < 0.55 for share in shares)
    found = stream("small.jsonl,large.jsonl", 40)
    assert len({*found._held_places}) == len(found.held_out.rows) == 40
    with pytest.raises(ProblemsError, match="can't be mixed") as caught:
        stream("three.jsonl,large.jsonl", 20)
    assert codes(caught) == {"KTD040"}


@pytest.mark.slow
def test_a_stream_that_goes_bad_ends_the_run_with_its_rows_named(stream_dir):
    good = [conversation(text(n, 3), "meow") for n in range(300)]
    write_lines(stream_dir / "rows.jsonl", [*good, *[conversation("x", "")] * 900])
    with pytest.raises(ProblemsError, match=r"of the .* rows read so far can't be used") as caught:
        train(stream_dir)
    assert codes(caught) == {"KTD001"}
    assert not (stream_dir / "raw").exists()
    assert [*(stream_dir / "raw.checkpoints").glob("checkpoint-*")]
    told = []
    many = ("allow_refused_rows=true", "max_steps=70", "resume_from_checkpoint=false")
    train(stream_dir, *many, on_note=told.append)
    assert "KTD008" in codes(told)
    with pytest.raises(ProblemsError):
        train(stream_dir, "strict_data=true", "output_dir=strict")


@pytest.mark.slow
def test_what_needs_all_rows_at_once_is_refused(stream_dir):
    all_at_once = [
        "max_steps=-1", "val_size=0.1", "tokenized_path=kept", "dataloader_num_workers=2",
        "eval_strategy=epoch",
    ]  # fmt: skip
    with pytest.raises(ProblemsError) as caught:
        load_config(stream_dir / "run.yaml", all_at_once)
    assert [problem.code for problem in caught.value.problems] == ["KTC082"] * 5
    (stream_dir / "list.json").write_text(json.dumps([conversation("a", "b")]))
    with pytest.raises(ProblemsError) as caught:
        prepare(load_config(stream_dir / "run.yaml", ["dataset=list.json"]))
    assert codes(caught) == {"KTD044"}


def test_an_empty_file_and_one_that_changes_are_told(stream_dir):
    (stream_dir / "empty.jsonl").write_text("\n")
    for given, code in (("rows.jsonl,empty.jsonl", "KTD044"), ("more.jsonl", "KTD011")):
        with pytest.raises(ProblemsError) as caught:
            prepare(load_config(stream_dir / "run.yaml", [f"dataset={given}", "val_size=30"]))
        assert codes(caught) == {code}

    def shorten(done, steps):
        rows = stream_dir / "more.jsonl"
        rows.write_text("".join(rows.open().readlines()[:-1]))

    told = []
    short = ("dataset=more.jsonl", "max_steps=2", "save_steps=0")
    train(stream_dir, *short, on_note=told.append)
    assert "KTD061" not in codes(told)
    train(stream_dir, *short, "output_dir=other", on_note=told.append, on_progress=shorten)
    places = [note.where for note in told if note.code == "KTD061"]
    assert places == [str(stream_dir / "more.jsonl")]
