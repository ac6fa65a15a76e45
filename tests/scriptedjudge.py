"""A judge over real HTTP that a test can script, with two arms and a bench for it to judge."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from mockserver import JsonServer

from ktbridge.eval import EvalRequest, collect, load_bench, parse_arms, score_run
from ktbridge.eval.judge.prompts import parse_judge
from ktbridge.eval.judge.run import judge_run
from ktbridge.eval.judge.score import read_judgements
from ktbridge.eval.store import read_snapshot

COLORS = ("red", "green", "blue")
ITEMS = 18  # fewer than 20 clusters are scored without a bootstrap, which is fast
BENCH = """
name: manners
version: "1"
language: en
max_tokens: 64
margin: 0.1
sampling: {temperature: 0}
checklists:
  TALK:
    - Does the answer thank the user?
    - Does the answer name a colour?
    - Is the answer free of the word never?
slices:
  TALK:
    primary: task
    meaning: manners
    anchors:
      - {user: Hi 1, good: Thank you. A red one., bad: "I never say what people like to hear, not at all."}
      - {user: Hi 2, good: "Thank you very much, it is kind, and mine is the blue one there.", bad: Never.}
      - {user: Hi 3, good: "Thank you, green.", bad: "No. It has a size and some weight.", fails: [1, 2]}
      - {user: Hi 4, good: "Thank you for the words, I like a red sky.", bad: Green., fails: [1]}
"""


def truth(answer: str) -> list[bool]:
    """The right verdicts on an answer: thanks, a colour, no "never"."""
    low = answer.lower()
    return ["thank" in low, any(colour in low for colour in COLORS), "never" not in low]


def arm_answer(model: str, prompt: str) -> str:
    """What an arm says: the trained one thanks more often, both at various lengths."""
    digest = int(hashlib.sha256(f"{prompt} {model}".encode()).hexdigest(), 16)
    thanks = digest % 10 < (8 if model.endswith(":full") else 3)
    words = ["Thank you."] if thanks else ["Very well."]
    words += ["It is " + (COLORS[digest // 10 % 3] if digest // 30 % 2 else "tall") + "."]
    words += ["I never sleep." if digest // 60 % 3 == 0 else "I sleep a lot."]
    return " ".join(words + ["And so on."] * (digest // 180 % 5) + [f"({digest % 97})"])


def parts_of(request: dict) -> dict[str, str]:
    """What stands between the marks of a judge's prompt."""
    text = request["messages"][1]["content"]
    found = re.findall(r"<([a-z-]+)-([0-9a-f]{12})>\n(.*?)\n</\1-\2>", text, re.DOTALL)
    return {name: body for name, _, body in found}


def fair(request: dict) -> str:
    """A judge that reads the answers and says what is true of them."""
    parts = parts_of(request)
    if "first-answer" in parts:
        one, two = (sum(truth(parts[name])) for name in ("first-answer", "second-answer"))
        return pair("first" if one > two else "second" if two > one else "tie")
    if "four" in request["messages"][1]["content"]:
        return checks([True, False])
    return checks(truth(parts["answer"]))


def checks(verdicts: list[bool]) -> str:
    words = {True: "yes", False: "no"}
    return json.dumps({f"q{n}": {"evidence": "seen", "verdict": words[v]} for n, v in enumerate(verdicts, 1)})


def pair(winner: str) -> str:
    return json.dumps({"evidence": "seen", "winner": winner})


class World(JsonServer):
    """A real HTTP server with the arms and a judge, which ``behave(request, nth)`` scripts.

    It gives the judge's text, or (status, headers, body).
    """

    def __init__(self) -> None:
        base = {"root": "/models/Qwen3-30B-A3B"}
        names = {"tiny:base": base, "tiny:full": base, "arbiter": {}, "Qwen2.5-72B-Instruct": {}}
        super().__init__(
            [{"id": name, "object": "model", "created": 0, **more} for name, more in names.items()]
        )
        self.reset()

    def respond(self, request):
        if request["model"].startswith("tiny"):
            if request["model"] not in ("tiny:base", "tiny:full"):
                return 404, {}, {"error": {"message": "no such model"}}
            return self.completion(arm_answer(request["model"], request["messages"][-1]["content"]))
        with self.lock:
            self.asked.append(request)
            nth = self.nth(request["messages"])
        said = self.behave(request, nth)
        return self.completion(said) if isinstance(said, str) else said

    @staticmethod
    def completion(text, finish="stop"):
        choice = {"index": 0, "finish_reason": finish, "message": {"content": text}}
        return 200, {}, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}

    def reset(self) -> None:
        self.behave = lambda request, nth: fair(request)
        self.asked: list[dict] = []
        self.seen.clear()


def make_bench(folder: Path, head: str = BENCH) -> Path:
    folder.mkdir()
    (folder / "bench.yaml").write_text(head)
    with (folder / "items.jsonl").open("w") as file:
        for n in range(ITEMS):
            row = {"id": f"i{n}", "slice": "TALK", "sub": "", "lang": "en", "judge": "TALK"}
            row["messages"] = [{"role": "user", "content": f"Say something about thing {n}."}]
            row["checks"] = [{"scorer": "min_len", "unit": "chars", "n": 1}]
            file.write(json.dumps({**row, "origin": "test", "license": "Apache-2.0"}) + "\n")
    return folder


def gather(world_, folder: Path, out: Path):
    arms = parse_arms([f"{name}=tiny:{name}@{world_.url}" for name in ("base", "full")])
    collect(EvalRequest(load_bench(folder), arms, out, concurrency=8, backoff=0.001))
    return out


def judge_it(world, run, model="arbiter", **options):
    options = {"backoff": 0.001, "concurrency": 8, **options}
    return judge_run(run, parse_judge(f"{model}@{world.url}"), **options)


def read(run, rows=None):
    rows = score_run(run)["items"] if rows is None else rows
    found = read_judgements(run, read_snapshot(run), rows)
    assert found is not None
    return found
