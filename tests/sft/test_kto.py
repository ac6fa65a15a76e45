"""`stage: kto`: the loss on judged answers, against the formula by plain logits; the base as reference."""

import json

import pytest
import torch
from findings import codes
from tinymoe import tiny_tokenizer
from trainrun import conversation, log_of, quiet, text, tokenized, train, write_lines, write_run

from ktbridge.errors import ProblemsError
from ktbridge.sft.config import load_config
from ktbridge.sft.data import load_rows

pytestmark = quiet
WEIGHTS = {"kto_chosen_weight": 1.5, "kto_rejected_weight": 0.7, "pref_beta": 2.0}


def judged(count, first=0):
    """trl's form, OpenAI's and sharegpt's, of unequal lengths."""
    rows = []
    for number in range(first, first + count):
        question, answer = text(number, 4, 3), text(number + 1, 1 + number % 4, 5)
        good = number % 3 != 0
        said = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        forms = (
            {"prompt": question, "completion": answer, "label": good},
            {**conversation(question, answer), "kto_tag": good},
            {"conversations": said, "kto_tag": str(good).lower()},
        )
        rows.append(forms[number // 3 % 3])
    return rows


@pytest.fixture
def run_dir(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "held.jsonl", judged(5, 100))
    return write_run(
        tmp_path, base_dir, judged(24), stage="kto", learning_rate=1e-2, max_steps=6,
        per_device_train_batch_size=4, save_steps=2, lora_target="q_proj,v_proj",
        lora_dropout=0.1, kt_config={"kt_num_threads": 2}, **WEIGHTS,
    )  # fmt: skip


@torch.no_grad()
def answers(model, inputs, prefix=""):
    """Float32 log-probabilities of each row's answer, and tokens of it, by plain logits."""
    ids, mask = inputs[f"{prefix}input_ids"], inputs[f"{prefix}completion_mask"][:, 1:].bool()
    logits = model(input_ids=ids, attention_mask=inputs[f"{prefix}attention_mask"]).logits
    each = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (each * mask).sum(1), mask.sum(1)


def test_the_loss_is_the_papers_and_the_reference_the_base(make):
    from ktbridge.sft.stages import as_base

    trainer = make(bf16="false", pref_ftx=0.25)
    trainer.train()
    log = [record for record in trainer.state.log_history if "loss" in record]
    assert log[0]["kl"] == pytest.approx(0, abs=1e-3)
    assert any(record["kl"] > 0 for record in log)
    assert log[-1]["rewards/margins"] > 0

    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    # Each prompt of the batch stands before another row's answer, too.
    own, other = (
        [
            row[mask.bool()].tolist()
            for row, mask in zip(inputs[f"{of}input_ids"], inputs[f"{of}completion_mask"], strict=True)
        ]
        for of in ("", "KL_")
    )
    assert other == [own[-1], *own[:-1]]
    assert len(set(map(tuple, own))) > 1

    trainer.model.eval()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, inputs).item()
    policy, counts = answers(trainer.model, inputs)
    mismatched, _ = answers(trainer.model, inputs, "KL_")
    with as_base(trainer.model):
        ratio = policy - answers(trainer.model, inputs)[0]
        kl = (mismatched - answers(trainer.model, inputs, "KL_")[0]).mean().clamp(min=0)
    good = inputs["label"].bool()
    assert 0 < good.sum() < 4
    beta = WEIGHTS["pref_beta"]
    each = torch.where(
        good,
        WEIGHTS["kto_chosen_weight"] * (1 - torch.sigmoid(beta * (ratio - kl))),
        WEIGHTS["kto_rejected_weight"] * (1 - torch.sigmoid(beta * (kl - ratio))),
    )
    expected = each.mean() - 0.25 * policy[good].sum() / counts[good].sum()
    assert loss == pytest.approx(expected.item(), rel=2e-3)
    assert ratio.abs().max() > 1e-2


def test_held_out_judgements_are_measured_by_their_weights(run_dir):
    held = (
        "eval_dataset=held.jsonl",
        "per_device_eval_batch_size=3",
        "max_steps=1",
        "save_steps=0",
    )
    result = train(run_dir, *held)
    assert (result.used, result.refused) == (24, 0)
    first, last = [one for one in log_of(run_dir / "raw") if "eval_loss" in one]
    weights = [WEIGHTS["kto_chosen_weight"], WEIGHTS["kto_rejected_weight"]]
    # Nothing is learned yet: each loss is half its weight.
    good = [row.get("kto_tag", row.get("label")) in (True, "true") for row in judged(5, 100)]
    expected = sum(0.5 * weights[not each] for each in good) / 5
    assert first["eval_loss"] == pytest.approx(expected, abs=2e-3)
    assert last["eval_rewards/chosen"] != 0 != last["eval_rewards/rejected"]
    summary = json.loads((run_dir / "raw" / "training_data.json").read_text())
    assert summary["stage"] == "kto"


def test_llama_factorys_entry_names_the_judgements_column(run_dir, tmp_path):
    said = conversation("who", "cat")["messages"]
    write_lines(tmp_path / "mine.jsonl", [{"said": said, "ok": value} for value in (True, False)])
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
    }
    columns = {"messages": "said", "kto_tag": "ok"}
    entry = {"file_name": "mine.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    given = ["dataset=mine", f"dataset_dir={tmp_path}"]
    found = load_rows(load_config(run_dir / "run.yaml", given))
    assert [each.good for each in found.rows] == [True, False]


def test_rows_and_settings_that_kto_cannot_take_are_refused(run_dir, tmp_path):
    """Reasons of single rows: test_messages.py."""
    write_lines(tmp_path / "rows.jsonl", judged(6))
    rows = load_rows(load_config(run_dir / "run.yaml"))
    assert [each.good for each in rows.rows] == [False, True, True] * 2
    wrong = ["per_device_train_batch_size=1", "tokens_per_pass=100", "packing=true"]
    with pytest.raises(ProblemsError) as caught:
        load_config(run_dir / "run.yaml", wrong)
    assert codes(caught) == {"KTC080", "KTC005"}
    sft = load_rows(load_config(run_dir / "run.yaml", ["stage=sft", "allow_refused_rows=true"]))
    assert "with kto_tag: every answer counts alike" in {item.why for item in sft.refused}


def test_answers_of_one_kind_alone_are_told(run_dir, tmp_path):
    config = load_config(run_dir / "run.yaml")
    for kind in (True, False):
        write_lines(tmp_path / "rows.jsonl", [{**conversation("a", "b"), "kto_tag": kind}] * 4)
        found = tokenized(config, tiny_tokenizer())
        assert "KTD060" in codes(found.notes)
    write_lines(tmp_path / "rows.jsonl", judged(6))
    assert "KTD060" not in codes(tokenized(config, tiny_tokenizer()).notes)
    write_lines(tmp_path / "rows.jsonl", [{**conversation("a", "b"), "kto_tag": True}] * 3)
    with pytest.raises(ProblemsError) as caught:
        load_rows(load_config(run_dir / "run.yaml", ["stage=sft"]))
    assert "Set stage: kto" in caught.value.next_step
