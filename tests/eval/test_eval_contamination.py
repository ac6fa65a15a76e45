"""What of a bench the training data holds is found, and nothing else is."""

from __future__ import annotations

import json

import pytest

from ktbridge.errors import ProblemsError, UsageError
from ktbridge.eval import load_bench
from ktbridge.eval.contamination import GRAM, find_contamination, overlap_problems

BENCH = load_bench("nekobench")
BY_ID = {item.id: item.messages[0]["content"] for item in BENCH.items}


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def pair(question, answer="好。"):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def test_exact_near_and_inner_matches_by_slice(tmp_path):
    long = BY_ID["kri-r-15"]  # more than 13 characters
    rows = [
        pair("完全无关的一句话，谁也没有问过。"),
        pair(BY_ID["pes-20"].replace("，", " ").replace("？", "")),  # other punctuation
        {"conversations": [{"from": "human", "value": "前言。" + long[:16] + "然后呢"}]},
        {"instruction": "x", "input": BY_ID["saf-30"].upper(), "output": "y"},
        {"text": f"Q: {BY_ID['kri-k-36']} A: the heart"},
        pair("q", BY_ID["cf-14"]),  # in an answer
    ]
    report = find_contamination(BENCH, write(tmp_path / "train.jsonl", rows))
    hits = {hit["item"]: hit for hit in report["hits"]}
    assert set(hits) == {"pes-20", "kri-r-15", "saf-30", "kri-k-36", "cf-14"}
    assert {name for name, hit in hits.items() if hit["exact"]} == {"pes-20", "saf-30", "cf-14"}
    assert (hits["pes-20"]["record"], hits["kri-r-15"]["record"]) == (2, 3)
    assert 0 < hits["kri-r-15"]["share"] < 1
    assert hits["pes-20"]["share"] == 1
    row = report["slices"]["KRI-R"]
    assert (report["records"], row["overlap"], row["exact"]) == (6, 1, 0)
    assert report["slices"]["INS"]["overlap"] == 0
    assert {problem.where for problem in overlap_problems(report)} == {
        "slice PES",
        "slice KRI-R",
        "slice SAF",
        "slice KRI-K",
        "slice CF",
    }
    document = json.loads(json.dumps(report))
    assert document["slices"]["PES"] == {"items": 40, "exact": 1, "overlap": 1, "short": 0}


@pytest.mark.parametrize(("size", "found"), [(GRAM - 1, []), (GRAM, ["pes-31"])])
def test_twelve_characters_in_common_are_none_thirteen_are_one(tmp_path, size, found):
    letters = [char for char in BY_ID["pes-31"] if char.isalnum()]
    assert len(letters) > GRAM
    rows = [pair("天" + "".join(letters[:size]) + "地")]
    report = find_contamination(BENCH, write(tmp_path / "train.jsonl", rows))
    assert [hit["item"] for hit in report["hits"]] == found


def test_english_counts_words_and_references_count_too(tmp_path):
    style = load_bench("translational-style")
    report = find_contamination(
        style, write(tmp_path / "t.jsonl", [{"input": "x", "output": style.items[0].gold[1]}])
    )
    (hit,) = report["hits"]
    assert (hit["item"], hit["part"], hit["exact"]) == (style.items[0].id, "reference", True)
    words = BY_ID["kri-r-34"].split()
    for size, found in ((GRAM - 1, []), (GRAM, ["kri-r-34"])):
        rows = [pair("so " + " ".join(words[1 : size + 1]))]
        report = find_contamination(BENCH, write(tmp_path / "e.jsonl", rows))
        assert [hit["item"] for hit in report["hits"]] == found


def test_short_questions_only_match_whole(tmp_path):
    rows = [{"prompt": "Tea?", "checks": [{"scorer": "min_len", "unit": "chars", "n": 1}]}]
    bench = load_bench("generic", write(tmp_path / "bench.jsonl", rows))
    inside = find_contamination(bench, write(tmp_path / "a.jsonl", [pair("Do you want tea? Yes.")]))
    assert (inside["hits"], inside["slices"]["ALL"]["short"]) == ([], 1)
    whole = find_contamination(bench, write(tmp_path / "b.jsonl", [pair("tea")]))
    assert [hit["exact"] for hit in whole["hits"]] == [True]


def test_labels_are_not_text_and_bad_files_are_refused(tmp_path):
    rows = [{"prompt": "User", "checks": [{"scorer": "min_len", "unit": "chars", "n": 1}]}]
    bench = load_bench("generic", write(tmp_path / "bench.jsonl", rows))
    assert find_contamination(bench, write(tmp_path / "a.jsonl", [pair("嗯")]))["hits"] == []
    question = "Which river flows through the city of Prague?"
    rows[0]["prompt"] = question
    bench = load_bench("generic", write(tmp_path / "bench.jsonl", rows))
    columns = [{"source": question, "target": "Vltava"}, {"language": "en"}]
    assert [
        hit["exact"] for hit in find_contamination(bench, write(tmp_path / "b.jsonl", columns))["hits"]
    ] == [True]
    with pytest.raises(UsageError, match="no training file"):
        find_contamination(bench, tmp_path / "nosuch")
    (tmp_path / "c.jsonl").write_text('{"a": ')
    with pytest.raises(ProblemsError):
        find_contamination(bench, tmp_path / "c.jsonl")
