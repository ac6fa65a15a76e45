"""One run on one kind of machine, and the bytes of its micro-batches in one decoder layer.

Outside the routed experts autograd keeps what backward needs. Frozen weights need no input for their
gradient, so these are the float32 inputs of RMSNorm, each adapted linear's input (on a CPU PEFT's copies in
the LoRA's dtype), what attention needs, and the products of gated MLPs; counted against autograd's own saved
tensors in tests/sft/test_plan.py.

The experts' kernels compute how much they take for a number of strips of tokens, which is estimated here
before any token is routed. Files on disk are counted here, too, for a plan and for the check before a run.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktbridge import _kernels
from ktbridge.errors import KtbridgeError
from ktbridge.experts.gpu.placement import ExpertSizes, Placement, piece_bytes
from ktbridge.files.sizes import size_text
from ktbridge.model import family_of
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.plan.lengths import Lengths, count_evaluations, optimizer_steps
from ktbridge.sft.plan.shape import LayerShape, ModelShape

_DELTA_CHUNK = 64
_WORKSPACE = 4 << 20  # panels, factors and results of one thread: about three times L2


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: ``rows`` sequences of ``length`` tokens; ``masked``: some of them padded.

    ``width`` is 2 for bfloat16 and 4 for float32 activations, ``lora_width`` the same for LoRA's weights;
    ``cuda`` decides which attention runs, and in which dtype LoRA does (``MasterLinear``); ``kernels``:
    flash-linear-attention's compute linear attention; ``pieces_from`` as ``Placement`` has it.
    """

    rows: int
    length: int
    masked: bool
    width: int
    cuda: bool
    lora_width: int = 4
    kernels: bool = False
    pieces_from: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class RunSetting:
    """One configuration on one kind of machine."""

    shape: ModelShape
    config: TrainConfig
    lengths: Lengths
    cuda: bool
    threads: int
    rows: int | None = None
    """Rows of a micro-batch; None: as configured."""
    placement: Placement | None = None
    """Placement of its experts; None: on the CPU, in batches as configured."""
    kernels: bool = False
    """True if flash-linear-attention computes linear attention."""
    processes: int = 1
    """Processes of the run, each with a GPU of its own."""
    pieces_from: int | None = None
    """``Placement.pieces_from``; None: as the placement that is chosen says."""

    @property
    def placed(self) -> Placement | None:
        """The placement, if the GPU computes the experts."""
        return self.placement if self.placement and self.placement.on_gpu else None

    @property
    def sides(self) -> int:
        """Sequences per row: dpo runs chosen and rejected side by side."""
        return 2 if self.config.stage == "dpo" else 1

    @property
    def batch(self) -> MicroBatch:
        """The largest micro-batch."""
        rows = self.rows or self.config.per_device_train_batch_size
        padded = rows > 1 and not self.lengths.even
        sides = self.sides
        width = 2 if self.config.in_bfloat16 or self.config.pure_bf16 else 4
        masked = padded or bool(self.config.forwards_alone)
        lora_width = 2 if self.config.pure_bf16 else 4
        return MicroBatch(
            rows * sides,
            self.lengths.longest,
            masked,
            width,
            self.cuda,
            lora_width,
            self.kernels,
            pieces_from=self.placed.pieces_from if self.placed else self.pieces_from or 0,
        )

    @property
    def most_tokens(self) -> int:
        """The most tokens of a micro-batch."""
        return self.placed.tokens if self.placed else self.batch.tokens

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step."""
        config = self.config
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        return min(rows, self.lengths.sequences)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step."""
        rows = self.rows or self.config.per_device_train_batch_size
        return max(1, -(-self.step_rows // rows))

    @property
    def expert_sizes(self) -> ExpertSizes:
        """Sizes of the routed experts, and of the MLPs beside them."""
        model, layers = self.shape.config, self.shape.sparse_layers
        linears = [out * inputs for each in self.shape.layers for out, inputs in each.linears.values()]
        share = 3 * model.hidden_size / max(1, sum(linears))  # gate, up and down
        widths = Counter(all_mlp_widths(self.shape))
        stored = self.shape.expert_bytes // max(layers, 1)
        return ExpertSizes(
            layers,
            model.num_experts,
            model.experts_per_token,
            model.hidden_size,
            model.intermediate_size,
            self.config.expert_rank,
            stored,
            tuple((inner, n, share * n * inner) for inner, n in widths.items()),
            self.config.expert_dropout > 0,
        )

    @property
    def retain(self) -> bool:
        return self.config.activation == "retain"

    @property
    def steps(self) -> int:
        return optimizer_steps(self.config, self.lengths.sequences)

    @property
    def evaluations(self) -> int:
        """Number of evaluations of the held-out rows."""
        return count_evaluations(self.config, self.lengths.sequences)

    @property
    def saves(self) -> bool:
        """True if checkpoints are written; the last step has one, too."""
        return kept_checkpoints(self.config, self.steps) > 0


def expert_lora_elements(setting: RunSetting) -> int:
    """Return the number of LoRA weights on the routed experts."""
    sizes = setting.expert_sizes
    return sizes.layers * sizes.lora


def nonexpert_lora_elements(setting: RunSetting) -> int:
    """Return the number of LoRA weights on everything else."""
    rank = setting.config.lora_rank
    found = 0
    for layer in setting.shape.layers:
        every = {**layer.linears, **layer.routers}
        found += sum(rank * sum(every[name]) for name in lora_paths(setting, layer))
    return found


def lora_paths(setting: RunSetting, layer: LayerShape) -> frozenset[str]:
    """Return paths in a layer that non-expert LoRA goes to, as ``experts.lora_targets`` chooses them."""
    family = family_of(setting.shape.config.model_type)
    served = family.nonexpert_targets if family else ()
    taken: set[str] = set()
    for target in setting.config.lora_target:
        if target == "all":
            taken |= {name for name in layer.linears if not served or name in served}
        else:
            every = (*layer.linears, *layer.routers)
            taken |= {name for name in every if name == target or name.endswith(f".{target}")}
    return frozenset(taken)


@dataclass(frozen=True)
class LayerBytes:
    """``kept`` between forward and backward; ``passing`` is the largest that comes and goes meanwhile."""

    kept: int
    passing: int
    of_mlps: int = 0
    """Of what passes, what is there while MLPs are computed."""
    piece: int = 0
    """What a piece of an MLP's tokens takes beside, of however many tokens."""


def mlp_widths(layer: LayerShape) -> dict[str, int]:
    """Return the inner widths of a layer's gated MLPs, by path: dense ones and shared experts."""
    found = {}
    for name, (_, inner) in layer.linears.items():
        path, _, last = name.rpartition(".")
        if last == "down_proj" and f"{path}.up_proj" in layer.linears:
            found[path] = inner
    return found


def all_mlp_widths(shape: ModelShape) -> list[int]:
    """Return the inner widths of all gated MLPs beside a model's routed experts."""
    return [inner for layer in shape.layers for inner in mlp_widths(layer).values()]


def layer_bytes(
    shape: ModelShape, layer: LayerShape, targets: frozenset[str], rank: int, batch: MicroBatch
) -> LayerBytes:
    """Return the bytes of a layer whose linears in ``targets`` (paths) have LoRA of ``rank``."""
    hidden, width = shape.config.hidden_size, batch.width
    mlps = mlp_widths(layer)
    split = {p: n for p, n in mlps.items() if batch.pieces_from and n >= batch.pieces_from}
    a_token = 2 * 4 * hidden  # the layer's two norms
    a_token += sum(4 * size for name, size in layer.norms.items() if name.endswith("a_layernorm"))
    inside = {True: 0, False: 0}  # of ``a_token``, what is within MLPs in pieces, and in whole ones
    widest = {True: 0, False: 0}  # of whole MLPs, and of all else
    lora_width = width if batch.cuda else batch.lora_width
    inputs_kept: set[tuple[str, int, bool]] = set()
    for name, (out, inputs) in layer.linears.items():
        path = name.rpartition(".")[0]
        kept = within = 0
        if name in targets:
            # Converted for each of them; where no conversion is needed, q, k and v keep one tensor.
            group = (path, inputs, name.endswith(("o_proj", "out_proj")))
            if lora_width != width or group not in inputs_kept:
                kept = lora_width * inputs
            inputs_kept.add(group)
            kept += lora_width * rank
            wide = max(lora_width, width) * (inputs + 3 * out)
        else:
            wide = 2 * width * out
        if name.endswith("up_proj"):  # silu(gate) * up, of dense layers and shared experts
            within = 3 * width * out
        a_token += kept + within
        if path in mlps:
            inside[path in split] += within + kept
        if path not in split:
            widest[path in mlps] = max(widest[path in mlps], wide)
    attention, passing = _attention(shape, layer, batch)
    a_token += attention
    constant = 0
    if layer.sparse:
        experts, top_k = shape.config.num_experts, shape.config.experts_per_token
        a_token += 3 * 4 * experts + 20 * top_k
        constant += 4 * experts * hidden if "n_routed_experts" in shape.config.text else 0
        if any("shared_expert_gate" in name for name in layer.linears):
            a_token += width * hidden + 8
        if not batch.cuda:
            a_token += 2 * hidden  # the experts' bfloat16 input
    states = 4 * width * hidden
    of_mlps = widest[True] + states
    # Attention's backward comes after the MLPs', and doesn't find what they and their norm had kept.
    of_attention = max(widest[False] + states, passing) - 4 * hidden - inside[False]
    a_token += len(split) * width * hidden - inside[True]  # of one in pieces only the input
    piece = max((piece_bytes(hidden, inner, width) for inner in split.values()), default=0)
    passing = max(of_mlps, of_attention)
    kept, passing, of_mlps = (batch.tokens * each for each in (a_token, passing, of_mlps))
    return LayerBytes(kept + constant, passing, of_mlps, piece)


def loss_bytes(shape: ModelShape, batch: MicroBatch) -> int:
    """Return the bytes of trl's fused head: logits in tiles of 4,096 tokens by 32,768 words.

    Backward makes them again. A GPU has one tile and the float32 gradient of the last hidden states, a CPU
    backward's temporaries as well: six of float32 and a mask.
    """
    hidden = shape.config.hidden_size
    rows, words = min(batch.tokens, 4096), min(shape.vocabulary, 32768)
    last = batch.tokens * hidden * (4 + batch.width)
    if batch.cuda:
        return rows * 32768 * batch.width + last + words * hidden * 2
    return rows * words * (batch.width + 6 * 4 + 1) + last


def _attention(shape: ModelShape, layer: LayerShape, batch: MicroBatch) -> tuple[int, int]:
    """Return bytes per token: kept, and temporary in backward."""
    text, width = shape.config.text, batch.width
    if any(name.startswith("linear_attn.") for name in layer.linears):
        return _linear_attention(text, width, batch.kernels)
    heads = int(text.get("num_attention_heads") or 1)
    if text.get("kv_lora_rank"):
        return _latent(text, heads, batch)
    out = next((i for n, (_, i) in layer.linears.items() if n.endswith("o_proj")), None)
    if out is None:
        out = shape.config.hidden_size
    keys = next((o for n, (o, _) in layer.linears.items() if n.endswith("k_proj")), out)
    queries = next((o for n, (o, _) in layer.linears.items() if n.endswith("q_proj")), out)
    # A mask keeps torch from sharing keys and values among heads: they are repeated.
    shared = keys if not batch.masked else out
    kept = width * (2 * out + 2 * shared) + 4 * heads
    if any(name.endswith(("q_norm", "k_norm")) for name in layer.norms):
        kept += 4 * (out + keys)
    if queries == 2 * out:  # the other half gates attention's output
        kept += 3 * width * out
    return kept, width * 6 * out


def _latent(text: Mapping[str, Any], heads: int, batch: MicroBatch) -> tuple[int, int]:
    """Multi-head latent attention: heads of keys are wider than those of values."""
    plain, rotary = int(text["qk_nope_head_dim"]), int(text["qk_rope_head_dim"])
    key, value = plain + rotary, int(text["v_head_dim"])
    if batch.cuda:
        return batch.width * heads * (2 * key + plain + 2 * value), batch.width * 8 * heads * key
    # On a CPU, torch's plain attention in float32, all its probabilities.
    kept = 4 * heads * (2 * key + value + batch.length)
    return kept, 4 * heads * (3 * batch.length + 2 * key)


def _linear_attention(text: Mapping[str, Any], width: int, kernels: bool) -> tuple[int, int]:
    """Gated delta rule by chunks of 64: as transformers writes it, in float32, or by ``kernels``.

    flash-linear-attention keeps in the model's dtype each value head's query, key, value, output, gate and a
    row of its chunk's matrix, and in float32 the decay. Backward makes a state and its gradient for each
    chunk, and gradients of all that was kept.
    """
    heads = int(text.get("linear_num_value_heads") or 0)
    key, value = (int(text.get(f"linear_{what}_head_dim") or 0) for what in ("key", "value"))
    conv = 2 * key * int(text.get("linear_num_key_heads") or 0) + heads * value
    if kernels:
        kept = width * (heads * (2 * key + 3 * value + _DELTA_CHUNK + 1) + 3 * conv) + 12 * heads
        states = 2 * key * value // _DELTA_CHUNK
        return kept, width * heads * (states + 4 * key + 4 * value + _DELTA_CHUNK)
    kept = 4 * heads * (6 * key + 6 * value + 6 * _DELTA_CHUNK) + 3 * width * conv
    return kept, 4 * heads * (2 * key + 2 * value + 2 * _DELTA_CHUNK)


def saved_bytes(sizes: ExpertSizes, tokens: int, retain: bool) -> int:
    """Return what ``MoELoRAExperts.saved_bytes`` will be, with a router that spreads ``tokens`` at random.

    "retain" keeps g and u, both activations keep the three thin products.
    """
    return _memory(sizes, tokens, retain).saved


def host_bytes(sizes: ExpertSizes, tokens: int, retain: bool, threads: int) -> int:
    """Return the bytes of the kernels during a layer's backward, beyond all that forwards saved.

    A forward needs less: h and y.
    """
    return _memory(sizes, tokens, retain).backward + threads * _WORKSPACE


def blocks(sizes: ExpertSizes, tokens: int, width: int) -> float:
    """Return the expected blocks of ``width`` slots over all experts, tokens being routed at random.

    The sum of E[ceil(n / width)] with n binomial, approximated as Poisson below 400 slots an expert and
    by n / width + 1/2 above.
    """
    mean = tokens * sizes.top_k / sizes.experts
    if mean > 400:
        return sizes.experts * (mean / width + 0.5)
    chance, expected = math.exp(-mean), 0.0
    for count in range(int(mean + 12 * math.sqrt(mean)) + 20):
        expected += chance * -(-count // width)
        chance *= mean / (count + 1)
    return sizes.experts * expected


def _memory(sizes: ExpertSizes, tokens: int, retain: bool) -> _kernels.Memory:
    strips, doubles = (round(blocks(sizes, tokens, n)) for n in (_kernels.STRIP, _kernels.DOUBLE))
    load = _kernels.Load(tokens * sizes.top_k, strips, doubles)
    keep = _kernels.Keep.retain if retain else _kernels.Keep.recompute
    return _kernels.pass_memory(sizes.hidden, sizes.inner, sizes.rank, load, keep)


# Files on disk


def existing(path: Path) -> Path:
    """Return ``path``, or the nearest directory above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def adapter_bytes(trained: int) -> int:
    """Bytes of a raw adapter with ``trained`` weights, in bf16."""
    return 2 * trained


def checkpoint_bytes(config: TrainConfig, trained: int) -> int:
    """Bytes of one checkpoint: the adapter, and to go on from it the float32 weights and two Adam states."""
    if config.save_only_model:
        return adapter_bytes(trained) + (4 * trained if config.load_best_model_at_end else 0)
    return adapter_bytes(trained) + 12 * trained


def kept_checkpoints(config: TrainConfig, steps: int) -> int:
    """Return how many checkpoints a run of so many steps leaves, at most; the last step always has one."""
    if not config.save_steps:
        return 0
    kept = min(config.save_total_limit, -(-steps // config.save_steps))
    return kept + config.load_best_model_at_end


def check_room(config: TrainConfig, root: Path, trained: int, steps: int, beside: int = 0) -> None:
    """Refuse a run whose files don't fit on the disk of its output.

    ``root`` is the directory of its checkpoints; existing files count as free space, since they are replaced.
    ``beside``: bytes of quantized experts that come to the same disk. Raises ``KtbridgeError`` with the
    needed and the free space.
    """
    output = Path(config.output_dir)
    free = shutil.disk_usage(existing(output)).free
    free += sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    kept = kept_checkpoints(config, steps)
    written = kept + 1 if kept else 0  # one is written beside those that are kept
    need = written * checkpoint_bytes(config, trained) + adapter_bytes(trained) + beside
    if need > free:
        files = f"checkpoints ({kept} kept and one being written) and the adapter" if kept else "the adapter"
        files += ", beside the quantized experts" if beside else ""
        fewer = ", or set save_steps: 0 (no checkpoints)" if kept else ""
        raise KtbridgeError(
            f"{output.parent} has {size_text(free)} free, and this run needs {size_text(need)} there: "
            f"{files}.",
            f"Make room, or choose another output_dir{fewer}.",
        )
