"""Placements of a model's routed experts: all that fit, ranked by predicted time. Pure.

``rank`` scores whole optimizer steps. A micro-batch takes, forward and backward each, as long as the slowest
of three that work beside each other: the link that transfers weights, the GPU, and Python that starts the
GPU's operations. `plan` and `train` call it with the same arguments; only what ``Costs`` were measured on
differs. The formulas are derived in docs/placements.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

GROUPS = (1, 2, 3, 4, 6, 8, 12)
"""Numbers of groups that a streamed layer may be transferred in."""
PAD = 16
"""An expert's rows are padded to a multiple of it, as grouped products over rows ask for."""
_LEAST_SLOTS = 2
_AHEAD = 2  # groups beyond a layer that are transferred while the layer before is computed
_UNEVEN = 1.25  # a group's rows over the mean group's: what more there are is computed in parts
ON_WAY = 3
"""A layer's inputs or outputs that leave or come back while others are used."""
_MASTERS = 16  # bytes a LoRA weight with gradient and two Adam states in float32
STEP_SECONDS = 0.015
"""Seconds a step of clipping, optimizer and log, for all but the experts."""
_HOME = 0.0003  # seconds in which Python sends a layer's gradients to the host; 0.5 by samples of a slow host
_WEIGHTS = (
    0.35  # of an expert layer's launches: what a streamed one adds, which is unpacked and gets its LoRA
)
_THREAD = 2.0  # times AdamW's seconds: the host's thread scales gradients and rounds masters, too
MICRO_BATCH_SECONDS = 0.005
"""Seconds to make a micro-batch's tensors."""
PIECE = 1 << 23
"""Numbers of an MLP's inner states in a piece of its tokens: enough to keep a GPU busy."""
_TILE = 128  # tokens of a piece are a multiple of it, as products go over tiles of rows
_PAGE = 4096
_CPU_SHARE = (1 / 3, 2 / 3)  # of the CPU's seconds for experts, forward and backward
# Powers of the means that are nearly the larger: the host runs far ahead of the GPU, but weights come just
# before they are multiplied. Fitted on the runs in docs/placements.md.
_QUEUED, _TAKEN = 8, 3
_PYTHON = ("launch", "launch_group", "launch_outside", "micro_batch")
_BESIDE = 1.2  # times the seconds that Python takes in a probe, beside transfers and AdamW (kernel-log, 74)


