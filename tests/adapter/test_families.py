"""An adapter of every family goes on as it was trained: converted, validated, merged, referenced, served."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from adapterfaults import add, copies, each, edit, rename
from familygradients import Choices
from findings import codes
from moefamilies import IDS, everything, parametrize_families, randomize, reference
from peft import PeftModel
from rawadapter import FILES
from safetensors.torch import load_file
from tinymoe import tiny_tokenizer

from ktbridge.adapter import Tensor, convert_adapter, merge_adapter, read_adapter, validate_adapter
from ktbridge.errors import ProblemsError
from ktbridge.experts.load_model import load_mapped, load_model
from ktbridge.model import read_model_config
from ktbridge.serve.local.loading import load_engine
from ktbridge.serve.local.plan import plan_local
from ktbridge.serve.request import ServeRequest
from ktbridge.sft import save_raw_adapter, wrap_experts
from ktbridge.sft.model import attach_lora
from ktbridge.verify.reference_model import ReferenceModel
from ktbridge.verify.verdict import Variant

NOT_IN_PEFT = ("laguna", "unlimited_ocr")
"""PEFT doesn't load these as trained, as docs/models.md says."""
ROUNDED = 0.04  # of bfloat16, relative to logits that the adapter moves by more than a tenth


class Tuned(NamedTuple):
    """A base, a raw adapter of all that can have LoRA, and their logits in float32 around the experts."""

    base: Path
    raw: Path
    plain: torch.Tensor
    exact: torch.Tensor


def tune(model_type: str, path: Path, choices: Choices) -> Tuned:
    base, raw = path / "base", path / "raw"
    plain = logits(reference(model_type, base))
    tiny_tokenizer().save_pretrained(base)
    mapped = load_mapped(base, torch.float32)
    tuned = attach_lora(mapped, everything(mapped, base)).eval()
    randomize(tuned, torch.Generator().manual_seed(3))
    save_raw_adapter(tuned, raw, str(base))
    choices.anew()
    return Tuned(base, raw, plain, logits(tuned))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS, use_cache=False).logits.float()


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error of the median token: in bfloat16 some go to another expert, for a rounding."""
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("model_type", parametrize_families())
def test_adapter(model_type, tmp_path, monkeypatch):
    choices = Choices(monkeypatch)
    tuned = tune(model_type, tmp_path, choices)
    assert off(tuned.plain, tuned.exact) > 0.1
    converted(tuned)
    faults(tuned)
    if model_type not in NOT_IN_PEFT:
        choices.again()
        peft = PeftModel.from_pretrained(load_model(tuned.base, torch.float32), tmp_path / "peft-fused")
        assert off(logits(peft.eval()), tuned.exact) < ROUNDED / 2
    merged = tmp_path / "merged"
    if model_type == "gpt_oss":  # its base is MXFP4; into BF16: tests/sft/test_gpt_oss.py
        with pytest.raises(ProblemsError, match="KTB732"):
            merge_adapter(tuned.raw, base_model=tuned.base, output=merged)
    else:
        merge_adapter(tuned.raw, base_model=tuned.base, output=merged)
        model = load_mapped(merged, torch.float32).eval()
        wrap_experts(model, lora_rank=0)
        choices.again()
        assert off(logits(model), tuned.exact) < ROUNDED / 2
    choices.anew()
    referenced(tuned)
    serves(tuned.base, {"a": str(tuned.raw)}, {"m:a": tuned.exact, "m:base": tuned.plain})
    if merged.exists():
        serves(merged, {}, {"m": tuned.exact})


def within_layers(file: Path) -> dict[str, bytes]:
    """The tensors by their names from the layer's number on."""
    found = load_file(file)
    return {
        name.partition("layers.")[2]: tensor.view(torch.uint8).numpy().tobytes()
        for name, tensor in found.items()
    }


