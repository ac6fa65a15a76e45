"""Sum up the comparison of a merged checkpoint: one verdict, one sentence, one table by groups of layers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ktbridge.codes import problem
from ktbridge.document import Block, Phrase, Sentences, Table, TableRow, Tone
from ktbridge.errors import Problem, has_errors, list_names
from ktbridge.files.sizes import size_text
from ktbridge.verify.merge_check import MatrixFinding, MergeCheck
from ktbridge.verify.merge_faults import (
    EXPERT,
    INTERLEAVED,
    LAYER,
    ORDER,
    OTHER,
    OTHER_A,
    OTHER_B,
    PACKED_A,
    PACKED_B,
    RANKS,
    SCALE,
    SLICE,
    SWAPPED,
    TRANSPOSED,
    number_ranges,
)
from ktbridge.verify.merge_sums import (
    APPLIED,
    CHANGED,
    DIFFERS,
    FOUR_BIT,
    FURTHER,
    KEPT,
    NOT_APPLIED,
    ROUNDED,
    SAME,
)

IN_PART, SEVERAL, CANT_TELL = "in part", "several mistakes", "can't tell"
_PARTIAL = {RANKS, SLICE, NOT_APPLIED}
MEANINGS = {
    DIFFERS: "changed; no adapter was given to compare with",
    APPLIED: "the base plus the adapter's delta",
    NOT_APPLIED: "the base's",
    ROUNDED: "the delta is smaller than the steps between stored values",
    SCALE: "the delta at another scale",
    RANKS: "some ranks of the delta only",
    SLICE: "a slice of the delta only",
    SWAPPED: "gate has up's delta, and up gate's",
    ORDER: "the delta's rows are in the order of slices",
    INTERLEAVED: "the delta's rows of gate and up alternate, or not, the wrong way",
    EXPERT: "the delta of another expert",
    LAYER: "the delta of another layer",
    TRANSPOSED: "the delta's transpose",
    PACKED_B: "B's columns of all experts were unpacked in another order",
    PACKED_A: "A's rows of all experts were unpacked in another order",
    OTHER_A: "this adapter's B with another A",
    OTHER_B: "this adapter's A with another B",
    OTHER: "a change that this adapter doesn't explain",
    FURTHER: "the adapter's delta, and a change that rounding doesn't explain",
    CHANGED: "changed, and no LoRA is on it",
    SAME: "the base's",
}


class MatrixGroup(NamedTuple):
    """Matrices of one module in several layers that are alike. ``experts``: "" of what isn't an expert's.

    ``k``: least and greatest; ``could_keep``, ``change``, ``left``, ``changed``: means; ``rank``: the
    highest, -1 for more than is seen. Layers are "-" where there are none.
    """

    label: str
    layers: str
    experts: str
    storage: str
    matrices: int
    verdict: str
    detail: str
    k: tuple[float, float]
    could_keep: float
    change: float
    left: float
    changed: float
    rank: int
    has_lora: bool

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {**self._asdict(), "k": [round(each, 6) for each in self.k]}


@dataclass(frozen=True)
class MergeVerdict:
    """``verdict`` in a few words, ``sentence`` that says why; ``kept``: share of the delta that is there."""

    verdict: str
    sentence: str
    kept: float
    groups: tuple[MatrixGroup, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return self.verdict in (APPLIED, DIFFERS) and not has_errors(self.problems)


def judge_merge(check: MergeCheck) -> MergeVerdict:
    """Sum up what ``check_merge`` found."""
    groups = tuple(_group(check.findings))
    problems = list(check.problems)
    with_lora = [finding for finding in check.findings if finding.has_lora and finding.energy > 0]
    energy = sum(finding.energy for finding in with_lora)
    kept = sum(finding.k * finding.energy for finding in with_lora) / energy if energy else 0.0
    if check.adapter is None:
        verdict, sentence = _without_adapter(check, groups)
        return MergeVerdict(verdict, sentence, 0.0, groups, tuple(problems))
    changed = [f for f in check.findings if f.verdict == CHANGED and not f.has_lora]
    others = [f for f in check.findings if not f.has_lora]
    another_base = len(changed) > len(others) / 2 and len(changed) > 1
    if changed:
        problems.append(_changed_problem(check, changed, len(others)))
    verdict, sentence = _with_adapter(check, with_lora, groups, kept)
    if changed and verdict in (APPLIED, FURTHER):
        verdict = FURTHER
        sentence += f"; {len(changed)} of {len(others)} tensors without LoRA are not the base's"
    if changed and all(finding.detail == FOUR_BIT for finding in changed):
        sentence += f", but {FOUR_BIT}: it was merged as QLoRA trains, and not into these weights"
    elif another_base:
        sentence += ": it may have been merged into another base model"
    return MergeVerdict(verdict, sentence, kept, groups, tuple(problems))


def as_dict(check: MergeCheck, verdict: MergeVerdict) -> dict[str, object]:
    """Return everything as JSON-ready values; docs/verify.md has the keys."""
    return {
        "ok": verdict.ok,
        "verdict": verdict.verdict,
        "sentence": verdict.sentence,
        "merged": str(check.merged),
        "base_model": str(check.base),
        "adapter": str(check.adapter.path) if check.adapter is not None else None,
        "rank": check.rank,
        "alpha": check.alpha,
        "scale": check.scale,
        "kept": round(verdict.kept, 6),
        "matrices": dict(Counter(f.verdict for f in check.findings)),
        "groups": [group.as_dict() for group in verdict.groups],
        "bytes": check.nbytes,
        "seconds": round(check.seconds, 3),
        "problems": [item.as_dict() for item in verdict.problems],
    }


def build_blocks(check: MergeCheck, verdict: MergeVerdict) -> list[Block]:
    """Return the sentence and the table; tensors without LoRA that are the base's are one row."""
    words = ("module", "layers", "experts", "in", "verdict", "how")
    rows: list[TableRow] = []
    for group in sorted(
        _over_modules(verdict.groups), key=lambda one: (one.verdict == SAME, not one.has_lora)
    ):
        if group.verdict == SAME and not group.has_lora:
            continue
        tone: Tone = "dropped"
        if group.verdict in (APPLIED, DIFFERS):
            tone = "improved"
        elif group.verdict in (SAME, NOT_APPLIED):
            tone = "calm"
        known = check.adapter is not None and group.has_lora
        k = " to ".join(dict.fromkeys(f"{each:.3g}" for each in group.k)) if known else ""
        cells: list[str | Phrase] = [
            group.label, group.layers, group.experts, group.storage, f"{group.matrices:,}",
            Phrase(group.verdict, tone), k, f"{group.change:.2%}", f"{group.left:.2%}", _remarks(group),
        ]  # fmt: skip
        rows.append(TableRow(cells))
    same = sum(g.matrices for g in verdict.groups if g.verdict == SAME and not g.has_lora)
    if same:
        others: list[str | Phrase] = ["all others", "", "", "", f"{same:,}", Phrase(SAME, "calm"), *[""] * 4]
        rows.append(TableRow(others, minor=True))
    head = ("module", "layers", "experts", "in", "count", "verdict", "k", "change", "left", "how")
    found = f"{verdict.verdict}: {verdict.sentence}"
    took = f"{size_text(check.nbytes)} of weights compared in {check.seconds:.1f} s"
    table = Table("what each matrix is", head, rows, took, words)
    return [Sentences([found], "strong"), table]


