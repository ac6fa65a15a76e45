"""Data types of a plan: parts of memory, verdicts, advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from ktbridge.experts.gpu.placement import Placement
from ktbridge.files.sizes import figures, size_text

Where = Literal["RAM", "page cache", "GPU", "disk"]


@dataclass(frozen=True)
class Part:
    """``size`` bytes of one item in one place, and how that was determined."""

    what: str
    where: Where
    size: int
    how: str


@dataclass(frozen=True)
class Verdict:
    """Whether ``need`` bytes fit into ``have``; None where that isn't known."""

    what: str
    need: int
    have: int | None

    @property
    def fits(self) -> bool:
        return self.have is None or self.need <= self.have

    def __str__(self) -> str:
        if self.have is None:
            return f"not judged: {size_text(self.need)} {self.what}; how much there is isn't known"
        lead = "fits" if self.fits else "does not fit"
        return f"{lead}: {size_text(self.need)} of {size_text(self.have)} {self.what}"


@dataclass(frozen=True)
class Advice:
    """A suggested change, as overrides of ``ktbridge train``, with its savings and cost."""

    change: str
    where: Where
    saves: int
    price: str


@dataclass(frozen=True)
class Pace:
    """How fast a run should be once its pages are warm.

    ``how`` describes what was measured and what was assumed. ``cold_bytes`` of experts are read from disk in
    the first step unless they are in the page cache; nothing here counts that time. Where RAM is too small
    for them, the steps' own reading (``DiskReads``) is counted.
    """

    tokens_per_second: float
    step_seconds: float
    seconds: float
    expert_share: float
    cold_bytes: int
    how: str
    eval_seconds: float = 0.0
    """Of ``seconds``, those of all evaluations of held-out rows."""

    def reading(self, seconds: float, steps: int) -> Pace:
        """The pace with ``seconds`` more in each of ``steps`` steps: the kernels wait for the disk."""
        step = self.step_seconds + seconds
        return replace(
            self,
            tokens_per_second=self.tokens_per_second * self.step_seconds / step,
            step_seconds=step,
            seconds=self.seconds + steps * seconds,
            expert_share=(self.expert_share * self.step_seconds + seconds) / step,
        )


@dataclass(frozen=True)
class DiskReads:
    """The part of the experts that the page cache can't hold, and the disk's speed.

    ``size`` bytes at least are read in each pass. ``rate`` is the disk's bytes per second, None if it isn't
    known; ``how`` describes how it was measured, or why not. ``enough`` is the memory with which nothing
    would be read, ``unread`` the tokens/s then, None if no pace was measured: ``Pace`` counts the reading.
    """

    size: int
    rate: float | None
    how: str
    enough: int = 0
    unread: float | None = None

    @property
    def seconds(self) -> float | None:
        """Return what reading takes of a pass, at least."""
        return None if self.rate is None else self.size / self.rate

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "seconds": self.seconds, "text": str(self)}

    def __str__(self) -> str:
        lead = f"RAM is short: each pass reads {size_text(self.size)} of experts from disk"
        if self.rate is None or self.seconds is None:
            return f"{lead}, at a pace that isn't known ({self.how})"
        rate = f"{size_text(round(self.rate))}/s ({self.how})"
        text = f"{lead} at {rate}: at least {figures(self.seconds)} s a pass"
        if self.unread is None:
            return text
        pace = f"{figures(self.unread)} tokens/s"
        return (
            f"{text}, which tokens/s count; with {size_text(self.enough)} of RAM it would be {pace}"
        )


@dataclass(frozen=True)
class Experts:
    """One mode of computing the experts; None if it is unavailable or was not timed."""

    name: str
    chosen: bool
    gpu: int | None
    """Bytes of GPU memory in all."""
    tokens_per_pass: int | None
    tokens_per_second: float | None
    why: str
    """Why it is unavailable or wasn't timed."""


@dataclass(frozen=True)
class Plan:
    """A training run before it starts. Sizes are bytes.

    ``machine`` describes what it is for. ``from_config`` is true if the weights aren't here, and
    ``to_download`` how many bytes they have. ``rows`` are those that can be used. They make ``sequences``: as
    many, more where answers have sequences of their own, or fewer under packing. ``longest`` and
    ``mean_tokens`` are those of sequences.
    """

    model: str
    model_type: str
    device: str
    machine: str
    from_config: bool
    to_download: int
    parts: tuple[Part, ...]
    verdicts: tuple[Verdict, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    rows: int
    sequences: int
    longest: int
    mean_tokens: float
    steps: int
    pace: Pace | None
    tokens_per_pass: int
    experts: tuple[Experts, ...] = ()
    """Modes of computing the experts, if there is a GPU."""
    disk_reads: DiskReads | None = None
    """What each pass reads from disk because the page cache is too small."""
    held_out: int = 0
    """Rows that are evaluated and not trained on."""
    evaluations: int = 0
    """How often they are."""
    refused: int = 0
    """Rows that can't be used."""
    placement: Placement | None = None
    """Where the experts will be, as ``train`` executes it; None where there was no choice."""
    reason: str = ""
    """The placement and why it is taken, in words; "" where there was no choice."""

    @property
    def fits(self) -> bool:
        return all(verdict.fits for verdict in self.verdicts)

    def total(self, where: Where) -> int:
        return total(self.parts, where)

    def as_dict(self) -> dict[str, object]:
        return {
            "fits": self.fits,
            "model": self.model,
            "model_type": self.model_type,
            "device": self.device,
            "machine": self.machine,
            "from_config_alone": self.from_config,
            "bytes_to_download": self.to_download,
            "bytes": {
                "ram_anonymous": self.total("RAM"),
                "page_cache": self.total("page cache"),
                "ram_peak": self.total("RAM") + self.total("page cache"),
                "gpu": self.total("GPU"),
                "disk": self.total("disk"),
            },
            "parts": [asdict(part) for part in self.parts],
            "verdicts": [{**asdict(v), "fits": v.fits, "text": str(v)} for v in self.verdicts],
            "advice": [asdict(item) for item in self.advice],
            "notes": list(self.notes),
            "rows": self.rows,
            "rows_refused": self.refused,
            "sequences": self.sequences,
            "longest_tokens": self.longest,
            "mean_tokens": self.mean_tokens,
            "held_out_rows": self.held_out,
            "evaluations": self.evaluations,
            "steps": self.steps,
            "pace": None if self.pace is None else asdict(self.pace),
            "tokens_per_pass": self.tokens_per_pass,
            "experts": [asdict(each) for each in self.experts],
            "placement": self.placement and asdict(self.placement),
            "reason": self.reason,
            "disk_reads": self.disk_reads and self.disk_reads.as_dict(),
        }


def total(parts: tuple[Part, ...] | list[Part], where: Where) -> int:
    """Bytes of all parts in one place."""
    return sum(part.size for part in parts if part.where == where)