def converted(tuned: Tuned) -> None:
    """Through every format and back, bit by bit; GGUF where llama.cpp has names for the modules."""
    for to in ("kt-merged", "peft-fused", "vllm", "sglang-3d"):
        there, back = tuned.raw.parent / to, tuned.raw.parent / f"{to}-back"
        convert_adapter(tuned.raw, to=to, output_dir=there)
        convert_adapter(there, to="raw", from_format=to, output_dir=back)
        for name in FILES:
            given, come = tuned.raw / name, back / name
            if to == "vllm" and read_model_config(tuned.base).model_type == "unlimited_ocr":
                # vLLM takes the checkpoint's names, which aren't those of transformers' modules here.
                assert within_layers(given) == within_layers(come), name
            else:
                assert given.read_bytes() == come.read_bytes(), (to, name)
    for path in (tuned.raw, tuned.raw.parent / "kt-merged"):
        found = validate_adapter([path], base_model=tuned.base)
        # What SGLang-KT doesn't apply, of the families of which that is known.
        assert codes(found) - {"KTB608"} == set(), found.problems
    spelled = validate_adapter([tuned.raw.parent / "vllm"], base_model=tuned.base)
    assert not codes(spelled) & {"KTB117", "KTB118"}, spelled.problems  # w1, w3 and w2 are targeted


def faults(tuned: Tuned) -> None:
    """Damage to the merged layout: each is found by the base's own names and shapes, in every family."""
    config = read_model_config(tuned.base)
    last = config.moe_layers[-1]
    key = next(key for key in read_adapter(tuned.raw).nonexpert_keys() if f"layers.{last}." in key)
    module = key.partition(".lora_")[0]
    path = module.rpartition(f"layers.{last}.")[0] + f"layers.{last}"
    halves = ((f"{path}.mixer.w_proj.lora_{half}.weight", shape)
              for half, shape in (("A", (4, 64)), ("B", (64, 4))))  # fmt: skip
    strange = dict(halves)
    damages: list[tuple[Callable[[dict[str, Tensor]], None], set[str]]] = [
        (rename(f"layers.{last}.", "layers.7."), {"KTB603", "KTB606"}),
        (each(f"{module}.lora_A", narrowed), {"KTB605"}),
        (each(f"layers.{last}.mlp.experts.0.up_proj.lora_B", lower), {"KTB605"}),
        (lambda tensors: [add(*one)(tensors) for one in strange.items()] and None, {"KTB610"}),
    ]
    if dense := set(range(config.num_layers)) - set(config.moe_layers):
        place = f"layers.{min(dense)}.mlp.experts."
        damages.append((copies(f"layers.{last}.mlp.experts.", place), {"KTB603"}))
    for number, (damage, expected) in enumerate(damages):
        broken = tuned.raw.parent / f"broken-{number}"
        shutil.copytree(tuned.raw.parent / "kt-merged", broken)
        found = validate_adapter([edit(broken, damage)], base_model=tuned.base)
        assert expected <= codes(found, "error"), (number, found.problems)


def narrowed(tensor: Tensor) -> Tensor:
    rank, wide = tensor.shape
    return replace(tensor, shape=(rank, wide - 2), data=bytes(tensor.data)[: 2 * rank * (wide - 2)])


def lower(tensor: Tensor) -> Tensor:
    high, rank = tensor.shape
    return replace(tensor, shape=(high - 2, rank), data=bytes(tensor.data)[: 2 * (high - 2) * rank])


def referenced(tuned: Tuned) -> None:
    """verify's references are what transformers and PEFT computed."""
    model = ReferenceModel(tuned.base, read_adapter(tuned.raw), IDS.tolist())
    variants = (Variant(expert=False, nonexpert=False), Variant(expert=True, nonexpert=True))
    wanted = [
        made[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).flatten()
        for made in (tuned.plain, tuned.exact)
    ]
    moved = (wanted[1] - wanted[0]).abs().median()
    for found, expected in zip(model.logprobs(variants), wanted, strict=True):
        assert (torch.tensor(found) - expected).abs().median() < 0.02 * moved


def serves(base: Path, adapters: dict[str, str], answers: dict[str, torch.Tensor]) -> None:
    """The embedded engine answers for its arms by name as ``answers`` do."""
    plan = plan_local(ServeRequest(str(base), adapters, served_name="m"))
    engine = load_engine(plan)
    asked = [arm for arm in plan.arms if arm.name in answers]
    assert len(asked) == len(answers)
    for arm in asked:
        found, _ = engine.prefill(arm, IDS[0].tolist(), all_logits=True)
        assert off(found.float(), answers[arm.name][0]) < ROUNDED, arm.name