def _remarks(group: MatrixGroup) -> str:
    said = [group.detail]
    if group.rank:
        said.append(f"rank {group.rank}" if group.rank > 0 else "full rank")
    if group.has_lora and group.could_keep < 0.99:
        said.append(f"{group.storage} could keep {group.could_keep:.0%}")
    return "; ".join(filter(None, said))


def _over_modules(groups: Iterable[MatrixGroup]) -> list[MatrixGroup]:
    """Join the groups of modules that are alike in layers, experts and verdict."""
    found: dict[tuple[object, ...], list[MatrixGroup]] = defaultdict(list)
    for group in groups:
        head, _, leaf = group.label.rpartition(".")
        alike = (
            head,
            group.layers,
            group.experts,
            group.storage,
            group.verdict,
            group.detail,
            group.has_lora,
        )
        found[alike if leaf.endswith("_proj") else group].append(group)
    joined = []
    for members in found.values():
        first, count = members[0], sum(group.matrices for group in members)
        leaves = [group.label.rpartition(".")[2].removesuffix("_proj") for group in members]
        means = {
            name: sum(getattr(group, name) * group.matrices for group in members) / count
            for name in ("could_keep", "change", "left", "changed")
        }
        ranks = [group.rank for group in members]
        label = f"{first.label.rpartition('.')[0]}.{', '.join(leaves)}".lstrip(".")
        joined.append(
            first._replace(
                label=label if len(members) > 1 else first.label,
                matrices=count,
                k=(min(group.k[0] for group in members), max(group.k[1] for group in members)),
                rank=-1 if -1 in ranks else max(ranks),
                **means,
            )
        )
    return joined


