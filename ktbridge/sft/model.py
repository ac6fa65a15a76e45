"""The model that a run trains: checked without weights, then loaded, with LoRA on experts and non-experts.

``check_model`` makes the model by its own class on the meta device, in a second or less, so that a missing
target, an adapter that doesn't fit or weights that can't be trained on are reported at once, and by
``--dry-run`` as well. ``load_trainable`` loads it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel, set_seed

from ktbridge.adapter import Adapter
from ktbridge.adapter.keys import is_named
from ktbridge.adapter.lora_config import half_numbers, numbers_of
from ktbridge.adapter.opening import reading_note
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.experts import recompute
from ktbridge.experts.inject import wrap_experts
from ktbridge.experts.layer import expert_layers
from ktbridge.experts.load_adapter import (
    Start,
    copy_nonexpert,
    load_expert_lora,
    match_model,
    mismatch,
    read_start,
)
from ktbridge.experts.load_model import CPU, load_for_kernels, make_skeleton
from ktbridge.experts.lora_targets import (
    LoraTargets,
    TunedModel,
    choose_modules,
    convert_masters,
    find_lora_targets,
    left_out_of_all,
    own_names,
    path_in_layer,
)
from ktbridge.experts.modules import experts_modules
from ktbridge.kernel_choice import choose_threads
from ktbridge.model import Checkpoint, find_model, open_checkpoint, read_model_config
from ktbridge.sft.compat import has_balancing_loss
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.schema import stabilised
from ktbridge.sft.launch import shards_parameters
from ktbridge.sft.quantized import experts_path

_PACKED = (".weight_packed", ".qweight", ".weight.absmax")
"""Names that quantizers write in a weight's place: compressed-tensors, GPTQ and AWQ, bitsandbytes."""
_READ_PACKED = ".weight_packed"
"""The one that the kernels read, for routed experts."""


@dataclass(frozen=True)
class ParameterCounts:
    """Trained weights of a run. ``modules``: a path within its layer -> how many layers have LoRA there."""

    modules: dict[str, int]
    expert_layers: int
    expert_parameters: int
    nonexpert_parameters: int

    @property
    def parameters(self) -> int:
        return self.expert_parameters + self.nonexpert_parameters


def choose_device(config: TrainConfig) -> torch.device:
    """Return the device that a run computes attention on: this process's GPU, or the CPU without one."""
    if config.use_cpu or not torch.cuda.is_available():
        return CPU
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_model(
    config: TrainConfig, base: Path, stored: Checkpoint | None = None, whole: bool = False
) -> tuple[ParameterCounts, list[Problem]]:
    """Return what is trained, and notes: model, ``lora_target`` and ``adapter_name_or_path`` are checked.

    ``stored`` has the names of the checkpoint's tensors, by default those of the files in ``base``;
    ``whole``: the model is loaded with its vision tower.

    Raises KtbridgeError for a model that can't be trained here, and what ``choose_modules`` and
    ``find_start`` raise.
    """
    _check_packed(config, base, stored or open_checkpoint(base))
    model = make_skeleton(base, whole)
    found = _adaptable(model, base)
    if config.moe_aux_loss_coef and not has_balancing_loss(model):
        raise UsageError(
            f"moe_aux_loss_coef: transformers' {type(model).__name__} has no loss on unbalanced routing.",
            "Leave it out.",
        )
    start = find_start(config, model, found)
    if start is not None:
        read = [reading_note(start.adapter)] if start.adapter.format else []
        return _trainable(config, model, start.modules), read
    names = choose_modules(model, found, config.lora_target)
    if not names and not config.expert_rank:
        raise UsageError(
            f"lora_target: {', '.join(config.lora_target)} names routed experts alone, and "
            "kt_skip_expert_lora_adaptation gives them no LoRA: there is nothing to train.",
            "Leave one of the two out.",
        )
    return _trainable(config, model, names), _left_out(config, model, found)


def _trainable(config: TrainConfig, model: PreTrainedModel, names: Sequence[str]) -> ParameterCounts:
    """Numbers of LoRA weights: r (in + out) for a module, that for each expert's three projections."""
    sizes = (model.get_parameter(f"{name}.weight").shape for name in names)
    experts = [module for _, module in experts_modules(model)]
    # down_proj is [E, H, I] or [E, I, H]; gate and up have as many weights.
    expert_sizes = (m.down_proj.shape[0] * 3 * sum(m.down_proj.shape[1:]) for m in experts)
    return ParameterCounts(
        modules=dict(Counter(path_in_layer(name) for name in names)),
        expert_layers=len(experts),
        expert_parameters=config.expert_rank * sum(expert_sizes),
        nonexpert_parameters=config.lora_rank * sum(sum(size) for size in sizes),
    )


