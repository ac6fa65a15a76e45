"""Our bench keeps its promises, and a broken one is refused with all that is wrong."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest

from ktbridge.errors import ProblemsError, UsageError
from ktbridge.eval import load_bench, parse_arms
from ktbridge.eval.bench import benches_root

COUNTS = {"PES": 14, "CF": 10, "ERM": 12, "INS": 16, "KRI-K": 12, "KRI-R": 8, "SAF": 8, "CTRL": 4}


def test_nekobench_is_what_it_says():
    bench = load_bench("nekobench")
    assert Counter(item.slice for item in bench.items) == COUNTS
    english = sum(item.lang == "en" for item in bench.items)
    assert 0.25 <= english / len(bench.items) <= 0.4
    texts = [message["content"] for item in bench.items for message in item.messages]
    assert len(set(texts)) == len(texts)
    # The persona is never prompted: no system turn, no address, no tic, no cat-girl.
    assert all(message["role"] == "user" for item in bench.items for message in item.messages)
    assert not any(
        word in text for text in texts for word in ("主人", "喵", "猫娘", "Master", "nya")
    )
    pairs = Counter(item.cluster for item in bench.items if item.slice == "SAF")
    assert set(pairs.values()) == {2}


def test_a_limit_is_spread_over_the_slices_and_keeps_the_order():
    bench = load_bench("nekobench")
    chosen = bench.select((), 10)
    assert Counter(item.slice for item in chosen) == dict.fromkeys(COUNTS, 1) | {
        "PES": 2,
        "CF": 2,
    }
    assert list(chosen) == [item for item in bench.items if item in chosen]
    assert {item.slice for item in bench.select(("SAF", "CTRL"))} == {"SAF", "CTRL"}
    with pytest.raises(UsageError, match="'XYZ'"):
        bench.select(("XYZ",))


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(benches_root() / "nekobench", tmp_path / "mine")


def test_all_problems_are_told_at_once(copy):
    lines = (copy / "items.jsonl").read_text("utf-8").splitlines()
    good = json.loads(lines[0])
    broken = [
        lines[0],
        lines[0],  # the same id
        json.dumps(good | {"id": "a", "checks": [{"scorer": "vibes"}]}),
        json.dumps({key: value for key, value in good.items() if key != "messages"} | {"id": "b"}),
        json.dumps(good | {"id": "c", "checks": [{"scorer": "max_len", "unit": "pages"}]}),
        json.dumps(good | {"id": "d", "checks": [{"scorer": "numeric"}], "gold": "eight"}),
        json.dumps(good | {"id": "e", "slice": "NOPE", "colour": 1}),
        json.dumps(good | {"id": "f", "checks": [{"scorer": "regex", "pattern": "("}]}),
        "{not json",
        "[]",
    ]
    (copy / "items.jsonl").write_text("\n".join(broken), "utf-8")
    persona = (copy / "persona.yaml").read_text("utf-8")
    (copy / "persona.yaml").write_text(persona.replace("target_rate: 0.5", "target_rate: 5"))
    head = (copy / "bench.yaml").read_text("utf-8")
    (copy / "bench.yaml").write_text(head.replace("max_tokens: 256", "max_tokens: -1"))
    with pytest.raises(ProblemsError) as caught:
        load_bench(copy)
    told = [str(problem) for problem in caught.value.problems]
    for words in (
        ("items.jsonl:2", "'pes-01' of line 1"),
        ("items.jsonl:3", "'vibes'"),
        ("items.jsonl:4", "no 'messages'"),
        ("items.jsonl:5", "without 'n'"),
        ("items.jsonl:5", "'pages'"),
        ("items.jsonl:6", "'eight'"),
        ("items.jsonl:7", "'NOPE'"),
        ("items.jsonl:7", "'colour'"),
        ("items.jsonl:8", "pattern"),
        ("items.jsonl:9", "not JSON"),
        ("items.jsonl:10", "list"),
        ("persona.yaml", "target_rate"),
        ("bench.yaml", "max_tokens"),
    ):
        assert any(all(word in text for word in words) for text in told), words
    assert len(told) == 13


def test_a_bench_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="no bench 'nosuch'") as caught:
        load_bench("nosuch")
    assert "nekobench" in caught.value.next_step
    (tmp_path / "bench.yaml").write_text("name: x")
    with pytest.raises(UsageError, match=r"no items\.jsonl and no persona\.yaml"):
        load_bench(tmp_path)


def test_the_hash_covers_every_file(copy):
    before = load_bench(copy).sha256
    assert before == load_bench("nekobench").sha256
    with open(copy / "persona.yaml", "a") as handle:
        handle.write("# a remark\n")
    assert load_bench(copy).sha256 != before


def test_arms_are_parsed_and_ordered():
    arms = parse_arms(
        [
            "full=org/m:neko@v2@http://h:1/v1/",
            "own=x@https://h",
            "base=tiny:base@http://127.0.0.1:8000",
        ]
    )
    assert [arm.name for arm in arms] == ["base", "full", "own"]
    assert (arms[1].model, arms[1].url) == ("org/m:neko@v2", "http://h:1/v1")
    assert (arms[1].served, arms[1].adapter) == ("org/m", "neko@v2")
    assert arms[2].url == "https://h/v1"


@pytest.mark.parametrize(
    "text",
    [
        "base",
        "base=m",
        "=m@http://h",
        "a b=m@http://h",
        "base=m@h:80",
        "base=@http://h",
        "base=m@http://h:99999",
        "base=m@ftp://h",
        "base=m@http://h?x=1",
    ],
)
def test_an_arm_that_makes_no_sense_is_refused(text):
    with pytest.raises(UsageError):
        parse_arms([text])


def test_two_arms_of_one_name_are_refused():
    with pytest.raises(UsageError, match="two arms are named 'a'"):
        parse_arms(["a=m@http://h", "a=n@http://h"])
