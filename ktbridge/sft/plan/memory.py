"""Memory of a training run: the process's own, the page cache, the GPU, the disk.

A pure function of the model's shape, the configuration and the rows' lengths, so that advice is
the same function of another configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ktbridge.experts.gpu.placement import ON_WAY, MemoryBudget, Placement
from ktbridge.files.sizes import count_text, size_text
from ktbridge.sft.plan.setting import (
    LayerBytes,
    RunSetting,
    adapter_bytes,
    checkpoint_bytes,
    expert_lora_elements,
    host_bytes,
    kept_checkpoints,
    layer_bytes,
    lora_paths,
    loss_bytes,
    nonexpert_lora_elements,
    saved_bytes,
)

Where = Literal["RAM", "page cache", "GPU", "disk"]
CHECKPOINT = "the model, to be downloaded"
QUANTIZED = "the experts, to be quantized"
# A process that has imported the recipe: its own memory, and the files it has mapped.
LIBRARIES = 420_000_000
LIBRARY_FILES = 240_000_000
# What CUDA adds to both, to pinned memory and on the GPU. Fitted on three runs on one H200 (docs/plan.md).
CUDA_HOST = 1_150_000_000
CUDA_FILES = 285_000_000
CUDA_PINNED = 20_000_000
CUDA_CONTEXT = 800_000_000
NCCL_BUFFERS = 1_000_000_000
# Allocator overhead, as a fraction of temporary memory.
HOST_SLACK, GPU_SLACK = 0.05, 0.25
# The same on the GPU where its memory grows in segments, as `ktbridge train` asks for with experts there.
GPU_SEGMENTS_SLACK = 0.1
WORKSPACES = 4 * (32 << 20)
"""cuBLAS's own memory on a GPU: for each thread and stream that multiplies."""
_LARGE = 8192  # tokens


@dataclass(frozen=True)
class PlanPart:
    """``size`` bytes of one item in one place, and how that was determined."""

    what: str
    where: Where
    size: int
    how: str


def total(parts: Sequence[PlanPart], where: Where) -> int:
    """Return the bytes of all parts in one place."""
    return sum(part.size for part in parts if part.where == where)


def predict_parts(setting: RunSetting) -> list[PlanPart]:
    """Return every part of a run, at its peak. The parts of one place add up to what that place must have."""
    return [*_expert_parts(setting), *_other_parts(setting), *_disk_parts(setting)]


def _expert_parts(setting: RunSetting) -> Iterator[PlanPart]:
    """Routed experts and their LoRA: on the host in any case."""
    shape, config = setting.shape, setting.config
    layers, hidden = shape.sparse_layers, shape.config.hidden_size
    plain = shape.expert_elements * 2 * layers
    if shape.mappable:
        read = layers - (len(setting.placed.resident) if setting.placed else 0)
        how = f"{read} layers of {shape.config.num_experts}, {shape.expert_storage}, as the files have them"
        if read:
            yield PlanPart("experts, mapped", "page cache", mapped_bytes(setting), how)
    else:
        how = f"stored as {shape.expert_storage} in a form the kernels can't map: loaded as bf16"
        yield PlanPart("experts, loaded", "RAM", plain, how)
    lora = expert_lora_elements(setting)
    how = f"rank {config.expert_rank}: {count_text(lora)} float32 weights, gradients, 2 Adam states"
    masters: Where = "GPU" if setting.placed is not None and setting.placed.masters else "RAM"
    spared = 0
    if setting.placed is not None:
        limits = memory_budget(setting, 0)
        spared = setting.placed.overlapped_gradient_bytes(setting.expert_sizes, limits)
        how += "; the gradients come as activations go" if spared else ""
    if lora:
        yield PlanPart("expert LoRA", masters, 16 * lora - spared, how)
    if lora and setting.placed is not None:
        how = "made on the host, in pages that the process keeps when it moves"
        yield PlanPart("expert LoRA, first copy", "RAM", 4 * lora, how)
    if setting.placed is not None:
        yield from _gpu_expert_parts(setting, setting.placed)
        return

    tokens = setting.batch.tokens
    sizes = setting.expert_sizes
    kept = layers * saved_bytes(sizes, tokens, setting.retain)
    word = f"{config.activation}, {tokens:,} tokens x {sizes.top_k} experts, {layers} layers"
    yield PlanPart("expert activations", "RAM", round(kept), word)
    passing = host_bytes(sizes, tokens, setting.retain, setting.threads)
    yield PlanPart("expert kernels", "RAM", round(passing), "one layer's backward, and panels of each thread")
    if setting.cuda:
        # Pinned blocks are powers of two. Python runs ahead of the kernels by a whole backward, so that
        # each layer's hidden states, its output and both gradients are there at once.
        block = 1 << (tokens * hidden * 2 - 1).bit_length()
        how = f"hidden states, outputs and their gradients of {layers} layers, bf16, pinned"
        yield PlanPart("crossing to the GPU", "RAM", 4 * layers * block + CUDA_PINNED, how)