def _adaptable(model: PreTrainedModel, base: Path) -> LoraTargets:
    try:
        return find_lora_targets(model)
    except KtbridgeError:
        if read_model_config(base).is_moe:
            raise
        raise KtbridgeError(
            f"{base} is a dense model ({model.config.model_type}): it has no routed experts to train on the "
            "CPU.",
            "Use a mixture-of-experts model, or train this one with PEFT or LLaMA-Factory.",
        ) from None


def _check_packed(config: TrainConfig, base: Path, stored: Checkpoint) -> None:
    own_experts = config.kt_config.kt_weight_path is None
    packed = [
        name
        for name in stored
        if name.endswith(_PACKED)
        and (".experts." not in name or (own_experts and not name.endswith(_READ_PACKED)))
    ]
    if not packed:
        return
    first = min(packed)
    step = "Use the model's BF16 or FP8 release."
    if all(name.endswith(_READ_PACKED) for name in packed):
        step = "Make BF16 of it with scripts/dequantize_checkpoint.py, or use the model's BF16 release."
    raise KtbridgeError(
        f"{base} has quantized weights that can't be trained on: {first}"
        f"{f' and {len(packed) - 1:,} more' if len(packed) > 1 else ''}.",
        step,
    )


def _left_out(config: TrainConfig, model: PreTrainedModel, found: LoraTargets) -> list[Problem]:
    """Return what ``lora_target: all`` doesn't mean in this family, and nothing else named."""
    if "all" not in config.lora_target:
        return []
    left = [
        name
        for name in left_out_of_all(model, found)
        if not any(is_named(target, name) for target in config.lora_target)
    ]
    if not left:
        return []
    return [
        problem(
            "KTC013",
            "lora_target",
            f"all leaves out {', '.join(left)}: SGLang-KT applies no LoRA there",
            next_step=f"Nothing, or lora_target: all, {', '.join(left)} if the adapter is served elsewhere.",
        )
    ]


def find_start(config: TrainConfig, model: nn.Module, found: LoraTargets) -> Start | None:
    """Return the adapter of ``config.adapter_name_or_path``, checked; None if there is none to go on from.

    Ranks and alphas must be the configuration's. ``lora_target: all`` takes the modules that the adapter
    has; names must mean just those. Raises KtbridgeError for a directory that can't be read or has
    another base model, and ProblemsError naming everything else that doesn't fit.
    """
    if config.adapter_name_or_path is None:
        return None
    base = find_model(config.model_name_or_path)
    adapter = read_start(config.adapter_name_or_path, config.adapter_format, base)
    if not adapter.experts and config.expert_rank:
        raise KtbridgeError(
            f"{adapter.path} has no expert LoRA to go on from.",
            "Set kt_skip_expert_lora_adaptation: true in the kt_config block to go on without, or give an "
            "adapter that was trained with LoRA on the routed experts.",
        )
    if adapter.experts and not config.expert_rank:
        raise KtbridgeError(
            f"{adapter.path} has expert LoRA, which kt_skip_expert_lora_adaptation would lose.",
            "Leave that key out to go on with both.",
        )
    start, problems = match_model(adapter, base, model, found)
    if not problems:
        problems += _settings(adapter, config)
        problems += _chosen(start, config, model, found)
    if problems:
        raise ProblemsError(f"training can't go on from {adapter.path}.", problems)
    return start


def _settings(adapter: Adapter, config: TrainConfig) -> Iterator[Problem]:
    """Ranks and alphas in which adapter and configuration differ."""
    pairs = []
    if adapter.experts:
        pairs += [
            ("kt_lora_rank", adapter.rank, config.expert_rank),
            ("kt_lora_alpha", adapter.alpha, config.expert_alpha),
        ]
    if adapter.nonexpert:
        alpha = adapter.nonexpert_alpha
        if config.use_rslora and adapter.config.get("use_rslora"):
            alpha = stabilised(alpha, adapter.nonexpert_rank)
        pairs += [
            ("lora_rank", adapter.nonexpert_rank, config.lora_rank),
            ("lora_alpha", alpha, config.alpha),
        ]
    odd = [
        part.key.module
        for part in adapter.nonexpert.values()
        if numbers_of(adapter, part.key).at(1) != half_numbers(adapter, "nonexpert").at(1)
    ]
    if odd:
        found = f"patterns give {odd[0]} a rank or scale of its own"
        step = f"Fold them: ktbridge convert {adapter.path} --to raw --output D (exact ones are)."
        yield mismatch("KTL006", adapter, "adapter_config.json", found, "one rank and alpha", step)
    for name, theirs, ours in pairs:
        if theirs != ours:
            exact = int(theirs) if float(theirs).is_integer() else theirs
            step = f"Set {name}: {exact}."
            if config.use_rslora and "alpha" in name:
                step = f"Leave use_rslora out and set {name}: {exact}."
            yield mismatch("KTL006", adapter, name, f"{theirs:g}", f"{ours:g}, as configured", step)


