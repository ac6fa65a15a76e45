"""Our bench keeps its promises, and a broken one is refused with all that is wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from ktbridge.errors import UsageError
from ktbridge.eval import load_bench, parse_arms
from ktbridge.eval.scorers import FAMILIES, SCORERS
from ktbridge.eval.scorers.text_metrics import longest_common, unicode_tokens
from ktbridge.eval.stats import detectable_effect

COUNTS = dict.fromkeys(("PES", "CF", "ERM", "INS", "KRI-K", "KRI-R"), 40) | {"SAF": 30, "CTRL": 30}
SMALL = Path(__file__).with_name("small")
BENCH = load_bench("nekobench")
README = Path(__file__).parents[2] / "eval" / "README.md"


def test_a_question_that_stands_there_twice_is_one_cluster(tmp_path):
    folder = shutil.copytree(SMALL, tmp_path / "bench")
    lines = (folder / "items.jsonl").read_text("utf-8").splitlines()
    first = {key: value for key, value in json.loads(lines[0]).items() if key != "cluster"}
    again = json.dumps(first | {"id": "again"}, ensure_ascii=False)
    (folder / "items.jsonl").write_text("\n".join([*lines, again]) + "\n", "utf-8")
    items = load_bench(folder).items
    assert items[-1].cluster == items[0].cluster
    assert len({item.cluster for item in items}) == len({item.cluster for item in load_bench(SMALL).items})


def test_nekobench_is_what_it_says():
    assert Counter(item.slice for item in BENCH.items) == COUNTS
    english = sum(item.lang == "en" for item in BENCH.items)
    assert 0.25 <= english / len(BENCH.items) <= 0.4
    texts = [message["content"] for item in BENCH.items for message in item.messages]
    assert len({"".join(unicode_tokens(text)) for text in texts}) == len(texts)
    # The persona is never prompted: no system turn, no address, no tic, no cat-girl.
    assert all(message["role"] == "user" for item in BENCH.items for message in item.messages)
    assert not any(word in text for text in texts for word in ("主人", "喵", "猫娘", "Master", "nya"))
    pairs: dict[str, list[str]] = {}
    for item in BENCH.items:
        if item.slice == "SAF":
            pairs.setdefault(item.cluster, []).append(item.sub)
    assert all(subs == ["harmful", "harmless"] for subs in pairs.values())
    assert len(pairs) == 15
    # What is for feeling or safety has questions for a judge; what a rule decides has none.
    assert {item.slice for item in BENCH.items if item.judge} == {"PES", "CF", "ERM", "SAF"}
    unjudged = {item.slice for item in BENCH.items if not item.judge}
    assert unjudged == {"INS", "KRI-K", "KRI-R", "CTRL"}
    assert all(len(item.judge) >= 3 for item in BENCH.items if item.judge)


def test_no_two_questions_are_nearly_the_same():
    # Two items that share half of their longer text are one question in two coats.
    tokens = [unicode_tokens(item.messages[0]["content"]) for item in BENCH.items]
    for i, one in enumerate(tokens):
        for j in range(i):
            other = tokens[j]
            if BENCH.items[i].cluster == BENCH.items[j].cluster or set(one).isdisjoint(other):
                continue
            if len(set(one) & set(other)) < 0.75 * max(len(set(one)), len(set(other))):
                continue
            common = longest_common(one, other) / max(len(one), len(other))
            assert common < 0.85, (BENCH.items[i].id, BENCH.items[j].id)


def test_a_limit_is_spread_over_the_slices_and_keeps_the_order():
    bench = BENCH
    chosen = bench.select((), 10)
    assert Counter(one.slice for one in chosen) == dict.fromkeys(COUNTS, 1) | {"PES": 2, "CF": 2}
    assert list(chosen) == [item for item in bench.items if item in chosen]
    assert {item.slice for item in bench.select(("SAF", "CTRL"))} == {"SAF", "CTRL"}
    with pytest.raises(UsageError, match="'XYZ'"):
        bench.select(("XYZ",))


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(SMALL, tmp_path / "mine")


def test_a_bench_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="no bench 'nosuch'") as caught:
        load_bench("nosuch")
    assert "nekobench" in caught.value.next_step
    (tmp_path / "bench.yaml").write_text("name: x")
    with pytest.raises(UsageError, match=r"has no items\.jsonl"):
        load_bench(tmp_path)


def test_the_hash_covers_every_file(copy):
    before = load_bench(copy).sha256
    assert before == load_bench(SMALL).sha256
    with open(copy / "persona.yaml", "a") as handle:
        handle.write("# a remark\n")
    assert load_bench(copy).sha256 != before


def test_arms_are_parsed_and_ordered():
    words = "full=org/m:neko@v2@http://h:1/v1/ own=x@https://h base=tiny:base@http://127.0.0.1:8000"
    arms = parse_arms(words.split())
    assert [arm.name for arm in arms] == ["base", "full", "own"]
    assert (arms[1].model, arms[1].url) == ("org/m:neko@v2", "http://h:1/v1")
    assert arms[1].served == "org/m"
    assert arms[2].url == "https://h/v1"
    with pytest.raises(UsageError, match="two arms are named 'a'"):
        parse_arms(["a=m@http://h", "a=n@http://h"])
    bad = ["base", "base=m", "=m@http://h", "a b=m@http://h", "base=m@h:80", "base=@http://h"]
    for text in [*bad, "base=m@http://h:99999", "base=m@ftp://h", "base=m@http://h?x=1"]:
        with pytest.raises(UsageError):
            parse_arms([text])


def test_what_the_readme_shows_is_a_bench(tmp_path):
    text = README.read_text("utf-8")
    block = re.search(r"^    mkdir mine.*?(?=^\S)", text, re.S | re.M).group(0)
    lines = [line[4:] for line in block.rstrip().split("\n")]
    assert lines[-1].startswith("ktbridge eval --bench mine ")
    subprocess.run(["bash", "-ec", "\n".join(lines[:-1])], cwd=tmp_path, check=True)
    bench = load_bench(tmp_path / "mine")
    assert [item.gold for item in bench.items] == [["Lima"], 42]
    assert [item.checks[0]["scorer"] for item in bench.items] == ["aliases", "numeric"]
    assert bench.persona.name == "none"
    assert (bench.version, bench.language, bench.margin) == ("1", "any", 0.1)
    assert (bench.sampling, bench.items[0].max_tokens) == ({"temperature": 0}, 512)
    filled = [(item.id, item.slice, item.lang) for item in bench.items]
    assert filled == [(f"line-{number}", "FACTS", "en") for number in (1, 2)]
    # The easy way: lines for --bench generic.
    rows = re.findall(r'^    (\{"(?:prompt|messages)".*\})$', text, re.M)[:3]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows), "utf-8")
    easy = load_bench("generic", tmp_path / "mine.jsonl")
    assert [item.gold for item in easy.items] == [["Lima"], ["Bonjour!", "Salut !"], 42]
    assert [item.checks[0]["scorer"] for item in easy.items] == ["references"] * 2 + ["numeric"]


def test_the_readme_names_every_scorer_family_and_bench_and_its_power_is_true():
    text = README.read_text("utf-8")
    told = set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| `.*?\|", text, re.M))))
    assert told >= {*SCORERS, *FAMILIES}
    assert all(f"`{path.parent.name}`" in text for path in README.parent.glob("*/bench.yaml"))
    rows = re.findall(r"^\| (\d+)(?: \(.*\))? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    assert len(rows) == 5
    for count, *shown in rows:
        # Yes/no marks of which 1 in 10, 1 in 4 change; graded ones with a standard deviation of 0.25.
        seen = [detectable_effect(sd, int(count)) for sd in (0.1**0.5, 0.5, 0.25)]
        assert [float(one) for one in shown] == pytest.approx(seen, abs=0.006)
    sizes = Counter(item.lang for item in BENCH.items)
    assert f"{len(BENCH.items)} in our own words (Apache-2.0), {sizes['zh']} Chinese" in text