class _Kind(NamedTuple):
    label: str
    verdict: str
    detail: str
    storage: str
    has_lora: bool


def _group(findings: Iterable[MatrixFinding]) -> Iterator[MatrixGroup]:
    kinds: dict[tuple[int, _Kind], list[MatrixFinding]] = defaultdict(list)
    for f in findings:
        kinds[f.layer, _Kind(f.label, f.verdict, f.detail, f.storage, f.has_lora)].append(f)
    groups: dict[tuple[_Kind, str, tuple[int, ...]], list[MatrixFinding]] = defaultdict(list)
    for (_, kind), alike in kinds.items():
        detail = kind.detail or _moved(alike)
        experts = tuple(sorted(f.expert for f in alike if f.expert >= 0))
        groups[kind, detail, experts] += alike
    order = {label: n for n, label in enumerate(dict.fromkeys(kind.label for kind, _, _ in groups))}
    for (kind, detail, experts), alike in sorted(
        groups.items(), key=lambda one: (order[one[0][0].label], one[0][0].verdict)
    ):
        ranks = [finding.rank for finding in alike]
        layers = sorted({finding.layer for finding in alike if finding.layer >= 0})
        count = len(alike)
        yield MatrixGroup(
            kind.label, number_ranges(layers) or "-", number_ranges(sorted(set(experts))), kind.storage,
            count, kind.verdict, detail,
            (min(f.k for f in alike), max(f.k for f in alike)),
            sum(f.could_keep for f in alike) / count, sum(f.change for f in alike) / count,
            sum(f.left for f in alike) / count, sum(f.changed for f in alike) / count,
            -1 if -1 in ranks else max(ranks), kind.has_lora,
        )  # fmt: skip


def _moved(alike: list[MatrixFinding]) -> str:
    """Return which other expert's or layer's delta it is, if that is a shift."""
    first = alike[0]
    if first.verdict == LAYER:
        return "one layer on" if first.other == first.layer + 1 else "of another layer"
    if first.verdict != EXPERT:
        return ""
    steps = Counter(finding.other - finding.expert for finding in alike)
    step, count = steps.most_common(1)[0]
    if count >= len(alike) - abs(step) and count > 1:
        return f"expert e has the delta of e{step:+d}"
    pairs = [f"{f.expert} has {f.other}'s" for f in alike[:3]]
    return ", ".join(pairs) + (", …" if len(alike) > 3 else "")


def _with_adapter(
    check: MergeCheck, findings: list[MatrixFinding], groups: tuple[MatrixGroup, ...], kept: float
) -> tuple[str, str]:
    if not findings:
        return CANT_TELL, "the adapter changes nothing: its B is zero"
    counts = Counter(finding.verdict for finding in findings)
    total = len(findings)
    kinds = counts.keys()
    if kinds <= {APPLIED, ROUNDED}:
        storages = ", ".join(sorted({f.storage for f in findings}))
        if kept < KEPT:
            could = sum(f.could_keep * f.energy for f in findings) / sum(f.energy for f in findings)
            return ROUNDED, (
                f"{kept:.0%} of the delta is left in {storages}, whose steps could keep {could:.0%}: merge "
                "into finer weights, or serve the adapter beside the base"
            )
        lost = f", of which {storages} kept {kept:.0%}" if kept < 0.99 else f" in {storages}"
        return APPLIED, f"all {total:,} matrices with LoRA are base + {check.scale:g}·B·A{lost}"
    if len(counts) > 1 and kinds <= {APPLIED, ROUNDED, *_PARTIAL}:
        right = counts[APPLIED] + counts[ROUNDED]
        return (IN_PART, f"{right:,} of {total:,} matrices are applied; {_places(groups, kinds - {APPLIED})}")
    wrong, *more = kinds - {APPLIED, ROUNDED}
    if more:
        return SEVERAL, f"of {total:,} matrices with LoRA {_places(groups, {wrong, *more})}"
    some, places = f"all {total:,} matrices", ""
    if len(counts) > 1:
        some, places = f"{counts[wrong]:,} of {total:,} matrices", f" ({_where(groups, wrong)})"
    if wrong == SCALE:
        scaled = [finding for finding in findings if finding.verdict == SCALE]
        return SCALE, _scale_sentence(check, scaled, some + places)
    return wrong, f"{some} with LoRA{places}: {MEANINGS[wrong]}{_how(groups, wrong)}"


