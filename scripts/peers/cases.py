"""One case of the bench: a shape, the least work it takes, and seeded tensors on disk.

The formulas of ``floor`` are pure arithmetic and import nothing, so tests and tables can use them
anywhere; only what makes and writes tensors needs torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROJECTIONS = ("gate", "up", "down")
LORA_NAMES = tuple(f"{name}_lora_{side}" for name in PROJECTIONS for side in "ab")
RESULTS = ("out", "d_hidden", "d_weights", *(f"d_{name}" for name in LORA_NAMES))
SEED = 20251121
# Of a weight with its scales: float32 a block of 128 x 128, bfloat16 a group of 32.
BITS = {"bf16": 16.0, "fp8": 8 + 32 / 128**2, "int4": 4 + 16 / 32}
DTYPES = {
    "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.int32": "I32", "torch.float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
MISALIGNED = 8
"""Bytes behind a multiple of 64 at which mapped weights begin here; safetensors promises multiples of 8."""


@dataclass(frozen=True)
class Shape:
    """E experts, K of them a token, hidden size H, intermediate size I, T tokens; how weights are stored."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    tokens: int
    storage: str = "bf16"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``"64,6,2048,1408,512"`` (E,K,H,I,T) as a shape, or with ``:fp8`` or ``:int4`` behind it.

        ``ValueError`` says what is wrong.
        """
        sizes, _, storage = text.partition(":")
        if storage not in ("", *BITS):
            raise ValueError(f"{storage!r} is none of {', '.join(BITS)}")
        try:
            numbers = [int(part) for part in sizes.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 5 or min(numbers) < 1:
            raise ValueError(f"{text!r} is not five positive numbers E,K,H,I,T")
        if numbers[1] > numbers[0]:
            raise ValueError(f"{text!r} sends a token to {numbers[1]} of {numbers[0]} experts")
        return cls(*numbers, storage or "bf16")

    def __str__(self) -> str:
        *sizes, storage = asdict(self).values()
        return ",".join(map(str, sizes)) + ("" if storage == "bf16" else f":{storage}")

    @property
    def slots(self) -> int:
        """Pairs of a token and an expert: S = T·K."""
        return self.tokens * self.top_k

    @property
    def weight_bytes(self) -> int:
        """gate, up and down of all experts, as stored."""
        return int(3 * self.experts * self.inner * self.hidden * BITS[self.storage] / 8)

    def lora_shapes(self, rank: int) -> dict[str, tuple[int, int, int]]:
        """A is [E, r, in], B is [E, out, r], in the order of ``LORA_NAMES``."""
        sizes = ((self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden))
        shapes = {}
        for name, (n_in, n_out) in zip(PROJECTIONS, sizes, strict=True):
            shapes[f"{name}_lora_a"] = (self.experts, rank, n_in)
            shapes[f"{name}_lora_b"] = (self.experts, n_out, rank)
        return shapes


# Where experts are fewer than the model's, so are the choices: as many tokens for each as the model has.
DEFAULT_SHAPES = (
    Shape(16, 4, 512, 256, 256),  # overhead
    Shape(64, 6, 2048, 1408, 512),  # DeepSeek-V2-Lite
    Shape(64, 6, 2048, 1408, 2048),
    Shape(128, 8, 2048, 768, 2048),  # Qwen3-30B-A3B
    Shape(256, 8, 2048, 512, 2048),  # Qwen3.5-35B-A3B
    Shape(256, 5, 2048, 512, 2048),  # Qwen3-Next, half of its 512 and 10
    Shape(32, 2, 4096, 1536, 2048),  # Qwen3-235B-A22B, a quarter
    Shape(128, 8, 4096, 1408, 1024),  # GLM-4.5-Air
    Shape(8, 2, 4096, 14336, 2048),  # Mixtral 8x7B
    Shape(32, 1, 7168, 2048, 2048, "fp8"),  # DeepSeek-V3, an eighth
    Shape(48, 1, 7168, 2048, 2048, "int4"),  # Kimi-K2, an eighth
)


@dataclass(frozen=True)
class Work:
    """The least a pass must move (bytes) and multiply (FLOPs)."""

    bytes: int
    flops: int

    def seconds(self, peak: float, bandwidth: float) -> float:
        """The floor: the larger of bytes over bandwidth [bytes/s] and FLOPs over peak [FLOP/s]."""
        return max(self.bytes / bandwidth, self.flops / peak)


def floor(shape: Shape, rank: int, routed: int) -> dict[str, Work]:
    """The least work of ``forward`` and ``backward`` when ``routed`` experts have tokens.

    With S = T·K, all weights and activations in bfloat16 (2 bytes):

    * forward bytes: 3·I·H·2 (or as stored) of each routed expert, once; hidden in, output out: 2·T·H·2
    * forward FLOPs: 2·S·3·H·I, and for LoRA 2·S·r·(3H + 3I)
    * backward bytes: the same weights, once (activations are retained, in cache at best, so they count
      nothing); hidden and d_out in, d_hidden out: 3·T·H·2; LoRA's float32 gradients of the routed
      experts, read and written: 2·4·routed·r·(3H + 3I)
    * backward FLOPs: 2·S·3·H·I for dX only, since weights are frozen; LoRA twice its forward (dX, and
      dA with dB)

    It is a lower bound: no schedule does less, and none is known to reach it.
    """
    hidden, inner, tokens = shape.hidden, shape.inner, shape.tokens
    weights = routed * shape.weight_bytes // shape.experts
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


def make_inputs(shape: Shape, rank: int, skew: float = 0.0) -> dict[str, torch.Tensor]:
    """hidden, topk_ids, topk_weights, d_out and the six LoRA tensors.

    Routing takes the K best of a softmax over random logits, so a token's experts differ, and normalizes
    their weights. With ``skew`` s the n-th expert is chosen as often as n^-s says (Zipf): K draws without
    replacement, which is what the K best of log-weights with Gumbel noise are. LoRA's B is not zero, or half
    of backward would have nothing to do.
    """
    import torch

    random = torch.Generator().manual_seed(SEED + 1)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=random) * scale).to(torch.bfloat16)

    logits = torch.randn(shape.tokens, shape.experts, generator=random)
    if skew:
        noise = torch.rand(shape.tokens, shape.experts, generator=random).clamp_min(1e-9)
        logits = -skew * torch.arange(1.0, shape.experts + 1).log() - (-noise.log()).log()
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


def quantized(weights: dict[str, torch.Tensor], storage: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in block FP8 or in INT4 by groups of 32: each weight and its ``_scale``."""
    import torch

    tensors = {}
    for name, weight in weights.items():
        values, rows, columns = weight.float(), *weight.shape[1:]
        if storage == "fp8":
            blocks = (-(-rows // 128), -(-columns // 128))
            scale = torch.full((len(weight), *blocks), float(values.abs().max()) / 448)
            tensors[name] = (values / scale[0, 0, 0]).to(torch.float8_e4m3fn)
        else:
            groups = values.view(len(weight), rows, -1, 32)
            scale = groups.abs().amax(-1) / 7
            codes = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
            shifts = torch.arange(0, 32, 4, dtype=torch.int32)
            words = codes.view(len(weight), rows, -1, 8) << shifts
            tensors[name], scale = words.sum(-1, dtype=torch.int32), scale.to(torch.bfloat16)
        tensors[f"{name}_scale"] = scale
    return tensors


def write_weights(path: Path, shape: Shape, offset: int = MISALIGNED) -> None:
    """``make_weights``, stored as the shape says, to a safetensors file.

    Its data begins ``offset`` bytes (a multiple of 8) behind a multiple of 64, as it may in a checkpoint.
    """
    import torch

    tensors, header, end = make_weights(shape), {}, 0
    if shape.storage != "bf16":
        tensors = quantized(tensors, shape.storage)
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        size, offsets = list(tensor.shape), [begin, end]
        header[name] = {"dtype": DTYPES[str(tensor.dtype)], "shape": size, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * ((offset - 8 - len(text)) % 64)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            tensor.flatten().view(torch.uint8).numpy().tofile(file)


def write_inputs(path: Path, shape: Shape, rank: int, skew: float = 0.0) -> int:
    """``make_inputs`` to a safetensors file; how many experts got tokens."""
    from safetensors.torch import save_file

    tensors = make_inputs(shape, rank, skew)
    save_file(tensors, path)
    return tensors["topk_ids"].unique().numel()
