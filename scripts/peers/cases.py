"""One case of the bench: a shape, the least work it takes, and seeded tensors on disk.

The formulas of ``floor`` are pure arithmetic and import nothing, so tests and tables can use them
anywhere; only what makes and writes tensors needs torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROJECTIONS = ("gate", "up", "down")
LORA_NAMES = tuple(f"{name}_lora_{side}" for name in PROJECTIONS for side in "ab")
RESULTS = ("out", "d_hidden", "d_weights", *(f"d_{name}" for name in LORA_NAMES))
SEED = 20251121


@dataclass(frozen=True)
class Shape:
    """E experts, K of them a token, hidden size H, intermediate size I, T tokens."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``"64,6,2048,1408,512"`` (E,K,H,I,T) as a shape; ``ValueError`` says what is wrong."""
        try:
            numbers = [int(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 5 or min(numbers) < 1:
            raise ValueError(f"{text!r} is not five positive numbers E,K,H,I,T")
        if numbers[1] > numbers[0]:
            raise ValueError(f"{text!r} sends a token to {numbers[1]} of {numbers[0]} experts")
        return cls(*numbers)

    def __str__(self) -> str:
        return ",".join(str(value) for value in asdict(self).values())

    @property
    def slots(self) -> int:
        """Pairs of a token and an expert: S = T·K."""
        return self.tokens * self.top_k

    @property
    def weight_bytes(self) -> int:
        """gate, up and down of all experts in bfloat16."""
        return 3 * self.experts * self.inner * self.hidden * 2

    def lora_shapes(self, rank: int) -> dict[str, tuple[int, int, int]]:
        """A is [E, r, in], B is [E, out, r], in the order of ``LORA_NAMES``."""
        sizes = ((self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden))
        shapes = {}
        for name, (n_in, n_out) in zip(PROJECTIONS, sizes, strict=True):
            shapes[f"{name}_lora_a"] = (self.experts, rank, n_in)
            shapes[f"{name}_lora_b"] = (self.experts, n_out, rank)
        return shapes


DEFAULT_SHAPES = (
    Shape(16, 4, 512, 256, 256),  # overhead
    Shape(64, 6, 2048, 1408, 512),  # DeepSeek-V2-Lite
    Shape(64, 6, 2048, 1408, 2048),
    Shape(128, 8, 2048, 768, 2048),  # Qwen3-30B-A3B
    Shape(256, 8, 2048, 512, 2048),  # Qwen3.5-35B-A3B
)
LARGE_SHAPES = (Shape(64, 6, 2048, 1408, 8192), Shape(256, 8, 2048, 512, 8192))


@dataclass(frozen=True)
class Work:
    """The least a pass must move (bytes) and multiply (FLOPs)."""

    bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte: where the pass stands on a roofline."""
        return self.flops / self.bytes

    def seconds(self, peak: float, bandwidth: float) -> float:
        """The floor: the larger of bytes over bandwidth [bytes/s] and FLOPs over peak [FLOP/s]."""
        return max(self.bytes / bandwidth, self.flops / peak)


def floor(shape: Shape, rank: int, routed: int) -> dict[str, Work]:
    """The least work of ``forward`` and ``backward`` when ``routed`` experts have tokens.

    With S = T·K, all weights and activations in bfloat16 (2 bytes):

    * forward bytes: 3·I·H·2 of each routed expert, once; hidden in, output out: 2·T·H·2
    * forward FLOPs: 2·S·3·H·I, and for LoRA 2·S·r·(3H + 3I)
    * backward bytes: the same weights, once (activations are retained, in cache at best, so they count
      nothing); hidden and d_out in, d_hidden out: 3·T·H·2; LoRA's float32 gradients of the routed
      experts, read and written: 2·4·routed·r·(3H + 3I)
    * backward FLOPs: 2·S·3·H·I for dX only, since weights are frozen; LoRA twice its forward (dX, and
      dA with dB)

    It is a lower bound: no schedule does less, and none is known to reach it.
    """
    hidden, inner, tokens = shape.hidden, shape.inner, shape.tokens
    weights = routed * 3 * inner * hidden * 2
    activation = tokens * hidden * 2
    base = 2 * shape.slots * 3 * hidden * inner
    lora = 2 * shape.slots * rank * 3 * (hidden + inner)
    gradients = 2 * 4 * routed * rank * 3 * (hidden + inner)
    return {
        "forward": Work(weights + 2 * activation, base + lora),
        "backward": Work(weights + 3 * activation + gradients, base + 2 * lora),
    }


def make_weights(shape: Shape) -> dict[str, torch.Tensor]:
    """gate, up [E, I, H] and down [E, H, I], normal with variance 1/in, in bfloat16."""
    import torch

    random = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name in PROJECTIONS:
        n_in, n_out = shape.hidden, shape.inner
        if name == "down":
            n_in, n_out = n_out, n_in
        weight = torch.empty(shape.experts, n_out, n_in, dtype=torch.bfloat16)
        for expert in weight:  # one at a time: drawn in float32, kept in bfloat16
            expert.copy_(torch.randn(n_out, n_in, generator=random) * n_in**-0.5)
        tensors[name] = weight
    return tensors


def make_inputs(shape: Shape, rank: int) -> dict[str, torch.Tensor]:
    """hidden, topk_ids, topk_weights, d_out and the six LoRA tensors.

    Routing takes the K best of a softmax over Gaussian logits, so a token's experts differ, and
    normalises their weights. LoRA's B is not zero, or half of backward would have nothing to do.
    """
    import torch

    random = torch.Generator().manual_seed(SEED + 1)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=random) * scale).to(torch.bfloat16)

    logits = torch.randn(shape.tokens, shape.experts, generator=random)
    weights, ids = logits.softmax(-1).topk(shape.top_k, dim=-1)
    tensors = {
        "hidden": normal(shape.tokens, shape.hidden),
        "topk_ids": ids.contiguous(),
        "topk_weights": (weights / weights.sum(-1, keepdim=True)).contiguous(),
        "d_out": normal(shape.tokens, shape.hidden),
    }
    for name, size in shape.lora_shapes(rank).items():
        tensors[name] = normal(*size, scale=size[-1] ** -0.5 if name.endswith("_a") else 0.05)
    return tensors


def write_weights(path: Path, shape: Shape) -> None:
    """``make_weights`` to a safetensors file."""
    from safetensors.torch import save_file

    save_file(make_weights(shape), path)


def write_inputs(path: Path, shape: Shape, rank: int) -> int:
    """``make_inputs`` to a safetensors file; how many experts got tokens."""
    from safetensors.torch import save_file

    tensors = make_inputs(shape, rank)
    save_file(tensors, path)
    return tensors["topk_ids"].unique().numel()