def mapped_bytes(setting: RunSetting) -> int:
    """Bytes of experts that every pass reads from the checkpoint's mapped files."""
    shape = setting.shape
    if not shape.mappable:
        return 0
    kept = len(setting.placed.resident) if setting.placed else 0
    return shape.expert_bytes * (shape.sparse_layers - kept) // shape.sparse_layers


def _gpu_expert_parts(setting: RunSetting, placement: Placement) -> Iterator[PlanPart]:
    """Experts that the GPU computes: what stays there, what passes through, and activations."""
    sizes = setting.expert_sizes
    kept, streamed = len(placement.resident), sizes.layers - len(placement.resident)
    if kept:
        how = f"{kept} of {sizes.layers} layers, in bf16"
        yield PlanPart("experts, resident", "GPU", placement.resident_bytes(sizes), how)
    if streamed:
        group = size_text(placement.slot_bytes)
        how = f"{streamed} layers in groups of {group}, {placement.slots} at a time"
        yield PlanPart("experts, streamed", "GPU", placement.streamed_bytes(sizes), how)
    if not placement.masters and sizes.rank:
        lora = placement.lora_bytes(sizes)
        yield PlanPart("expert LoRA of one layer", "GPU", lora, "its masters are in RAM")
    tokens, limits = placement.tokens, memory_budget(setting, 0)
    count = ON_WAY if placement.outputs_on_host else sizes.layers
    how = f"{tokens:,} tokens x {sizes.top_k} experts, one layer, and {count} outputs"
    if placement.keep_gate_up:
        how += ", with gate and up of all layers"
    taken = placement.activation_bytes(sizes, limits.passing_bytes(tokens))
    yield PlanPart("expert activations", "GPU", taken, how)
    if placement.outputs_on_host:
        away = tokens * 2 * sizes.hidden * sizes.layers + placement.away_bytes(limits.away)
        how = "pinned, until each layer's backward"
        yield PlanPart("inputs of the layers and outputs of the experts", "RAM", away, how)


@dataclass(frozen=True)
class OutsideBytes:
    """GPU memory outside the experts that the GPU computes, with what the allocator adds to activations."""

    weights: int
    lora: int
    """LoRA weights that are trained."""
    lora_more: int
    """Their gradients, Adam states and bfloat16 copies."""
    constant: int
    """Of activations, what more tokens don't change: tiles of the loss."""
    token: int
    """Of activations, a token's while the experts are computed."""
    kept: int
    """Of ``token``, what backward lets go of as it goes through the layers."""
    away: int
    """Of ``kept``, what waits on the host where a placement has the layers' outputs there."""
    passing: int
    """A token's beside ``token`` when experts aren't computed: a layer's temporaries, or the loss."""
    piece: tuple[int, int]
    """A token's beside ``token`` while an MLP's piece is computed, and the piece's own."""

    @property
    def taken(self) -> int:
        """Return what a loaded model takes."""
        return self.weights + self.lora

    @property
    def more(self) -> int:
        """Return what a run takes beside it, of any number of tokens."""
        return self.lora_more + self.constant + WORKSPACES