def _chosen(start: Start, config: TrainConfig, model: nn.Module, found: LoraTargets) -> Iterator[Problem]:
    """Modules with unrequested LoRA, and requested modules without it."""
    adapter, keys = start.adapter, start.keys
    if config.lora_target != ("all",):
        asked = {*choose_modules(model, found, config.lora_target)}
        for names, expected, actual in (
            ({*keys} - asked, "no LoRA, as configured", "LoRA"),
            (asked - {*keys}, "LoRA, as configured", "no LoRA"),
        ):
            if names:
                ends = sorted({path_in_layer(name) for name in names})
                step = f"Set lora_target: {', '.join(own_names(keys))}, or all."
                yield mismatch("KTL006", adapter, ", ".join(ends), actual, expected, step)


def load_trainable(config: TrainConfig, base: Path, whole: bool = False) -> TunedModel:
    """Return the model in ``base``, placed, its experts on the kernels, with a LoRA to train on both.

    ``config``: that of ``prepare``, whose dtype is decided; ``whole``: with the model's vision tower, which
    stays as it is.
    Seeds torch's, numpy's and Python's random numbers with ``config.seed`` first.
    """
    set_seed(config.seed)
    model = load_for_kernels(
        base,
        torch.bfloat16 if config.in_bfloat16 else torch.float32,
        choose_device(config),
        experts_path(config, base),
        config.attn_implementation,
        whole,
    )
    tuned = attach_lora(model, config)
    if not config.disable_gradient_checkpointing:
        recompute.enable(tuned)
    return tuned


def attach_lora(model: PreTrainedModel, config: TrainConfig) -> TunedModel:
    """Wrap the non-experts by PEFT, then the experts by the kernels; both from an adapter if one is given.

    ``config.lora_target``: "all" is every linear module of the decoder layers outside the routed experts,
    shared experts included, but for those whose LoRA SGLang-KT is known not to apply in this
    family (``left_out_of_all``); with ``config.adapter_name_or_path`` it is what that adapter has.
    Else names of modules, or the ends of their paths: "gate_proj" is that of shared experts and dense
    layers, "mlp.gate_proj" of dense layers alone, "gate" the router. Routed experts have LoRA whatever
    is named ("experts": they alone), but with ``kt_skip_expert_lora_adaptation``. A router's LoRA has no
    dropout.

    Raises UsageError naming every target that the model doesn't have, ProblemsError naming everything in
    which an adapter to go on from doesn't fit configuration or model, and what ``wrap_experts`` does.
    """
    device = attention_device(model)
    start = find_start(config, model, find_lora_targets(model))
    tuned = attach_linear_lora(model, config, start)
    wrap_experts(
        tuned,
        config.expert_rank,
        config.expert_alpha,
        threads=config.kt_config.kt_num_threads or threads_beside_python(device),
        activation=config.activation,
        lora_dropout=config.expert_dropout,
        accumulate_grad=True,  # the Trainer reads .grad only, after whole backward passes
    )
    for layer in expert_layers(tuned).values():
        layer.run_ahead = True  # the LoRA changes after whole backward passes only
    without = sum(1 for _ in experts_modules(tuned)) - len(expert_layers(tuned))
    if without:  # a layer's LoRA is known by the layer's index
        raise KtbridgeError(
            f"{without} experts modules of {type(model).__name__} belong to no decoder layer of their own.",
            "Report the model, please: its expert LoRA could not be saved.",
        )
    if start:
        copy_nonexpert(model, start)
        if config.expert_rank:
            load_expert_lora(tuned, start.adapter)
    return tuned


def attach_linear_lora(model: PreTrainedModel, config: TrainConfig, start: Start | None = None) -> TunedModel:
    """Wrap the non-experts alone, by PEFT; the modules of ``start``, if an adapter is given."""
    found = find_lora_targets(model)
    names = start.modules if start else choose_modules(model, found, config.lora_target)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT takes fractions, its annotation doesn't
        lora_dropout=config.lora_dropout,
        # An adapter to go on from may have it; where the configuration asks for it, alpha has it in it.
        use_rslora=bool(start and start.adapter.config.get("use_rslora")) and not config.use_rslora,
        task_type="CAUSAL_LM",
    )
    tuned = TunedModel(model, lora, names, found)
    if not config.pure_bf16:  # masters, as PEFT makes them of whole models and the experts' LoRA is
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    convert_masters(tuned, keep_copies=not shards_parameters())
    return tuned


def attention_device(model: nn.Module) -> torch.device:
    """Return the first device beside the CPU that a part of ``model`` is on, else the CPU.

    Embeddings may stay on the CPU while what follows is on a GPU.
    """
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def threads_beside_python(device: torch.device) -> int:
    """Return the default number of kernel threads; 0 leaves it to the kernels.

    With attention on a GPU, Python queues its work while the kernels run, and needs a CPU of its own.
    """
    threads = choose_threads()
    spare = device.type == "cuda" and threads >= 4 and "KTBRIDGE_THREADS" not in os.environ
    return threads - 1 if spare else 0
