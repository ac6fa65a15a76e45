"""What a soak found, judged a line at a time: soak.json and the page soak.md."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from soaking import clients, misbehaving, watching
from soaking.rounds import STEPS, Rounds

from ktbridge.machine import read_machine

HEALTH_MS = {"median": watching.SLOW_MS, "99 %": watching.SLOW_MS, "worst": 1000.0}
LOG_BYTES = 200
"""Of the server's log, for each broken request."""
EVAL_MB = 400
STOP_SECONDS = 30.0  # the server's drain time, and what follows it
TOLD = 20  # faults of a kind in the report


class Line(NamedTuple):
    """One line of the page: what was looked at, what was found, what it had to be, whether it was."""

    what: str
    found: str
    limit: str
    held: bool


def server_lines(found: Mapping[str, Any]) -> list[Line]:
    """Outcomes, answers, /health, log and end of `ktbridge serve`."""
    counts: dict[str, int] = found["requests"]
    kinds = {
        kind: sum(n for key, n in counts.items() if key.startswith(f"{kind}: "))
        for kind in clients.ALLOWED
    }
    odd = {
        key: n
        for key, n in counts.items()
        for kind, _, outcome in [key.partition(": ")]
        if kind in clients.ALLOWED and outcome not in clients.ALLOWED[kind]
    }
    same = sum(found["after"].get(key) == text for key, text in found["expected"].items())
    changed = counts.get("answers that changed", 0)
    health = watching.waits(found["watch"].health)
    broken = sum(kinds[kind] for kind in clients.BROKEN)
    log, (idle, rest) = found["log bytes"], found["descriptors"]
    code, stopped = found["sigterm"]
    return [
        Line(
            "requests: " + ", ".join(f"{n:,} {kind}" for kind, n in kinds.items()),
            f"{sum(odd.values())} answered otherwise" + (f": {odd}" if odd else ""),
            "each kind as it should be",
            not odd and min(kinds.values()) > 0,
        ),
        Line(
            "answers at temperature 0 under attack",
            f"{changed} of {counts.get('answers compared', 0):,} differ from those before",
            "none",
            not changed and counts.get("answers compared", 0) > 0,
        ),
        Line(
            "answers at temperature 0 afterwards",
            f"{same} of {len(found['expected'])} are those before",
            "all",
            same == len(found["expected"]),
        ),
        *(
            Line(f"/health, {mark}", f"{health[mark]:g} ms", f"{limit:g} ms", health[mark] <= limit)
            for mark, limit in HEALTH_MS.items()
        ),
        Line(
            "/health answered",
            f"{health['asked']:,} times; {len(found['watch'].faults)} failed",
            "each time",
            not found["watch"].faults,
        ),
        Line(
            "the server's log",
            f"{log:,} bytes for {broken:,} broken requests: {log / max(broken, 1):.1f} each",
            f"{LOG_BYTES} each",
            log <= LOG_BYTES * broken,
        ),
        Line(
            "descriptors, quiet, before and after",
            f"{idle} and {rest}",
            f"+{watching.MORE_DESCRIPTORS}",
            rest is not None and rest <= idle + watching.MORE_DESCRIPTORS,
        ),
        Line(
            "SIGTERM ends the server",
            f"with {code} after {stopped:g} s",
            f"with 0 within {STOP_SECONDS:g} s",
            code == 0 and stopped <= STOP_SECONDS,
        ),
    ]


def process_line(name: str, samples: list[watching.Sample]) -> Line:
    seen = watching.growth(samples)
    texts = [
        f"{a:g} → {b:g} {unit}"
        for (a, b), unit in zip(seen.values(), ("MB", "descriptors", "threads"), strict=True)
    ]
    limits = (
        f"+{watching.MEMORY_GROWTH:.0%} or {watching.LEAST_GROWTH_MB:g} MB, "
        f"+{watching.MORE_DESCRIPTORS}, +{watching.MORE_THREADS}"
    )
    texts.append(f"{watching.slope(samples):+.1f} MB an hour in the second half")
    return Line(f"held by {name}", "; ".join(texts), limits, watching.is_flat(seen))