def _places(groups: tuple[MatrixGroup, ...], kinds: Iterable[str]) -> str:
    wanted = set(kinds)
    found = [
        f"{kind}: {_where(groups, kind)}{_how(groups, kind)}"
        for kind in dict.fromkeys(group.verdict for group in groups if group.has_lora)
        if kind in wanted
    ]
    return "; ".join(found[:4]) + ("; …" if len(found) > 4 else "")


def _where(groups: tuple[MatrixGroup, ...], kind: str) -> str:
    by_place: dict[tuple[str, str], list[str]] = defaultdict(list)
    for group in groups:
        if group.has_lora and group.verdict == kind:
            by_place[group.layers, group.experts].append(group.label.removesuffix("_proj"))
    texts = []
    for (layers, experts), labels in by_place.items():
        of = f" of experts {experts}" if experts else ""
        texts.append(f"{', '.join(dict.fromkeys(labels))}{of} in layers {layers}")
    return "; ".join(texts[:3]) + ("; …" if len(texts) > 3 else "")


def _how(groups: tuple[MatrixGroup, ...], kind: str) -> str:
    details = dict.fromkeys(g.detail for g in groups if g.verdict == kind and g.detail)
    if not details:
        return ""
    shown = list(details)[:2]
    return f" ({'; '.join(shown)}{'; …' if len(details) > 2 else ''})"


def _scale_sentence(check: MergeCheck, findings: list[MatrixFinding], what: str) -> str:
    values = [finding.k for finding in findings]
    k = median(values)
    if max(values) - min(values) > 0.1 * abs(k):
        return f"{what} have the delta at {min(values):.3g} to {max(values):.3g} times its scale"
    text = f"{what} have it at scale {k * check.scale:.3g} instead of {check.scale:g} (×{k:.3g})"
    return text + _cause(k, check.scale, check.rank)


def _cause(k: float, scale: float, rank: int) -> str:
    """Return what usually makes such a factor."""
    root = math.sqrt(rank) if rank else 0.0
    causes = (
        (1 / scale if scale else 0.0, "alpha/r was left out"),
        (2.0, "it was added twice, or alpha doubled"),
        (root, "alpha/√r as of rsLoRA, where the adapter has alpha/r"),
        (1 / root if root else 0.0, "alpha/r, where the adapter is rsLoRA with alpha/√r"),
        (scale, "alpha/r was applied twice"),
    )
    fitting = [cause for value, cause in causes if value and abs(k / value - 1) < 0.03]
    parts = round(1 / k) if 0 < k < 0.55 else 0
    if parts > 1 and abs(k * parts - 1) < 0.03:
        fitting.append(f"the mean over {parts} processes instead of the sum")
    return f": {', or '.join(fitting)}" if fitting else ""


def _without_adapter(check: MergeCheck, groups: tuple[MatrixGroup, ...]) -> tuple[str, str]:
    changed = [f for f in check.findings if f.verdict in (CHANGED, DIFFERS)]
    total = len(check.findings)
    if not changed:
        beyond = any(finding.changed for finding in check.findings)
        how = "the base's up to rounding" if beyond else "the base's, bit by bit"
        return SAME, f"all {total:,} matrices are {how}: no tuning is in it"
    ranks = Counter(finding.rank for finding in changed)
    low = [rank for rank in ranks if rank > 0]
    parts = [f"{sum(ranks[rank] for rank in low):,} by rank {min(low)} to {max(low)}"] if low else []
    if ranks[-1]:
        parts.append(f"{ranks[-1]:,} by full rank")
    if ranks[0]:
        parts.append(f"{ranks[0]:,} by no more than noise shows")
    sizes = [finding.change for finding in changed]
    return DIFFERS, (
        f"{len(changed):,} of {total:,} matrices differ from the base: {', '.join(parts)}; by "
        f"{min(sizes):.2%} to {max(sizes):.2%} of the weights"
    )


def _changed_problem(check: MergeCheck, changed: list[MatrixFinding], total: int) -> Problem:
    names = dict.fromkeys(f"layer {f.layer} {f.label}" if f.layer >= 0 else f.label for f in changed)
    sizes = [finding.change for finding in changed]
    found = f"{len(changed)} of {total} tensors without LoRA are not the base's: {list_names(list(names), 3)}"
    found += f"; by up to {max(sizes):.2%}"
    return problem("KTV032", str(check.merged), found)
