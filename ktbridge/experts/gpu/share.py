"""What of a model's experts is on the GPU: bytes of each part, and seconds of a pass. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_GROUP = 300_000_000  # bytes that cross at once: large enough for the link, small beside a layer
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

    forward: float
    backward: float
    cpu: float
    """Forward and backward of all of them on the CPU."""
    link: float
    """Bytes a second from host to GPU."""

    @property
    def gpu(self) -> float:
        """Forward and backward of all of them on the GPU."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Outside:
    """Seconds of a pass outside the routed experts: over all layers, and of the head with the loss."""

    forward: float = 0.0
    backward: float = 0.0
    loss: float = 0.0
    """Forward and backward."""


_NOTHING = Outside()


def gpu_seconds(
    times: LayerTimes, share: Share, sizes: Sizes, outside: Outside = _NOTHING
) -> float:
    """Seconds of a pass whose experts the GPU computes: crossings run beside all the rest.

    Each streamed group crosses in forward and in backward, but for those in the ring where the pass turns.
    What the ring doesn't hold can't cross before it is needed, so the slower of link and GPU counts each way.
    """
    streamed = (sizes.layers - len(share.resident)) * share.groups
    crossing = 0.0
    if streamed:
        crossing = max(0, streamed - share.slots) * share.slot_bytes / times.link
    forward = sizes.layers * times.forward + outside.forward
    backward = sizes.layers * times.backward + outside.backward
    return max(crossing, forward) + max(crossing, backward)


def cpu_seconds(times: LayerTimes, sizes: Sizes) -> float:
    """Seconds that a pass waits for experts that the CPU computes."""
    return sizes.layers * times.cpu