def round_lines(found: Mapping[str, Any]) -> list[Line]:
    """Evaluations and training."""
    bad, real, train = (
        found["evaluations"],
        found["attacked evaluations"],
        found["training"],
    )
    peak = max([*bad.peak_mb, *real.peak_mb], default=0)
    return [
        Line(
            f"`ktbridge eval` of a server with {len(misbehaving.EXPECTED) - 1} faults, then without",
            f"{bad.done} rounds, {bad.items:,} items; {len(bad.faults)} faults",
            "each item's outcome, then answers and results as at first",
            bad.done > 0 and not bad.faults,
        ),
        Line(
            "`ktbridge eval` of the server under attack",
            f"{real.done} runs, {real.items:,} answers; {len(real.faults)} faults",
            "answers and results as before",
            real.done > 2 and not real.faults,
        ),
        Line("memory of an evaluation", f"{peak} MB", f"{EVAL_MB} MB", 0 < peak <= EVAL_MB),
        Line(
            f"`ktbridge train` of {STEPS} steps, killed twice a round",
            f"{train.done} runs, {train.kills} times SIGKILL, up to {max(train.peak_mb, default=0)} MB; "
            f"{len(train.faults)} faults",
            "the uninterrupted run's SHA-256 of adapter and losses",
            train.done > 0 and train.kills > 0 and not train.faults,
        ),
    ]


def machine() -> dict[str, object]:
    """What this ran on."""
    here = asdict(read_machine())
    return {
        "cpu": here["cpu"],
        "instruction sets": " ".join(here["isa"]),
        "cores for this process": len(os.sched_getaffinity(0)),
        "memory in GB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "ktbridge": version("ktbridge"),
        "torch": version("torch"),
    }


def write(found: Mapping[str, Any], output: Path) -> int:
    """Judge, write both files into ``output``, print the page; 1 if any line fell short, else 0."""
    watch = found["watch"]
    lines = server_lines(found) + round_lines(found)
    lines += [process_line(name, samples) for name, samples in watch.samples.items()]
    rounds: dict[str, Rounds] = {
        "misbehaving server": found["evaluations"],
        "attacked server": found["attacked evaluations"],
        "training": found["training"],
    }
    faults = (
        watch.faults[:TOLD]
        + found["wrong"]
        + [f for one in rounds.values() for f in one.faults[:TOLD]]
    )
    held = all(line.held for line in lines)
    seen = found["load"]
    load = {
        "before": seen[0],
        "median": statistics.median(seen),
        "largest": max(seen),
        "after": seen[-1],
    }
    load = {when: round(value, 1) for when, value in load.items()}
    plain = watching.waits(watch.plain)
    document = {
        "held": held,
        "began": found["began"],
        "seconds": found["seconds"],
        "seconds under attack": found["seconds under attack"],
        "machine": machine(),
        "load": load,
        "lines": [line._asdict() for line in lines],
        "requests": dict(sorted(found["requests"].items())),
        "health_ms": watching.waits(watch.health),
        "health_over_the_limit": watch.slow,
        "plain_server_ms": plain,
        "rounds": {name: asdict(one) for name, one in rounds.items()},
        "adapter": found["adapter"],
        "log's end": found["log's end"],
        "faults": faults,
        "samples": {name: watching.thinned(samples) for name, samples in watch.samples.items()},
    }
    (output / "soak.json").write_text(
        json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )
    text = render(document, lines)
    (output / "soak.md").write_text(text, "utf-8")
    print(text, end="")
    return 0 if held else 1


def render(document: Mapping[str, Any], lines: list[Line]) -> str:
    plain = document["plain_server_ms"]
    text = [
        f"# Soak: {'held' if document['held'] else 'FELL SHORT'}",
        "",
        f"{document['began']}, {document['seconds under attack']:g} s under attack, "
        f"{document['seconds']} s in all. "
        f"{', '.join(f'{key} {value}' for key, value in document['machine'].items())}.",
        "",
        f"Load average: {', '.join(f'{when} {value}' for when, value in document['load'].items())}. "
        f"A plain Python server that nobody else asked, beside /health: {plain['median']:g} ms median, "
        f"{plain['99 %']:g} ms 99 %, {plain['worst']:g} ms worst.",
        "",
        "| what | found | limit | |",
        "| --- | --- | --- | --- |",
    ]
    text += [
        f"| {what} | {found} | {limit} | {'held' if held else '**fell short**'} |".replace(
            "\n", " "
        )
        for what, found, limit, held in lines
    ]
    if document["faults"]:
        text += ["", "## Faults", "", *(f"- {fault}" for fault in document["faults"])]
    return "\n".join(text) + "\n"
