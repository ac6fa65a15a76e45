"""Tables of the record that --json writes, so a recorded run reads the same.

``show_machine`` and ``speed_table`` are every bench's, the rest bench_kernels.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peers.driver import Record, quartiles
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

OURS = "ktbridge"
PASSES = ("forward", "backward")
QUIET = 0.5  # processes running in the last minute


def seconds(entry: Record, which: str) -> float:
    """The median of one contestant's ``forward``, ``backward`` or ``both`` (their sum)."""
    if which == "both":
        return entry["median"]["forward"] + entry["median"]["backward"]
    return entry["median"][which]


def ratio(result: Record, entry: Record, which: str) -> float | None:
    """Return ``entry``'s time over ours; None when we did not run."""
    ours = next((other for other in result["contestants"] if other["name"] == OURS), None)
    return None if ours is None else seconds(entry, which) / seconds(ours, which)


def plain_table(title: str, *headings: str) -> Table:
    """A column for names, without a heading, and columns of numbers."""
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


@dataclass(frozen=True)
class Row:
    """A line of ``speed_table``: one contestant's ``what``, beside others' records."""

    entry: Record
    what: str
    peers: Sequence[tuple[str, float]] = ()
    """Names of peers and their medians of what is compared with this one's."""
    more: Sequence[str] = ()
    name: str = ""  # the contestant's own


def speed_table(
    unit: str,
    rows: Iterable[Row],
    more: Sequence[str] = (),
    digits: int = 2,
    largest_is_best: bool = False,
) -> Table:
    """Medians with quartiles, the best round, ``more``, and times each peer's median."""
    rows = list(rows)
    peers = list(dict.fromkeys(peer for row in rows for peer, _ in row.peers))
    table = plain_table("", unit, "quartiles", "best", *more, *(f"x {peer}" for peer in peers))
    for row in rows:
        middle, samples = row.entry["median"][row.what], row.entry["samples"][row.what]
        first, third = quartiles(samples)
        best = max(samples) if largest_is_best else min(samples)
        ratios = {peer: f"{middle / other:.2f}" for peer, other in row.peers}
        table.add_row(
            row.name or row.entry["name"],
            *(
                f"{middle:.{digits}f}",
                f"{first:.{digits}f} – {third:.{digits}f}",
                f"{best:.{digits}f}",
            ),
            *row.more,
            *(ratios.get(peer, "") for peer in peers),
        )
    return table


def named(run: Record, name: str) -> Record | None:
    """A contestant's record, if it was measured."""
    return next((entry for entry in run["contestants"] if entry["name"] == name), None)


def show_machine(console: Console, machine: Record) -> None:
    """The CPU and, where known, the ceilings measured just now; how busy it was before."""
    lines = [f"{machine['cpu']}, {machine['cores']} cores"]
    if "peaks" in machine:
        found = machine["peaks"].items()
        peaks = ", ".join(f"{peak / 1e12:.2f} TFLOP/s {isa}" for isa, peak in found)
        lines = [
            f"{machine['cpu']}, {machine['threads']} threads on {machine['cores']} cores, "
            f"ktbridge on {machine['isa']}.",
            f"Ceilings measured now: bf16 {peaks}; memory reads {machine['bandwidth'] / 1e9:.1f} GB/s.",
        ]
    if machine["load"] > QUIET:
        lines.append(
            f"Others were at work here before this run (load {machine['load']:.1f}): "
            "ratios are rough, and times mean little."
        )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def show_left_out(console: Console, run: Record) -> None:
    for sentence in run["skipped"] + run["failed"]:
        console.print(sentence, markup=False, soft_wrap=True)


def print_result(console: Console, result: Record) -> None:
    """One shape: a row a contestant, then the ratios in words, then what to know about them."""
    console.print(shape_table(result))
    for entry in result["contestants"]:
        if entry["name"] != OURS and (both := ratio(result, entry, "both")) is not None:
            parts = ", ".join(f"{which} {ratio(result, entry, which):.2f}x" for which in PASSES)
            console.print(f"{entry['name']} / {OURS} = {both:.2f}x ({parts})")
    console.print(
        f"Least and quartiles, forward and backward, ms: {'; '.join(map(spread, result['contestants']))}"
    )
    if any("accuracy" in entry for entry in result["contestants"]):
        console.print(accuracy_table(result))
    who = (f"{entry['name']} {entry['version']} ({entry['isa']})" for entry in result["contestants"])
    console.print(", ".join(who), markup=False)
    fastest = (entry["median"][which] for entry in result["contestants"] for which in PASSES)
    least = (result["floor"][which]["seconds"] for _ in result["contestants"] for which in PASSES)
    if any(took < floor for took, floor in zip(fastest, least, strict=True)):
        console.print("More than 100 % of the floor: the ceilings were measured in a busy moment.")
    if "load" in result:
        console.print(
            f"Load {result['load']:.1f}; ceilings in between: {result['peak'] / 1e12:.2f} TFLOP/s, "
            f"{result['bandwidth'] / 1e9:.1f} GB/s."
        )
    for note in result.get("notes", ()):
        console.print(note, markup=False)
    console.print()


def spread(entry: Record) -> str:
    """The least and the quartiles of both passes in milliseconds."""
    ranges = ((min(samples), *quartiles(samples)) for samples in map(entry["samples"].get, PASSES))
    return f"{entry['name']} " + ", ".join(
        f"{1e3 * least:.2f}, {1e3 * low:.2f} – {1e3 * high:.2f}" for least, low, high in ranges
    )


def shape_table(result: Record) -> Table:
    shape, floor = result["shape"], result["floor"]
    title = (
        f"E={shape['experts']} K={shape['top_k']} H={shape['hidden']} I={shape['inner']} T={shape['tokens']}"
        f"{' ' + shape['storage'] if shape.get('storage', 'bf16') != 'bf16' else ''}"
        f"{', skew ' + format(result['skew'], 'g') if result.get('skew') else ''}"
        f"; floor {floor['forward']['seconds'] * 1e3:.2f} + {floor['backward']['seconds'] * 1e3:.2f} ms"
    )
    headings = ("fwd ms", "bwd ms", "both", "TFLOP/s", "% of floor", "÷ ours", "+MB")
    table = plain_table(title, *headings)
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


def accuracy_table(result: Record) -> Table:
    """A row a tensor, a column a contestant."""
    entries = [entry for entry in result["contestants"] if "accuracy" in entry]
    title = "Relative norm error against float32 autograd, %"
    table = plain_table(title, *(entry["name"] for entry in entries))
    for name in entries[0]["accuracy"]:  # in the order of cases.RESULTS
        table.add_row(name, *(f"{100 * entry['accuracy'][name]:.3f}" for entry in entries))
    return table
