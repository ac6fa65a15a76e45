"""What a run says: tables from the same dictionary that --json writes, so a recorded run reads the same."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

OURS = "ktbridge"
PASSES = ("forward", "backward")
QUIET = 0.5  # processes running in the last minute


def seconds(entry: dict[str, Any], which: str) -> float:
    """The median of one contestant's ``forward``, ``backward`` or ``both`` (their sum)."""
    if which == "both":
        return entry["median"]["forward"] + entry["median"]["backward"]
    return entry["median"][which]


def ratio(result: dict[str, Any], entry: dict[str, Any], which: str) -> float | None:
    """How many times our time ``entry`` takes; None when we did not run."""
    ours = next((other for other in result["contestants"] if other["name"] == OURS), None)
    return None if ours is None else seconds(entry, which) / seconds(ours, which)


def machine_line(machine: dict[str, Any]) -> str:
    """The CPU, the threads in use and the ceilings they reached just now."""
    peaks = ", ".join(f"{peak / 1e12:.2f} TFLOP/s {isa}" for isa, peak in machine["peaks"].items())
    return (
        f"{machine['cpu']}, {machine['threads']} threads on {machine['cores']} cores, "
        f"ktbridge on {machine['isa']}.\nCeilings measured now: bf16 {peaks}; "
        f"memory reads {machine['bandwidth'] / 1e9:.1f} GB/s.\n"
    )


def print_machine(console: Console, machine: dict[str, Any]) -> None:
    console.print(machine_line(machine), highlight=False, markup=False)
    if machine["load"] > QUIET:
        console.print(
            f"Others were at work here before this run (load {machine['load']:.1f}): "
            "ratios are rough and milliseconds mean little.\n",
            highlight=False,
        )


def print_result(console: Console, result: dict[str, Any]) -> None:
    """One shape: a row a contestant, then the ratios in words, then what to know about them."""
    console.print(shape_table(result))
    for entry in result["contestants"]:
        if entry["name"] != OURS and (both := ratio(result, entry, "both")) is not None:
            parts = ", ".join(f"{which} {ratio(result, entry, which):.2f}x" for which in PASSES)
            console.print(f"{entry['name']} / {OURS} = {both:.2f}x ({parts})", highlight=False)
    if "parts" in result:
        console.print(parts_table(result))
    if any("accuracy" in entry for entry in result["contestants"]):
        console.print(accuracy_table(result))
    who = (
        f"{entry['name']} {entry['version']} ({entry['isa']})" for entry in result["contestants"]
    )
    console.print(", ".join(who), highlight=False, markup=False)
    fastest = (entry["median"][which] for entry in result["contestants"] for which in PASSES)
    least = (result["floor"][which]["seconds"] for _ in result["contestants"] for which in PASSES)
    if any(took < floor for took, floor in zip(fastest, least, strict=True)):
        console.print("More than 100 % of the floor: the ceilings were measured in a busy moment.")
    for note in result.get("notes", ()):
        console.print(note, highlight=False, markup=False)
    console.print()


def shape_table(result: dict[str, Any]) -> Table:
    shape, floor = result["shape"], result["floor"]
    title = (
        f"E={shape['experts']} K={shape['top_k']} H={shape['hidden']} I={shape['inner']} T={shape['tokens']}"
        f"; floor {floor['forward']['seconds'] * 1e3:.2f} + {floor['backward']['seconds'] * 1e3:.2f} ms"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("fwd ms", "bwd ms", "both", "TFLOP/s", "% of floor", "÷ ours", "+MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in result["contestants"]:
        shares = [100 * floor[which]["seconds"] / seconds(entry, which) for which in PASSES]
        rates = [floor[which]["flops"] / seconds(entry, which) / 1e12 for which in PASSES]
        both = ratio(result, entry, "both")
        table.add_row(
            entry["name"],
            *(f"{seconds(entry, which) * 1e3:.2f}" for which in (*PASSES, "both")),
            " / ".join(f"{rate:.2f}" for rate in rates),
            " / ".join(f"{share:.0f}" for share in shares),
            "–" if both is None else f"{both:.2f}x",
            f"{entry['extra_bytes'] / 1e6:.0f}",
        )
    return table


def parts_table(result: dict[str, Any]) -> Table:
    """What the layer's main loops take by themselves, beside the passes and a third of each peer."""
    parts = {name: took * 1e3 for name, took in result["parts"].items()}
    table = Table(
        title="Parts of a pass over these weights by themselves, ms",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    headings = ("read", "multiply", "sum", "loop")
    peers = [entry for entry in result["contestants"] if entry["name"] != OURS]
    for heading in ("", *headings, OURS, *(f"{entry['name']} / 3" for entry in peers)):
        table.add_column(heading, justify="right" if heading else "left")
    first = {"forward": parts["read"], "backward": parts["pack"]}
    rows = {
        w: (first[w], parts["products"], first[w] + parts["products"], parts[w]) for w in PASSES
    }
    rows["both"] = tuple(map(sum, zip(*rows.values(), strict=True)))
    ours = [entry for entry in result["contestants"] if entry["name"] == OURS]
    for which, numbers in rows.items():
        took = [1e3 * seconds(entry, which) for entry in ours]
        third = [1e3 * seconds(entry, which) / 3 for entry in peers]
        label = "backward (read: into panels)" if which == "backward" else which
        table.add_row(label, *(f"{value:.2f}" for value in (*numbers, *took, *third)))
    return table


def accuracy_table(result: dict[str, Any]) -> Table:
    """A row a tensor, a column a contestant."""
    entries = [entry for entry in result["contestants"] if "accuracy" in entry]
    title = "Relative norm error against float32 autograd, %"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for entry in entries:
        table.add_column(entry["name"], justify="right")
    for name in entries[0]["accuracy"]:  # in the order of cases.RESULTS
        table.add_row(name, *(f"{100 * entry['accuracy'][name]:.3f}" for entry in entries))
    return table


def sweep_table(result: dict[str, Any]) -> Table:
    """Ours by number of threads, and whether one more ever cost time."""
    table = Table(
        title=f"{OURS} by threads, {result['label']}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("threads", "fwd ms", "bwd ms", "both ms", "× 1st", ""):
        table.add_column(heading, justify="right" if heading else "left")
    first = before = None
    for entry in result["contestants"]:
        both = seconds(entry, "both")
        first = first or both
        slower = before is not None and both > before
        table.add_row(
            str(entry["threads"]),
            *(f"{seconds(entry, which) * 1e3:.2f}" for which in (*PASSES, "both")),
            f"{first / both:.2f}x",
            "slower than the row above" if slower else "",
        )
        before = both
    return table
