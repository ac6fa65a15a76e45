"""How much of the experts a GPU-memory budget keeps on the GPU, and how many tokens fit beside it. Pure.

In this order: two slots of the ring, the step's rows in as few passes as may be, the rest of the ring, the
LoRA's masters with the optimizer's state, whole layers that stay resident, and more slots. Masters don't go
before the ring: the optimizer on the host takes less than a GPU that waits for each layer's weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.share import Share, Sizes
from ktbridge.units import size_text

_LEAST_SLOTS = 2
_AHEAD = 2  # groups beyond a layer that cross while the layer before is computed
_FEW = 4096  # tokens of a pass whose products take less time than starting them


@dataclass(frozen=True)
class Room:
    """GPU memory that is left for experts and activations, and bytes a token of what is outside them."""

    free: int
    token_bytes: int
    """While the experts are computed."""
    passing: int
    """What comes and goes of a token in a layer, when experts aren't computed."""
    longest: int
    """The least tokens of a pass: a row, or a pair."""
    step: int
    """Tokens of an optimizer step."""
    kept: int = 0
    """Of ``token_bytes``, what backward lets go of as it goes through the layers."""

    @property
    def most(self) -> int:
        """Tokens of a pass that computes experts elsewhere."""
        return min(self.step, max(self.longest, self.free // (self.token_bytes + self.passing)))

    def taken(self, share: Share, sizes: Sizes) -> int:
        """What a pass of ``share`` takes of ``free``."""
        each = self.token_bytes + share.token_bytes(sizes, self.passing)
        whole = share.gpu_bytes(sizes) + share.tokens * each
        return whole - share.spared(sizes, self.kept, self.step)


def evenly(count: int, layers: int) -> tuple[int, ...]:
    """``count`` of ``layers`` numbers, spread evenly, so that the others cross while these are computed."""
    return tuple((2 * n + 1) * layers // (2 * count) for n in range(count))


def choose_share(
    sizes: Sizes,
    room: Room,
    *,
    mode: str = "stream",
    gpu_experts: int | None = None,
    tokens: int | None = None,
) -> Share:
    """The share that ``room`` allows.

    ``mode`` "resident" keeps every layer. ``gpu_experts`` of each layer's experts are kept as so many whole
    layers; None: what fits. ``tokens`` sets those of a pass.

    Raises ``UsageError`` where it doesn't fit, with what is short.
    """
    start = _least(sizes, mode, gpu_experts, tokens or room.longest)
    if _tokens(start, sizes, room) < (tokens or room.step):
        start = replace(start, outputs_on_host=True)  # for more tokens a pass, or any
    if room.taken(start, sizes) > room.free:
        raise _too_much(start, sizes, room, mode)
    most = max(room.longest, _tokens(start, sizes, room))
    share = replace(start, tokens=tokens or _even_passes(most, room))

    def grown(share: Share, **more: object) -> Share | None:
        """``share`` with something more, where that fits."""
        larger = replace(share, **more)  # type: ignore[arg-type]
        return larger if room.taken(larger, sizes) <= room.free else None

    if share.tokens <= _FEW:  # what a group costs besides its bytes counts more
        while share.groups > 1:
            groups = share.groups - 1
            slot = sizes.slot(groups)
            if not grown(share, groups=groups, slot_bytes=slot, masters=True):
                break
            share = replace(share, groups=groups, slot_bytes=slot)

    def with_slots(share: Share, most: int) -> Share:
        while share.slots < most and (more := grown(share, slots=share.slots + 1)):
            share = more
        return share

    def streamed(share: Share) -> int:
        return share.groups * (sizes.layers - len(share.resident))

    ring = max(share.slots, min(share.groups + _AHEAD, streamed(share)))
    share = grown(share, masters=True, slots=ring) or with_slots(share, ring)
    if mode == "stream" and gpu_experts is None:
        while len(share.resident) < sizes.layers:
            layers = evenly(len(share.resident) + 1, sizes.layers)
            if not (more := grown(share, resident=layers)):
                break
            share = more
    if len(share.resident) == sizes.layers:
        return replace(share, groups=1, slot_bytes=sizes.slot(1))  # fewer, larger products
    return with_slots(share, streamed(share))


def _least(sizes: Sizes, mode: str, gpu_experts: int | None, tokens: int) -> Share:
    """The share that takes least."""
    layers = sizes.layers if mode == "resident" else 0
    if gpu_experts is not None and mode == "stream":
        layers = min(sizes.layers, round(sizes.layers * gpu_experts / sizes.experts))
    return Share(
        slot_bytes=sizes.slot(sizes.groups),
        slots=0 if layers == sizes.layers else _LEAST_SLOTS,
        resident=evenly(layers, sizes.layers),
        masters=False,
        tokens=tokens,
        groups=sizes.groups,
    )


def _tokens(share: Share, sizes: Sizes, room: Room) -> int:
    """Tokens that a pass of ``share`` has room for, of a step's; fewer than a row where it doesn't fit."""
    one, two = (room.taken(replace(share, tokens=room.longest + more), sizes) for more in range(2))
    return min(room.step, room.longest + (room.free - one) // (two - one))


def _even_passes(most: int, room: Room) -> int:
    """At most ``most`` tokens, so that passes are of equal size."""
    passes = -(-room.step // most)
    if passes == 1:
        return most
    return max(room.longest, min(most, -(-room.step // passes) + room.longest // 2))


def _too_much(share: Share, sizes: Sizes, room: Room, mode: str) -> UsageError:
    what = f"groups of experts of {size_text(share.slot_bytes)}"
    instead = "lower cutoff_len, or set kt_experts: cpu"
    if mode == "resident":
        what, instead = "all experts resident", "set kt_experts: stream"
    return UsageError(
        f"{what} and a pass of {share.tokens:,} tokens take {size_text(room.taken(share, sizes))} of GPU "
        f"memory beside the rest of the model, and {size_text(max(room.free, 0))} are left for them.",
        f"Give more with kt_gpu_memory, {instead}.",
    )