def pad_rank(rank: int) -> int:
    """Return ``rank`` rounded up to what grouped GEMM takes."""
    return -(-rank // 8) * 8


def border_widths(rank: int) -> tuple[int, int]:
    """Return R and Q of ``layer_math`` for ``rank``: widths of the borders of gate and up, and of down."""
    return 2 * pad_rank(rank), pad_rank(rank)


def piece_tokens(inner: int) -> int:
    """Return the most tokens of a piece of an MLP with ``inner`` states a token."""
    return max(_TILE, PIECE // inner // _TILE * _TILE)


def piece_bytes(hidden: int, inner: int, width: int) -> int:
    """Return what a piece of a gated MLP takes in its backward; ``width`` is a number's bytes.

    Gate, its activation and their product with up, as many gradients and one more; its own rows, twice.
    """
    return width * piece_tokens(inner) * (7 * inner + 4 * hidden)


def spread_evenly(count: int, layers: int) -> tuple[int, ...]:
    """Choose ``count`` of ``layers`` numbers, evenly, so that others are transferred while these compute."""
    return tuple((2 * n + 1) * layers // (2 * count) for n in range(count))


@dataclass(frozen=True)
class ExpertSizes:
    """A model's routed experts: counts, widths, and a layer's ``stored`` bytes in the checkpoint."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    rank: int
    stored: int
    mlps: tuple[tuple[int, int, float], ...] = ()
    """Of MLPs beside them inner states, how many have so many, and all those' part of other products."""
    dropout: bool = False
    """Whether inputs of the LoRA are dropped, so that gate's and up's are apart from the rows' own."""

    def slot(self, groups: int) -> int:
        """Bytes of a slot, which holds one of a layer's ``groups`` groups."""
        return -(-self.experts // groups) * (-(-self.stored // self.experts) + _PAGE)

    @property
    def lora(self) -> int:
        """LoRA weights of a layer."""
        return 3 * self.experts * self.rank * (self.hidden + self.inner)

    def matrices(self, experts: int) -> int:
        """Bytes of the bfloat16 matrices of ``experts`` experts with their borders."""
        more, less = border_widths(self.rank)
        gate_up = (2 * self.inner + more) * (self.hidden + more)
        return 2 * experts * (gate_up + (self.hidden + less) * (self.inner + less))

    def rows(self, tokens: int) -> int:
        """Rows that ``tokens`` have at most in a layer, padding included."""
        slots = tokens * self.top_k
        return slots + min(self.experts, slots) * (PAD - 1)

    def rows_at_once(self, tokens: int, groups: int) -> int:
        """The most rows that are multiplied at once, whatever the router does."""
        rows = self.rows(tokens)
        return rows if groups == 1 else min(rows, round(_UNEVEN * rows / groups) + PAD)

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes while it is multiplied, in the backward of one layer."""
        more, less = border_widths(self.rank)
        width = 2 * (self.hidden + more) + 2 * (2 * self.inner + more) + 2 * (self.inner + less)
        return 2 * (width + (1 + self.dropout) * self.hidden + less + self.inner)

    def work(self, tokens: int, groups: int) -> int:
        """Bytes that the experts take in one layer's backward."""
        gathered = 2 * self.hidden if groups > 1 else 0  # one group's rows are the layer's
        whole = self.rows(tokens) * (gathered + 28)
        return self.rows_at_once(tokens, groups) * self.row_bytes + whole

    def outputs(self, on_host: bool) -> int:
        """Bytes a token, on the GPU, of all layers' outputs and routing between forward and backward."""
        routing = 24 * self.top_k * self.layers
        return routing + 2 * self.hidden * (ON_WAY if on_host else self.layers)


@dataclass(frozen=True)
class Placement:
    """Places of experts, their LoRA and their activations: what a run executes and a plan prints."""

    tokens: int
    """The most tokens of a micro-batch, padding included."""
    on_gpu: bool = True
    """Whether the GPU computes the experts; else the kernels do, on the CPU."""
    slot_bytes: int = 0
    slots: int = 0
    """Slots of the ring that streamed groups are transferred into."""
    groups: int = 1
    """Groups that a streamed layer is transferred in."""
    resident: tuple[int, ...] = ()
    """Numbers of the layers that stay on the GPU, counted among those with routed experts."""
    masters: bool = False
    """Whether expert LoRA weights, gradients and Adam's states are on the GPU."""
    outputs_on_host: bool = False
    """Whether the layers' inputs, and their experts' outputs, wait there for their second forward."""
    keep_gate_up: bool = False
    """Whether gate and up are kept for backward instead of computed again."""
    rows_at_once: int = 0
    """The most rows that are multiplied at once: a group with more is computed in parts."""
    pieces_from: int = 0
    """Inner states a token from which on dense MLPs and shared experts are in pieces of tokens; 0: none."""

    def mode(self, sizes: ExpertSizes) -> str:
        """Return the value of ``kt_experts`` that means it: cpu, stream or resident."""
        if not self.on_gpu:
            return "cpu"
        return "resident" if len(self.resident) == sizes.layers else "stream"

    def resident_bytes(self, sizes: ExpertSizes) -> int:
        """Return what the layers that stay take on the GPU."""
        return len(self.resident) * sizes.matrices(sizes.experts)

    def streamed_bytes(self, sizes: ExpertSizes) -> int:
        """The ring, and the matrices of the group that is computed; 0 where nothing is streamed."""
        if not self.on_gpu or len(self.resident) == sizes.layers:
            return 0
        return self.slots * self.slot_bytes + sizes.matrices(-(-sizes.experts // self.groups))

    def lora_bytes(self, sizes: ExpertSizes) -> int:
        """The LoRA on the GPU: all with its optimizer's states, or one layer's that passes through."""
        if not self.on_gpu:
            return 0
        return sizes.layers * sizes.lora * _MASTERS if self.masters else 12 * sizes.lora

    def activation_bytes(self, sizes: ExpertSizes, passing: int) -> int:
        """Bytes of the experts' activations; ``passing`` bytes come and go when these aren't computed."""
        if not self.on_gpu:
            return passing
        work = max(sizes.work(self.tokens, self.groups), passing)
        kept = 0
        if self.keep_gate_up:
            kept = sizes.layers * sizes.rows(self.tokens) * 2 * 2 * sizes.inner
        return self.tokens * sizes.outputs(self.outputs_on_host) + kept + work

    def overlapped_gradient_bytes(self, sizes: ExpertSizes, limits: MemoryBudget) -> int:
        """Return what the LoRA's gradients don't take on the GPU beside all else.

        In a step of one micro-batch they come while backward lets go of the layers' inputs and outputs, so
        the larger of both is there. A later micro-batch finds all gradients.
        """
        if not self.masters or self.tokens < limits.step_tokens:
            return 0
        going = self.tokens * (limits.kept + sizes.outputs(self.outputs_on_host))
        going -= self.away_bytes(limits.away)
        gradients = 4 * sizes.layers * sizes.lora
        return min(gradients, going) * (sizes.layers - 1) // sizes.layers

    def away_bytes(self, of_token: int) -> int:
        """Return what the layers' inputs don't take on the GPU, ``of_token`` a token if they leave it."""
        return self.tokens * of_token if self.outputs_on_host else 0

    def loading_bytes(self, sizes: ExpertSizes) -> int:
        """Return what loading takes: the layers that stay, and a group as it is stored, before all else."""
        if not self.resident:
            return 0
        lora = 4 * sizes.layers * sizes.lora if self.masters else 0
        return self.resident_bytes(sizes) + lora + self.slot_bytes

    def bytes(self, sizes: ExpertSizes, limits: MemoryBudget) -> int:
        """Return what of ``limits.free`` it takes at most."""
        parts = self.resident_bytes, self.streamed_bytes, self.lora_bytes
        own = limits.for_pieces(self.pieces_from)
        training = (
            sum(part(sizes) for part in parts)
            + limits.free
            - own.free
            + self.tokens * own.token_bytes
            + self.activation_bytes(sizes, own.passing_bytes(self.tokens))
            - self.away_bytes(limits.away)
            - self.overlapped_gradient_bytes(sizes, limits)
        )
        return max(training, self.loading_bytes(sizes))


@dataclass(frozen=True)
class MemoryBudget:
    """GPU memory that is left for experts and activations, bytes a token of what is outside the experts."""

    free: int
    token_bytes: int
    """While the experts are computed."""
    passing: int
    """What comes and goes of a token in a layer, when experts aren't computed."""
    longest: int
    """The fewest tokens of a micro-batch: a row, or a pair."""
    step_tokens: int
    """Tokens of an optimizer step."""
    kept: int = 0
    """Of ``token_bytes``, what backward lets go of as it goes through the layers."""
    away: int = 0
    """Of ``kept``, inputs of layers that the GPU needn't have meanwhile."""
    cpu_tokens: int | None = None
    """The most tokens of a micro-batch whose experts the CPU computes; None: what the GPU has memory for."""
    in_pieces: tuple[PieceBytes, ...] = ()
    """Differences where MLPs are computed in pieces, those of more inner states first."""
    piece: tuple[int, int] = (0, 0)
    """What comes and goes while a piece is computed: of a token, and the piece's own."""

    def passing_bytes(self, tokens: int) -> int:
        """Return what comes and goes of a micro-batch's ``tokens`` when experts aren't computed."""
        return max(tokens * self.passing, tokens * self.piece[0] + self.piece[1])

    def for_pieces(self, pieces_from: int) -> MemoryBudget:
        """Return what is left for a placement whose MLPs are in pieces from ``pieces_from`` on."""
        own = next((each for each in self.in_pieces if each.pieces_from == pieces_from), None)
        if own is None:
            return self
        free = self.free - own.constant
        token_bytes = min(own.token_bytes, self.token_bytes)
        return replace(self, free=free, token_bytes=token_bytes, passing=own.passing, piece=own.piece)


@dataclass(frozen=True)
class PieceBytes:
    """A ``MemoryBudget``'s bytes where MLPs are in pieces from ``pieces_from`` on, and ``constant`` more."""

    pieces_from: int
    token_bytes: int
    passing: int
    constant: int
    piece: tuple[int, int]


@dataclass(frozen=True)
class StepSplit:
    """A way to cut an optimizer step into micro-batches."""

    most: int
    """The most tokens that a micro-batch may have."""
    batches: tuple[int, ...]
    """Tokens of each micro-batch of a typical step, padding included."""


@dataclass(frozen=True)
class Line:
    """Seconds that are linear in a size."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, size: float) -> float:
        """Return the seconds for ``size``."""
        return self.fixed + self.each * size

    def scaled(self, factor: float) -> Line:
        """Return the line ``factor`` times as long."""
        return Line(self.fixed * factor, self.each * factor)


@dataclass(frozen=True)
class Costs:
    """Seconds on one machine of what a step is made of, forward and backward where there are two."""

    link: float
    """Bytes a second from host memory to the GPU."""
    experts: tuple[Line, Line]
    """The GPU's, of one layer's experts by rows, backward with gate and up computed again."""
    again: Line = field(default_factory=Line)
    """Of that backward, gate's and up's second computation."""
    unpack: float = 0.0
    """The GPU's, for a byte of a streamed layer's bfloat16 matrices."""
    launch: tuple[float, float] = (0.0, 0.0)
    """The host's, of one layer's experts in one group."""
    launch_group: float = 0.0
    """The host's, for each group of a streamed layer."""
    outside: tuple[Line, Line] = field(default_factory=lambda: (Line(), Line()))
    """The GPU's outside the routed experts, over all layers, by tokens."""
    launch_outside: tuple[float, float] = (0.0, 0.0)
    """The host's outside the routed experts, over all layers."""
    loss: Line = field(default_factory=Line)
    """Head and loss, forward and backward, by tokens."""
    update: tuple[float, float] = (0.0, 0.0)
    """Optimizer and clipping for a LoRA weight, on the GPU and on the host."""
    deferred: float = 0.0
    """AdamW's by the host's thread, beside the next forward where the GPU computes, for a weight."""
    add: float = 0.0
    """The host's, to add a gradient that arrives to one that is there, for a weight."""
    others: float = 0.0
    """Optimizer, clipping and log of all else, once a step."""
    micro_batch: float = 0.0
    """The host's, to make a micro-batch's tensors."""
    cpu: Line | None = None
    """One layer's experts on the CPU, forward and backward, by tokens; None: not measured."""
    forwards: int = 1
    """Forwards of a micro-batch: more than one where a reference runs, too."""

    def alone_in_update(self, placement: Placement) -> float:
        """Return the seconds of an optimizer step for a LoRA weight beside which nothing else is done."""
        if placement.on_gpu:
            return self.update[0] if placement.masters else 0.0
        return self.update[1]

    def scaled(self, factor: float, link: float | None = None, host: float = 1.0) -> Costs:
        """Return costs ``factor`` times as high, Python's by ``host`` more, but for a ``link`` measured."""

        def scale(value: Any, by: float) -> Any:
            if isinstance(value, tuple):
                return tuple(scale(each, by) for each in value)
            return value.scaled(by) if isinstance(value, Line) else value and value * by

        own = {each.name: factor * (host if each.name in _PYTHON else 1) for each in fields(self)}
        numbers = {name: scale(getattr(self, name), by) for name, by in own.items()}
        return Costs(**numbers | {"link": link or self.link / factor, "forwards": self.forwards})


@dataclass(frozen=True)
class Seconds:
    """A step's seconds, and how busy each of those is that work beside each other."""

    step: float
    link: float
    gpu: float
    host: float
    alone: float
    """Of ``step``, loss and optimizer, beside which nothing is transferred or computed."""

    @property
    def bound(self) -> str:
        """Return what the micro-batches wait for most."""
        busy = {"the link": self.link, "the GPU": self.gpu, "the host": self.host}
        return max(busy, key=lambda name: busy[name])


@dataclass(frozen=True)
class Scored:
    """A placement with its predicted seconds a step and bytes of GPU memory."""

    placement: Placement
    seconds: Seconds
    bytes: int


def predict_seconds(placement: Placement, sizes: ExpertSizes, cut: StepSplit, costs: Costs) -> Seconds:
    """Predict an optimizer step of ``placement`` whose rows are ``cut``."""
    link = gpu = host = waiting = alone = 0.0
    lora = sizes.layers * sizes.lora
    layers, streamed = sizes.layers, sizes.layers - len(placement.resident)
    transfers = 0
    if placement.on_gpu:
        transfers = max(0, streamed * placement.groups - placement.slots) * placement.slot_bytes
        transfers += 0 if placement.masters else 2 * lora  # as bfloat16
    for number, tokens in enumerate(cut.batches):
        rows = tokens * sizes.top_k + min(tokens * sizes.top_k, sizes.experts) * PAD // 2
        for way in range(2):
            busy = costs.outside[way].at(tokens)
            starting = costs.launch_outside[way]
            if placement.on_gpu:
                experts = costs.experts[way].at(rows)
                if way and placement.keep_gate_up:
                    experts -= costs.again.at(rows)
                busy += layers * experts
                busy += streamed * costs.unpack * sizes.matrices(sizes.experts)
                more = _WEIGHTS * max(costs.launch) + (placement.groups - 1) * costs.launch_group
                starting += layers * costs.launch[way] + streamed * more
                starting *= _BESIDE if transfers else 1
            for inner, count, share in sizes.mlps if way and placement.pieces_from else ():
                if inner < placement.pieces_from:
                    continue
                busy += share * costs.outside[0].each * tokens  # forward once more
                further = count * max(0.0, tokens / piece_tokens(inner) - 1)
                # A piece is started as a quarter of what a layer has outside the experts.
                starting += further * sum(costs.launch_outside) / layers / 4
            if placement.on_gpu and not placement.masters:
                starting += way * layers * _HOME
                if way and number:
                    starting += costs.add * lora
                if not way and not number:
                    starting = max(starting, _THREAD * costs.deferred * lora)
            if not placement.on_gpu:
                assert costs.cpu is not None
                # GPU and CPU wait for each other, while Python starts what comes next for both.
                busy += layers * costs.cpu.at(tokens) * _CPU_SHARE[way]
            returning = 4 * sizes.hidden * layers * tokens if way and placement.outputs_on_host else 0
            transfer = (transfers + returning) / costs.link
            times = 1 if way else costs.forwards
            link, gpu, host = link + times * transfer, gpu + times * busy, host + times * starting
            waiting += times * _together(_together(busy, starting, _QUEUED), transfer, _TAKEN)
        alone += costs.loss.at(tokens) + costs.micro_batch
    alone += costs.alone_in_update(placement) * lora + costs.others
    return Seconds(waiting + alone, link, gpu, host, alone)


def _together(one: float, other: float, power: int) -> float:
    """Seconds of two that work beside each other: the slower's, and more where both are nearly as slow."""
    longest, shortest = max(one, other), min(one, other)
    if not longest:
        return 0.0
    return float(longest * (1 + (shortest / longest) ** power) ** (1 / power))


def rank(
    sizes: ExpertSizes,
    cuts: Sequence[StepSplit],
    limits: MemoryBudget,
    costs: Costs,
    *,
    mode: str = "auto",
    gpu_experts: int | None = None,
    pieces_from: int | None = None,
) -> list[Scored]:
    """Rank every placement that fits by the predicted seconds of an optimizer step, the fastest first.

    ``cuts`` are the ways to cut a step. ``mode`` "cpu", "stream" or "resident" leaves the others out;
    ``gpu_experts`` of each layer's experts are kept, as whole layers; with ``pieces_from`` others are left
    out. Placements of equal seconds are in a fixed order: the same arguments give the same list. Empty where
    nothing fits.
    """
    found = []
    for cut, pieces in product(cuts, _piece_choices(limits, pieces_from)):
        own = limits.for_pieces(pieces)
        for made in _candidates(sizes, cut.most, own, mode, gpu_experts):
            placement = replace(made, pieces_from=pieces if made.on_gpu else 0)
            if not placement.on_gpu and (costs.cpu is None or (pieces and pieces_from is None)):
                continue
            taken = placement.bytes(sizes, limits)
            if taken > limits.free:
                continue
            seconds = predict_seconds(placement, sizes, cut, costs)
            found.append(Scored(placement, seconds, taken))
    return sorted(found, key=lambda each: each.seconds.step)


def _piece_choices(limits: MemoryBudget, wanted: int | None) -> tuple[int, ...]:
    """Return what ``Placement.pieces_from`` may be: what is ``wanted``, or none, few, more and all MLPs."""
    known = (0, *(each.pieces_from for each in limits.in_pieces))
    return known if wanted is None else (wanted if wanted in known else 0,)


def least_bytes(
    sizes: ExpertSizes, limits: MemoryBudget, mode: str, pieces_from: int | None = None
) -> tuple[Placement, int]:
    """Return the placement on the GPU that takes least, and what it takes: for who has less.

    ``mode`` and ``pieces_from`` as ``rank`` has them.
    """
    layers = spread_evenly(sizes.layers, sizes.layers) if mode == "resident" else ()
    least = [
        replace(placement, pieces_from=pieces)
        for groups in _groups(sizes)
        for pieces in _piece_choices(limits, pieces_from)
        for placement in [
            _placed(sizes, limits.longest, 1 if layers else groups, resident=layers, outputs=True)
        ]
    ]
    taken = [each.bytes(sizes, limits) for each in least]
    return least[taken.index(min(taken))], min(taken)


def _candidates(
    sizes: ExpertSizes, tokens: int, limits: MemoryBudget, mode: str, gpu_experts: int | None
) -> Iterator[Placement]:
    """Yield what may be asked of a micro-batch of ``tokens``; each filled up with what memory is left for."""
    if mode in ("auto", "cpu") and tokens <= max(limits.longest, limits.cpu_tokens or tokens):
        yield Placement(tokens, on_gpu=False)
    if mode == "cpu":
        return
    layers = sizes.layers
    wanted = None if gpu_experts is None else min(layers, round(layers * gpu_experts / sizes.experts))
    if wanted in (None, layers) or mode == "resident":
        every = spread_evenly(layers, layers)
        for masters, outputs, keep in product((True, False), (False, True), (True, False)):
            yield _placed(sizes, tokens, 1, masters, outputs, resident=every, keep=keep)
    if mode == "resident" or wanted == layers:
        return
    for groups, masters, outputs in product(_groups(sizes), (True, False), (False, True)):
        start = _placed(sizes, tokens, groups, masters, outputs)
        for fill in ("resident", "ring") if wanted is None else ("ring",):
            if made := _filled(start, sizes, limits, fill, wanted or 0):
                yield made


def _groups(sizes: ExpertSizes) -> Iterator[int]:
    return (groups for groups in GROUPS if groups <= sizes.experts)


def _placed(
    sizes: ExpertSizes,
    tokens: int,
    groups: int,
    masters: bool = False,
    outputs: bool = False,
    *,
    resident: tuple[int, ...] = (),
    keep: bool = False,
) -> Placement:
    """A placement on the GPU with the least ring."""
    return Placement(
        tokens,
        slot_bytes=sizes.slot(groups),
        slots=0 if len(resident) == sizes.layers else _LEAST_SLOTS,
        groups=groups,
        resident=resident,
        masters=masters,
        outputs_on_host=outputs,
        keep_gate_up=keep,
        rows_at_once=sizes.rows_at_once(tokens, groups),
    )


def _filled(
    start: Placement, sizes: ExpertSizes, limits: MemoryBudget, fill: str, layers: int
) -> Placement | None:
    """Fill ``start`` with ``layers`` resident, a ring, and what memory is left for; None: it doesn't fit.

    ``fill`` "resident": as many more layers, then slots; "ring": slots alone. A slot holds what is stored,
    a resident layer its bfloat16 matrices, which take more where experts are quantized.
    """
    start = replace(start, resident=spread_evenly(layers, sizes.layers))
    left = limits.free - start.bytes(sizes, limits)
    if left < 0:
        return None

    def ring(resident: int) -> int:
        return (sizes.layers - resident) * start.groups

    most = min(start.groups + _AHEAD, ring(layers))
    more = max(0, min(most - start.slots, left // start.slot_bytes))
    slots, left = start.slots + more, left - more * start.slot_bytes
    if fill == "resident":
        more = min(sizes.layers - 1 - layers, left // sizes.matrices(sizes.experts))
        layers, left = layers + more, left - more * sizes.matrices(sizes.experts)
    more = max(0, min(ring(layers) - slots, left // start.slot_bytes))
    resident = spread_evenly(layers, sizes.layers)
    return replace(start, slots=slots + more, resident=resident)
