"""lm-evaluation-harness scores and generates through the server what the model itself would.

The judge of scores is transformers on its own experts in float32, in this process: other code, another
precision. Tasks are files written here, so nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

ROWS = [
    {"question": "How are you today?", "choices": ["I am fine", "yes", "苹果 no"], "answer": 0},
    {"question": "The cat sleeps on", "choices": ["the warm stone.", "maybe no"], "answer": 0},
    {"question": "今天天气", "choices": ["很好", "question", "我们去公园散步吧"], "answer": 0},
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
CHOOSE = COMMON | {
    "task": "ktbridge_choose",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
SAY = COMMON | {
    "task": "ktbridge_say",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["~~"], "max_gen_toks": 12, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    (root / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    for task in (CHOOSE, SAY):
        data = {"dataset_kwargs": {"data_files": {"test": str(root / "rows.jsonl")}}}
        (root / f"{task['task']}.yaml").write_text(json.dumps(task | data))  # JSON is YAML
    return root


@pytest.fixture
def evaluate(run_client, server, base, tasks, tmp_path):
    """The samples of one task, by question."""

    def run(kind: str, path: str, arm: str, task: str, *more: str) -> dict[str, dict]:
        settings = {
            "model": arm,
            "base_url": f"{server.url}/{path}",
            "tokenizer_backend": "huggingface",
            "tokenizer": base,
            "num_concurrent": 4,
            "max_retries": 1,
        }
        done = run_client(
            "lm_eval",
            *("run", "--model", kind, "--tasks", task, "--include_path", str(tasks)),
            *("--model_args", ",".join(f"{key}={value}" for key, value in settings.items())),
            *("--output_path", str(tmp_path / "out"), "--log_samples", *more),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return {line["doc"]["question"]: line for line in lines}

    return run


def test_loglikelihoods_are_the_models_own(evaluate, base):
    """local-completions: echo with logprobs, prompt and continuation in one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    samples = evaluate("local-completions", "completions", "tiny:base", "ktbridge_choose")
    assert set(samples) == {row["question"] for row in ROWS}
    for row in ROWS:
        sample = samples[row["question"]]
        assert len(sample["resps"]) == len(row["choices"])
        for choice, ((told, greedy),) in zip(row["choices"], sample["resps"], strict=True):
            prompt = tokenizer.encode(row["question"])
            whole = tokenizer.encode(f"{row['question']} {choice}")
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1]
            chosen = torch.tensor(whole[len(prompt) :])
            logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
            assert float(told) == pytest.approx(logprobs.sum().item(), abs=0.05 * len(chosen))
            assert str(greedy) == str(bool((logits.argmax(-1) == chosen).all()))


@pytest.mark.parametrize("arm", ["tiny:neko", "tiny:base"])
def test_chat_answers_are_what_another_client_gets(evaluate, server, arm):
    """local-chat-completions, four at a time, against the same questions one by one."""
    samples = evaluate(
        *("local-chat-completions", "chat/completions", arm, "ktbridge_say"),
        "--apply_chat_template",
    )
    with server.client() as client:
        for row in ROWS:
            asked = [{"role": "user", "content": row["question"]}]
            answer = client.chat.completions.create(
                model=arm, messages=asked, max_tokens=12, temperature=0, stop=["~~"]
            )
            assert samples[row["question"]]["resps"] == [[answer.choices[0].message.content]]
