"""Answers that other tools collected: paired, marked and compared; what cannot be read is named."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from evalruns import validate

from ktbridge.cli.report import command
from ktbridge.errors import ProblemsError, UsageError
from ktbridge.eval import write_report
from ktbridge.eval.imports import import_answers, parse_source


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def predictions(path, predict, count=20):
    """As LLaMA-Factory's predict_with_generate writes them."""
    prompts = [f"<|user|>第{i % (count - 1)}个问题<|assistant|>" for i in range(count)]
    return lines(
        path,
        [
            {"prompt": prompt, "predict": predict(i), "label": f"今天的天气很好，去第{i}个公园。"}
            for i, prompt in enumerate(prompts)
        ],
    )


def sample(doc_id, text, right, **more):
    """A row of `lm_eval --log_samples`, as version 0.4 writes it for a generating task."""
    return {
        "doc_id": doc_id,
        "doc": {"question": f"What is {doc_id} + 1?", "answer": str(doc_id + 1)},
        "target": str(doc_id + 1),
        "arguments": {"gen_args_0": {"arg_0": f"Q: What is {doc_id} + 1?\nA:", "arg_1": {}}},
        "resps": [[text]],
        "filtered_resps": [text],
        "filter": "strict-match",
        "metrics": ["exact_match"],
        "exact_match": right,
        "doc_hash": f"{doc_id:064x}",
        **more,
    }


def weighed(doc_id, weights, right, **more):
    """A row of a multiple-choice task: log-likelihoods instead of text."""
    return {
        "doc_id": doc_id,
        "doc": {"query": "Which?", "choices": ["a", "b"]},
        "target": 0,
        "arguments": [["Which?", " a"], ["Which?", " b"]],
        "resps": [[[weight, False]] for weight in weights],
        "filtered_resps": [[weight, False] for weight in weights],
        "perplexity": 3.5,
        "acc": right,
        "acc_norm": 1.0 - right,
        **more,
    }


def report(out, *sources):
    import_answers([parse_source(kind, text) for kind, text in sources], out)
    results = write_report(out)
    validate(results)
    return results


def test_llama_factory_predictions(tmp_path):
    base = predictions(tmp_path / "base" / "generated_predictions.jsonl", lambda i: "我不知道。")
    full = predictions(
        tmp_path / "full" / "generated_predictions.jsonl",
        lambda i: f"<think>想一想</think>今天的天气很好，去第{i}个公园。" if i else "",
    )
    out = tmp_path / "out"
    results = report(out, ("lf", f"base={base}"), ("lf", f"full={full}"))
    assert (results["asked"], results["valid"]) == (20, 19)
    assert results["outcomes"]["full"] == {"ok": 19, "empty": 1}
    assert results["tables"]["task"]["predictions"]["full"]["mean"] == 1
    assert results["verdict"]["task"] == "improved"
    assert "task quality ↑ " in results["verdict"]["line"]
    # The first and the last prompt are the same: one cluster.
    assert results["tables"]["task"]["overall"]["full"]["clusters"] == 19
    texts = results["texts"]["slices"]["predictions"]
    assert set(texts) == {"lf", "seedlike", "std"}
    assert texts["lf"]["full"]["scores"]["rouge-l"] == 100
    assert results["items"][1]["answers"]["full"]["thinking"] == "想一想"
    assert results["axes"] == ["task"]
    # The report needs what was imported and no longer the files.
    before = [(out / name).read_bytes() for name in ("results.json", "report.html", "report.md")]
    base.unlink()
    full.unlink()
    write_report(out)
    assert before == [
        (out / name).read_bytes() for name in ("results.json", "report.html", "report.md")
    ]


