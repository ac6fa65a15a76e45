"""`ktbridge predict` as a process: LLaMA-Factory's files and metrics, interruptions, mistakes."""

import json
import re
import shutil
import time
from contextlib import closing

import jieba
import pytest
import torch
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from safetensors.torch import load_file, save_file
from trainrun import conversation, pair
from transformers import AutoTokenizer

from ktbridge.errors import KtbridgeError
from ktbridge.eval.scorers import measure_texts
from ktbridge.predict.output import Answered, Journal, journal_path, measure_answers
from ktbridge.predict.prompts import PredictionInputs
from ktbridge.predict.run import choose_adapter
from ktbridge.sft.config import load_config

jieba.setLogLevel(40)


def results_in(directory):
    return json.loads((directory / "predict_results.json").read_text())


def fails(done, *words, code=1):
    assert done.returncode == code
    for said in words:
        assert said in done.stderr


@pytest.mark.slow
def test_files_and_metrics_are_llama_factorys(write, dataset, predict, predictions, base, tmp_path):
    broken = {"messages": dataset[0]["messages"][:1]}
    file = write([*dataset[:4], broken, *dataset[4:]], template="qwen3", val_size=0.1)
    shown = predict(file, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    for words in (
        "answers 9 of 10 rows", "rows.jsonl: line 5: the last message is not the assistant's",
        "    How are you today 0? 你喜欢吃苹果吗<|im_end|>\n    <|im_start|>assistant",
    ):  # fmt: skip
        assert words in shown.stdout
    assert not (tmp_path / "out").exists()
    done = predict(file, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["answered"], said["refused"], said["ok"]) == (9, 1, True)

    rows, metrics = predictions(), results_in(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(base)
    for row, (question, answer) in zip(rows, (row["messages"] for row in dataset), strict=True):
        options = {"tokenize": False, "add_generation_prompt": True}
        prompt = tokenizer.apply_chat_template([question], **options)
        assert row == {"prompt": prompt, "predict": row["predict"], "label": answer["content"]}
    how = SmoothingFunction().method3
    bleu = [
        round(100 * sentence_bleu([[*r["label"]]], [*r["predict"]], smoothing_function=how), 4) for r in rows
    ]
    assert metrics["predict_bleu-4"] == pytest.approx(sum(bleu) / len(bleu), abs=1e-4)
    texts, labels = [row["predict"] for row in rows], [[row["label"]] for row in rows]
    rouges = measure_texts("lf", texts, labels)["scores"]  # held against the package's own elsewhere
    assert {name: metrics[f"predict_{name}"] for name in rouges} == rouges
    assert metrics["predict_samples"] == 9
    assert metrics["predict_runtime"] > 0 < metrics["predict_samples_per_second"]
    fails(predict(file), "has predictions already", code=2)


@pytest.mark.slow
def test_any_adapter_format_answers_alike_and_the_base_otherwise(
    write, predict, predictions, gguf, base, tmp_path
):
    of_gguf = {"adapter_name_or_path": str(gguf)}
    for name, changes in (("raw", {}), ("gguf", of_gguf), ("base", {"adapter_name_or_path": None})):
        done = predict(write(**changes), f"output_dir={tmp_path / name}", "max_samples=3")
        assert done.returncode == 0, done.stderr
    assert predictions("raw") == predictions("gguf") != predictions("base")
    assert "by the base model, without an adapter" in done.stdout
    assert f"{base.name} without an adapter ..." in done.stderr
    asked = ("--dry-run", "--json", "kt_config.kt_expert_weight_format=int8")
    planned = json.loads(predict(write(**of_gguf), "max_samples=3", *asked).stdout)
    assert planned["adapter"] == str(gguf)
    assert [note["where"] for note in planned["notes"]] == ["kt_config.kt_expert_weight_format"]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_files(write, predict, predictions, warm, tmp_path):
    """Each row has random numbers of its own. One at a time: neighbors may move answers by rounding."""
    file = write(per_device_eval_batch_size=1, max_new_tokens=80, do_sample=True, temperature=1.5)
    assert predict(file, f"output_dir={tmp_path / 'whole'}").returncode == 0
    journal = tmp_path / "out.predictions.jsonl"
    process = warm.start("-m", "ktbridge", "predict", file, OMP_NUM_THREADS="1", KTBRIDGE_THREADS="1")
    ends = time.monotonic() + 100
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.002)
    process.kill()
    process.communicate(10)
    assert not (tmp_path / "out").exists()
    with journal.open("ab") as torn:
        torn.write(b'{"row": 8, "predict": "half an ans')
    other = predict(file, "temperature=0.5")
    assert other.returncode == 1
    assert re.search(r"KTP002 .*: temperature\n +found +1.5 in the unfinished run", other.stderr)
    done = predict(file)
    assert done.returncode == 0, done.stderr
    assert re.search(r"answered 9 of 9 rows with .*, [3-8] answered before", done.stdout)
    assert predictions() == predictions("whole")
    assert not journal.exists()
    found, wanted = results_in(tmp_path / "out"), results_in(tmp_path / "whole")
    for timed in ("predict_runtime", "predict_samples_per_second"):
        assert found.pop(timed) > 0 < wanted.pop(timed)
    assert found == wanted


@pytest.mark.parametrize(
    "line", ['{"row": 1}', '{"row": 1e400, "predict": "", "cut": 0, "seconds": 1}', "[" * 100_000]
)
def test_a_journal_counts_up_to_a_line_that_is_no_answer(tmp_path, line):
    answers = [Answered(row=row, predict="é", cut=False, seconds=row) for row in range(3)]
    with closing(Journal(tmp_path / "out", {"seed": 1})) as journal:
        for answer in answers:
            journal.store(answer)
    lines = journal_path(tmp_path / "out").read_text().splitlines(keepends=True)
    journal_path(tmp_path / "out").write_text("".join([*lines[:3], f"{line}\n", lines[3]]))
    with closing(Journal(tmp_path / "out", {"seed": 1})) as journal:
        assert journal.answers == {0: answers[0], 1: answers[1]}
        assert journal.seconds == 1
    assert journal_path(tmp_path / "out").read_text() == "".join(lines[:3])


@pytest.mark.slow
def test_rows_that_fail_are_named_and_asked_again(write, dataset, predict, predictions, base, tmp_path):
    """A word of the vocabulary whose embedding is damaged: only the row that has it has no answer."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in base.iterdir():
        (damaged / path.name).symlink_to(path)
    (word,) = AutoTokenizer.from_pretrained(base).encode("散步", add_special_tokens=False)[:1]
    tensors = load_file(base / "model.safetensors")
    tensors["model.embed_tokens.weight"][word] = torch.nan
    (damaged / "model.safetensors").unlink()
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    rows = [*dataset[:2], conversation("散步", "no"), *dataset[2:4]]
    file = write(rows, model_name_or_path=str(damaged), adapter_name_or_path=None, do_sample=True)
    labels = [row["messages"][1]["content"] for row in dataset[:4]]
    for before in ("", ", 4 answered before"):
        done = predict(file)
        fails(done, "KTP001", "rows.jsonl: line 3")
        assert "Traceback" not in done.stderr
        assert f"without an adapter{before}" in done.stdout
        assert [row["label"] for row in predictions()] == labels
    metrics = results_in(tmp_path / "out")
    assert (metrics["predict_samples"], metrics["predict_unanswered"]) == (4, 1)


def test_training_predicts_with_what_it_trained(write, dataset, warm, predict, predictions, tmp_path):
    own = {"do_train": True, "dataset": "rows.jsonl", "num_train_epochs": 1, "lora_rank": 4}
    file = write(dataset[:3], adapter_name_or_path=None, **own)
    fails(predict(file), "has no adapter yet")
    done = warm.run("-m", "ktbridge", "train", file, "--json", KTBRIDGE_THREADS="1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["steps"], said["predictions"]["adapter"]) == (3, str(tmp_path / "out"))
    trained = predictions()
    assert len(trained) == 3
    done = predict(file, "overwrite_output_dir=true")
    assert done.returncode == 0, done.stderr
    assert predictions() == trained
    again = warm.run("-m", "ktbridge", "train", file, "--dry-run")
    fails(again, "`ktbridge predict CONFIG` predicts with the adapter in it", code=2)
    fails(warm.run("-m", "ktbridge", "plan", write()), "trains nothing", code=2)


def test_which_adapter_answers(write, predict, adapter, tmp_path):
    def chosen(named=False, **changes):
        config = load_config(write(**changes))
        return choose_adapter(PredictionInputs(config, tmp_path, 0, [], [], 0, (), named=named))

    assert chosen() == str(adapter)
    assert chosen(adapter_name_or_path=None) is None
    training = {"do_train": True, "dataset": "rows.jsonl"}
    with pytest.raises(KtbridgeError, match="no adapter yet"):
        chosen(**training)
    assert chosen(named=True, **training) == str(adapter)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    # The one that the file names is the one that its training began with.
    assert chosen() == chosen(**training) == str(tmp_path / "out")
    assert chosen(named=True) == str(adapter)
    done = predict(write(), "--dry-run", "--json")  # a file for prediction means the one that it names
    assert json.loads(done.stdout)["adapter"] == str(adapter), done.stderr
    # What a file has trained answers where the answers go elsewhere, too.
    shutil.copytree(adapter, tmp_path / "out", dirs_exist_ok=True)
    alone = write(adapter_name_or_path=None)
    done = predict(alone, f"output_dir={tmp_path / 'answers'}", "--dry-run", "--json")
    assert json.loads(done.stdout)["adapter"] == str(tmp_path / "out"), done.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval_dataset": None}, "eval_dataset\n    found     missing"),
        ({"eval_dataset": "no.jsonl"}, "there is no dataset file 'no.jsonl'"),
        ({"stage": "dpo"}, "true with stage: dpo"),
        ({"predict_with_generate": False}, "false with do_predict"),
        ({"top_p": 0}, "a number above 0, at most 1"),
        ({"adapter_name_or_path": "no"}, "an adapter in any format that `ktbridge convert` reads"),
        ({"cutoff_len": 4}, "no answer within cutoff_len=4 tokens: the prompt has"),
        ({"rows": [pair("a", "b", "c")]}, "a preference pair"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(write, predict, tmp_path, changes, words):
    fails(predict(write(**changes)), words)
    assert not (tmp_path / "out").exists()


def test_accuracy_of_choices():
    def measured(*pairs, unanswered=0, seconds=1.0):
        rows = [{"prompt": "", "predict": predict, "label": label} for predict, label in pairs]
        return measure_answers(rows, unanswered, seconds)

    choices = (("B", "B"), ("The answer is C.", "(C)"), ("A", "D"), ("?", "A."))
    found = measured(*choices, seconds=2.0)
    assert (found["predict_accuracy"], found["predict_samples_per_second"]) == (50, 2)
    assert "predict_accuracy" not in measured(("B", "B"), ("A", "A cat"))
    assert measured(unanswered=3, seconds=0.0)["predict_unanswered"] == 3
