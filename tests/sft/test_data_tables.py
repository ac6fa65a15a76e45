"""Rows of Parquet and CSV files, and of datasets on the Hub: a real server on loopback."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hubserver import running_hub
from trainrun import messages_of

from ktbridge.errors import KtbridgeError
from ktbridge.sft.config import parse_config
from ktbridge.sft.data import format_refused, load_rows

MESSAGES = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def settings(*names, **values):
    given = {"model_name_or_path": "m", "dataset": [str(name) for name in names], "output_dir": "o"}
    return parse_config({**given, **values})


def parquet(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def alpaca(*words):
    return [{"instruction": word, "output": f"to {word}"} for word in words]


def answers(rows):
    return [conversation[-1]["content"] for conversation in messages_of(rows)]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with running_hub() as made:
        made.use(monkeypatch, tmp_path / "home")
        yield made


def test_parquet_rows_are_those_of_json_and_keep_their_places(tmp_path):
    path = tmp_path / "rows.parquet"
    silent = {"messages": [{"role": "user", "content": "only asked"}]}
    path.write_bytes(parquet([MESSAGES, silent, MESSAGES]))
    rows = load_rows(settings(path))
    assert answers(rows) == ["yo", "yo"]
    assert [row.where for row in rows.rows] == [f"{path}: row 1", f"{path}: row 3"]
    assert [item.where for item in rows.refused] == [f"{path}: row 2"]
    assert json.loads(format_refused(rows.refused))["row"] == silent
    path.write_bytes(parquet([PAIR]))
    (pair,) = load_rows(settings(path, stage="dpo")).rows
    assert pair.messages[-1] == {"role": "assistant", "content": "a"}
    # Half a download, and a page that was written over.
    path.write_bytes(parquet([MESSAGES])[:-9])
    with pytest.raises(KtbridgeError, match=r"rows\.parquet is not Parquet that can be read"):
        load_rows(settings(path))


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")])
def test_csv_cells_are_text_and_may_hold_marks_quotes_and_lines(name, mark, tmp_path):
    path = tmp_path / name
    lines = [
        ["instruction", "output", '"note, source, date"'], ["add 40", "42", ""],
        ['"a, ""b""\nc"', "say 'd' or", ""], ["only one"], [], ["last", "7.0", "x"],
    ]  # fmt: skip
    text = "\r\n".join(mark.join(cells) for cells in lines)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = load_rows(settings(path))
    assert answers(rows) == ["42", "say 'd' or", "7.0"]
    assert messages_of(rows)[1][0]["content"] == 'a, "b"\nc'
    assert [(item.where, item.why) for item in rows.refused] == [
        (f"{path}: row 3", "with 1 cells under 3 column names")
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'instruction,output\n"open,x\ny,z\n', "not CSV that can be read: .* at line"),
        (b"instruction,output\n\xff,x\n", "not UTF-8"),
        (b"output,output\na,b\n", "two columns 'output'"),
        ("a,b\n".encode("utf-16"), "UTF-16"),
        (b"instruction,output\n", "holds no row"),
        (b"PAR1 not really", "not Parquet"),
    ],
)
def test_a_broken_table_is_a_sentence(data, words, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(data)
    with pytest.raises(KtbridgeError, match=words):
        load_rows(settings(path))


def test_a_dataset_of_the_hub_by_name_is_downloaded_once(hub, tmp_path, monkeypatch):
    jsonl = "".join(json.dumps(row) + "\n" for row in alpaca("a", "b")) + "{broken\n"
    files = {"train.jsonl": jsonl.encode(), "test.jsonl": b"{}", "script.py": b"evil()"}
    repo = hub.dataset("org/rows", files)
    rows = load_rows(settings("org/rows"))
    assert answers(rows) == ["to a", "to b"]
    assert rows.rows[0].where == "org/rows/train.jsonl: line 1"
    assert rows.refused[0].where == "org/rows/train.jsonl: line 3"
    assert [hub.downloads(name) for name in (".jsonl", "test.jsonl", ".py")] == [[""], [], []]
    # What is in the cache needs no network; another revision does.
    hub.asked.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert len(load_rows(settings("org/rows")).rows) == 2
    with pytest.raises(KtbridgeError, match="HF_HUB_OFFLINE"):
        load_rows(settings(f"org/rows@{repo.commit}"))
    assert not hub.asked


SUBSETS = b"""---
configs:
- config_name: small
  data_files:
  - {split: train, path: small/*.parquet}
  - {split: held_out, path: other/held.parquet}
- {config_name: large, data_files: large/*.json}
---
# Rows
"""


def test_an_entry_chooses_subset_split_folder_and_samples(hub, tmp_path):
    hub.dataset("org/several", {
        "README.md": SUBSETS,
        "small/0.parquet": parquet(alpaca("a", "b", "c")), "small/1.parquet": parquet(alpaca("d")),
        "other/held.parquet": parquet(alpaca("x")), "large/z.json": b"[]",
    })  # fmt: skip
    english = json.dumps(alpaca("e")).encode()
    folders = {"en/train.json": english, "zh/train.json": b"[]", "notes.txt": b""}
    hub.dataset("org/folders", folders)
    url = {"hf_hub_url": "org/several", "ms_hub_url": "other/place", "subset": "small"}
    info = {
        "all": {**url, "split": None},
        "held": {**url, "split": "held_out", "revision": "main"},
        "few": {**url, "num_samples": 2},
        "many": {**url, "num_samples": 9},
        "folder": {"hf_hub_url": "org/folders", "folder": "en"},
        "none": {**url, "split": "test"},
        "lost": {**url, "subset": "medium"},
        "which": {"hf_hub_url": "org/several"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))

    def read(name, **values):
        return answers(load_rows(settings(name, dataset_dir=str(tmp_path), **values)))

    whole = ["to a", "to b", "to c", "to d"]
    assert (read("all"), read("held"), read("folder")) == (whole, ["to x"], ["to e"])
    few = read("few")
    assert len(set(few)) == 2
    assert few == read("few")
    assert {tuple(read("few", seed=seed)) for seed in range(9)} != {tuple(few)}
    many = read("many")
    assert (len(many), set(many)) == (9, {*whole})
    assert len(read("many", max_samples=3)) == 3
    for name, words in (
        ("none", "org/several on the Hub has no split 'test'"),
        ("lost", "has no subset 'medium'"),
        ("which", "has several subsets"),
    ):
        with pytest.raises(KtbridgeError, match=words) as caught:
            read(name)
        assert "to one of: " in caught.value.next_step


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/none", "there is no dataset 'org/none': no directory"),
        ("org/rows@v9", "no branch, tag or commit 'v9'"),
        ("org/gated", "org/gated is gated"),
        ("org/pictures", "no JSON, Parquet or CSV file"),
        ("org/odd", "on the Hub can't be read as a dataset"),
    ],
)
def test_a_dataset_that_cant_be_had_is_a_sentence(name, words, hub):
    rows = {"train.jsonl": json.dumps(MESSAGES).encode() + b"\n"}
    hub.dataset("org/rows", rows)
    hub.dataset("org/gated", rows).gated = True
    hub.dataset("org/pictures", {"a.png": b"x"})
    broken = b"---\nconfigs:\n- config_name: x\n  data_files: gone/*.json\n---\n"
    hub.dataset("org/odd", {**rows, "README.md": broken})
    with pytest.raises(KtbridgeError, match=words) as caught:
        load_rows(settings(name))
    assert caught.value.next_step