def test_lm_eval_samples(tmp_path):
    stamp = "2026-01-02T03-04-05.678901"
    for arm, right in (("base", 0.0), ("full", 1.0)):
        rows = [sample(i, "so 7" if i % 2 else "4", right) for i in range(12)]
        rows += [sample(i, "4", 1.0, filter="flexible-extract") for i in range(12)]
        lines(tmp_path / arm / f"samples_gsm8k_{stamp}.jsonl", rows)
        rows = [weighed(i, ["-1.5", "-0.25"], right) for i in range(12)]
        lines(tmp_path / arm / f"samples_arc_easy_{stamp}.jsonl", rows)
    named = [
        ("lm-eval", f"{arm}={tmp_path / arm / f'samples_{task}_{stamp}.jsonl'}")
        for arm in ("base", "full")
        for task in ("gsm8k", "arc_easy")
    ]
    results = report(tmp_path / "out", *named)
    table = results["tables"]["task"]
    assert set(table) == {
        "overall",
        "gsm8k (strict-match)",
        "gsm8k (flexible-extract)",
        "arc_easy",
    }
    assert [table["arc_easy"][arm]["mean"] for arm in ("base", "full")] == [0, 1]
    assert table["gsm8k (flexible-extract)"]["base"]["mean"] == 1
    # Two filters read one answer: not independent.
    assert (table["overall"]["base"]["n"], table["overall"]["base"]["clusters"]) == (36, 24)
    row = next(one for one in results["items"] if one["slice"] == "arc_easy")
    assert row["messages"] == [{"role": "user", "content": "Which?"}]
    assert row["answers"]["full"]["text"] == "choice 2 of 2 (log-likelihoods -1.50, -0.25)"
    assert [one["scorer"] for one in row["answers"]["full"]["checks"]] == ["acc", "acc_norm"]
    lost = {one["slice"]: one["mcnemar"] for one in results["contrasts"]}["arc_easy"]
    assert (lost["gained"], lost["lost"]) == (12, 0)
    assert set(results["texts"]["slices"]) == {"gsm8k (strict-match)", "gsm8k (flexible-extract)"}


def test_rows_that_cannot_be_read_are_all_named(tmp_path):
    rows = [{"prompt": "a", "predict": "b", "label": "c"}, {"prompt": "a", "predict": None}]
    path = lines(tmp_path / "bad.jsonl", rows)
    path.write_text(path.read_text() + '{"prompt": "half\n[1]\n{"prompt": "\\ud83d"}\n')
    samples = lines(
        tmp_path / "samples_t.jsonl",
        [sample(1, "4", 1.0), sample(1, "4", 1.0), {"doc_id": 2}, sample(3, "4", [1, 2])],
    )
    other = lines(tmp_path / "samples_t2" / "samples_t.jsonl", [sample(1, "4", 1.0, doc_hash="x")])
    sources = [
        parse_source("lf", f"base={path}"),
        parse_source("lm-eval", f"base={samples}"),
        parse_source("lm-eval", f"full={other}"),
    ]
    with pytest.raises(ProblemsError) as caught:
        import_answers(sources, tmp_path / "out")
    assert [
        (one.code, one.where.removeprefix(f"{tmp_path}/")) for one in caught.value.problems
    ] == [
        ("KTB841", "bad.jsonl:3"),
        ("KTB841", "bad.jsonl:4"),
        ("KTB841", "bad.jsonl:5"),
        ("KTB841", "bad.jsonl:2"),
        ("KTB841", "samples_t.jsonl:3"),
        ("KTB841", "samples_t.jsonl:4"),
        ("KTB842", "samples_t.jsonl:2"),
        ("KTB842", "samples_t2/samples_t.jsonl:1"),
    ]
    assert not (tmp_path / "out").exists()


def test_imports_stay_out_of_evaluations(tmp_path):
    path = predictions(tmp_path / "p.jsonl", str)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="holds an evaluation"):
        import_answers([parse_source("lf", f"a={path}")], tmp_path)
    for text in ("a", "=x", "a=", f"a={tmp_path / 'none'}"):
        with pytest.raises(UsageError):
            parse_source("lf", text)


def test_the_command_imports_prints_markdown_and_fails_on_a_condition(tmp_path):
    base = predictions(tmp_path / "base.jsonl", lambda i: f"今天的天气很好，去第{i}个公园。")
    full = predictions(tmp_path / "full.jsonl", lambda i: "嗯。")
    out = str(tmp_path / "out")
    words = [out, "--lf", f"base={base}", "--lf", f"full={full}"]
    done = CliRunner().invoke(command, [*words, "--markdown", "--fail-on", "predictions<-0.2"])
    assert done.exit_code == 1
    assert done.stdout == (tmp_path / "out" / "report.md").read_text("utf-8")
    assert "task quality ↓ " in done.stdout
    assert "KTB840" in done.stderr
    kept = CliRunner().invoke(command, [out, "--json", "--fail-on", "predictions>0"])
    assert kept.exit_code == 0
    assert json.loads(kept.stdout)["verdict"]["task"] == "dropped"
    for more in (["--fail-on", "nonsense"], ["--fail-on", "NOPE<0"], ["--markdown", "--json"]):
        assert CliRunner().invoke(command, [out, *more]).exit_code == 2
