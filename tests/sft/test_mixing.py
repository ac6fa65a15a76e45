"""`mix_strategy`: how several datasets make an epoch, and what is said of it."""

import pytest
from findings import codes
from tinymoe import tiny_tokenizer
from trainrun import conversation, quiet, tokenized, write_lines, write_run

from ktbridge.errors import ProblemsError
from ktbridge.sft.config import load_config
from ktbridge.sft.data import describe_rows

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
