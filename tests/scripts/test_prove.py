"""The proof's steps, what it measures of rows, and its page: made of small results in the real ones' form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tinymoe import tiny_model, tiny_tokenizer
from tinyserver import ASCII, save_tokenizer
from trainrun import ROWS, conversation, quiet, write_run

from ktbridge.adapter import open_adapter
from ktbridge.errors import KtbridgeError

WRITE = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text(pathlib.Path(sys.argv[1]).read_text())"


@pytest.fixture
def step(tmp_path: Path):
    """A step that copies ``source`` to ``target``."""
    from proving.steps import Step

    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("one")
    return Step("copy", [sys.executable, "-c", WRITE, str(source), str(target)], [source], target)


def test_a_step_is_made_once_until_what_it_reads_changes(tmp_path, step, capsys) -> None:
    from proving.steps import Steps

    for text, ran in (("one", True), ("one", False), ("two", True)):
        step.reads[0].write_text(text)
        assert Steps(tmp_path).run(step).read_text() == text
        assert ("kept  copy" in capsys.readouterr().out) is not ran
    step.writes.write_text("changed by hand")
    assert Steps(tmp_path).run(step).read_text() == "two"
    assert list(json.loads((tmp_path / "seconds.json").read_text())) == ["copy"]


def test_a_step_that_fails_ends_with_the_end_of_its_log_and_is_made_again(tmp_path, step) -> None:
    from proving.steps import Steps

    step.reads[0].unlink()
    with pytest.raises(KtbridgeError, match="copy ended with 1") as failure:
        Steps(tmp_path).run(step)
    assert "FileNotFoundError" in str(failure.value)
    step.reads[0].write_text("there")
    assert Steps(tmp_path).run(step).read_text() == "there"


def test_only_the_answer_counts(tmp_path) -> None:
    from proving.quality import means, tokenized

    tokenizer = save_tokenizer(tmp_path, ASCII)
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    ids, start = tokenized(tokenizer, row)
    assert tokenizer.decode(ids[start:-1]) == "yes"
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenized(tokenizer, {"text": "yes"})[1] == 1
    assert means([-1.0, -2.0, -6.0], [2, 1]) == [1.5, 6.0]


def test_the_difference_of_two_losses_is_paired_by_row() -> None:
    """Rows far apart, one nat better each: the interval knows that, and weighs rows by their tokens."""
    from proving.proof_page import paired

    found = paired([1.0, 5.0, 9.0], [0.0, 4.0, 8.0], [10, 20, 30])
    assert found == pytest.approx({"mean": -1, "low": -1, "high": -1})
    assert paired([0, 0], [0, 1], [1, 3])["mean"] == 0.75


@quiet
@pytest.mark.parametrize("bf16", [True, False])
def test_the_peer_trains_in_the_fastest_precision_that_the_machine_has(tmp_path, bf16) -> None:
    from proving import hf_peer

    base, output = tmp_path / "base", tmp_path / "peer" / "adapter"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    rows = [conversation(*row) for row in ROWS]
    whole = {"max_steps": 6, "per_device_train_batch_size": len(rows)}
    write_run(tmp_path, base, rows, bf16=bf16, lora_alpha=8, **whole)
    hf_peer.main(str(tmp_path / "run.yaml"), str(output), "learning_rate=1e-2")
    told = json.loads((output / "losses.json").read_text())
    assert list(told["tried"]) == (list(hf_peer.PRECISIONS) if bf16 else [])
    speeds = {name: each["seconds_a_step"] for name, each in told["tried"].items()}
    assert told["precision"] == min(speeds, key=lambda name: speeds[name], default="float32")
    (_, first), *_, (last_step, last) = told["losses"]
    assert (last_step, last < first - 0.5) == (6, True)
    for each in told["tried"].values():  # the same rows and adapter, whatever was tried before
        assert each["first_loss"] == pytest.approx(first, rel=0.01)
    assert open_adapter(output, base_model=base).expert_layers() == (0, 1)


@pytest.fixture
def found(tmp_path: Path) -> dict:
    """What a proof found in which vLLM served the base alone."""
    for name in ("adapter/raw", "peer/adapter", "again/raw"):
        (tmp_path / name).mkdir(parents=True)
        for file in ("fused_expert_lora.safetensors", "adapter_model.safetensors"):
            (tmp_path / name / file).write_bytes(name.encode() if file.startswith("fused") else b"same")
    log = [{"step": step, "loss": 3 - step} for step in (1, 2)]
    (tmp_path / "adapter/raw/trainer_log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in log))
    speeds = {"bfloat16": 8.4, "float32": 4.5}
    peer = {
        "losses": [[1, 2.5], [2, 1.5]],
        "seconds": 9.0,
        "steps": 2,
        "trained": 1000,
        "experts": "grouped_mm",
        "precision": "float32",
        "tried": {name: {"seconds_a_step": each} for name, each in speeds.items()},
        "versions": {"transformers": "5", "peft": "0.22"},
    }
    (tmp_path / "peer/adapter/losses.json").write_text(json.dumps(peer))
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 20}
    arms = ("base", "ktbridge", "peer")

    def result(*slices: str) -> dict:
        contrasts = [
            {
                "axis": "task",
                "slice": name,
                "of": arm,
                "minus": "base",
                "verdict": "dropped",
                **interval,
            }
            for name in slices
            for arm in arms[1:]
        ]
        return {
            "tables": {"task": {name: dict.fromkeys(arms, interval) for name in slices}},
            "contrasts": contrasts,
        }

    rows = {"tokens": [3, 4], "base": [2.0, 3.0], "ktbridge": [1.0, 2.5], "peer": [1.0, 3.0]}
    halves = [{"half": half, "verdict": "applied"} for half in ("expert", "nonexpert")]
    applied = {"ok": True, "verdict": "applied", "halves": halves, "logprobs_from": "echo"}
    return {
        "settings": {"experts": "cpu"},
        "again": True,
        "validate": {"ok": True},
        "verdicts": {"ours": applied, "vLLM": {**applied, "ok": False, "verdict": "not applied"}},
        "eval": {"bench": result("FACTS", "GENERAL"), "nekobench-slice": result("overall")},
        "quality": {"held_out": rows, "plain": rows},
    }


def test_what_failed_comes_first_on_the_page(tmp_path, found) -> None:
    from proving.proof_page import failures, write_page
    from proving.steps import Steps

    wrong = failures(tmp_path, found)
    assert wrong == [
        "verify, vLLM: not applied",
        "fused_expert_lora.safetensors of a second run has other bits",
    ]
    found_by_validate = failures(tmp_path, {**found, "validate": {"ok": False}})
    assert found_by_validate == ["validate found problems: validate.json has them", *wrong]
    steps, page = Steps(tmp_path), tmp_path / "page"
    steps.commands["train"], steps.seconds["train"] = "ktbridge train train.yaml", 61.0
    write_page(page, steps, found, wrong)
    text = (page / "README.md").read_text()
    assert text.index("**Failed: verify, vLLM: not applied") < text.index("## Did the adapter")
    assert (
        "| loss of 40 held-out answers in the style | 2.57 | 1.86 | -0.71 [-1.00, -0.50] | 2.14 | -0.43 "
        in text
    )
    assert "float32, the fastest of those tried, in seconds a step: bfloat16 8.4, float32 4.5)" in text
    assert "0.50 | +0.50 [+0.25, +0.75] dropped" in text
    assert "A second training gave **other bits**." in text
    assert {each.name for each in page.iterdir()} == {
        "README.md", "losses.png", "quality.png", "proof.json", "lock.txt",
    }  # fmt: skip
    assert json.loads((page / "proof.json").read_text())["failures"] == wrong
