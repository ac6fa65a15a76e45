"""How much of the experts a GPU-memory budget keeps on the GPU, and how many tokens fit beside it. Pure.

In this order: two slots of the ring, the step's rows in as few passes as may be, the LoRA's masters with the
optimizer's state, the rest of the ring, and then whole layers that stay resident.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.cut import Paces, Phase, layer_seconds
from ktbridge.units import size_text

_GROUP = 300_000_000  # bytes that cross at once: large enough for the link, small beside a layer
_LEAST_SLOTS = 2
_FEW = 4096  # tokens of a pass whose products take less time than starting them
_AHEAD = 2  # groups beyond a layer that cross while the layer before is computed
_UNEVEN = 1.25  # a group's rows over the mean group's: routers are not even
_ON_WAY = 3  # outputs that leave or come back while others are used
_MASTERS = 16  # bytes a LoRA weight with gradient and two Adam states in float32


def padded(rank: int) -> int:
    """``rank`` rounded up to what grouped GEMM takes."""
    return -(-rank // 8) * 8


def borders(rank: int) -> tuple[int, int]:
    """R and Q of ``layer_math`` for a LoRA of ``rank``: widths of the borders of gate and up, and of down."""
    return 2 * padded(rank), padded(rank)


@dataclass(frozen=True)
class Sizes:
    """A model's routed experts: counts, widths, and a layer's ``stored`` bytes in the checkpoint."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    rank: int
    stored: int

    @property
    def groups(self) -> int:
        """Groups that a layer crosses in where memory or many tokens ask for small ones."""
        return min(self.experts, max(1, -(-self.stored // _GROUP)))

    def slot(self, groups: int) -> int:
        """Bytes of a slot, which holds one of a layer's ``groups`` groups."""
        return -(-self.experts // groups) * (-(-self.stored // self.experts) + 4096)

    @property
    def lora(self) -> int:
        """LoRA weights of a layer."""
        return 3 * self.experts * self.rank * (self.hidden + self.inner)

    def matrices(self, experts: int) -> int:
        """Bytes of so many experts' bfloat16 matrices with their borders."""
        more, less = borders(self.rank)
        gate_up = (2 * self.inner + more) * (self.hidden + more)
        return 2 * experts * (gate_up + (self.hidden + less) * (self.inner + less))

    def work(self, groups: int) -> int:
        """Bytes a token that the experts take in one layer's backward, in ``groups`` groups."""
        more, less = borders(self.rank)
        width = 2 * (self.hidden + more) + 2 * (2 * self.inner + more) + 2 * (self.inner + less)
        width += self.hidden + less + self.inner
        share = min(1.0, _UNEVEN / groups)
        return self.top_k * (round(2 * width * share) + 2 * self.hidden + 28)

    def outputs(self, on_host: bool) -> int:
        """Bytes a token, on the GPU, of all layers' outputs and routing between forward and backward."""
        routing = 24 * self.top_k * self.layers
        return routing + 2 * self.hidden * (_ON_WAY if on_host else self.layers)


@dataclass(frozen=True)
class Share:
    """What of a model's experts is where."""

    slot_bytes: int
    slots: int
    resident: tuple[int, ...]
    """Numbers of the layers that stay on the GPU, counted among those with routed experts."""
    masters: bool
    """Whether LoRA weights, gradients and Adam's states are on the GPU."""
    tokens: int
    """Tokens a pass."""
    groups: int = 1
    """Groups that a streamed layer crosses in."""
    outputs_on_host: bool = False
    """Whether the layers' outputs wait there for their second forward."""
    hybrid: bool = False
    """Whether the CPU computes some experts of each layer."""
    cold: int | None = None
    """How many of each layer; None: as many as are best."""

    def resident_bytes(self, sizes: Sizes) -> int:
        """What the layers that stay take on the GPU."""
        return len(self.resident) * sizes.matrices(sizes.experts)

    def streamed_bytes(self, sizes: Sizes) -> int:
        """The ring, and the matrices of the group that is computed; 0 where nothing is streamed."""
        if len(self.resident) == sizes.layers:
            return 0
        return self.slots * self.slot_bytes + sizes.matrices(-(-sizes.experts // self.groups))

    def lora_bytes(self, sizes: Sizes) -> int:
        """The LoRA on the GPU: all with its optimizer's states, or one layer's that passes through."""
        return sizes.layers * sizes.lora * _MASTERS if self.masters else 12 * sizes.lora

    def token_bytes(self, sizes: Sizes, passing: int) -> int:
        """Bytes a token of the experts' activations; ``passing`` come and go when these aren't computed."""
        work = sizes.work(1 if len(self.resident) == sizes.layers else self.groups)
        return sizes.outputs(self.outputs_on_host) + max(work, passing)

    def spared(self, sizes: Sizes, kept: int, step_tokens: int) -> int:
        """What the LoRA's gradients don't take on the GPU beside all else.

        In a step of one pass they come while backward lets go of the layers' inputs (``kept`` bytes a token)
        and outputs, so the larger of both is there. A later pass finds all gradients.
        """
        if not self.masters or self.tokens < step_tokens:
            return 0
        going = self.tokens * (kept + sizes.outputs(self.outputs_on_host))
        gradients = 4 * sizes.layers * sizes.lora
        return min(gradients, going) * (sizes.layers - 1) // sizes.layers

    def gpu_bytes(self, sizes: Sizes) -> int:
        """What experts and their LoRA take on the GPU, activations left out."""
        parts = self.resident_bytes, self.streamed_bytes, self.lora_bytes
        return sum(part(sizes) for part in parts)


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer's experts in a pass."""

    forward: Phase
    backward: Phase
    cpu: float
    """Forward and backward of all of them on the CPU."""
    link: float
    """Bytes a second from host to GPU."""

    @property
    def gpu(self) -> float:
        """Forward and backward of all of them on the GPU."""
        return self.forward.experts + self.backward.experts


def gpu_seconds(times: LayerTimes, share: Share, sizes: Sizes, others: float = 0.0) -> float:
    """Seconds of a pass whose experts the GPU computes: crossings run beside all the rest.

    ``others`` are the seconds of the rest. Each streamed group crosses twice, but for those in the ring
    where the pass turns.
    """
    streamed = (sizes.layers - len(share.resident)) * share.groups
    crossing = 0.0
    if streamed:
        crossing = 2 * max(0, streamed - share.slots) * share.slot_bytes / times.link
    return max(crossing, sizes.layers * times.gpu + others)


def paces(times: LayerTimes, share: Share, sizes: Sizes, others: float = 0.0) -> Paces:
    """What a layer is cut by; ``others`` are a pass's seconds outside the experts, a third in forward."""
    outside = others / sizes.layers / 3
    streamed = max(1, sizes.layers - len(share.resident))
    return Paces(
        replace(times.forward, outside=outside),
        replace(times.backward, outside=2 * outside),
        sizes.stored / sizes.experts / times.link,
        share.slots * sizes.experts / share.groups / streamed,
    )


def hybrid_seconds(times: LayerTimes, share: Share, sizes: Sizes, others: float = 0.0) -> float:
    """Seconds of a pass whose coldest experts the CPU computes, where tokens go to all alike."""
    rows = [share.tokens * sizes.top_k / sizes.experts] * sizes.experts
    cut = paces(times, share, sizes, others)
    if share.cold is not None:
        return sizes.layers * layer_seconds(rows, cut)[share.cold]
    return sizes.layers * min(layer_seconds(rows, cut))


def cpu_seconds(times: LayerTimes, sizes: Sizes) -> float:
    """Seconds that a pass waits for experts that the CPU computes."""
    return sizes.layers * times.cpu


def evenly(count: int, layers: int) -> tuple[int, ...]:
    """``count`` of ``layers`` numbers, spread evenly, so that the others cross while these are computed."""
    return tuple((2 * n + 1) * layers // (2 * count) for n in range(count))


def choose_share(
    sizes: Sizes,
    free: int,
    token_bytes: int,
    passing: int,
    longest: int,
    step_tokens: int,
    *,
    mode: str = "stream",
    gpu_experts: int | None = None,
    tokens: int | None = None,
    kept: int = 0,
) -> Share:
    """The share for ``free`` bytes of GPU memory, which all but the experts has been taken from.

    ``token_bytes`` is what a token takes outside the experts while these are computed, ``passing`` what comes
    and goes in a layer when they are not. ``longest`` are the least tokens of a pass (a whole row),
    ``step_tokens`` those of an optimizer step. ``mode`` "resident" keeps every layer; "hybrid" gives all
    that is left to the ring. ``gpu_experts`` of each layer's experts are kept as so many whole layers, or in
    "hybrid" computed by the GPU; None: what fits, what is best. ``tokens`` sets those of a pass. ``kept`` of
    ``token_bytes`` is let go of as backward goes through the layers.

    Raises ``UsageError`` where it doesn't fit, with what is short.
    """
    whole, hybrid = mode == "resident", mode == "hybrid"
    layers = sizes.layers if whole else 0
    cold = None
    if gpu_experts is not None and hybrid:
        cold = max(0, sizes.experts - gpu_experts)
    elif gpu_experts is not None and not whole:
        layers = min(sizes.layers, round(sizes.layers * gpu_experts / sizes.experts))
    slots = 0 if layers == sizes.layers else _LEAST_SLOTS

    away, groups = False, sizes.groups

    def share(tokens: int, slots: int, layers: int, masters: bool) -> Share:
        kept = evenly(layers, sizes.layers)
        slot = sizes.slot(groups)
        return Share(slot, slots, kept, masters, tokens, groups, away, hybrid, cold)

    def taken(found: Share) -> int:
        each = token_bytes + found.token_bytes(sizes, passing)
        whole = found.gpu_bytes(sizes) + found.tokens * each
        return whole - found.spared(sizes, kept, step_tokens)

    def room() -> int:
        one = share(longest, slots, layers, False)
        return (free - taken(one)) // (taken(share(longest + 1, slots, layers, False)) - taken(one))

    least = tokens or longest
    if min(step_tokens, longest + room()) < (tokens or step_tokens):
        away = True  # for more tokens a pass, or any
    needed = taken(share(least, slots, layers, False))
    if needed > free:
        what = (
            "all experts resident"
            if whole
            else f"groups of experts of {size_text(sizes.slot(groups))}"
        )
        raise UsageError(
            f"{what} and a pass of {least:,} tokens take {size_text(needed)} of GPU memory "
            f"beside the rest of the model, and {size_text(max(free, 0))} are left for them.",
            "Give more with kt_gpu_memory, "
            + ("set kt_experts: stream" if whole else "lower cutoff_len, or set kt_experts: cpu")
            + ".",
        )
    most = tokens or max(longest, min(step_tokens, longest + room()))
    passes = -(-step_tokens // most)
    if not tokens and passes > 1:  # passes of equal size
        most = max(longest, min(most, -(-step_tokens // passes) + longest // 2))
    if most <= _FEW:  # what a group costs besides its bytes counts more
        while groups > 1:
            groups -= 1
            if taken(share(most, slots, layers, True)) > free:
                groups += 1
                break
    best = share(most, slots, layers, taken(share(most, slots, layers, True)) <= free)
    enough = min(groups + _AHEAD, groups * (sizes.layers - layers))
    while best.slots < enough and taken(share(most, best.slots + 1, layers, best.masters)) <= free:
        best = share(most, best.slots + 1, layers, best.masters)
    if gpu_experts is None and not whole and not hybrid:
        while len(best.resident) < sizes.layers:
            more = share(most, best.slots, len(best.resident) + 1, best.masters)
            if taken(more) > free:
                break
            best = more
    # What is left over holds groups at least.
    full = groups * (sizes.layers - len(best.resident))
    while best.slots < full:
        more = share(most, best.slots + 1, len(best.resident), best.masters)
        if taken(more) > free:
            break
        best = more
    return best
