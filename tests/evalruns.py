"""Short evaluations for tests: items of nekobench, asked of a mock server or stored as if they had been."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
from click.testing import CliRunner

from ktbridge.eval import EvalRequest, RunEvents, collect, load_bench, parse_arms
from ktbridge.eval.arms import Arm
from ktbridge.eval.request import answer_key
from ktbridge.eval.store import read_run, write_run

SMALL = Path(__file__).with_name("eval") / "small"
BENCH = load_bench(SMALL)
SCHEMA = json.loads((Path(__file__).parents[1] / "docs/results.schema.json").read_text("utf-8"))
EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)> "\' onload="x {{ 7*7 }} <!--'


def run(server, out, **options):
    """One invocation against ``server``: 16 items of all its arms, unless told otherwise."""
    arms = parse_arms(options.pop("arms", server.arms))
    bench = options.pop("bench", BENCH)
    settings = {"backoff": 0.001, "concurrency": 8, "limit": 16, **options}
    events = {name: settings.pop(name) for name in list(settings) if name.startswith("on_")}
    return collect(EvalRequest(bench, arms, out, **settings), RunEvents(**events))


def prompt_of(request):
    return request["messages"][-1]["content"]


def is_item(request):
    """Whether this asks an item, not a probe (short) or the invented adapter (shorter)."""
    return request.get("max_tokens", request.get("max_completion_tokens")) > 32


def invoke(command, *words):
    return CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)


def arm_words(server):
    """The command line's words for the arms of ``server``."""
    return [word for arm in server.arms for word in ("--arm", arm)]


def stored(out, answers, bench=BENCH, repeat=1, items=None):
    """A run's directory as `ktbridge eval` leaves it; ``answers[arm](item, repeat)`` gives texts."""
    cards = {
        name: {
            "name": name,
            "model": f"tiny:{name}",
            "url": "http://127.0.0.1:1/v1",
            "server": {},
            "sampling": dict(bench.sampling),
            "fingerprint": name,
        }
        for name in answers
    }
    out.mkdir(parents=True, exist_ok=True)
    slices = [one.name for one in bench.slices]
    counts = Counter(item.slice for item in items or bench.items)
    planned = {name: {"items": counts[name], "repeat": repeat} for name in slices if counts[name]}
    plan = dict.fromkeys(answers, planned)
    before = read_run(out)
    write_run(
        out,
        {**before, "arms": {**before["arms"], **cards}, "repeat": repeat, "plan": plan},
        bench,
    )
    lines = []
    for item in bench.items if items is None else items:
        for name, answer in answers.items():
            for nth in range(repeat):
                arm = Arm(name, cards[name]["model"], cards[name]["url"])
                text = answer(item, nth)
                record = {
                    "key": answer_key(cards[name], arm, item, bench, nth),
                    "arm": name,
                    "item": item.id,
                    "outcome": "ok" if text else "empty",
                    "text": text,
                    "thinking": "",
                    "detail": "",
                    "status": 200,
                    "prompt_tokens": 7,
                    "completion_tokens": 3,
                    "seconds": 0.123,
                }
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    (out / "answers.jsonl").write_text("".join(lines), "utf-8")
    return out


def knows(item, nth=0):
    gold = item.gold[0] if isinstance(item.gold, list) else item.gold
    return "好的。" if gold is None else str(gold)


def validate(document):
    jsonschema.Draft202012Validator(SCHEMA).validate(document)


class Page(HTMLParser):
    """Collects tags, attributes and visible text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text += data
