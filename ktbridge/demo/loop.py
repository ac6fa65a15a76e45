"""The demo's directory: its inputs, written unless the user has changed them.

There are two demos: one on real weights, and a tiny one that downloads nothing. The seven commands are those
of a demo's recipe.yaml, which ``ktbridge.recipe`` runs as it runs any other; smollm2.py or tiny.py makes the
model before them. Nothing here prints: ``ktbridge.cli.demo`` does.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ktbridge.errors import UsageError
from ktbridge.files import digests
from ktbridge.files.publish import write_text
from ktbridge.server_api.served_names import adapter_name, base_name

from .persona import persona_rows

ADAPTER = "neko"
STATE = ".ktbridge-demo.json"
CONFIG, RECIPE, ROWS, BENCH = "demo.yaml", "recipe.yaml", "neko.jsonl", "bench"


@dataclass(frozen=True)
class Demo:
    """One of the two demos: the name that its base is served as, and where it is unless the user says."""

    served: str
    directory: str

    @property
    def arms(self) -> dict[str, str]:
        """The names of the base and of the whole adapter on the demo's server."""
        return {"base": base_name(self.served), "full": adapter_name(self.served, ADAPTER)}


REAL = Demo("smollm2", "ktbridge-demo")
TINY = Demo("tiny", "ktbridge-demo-tiny")


def check_demo(directory: Path, demo: Demo) -> None:
    """Raise ``UsageError`` where the directory holds something that isn't this demo of ours."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file.", "Give another --output.")
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if not (directory / STATE).is_file():
        raise UsageError(
            f"{directory} is not empty and was not made by `ktbridge demo`.", "Give another --output."
        )
    # Until 0.6.1 there was the tiny one alone, without a name; a damaged state says nothing.
    state = _read_state(directory)
    if (made := state.get("demo", TINY.served) if state else demo.served) != demo.served:
        flag = {TINY.served: "with --tiny", REAL.served: "without --tiny"}[made]
        raise UsageError(
            f"{directory} has the demo on {made!r}, not the one on {demo.served!r}.",
            f"Go on with it {flag}, or give another --output.",
        )


def prepare_demo(directory: Path, demo: Demo) -> None:
    """Make (or reopen) the demo directory, which :func:`check` may refuse: then nothing there is touched."""
    check_demo(directory, demo)
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / STATE).is_file():
        _write_state(directory, {"demo": demo.served})


def provide(directory: Path, name: str, text: str) -> None:
    """Write one of the demo's inputs, unless the user has changed it since we wrote it."""
    path, state = directory / name, _read_state(directory)
    if path.exists() and digests.of_file(path) != state.get(name):
        return
    path.parent.mkdir(exist_ok=True)
    write_text(path, text)
    _write_state(directory, {**state, name: digests.of_text(text)})


def provide_inputs(directory: Path, demo: Demo) -> Path:
    """Write the recipe, the training configuration, the rows and the bench; the recipe's path."""
    rows = persona_rows() if demo is TINY else text_of(demo, ROWS)
    config = text_of(demo, CONFIG)
    inputs = {ROWS: rows, CONFIG: config, RECIPE: text_of(demo, RECIPE)}
    if demo is REAL:
        inputs |= {f"{BENCH}/{name}": text for name, text in english_bench().items()}
    for name, text in inputs.items():
        provide(directory, name, text)
    return directory / RECIPE


def text_of(demo: Demo, name: str) -> str:
    """One of the files that the demo writes, as it comes with ktbridge."""
    return (Path(__file__).parent / "inputs" / demo.served / name).read_text(encoding="utf-8")


def english_bench() -> dict[str, str]:
    """The files of nekobench with its English items alone: what SmolLM2 speaks."""
    from ktbridge.eval import load_bench  # numpy, which --help does without

    files = {name: each.decode("utf-8") for name, each in load_bench("nekobench").files.items()}
    head = re.sub(r"(?m)^name: .*$", "name: nekobench-en", files["bench.yaml"], count=1)
    files["bench.yaml"] = re.sub(r"(?m)^language: .*$", "language: en", head, count=1)
    items = files["items.jsonl"].splitlines(keepends=True)
    files["items.jsonl"] = "".join(line for line in items if json.loads(line)["lang"] == "en")
    return files


def _read_state(directory: Path) -> dict[str, str]:
    """The recorded state; empty if the file is damaged, so that everything is made again."""
    try:
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(directory: Path, state: dict[str, str]) -> None:
    write_text(directory / STATE, json.dumps({"made_by": "ktbridge demo", **state}, indent=1) + "\n")