def outside_bytes(setting: RunSetting) -> OutsideBytes:
    """Return what a run takes of the GPU outside its experts."""
    longest = setting.lengths.longest * setting.sides
    # From large micro-batches: in small ones a tile of the loss decides, which is no larger for more tokens.
    rows = max(1, _LARGE // longest)
    small, few, many = (
        [round((1 + GPU_SEGMENTS_SLACK) * each) for each in _activation_bytes(replace(setting, rows=n))]
        for n in (1, rows, 2 * rows)
    )
    token, passing = (max(1, math.ceil((b - a) / (rows * longest))) for a, b in zip(few, many, strict=True))
    constant = max(0, sum(small) - (token + passing) * longest)
    lora = nonexpert_lora_elements(setting)
    width = 2 if setting.config.pure_bf16 else 4
    more = 3 * width + (0 if setting.config.pure_bf16 or setting.batch.width != 2 else 2)
    weights = setting.shape.nonexpert_elements * setting.batch.width
    slack = 1 + GPU_SEGMENTS_SLACK
    kept = round(slack * _activations(setting)[0]) // setting.batch.tokens
    layers = () if setting.config.disable_gradient_checkpointing else setting.shape.layers
    away = max(0, len(layers) - ON_WAY) * setting.shape.config.hidden_size * setting.batch.width
    away = round(slack * away)  # the allocator has no more to do with them either
    return OutsideBytes(
        weights,
        width * lora,
        more * lora,
        constant,
        token,
        kept,
        away,
        passing,
        _piece_bytes(replace(setting, rows=rows)),
    )


def memory_budget(setting: RunSetting, free: int) -> MemoryBudget:
    """Return limits of a placement with ``free`` bytes, its MLPs whole or in pieces as the setting says."""
    found = outside_bytes(setting)
    longest = setting.lengths.longest * setting.sides
    step = math.ceil(setting.step_rows * setting.sides * setting.lengths.mean)
    return MemoryBudget(
        free, found.token, found.passing, longest, step, found.kept, found.away, piece=found.piece
    )


def _piece_bytes(setting: RunSetting) -> tuple[int, int]:
    """Return bytes beside those while experts are computed: a token's, and of the largest piece."""
    found = list(zip(setting.shape.layers, _layers(setting), strict=True))
    routed = max((one.kept for layer, one in found if layer.sparse), default=0)
    piece = max(one.piece for _, one in found)
    if not piece:
        return 0, 0
    most = max(one.kept + one.of_mlps for _, one in found) - routed
    slack = 1 + GPU_SEGMENTS_SLACK
    return math.ceil(slack * max(0, most) / setting.batch.tokens), math.ceil(slack * piece)


def _other_parts(setting: RunSetting) -> Iterator[PlanPart]:
    """Everything that isn't a routed expert: on the GPU if there is one, else on the host."""
    shape, config, batch = setting.shape, setting.config, setting.batch
    where: Where = "GPU" if setting.cuda else "RAM"
    kind = "bf16" if batch.width == 2 else "float32"
    own = shape.nonexpert_elements - shape.vision_elements
    how = f"{count_text(own)} weights in {kind}"
    yield PlanPart("attention, embeddings, routers, …", where, own * batch.width, how)
    if shape.vision_elements:
        how = f"{count_text(shape.vision_elements)} weights in {kind}, which stay as they are"
        yield PlanPart("the vision tower", where, shape.vision_elements * batch.width, how)
    if setting.lengths.images and setting.placed is None:  # else among activations
        how = f"up to {setting.lengths.most_image_tokens:,} tokens in each of {batch.rows} rows, one layer"
        yield PlanPart("images in the vision tower", where, _image_bytes(setting), how)
    lora = nonexpert_lora_elements(setting)
    width, kind = (2, "bf16") if config.pure_bf16 else (4, "float32")
    how = f"rank {config.lora_rank}: {count_text(lora)} {kind} weights, gradients, 2 Adam states"
    yield from _computed_parts(setting, how)
    kept, passing, _ = _activations(setting)
    most = max(passing, loss_bytes(shape, batch))
    trained = expert_lora_elements(setting) + lora
    saving = 4 * trained if setting.saves else 2 * trained
    # Saved between steps, when these gradients are gone, and on a CPU the activations.
    free = 4 * expert_lora_elements(setting)
    free += 0 if setting.cuda else width * lora + kept + most
    if saving > free:
        how = "the trained tensors once more, where gradients were"
        yield PlanPart("saving", "RAM", saving - free, how)
    yield from _process_parts(setting)


def _computed_parts(setting: RunSetting, lora_how: str) -> Iterator[PlanPart]:
    """LoRA and activations outside the experts, and what the allocator adds to these."""
    where: Where = "GPU" if setting.cuda else "RAM"
    if setting.placed is not None:
        found, tokens = outside_bytes(setting), setting.placed.tokens
        if found.lora_more % 3:
            lora_how += ", a copy in bf16"
        yield PlanPart("non-expert LoRA", "GPU", found.lora + found.lora_more, lora_how)
        slack = GPU_SEGMENTS_SLACK
        activations, constant = tokens * found.token, found.constant
        away = setting.placed.away_bytes(found.away)
        activations -= away
        kept = min(activations, round((tokens * found.kept - away) / (1 + slack)))
        plain = [round(each / (1 + slack)) for each in (activations, constant)]
        what = f"inputs of {ON_WAY if away else 'all'} layers, {tokens:,} tokens"
        yield PlanPart("activations", "GPU", kept, what)
        images = min(plain[0] - kept, _image_bytes(setting) * tokens // setting.batch.tokens)
        if setting.lengths.images:
            most = setting.lengths.most_image_tokens
            how = f"up to {most:,} tokens in each row, one layer"
            yield PlanPart("images in the vision tower", "GPU", images, how)
        most = max(0, plain[0] - kept - images) + plain[1]
        how = f"one layer at a time, {tokens:,} tokens, and a tile of the loss"
        yield PlanPart("temporary: a layer and the loss", "GPU", most, how)
        more = activations + constant - kept - images - most
        yield PlanPart("allocator", "GPU", more, f"{slack:.0%} of what comes and goes")
        yield PlanPart("workspaces", "GPU", WORKSPACES, "cuBLAS's, for each thread and stream")
        return
    width = 2 if setting.config.pure_bf16 else 4
    lora = nonexpert_lora_elements(setting)
    yield PlanPart("non-expert LoRA", where, 4 * width * lora, lora_how)
    kept, passing, how = _activations(setting)
    yield PlanPart("activations", where, kept, how)
    loss = loss_bytes(setting.shape, setting.batch)
    most = max(passing, loss)
    what = "logits and loss" if loss >= passing else "one layer at a time"
    yield PlanPart(f"temporary: {what}", where, most, "the largest at its peak")
    slack = GPU_SLACK if setting.cuda else HOST_SLACK
    more = round(slack * (kept + most))
    yield PlanPart("allocator", where, more, f"{slack:.0%} of what comes and goes")


def _image_bytes(setting: RunSetting) -> int:
    """Return what the vision tower has of a pass's images at once: nothing is kept for a backward."""
    batch, most = setting.batch, setting.lengths.most_image_tokens
    return batch.rows * most * setting.shape.image_token_numbers * batch.width


def _activation_bytes(setting: RunSetting) -> tuple[int, int]:
    """Return bytes of a micro-batch outside the experts: while these are computed, and more when not."""
    kept, most, _ = _activations(setting)
    computed = zip(setting.shape.layers, _layers(setting), strict=True)
    routed = max((one.kept for layer, one in computed if layer.sparse), default=0)
    if setting.config.disable_gradient_checkpointing:
        routed = 0  # all layers' are kept
    most = max(most, loss_bytes(setting.shape, setting.batch))
    return kept + _image_bytes(setting) + routed, max(0, most - routed)


def _layers(setting: RunSetting) -> list[LayerBytes]:
    """Each decoder layer's bytes in a pass."""
    shape, rank = setting.shape, setting.config.lora_rank
    return [
        layer_bytes(shape, layer, lora_paths(setting, layer), rank, setting.batch) for layer in shape.layers
    ]


def context_bytes(processes: int) -> int:
    """Return what a process takes of its GPU's memory beside torch's tensors: a constant, from test runs."""
    return CUDA_CONTEXT + (NCCL_BUFFERS if processes > 1 else 0)


def _process_parts(setting: RunSetting) -> Iterator[PlanPart]:
    """Fixed memory of any training process."""
    cuda = setting.cuda
    files = LIBRARY_FILES + (CUDA_FILES if cuda else 0)
    name = "Python, torch, CUDA" if cuda else "Python, torch, …"
    yield PlanPart(f"{name}, mapped", "page cache", files, "their files, as far as they are touched")
    how = "a constant, from test runs on {}: depends on versions"
    if cuda:
        yield PlanPart(name, "RAM", LIBRARIES + CUDA_HOST, how.format("an H200"))
        name = "CUDA context" if setting.processes == 1 else "CUDA context, NCCL's buffers"
        yield PlanPart(name, "GPU", context_bytes(setting.processes), how.format("an H200"))
    else:
        yield PlanPart(name, "RAM", LIBRARIES, how.format("a CPU"))


def _activations(setting: RunSetting) -> tuple[int, int, str]:
    """Bytes kept between forward and backward, bytes passing, and how."""
    shape, batch = setting.shape, setting.batch
    found = _layers(setting)
    size = f"{batch.rows} x {batch.length:,} tokens"
    routed = 0
    if setting.config.moe_aux_loss_coef:  # routers' logits and their float32 softmax, twice
        routed = 12 * batch.tokens * shape.config.num_experts * shape.sparse_layers
    if setting.config.disable_gradient_checkpointing:
        passing = max(one.passing for one in found)
        return routed + sum(one.kept for one in found), passing, f"{len(found)} layers, all kept, {size}"
    inputs = routed + len(found) * batch.tokens * shape.config.hidden_size * batch.width
    if not setting.cuda:  # the experts' outputs, kept for the second forward
        inputs += shape.sparse_layers * batch.tokens * shape.config.hidden_size * 2
    most = max(one.kept + one.passing for one in found)
    return inputs, most, f"inputs of {len(found)} layers, {size}; the rest is computed again"


def _disk_parts(setting: RunSetting) -> Iterator[PlanPart]:
    if setting.shape.to_download:
        yield PlanPart(CHECKPOINT, "disk", setting.shape.to_download, "all its tensors, in its storage")
    if setting.shape.to_quantize:
        how = f"{setting.shape.expert_storage}, made once, before the first step"
        yield PlanPart(QUANTIZED, "disk", setting.shape.to_quantize, how)
    trained = expert_lora_elements(setting) + nonexpert_lora_elements(setting)
    config = setting.config
    if setting.saves:
        count, one = kept_checkpoints(config, setting.steps), checkpoint_bytes(config, trained)
        more = "" if config.save_only_model else ", float32 weights and 2 Adam states"
        how = f"{count} kept and one being written: adapter{more}, {size_text(one)} each"
        yield PlanPart("checkpoints", "disk", (count + 1) * one, how)
    how = f"{count_text(trained)} weights in bf16"
    yield PlanPart("the adapter", "disk", adapter_bytes(trained), how)
