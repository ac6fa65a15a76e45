"""What is wrong is named: wrong adapters on disk, run by transformers, held against the right one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ktbridge.adapter import merge_adapter, read_adapter
from ktbridge.experts.load_model import load_model, load_tokenizer
from ktbridge.verify.hypotheses import explain
from ktbridge.verify.reference_model import ReferenceModel, compute_references
from ktbridge.verify.run import adapter_facts, fixed_prompts
from ktbridge.verify.verdict import Variant, Verification, judge

FILES = ("fused_expert_lora.safetensors", "adapter_model.safetensors")
Tensors = dict[str, torch.Tensor]


class Bench:
    """References of one adapter, and what a server would answer that has another one."""

    def __init__(self, base: Path, adapter: Path, work: Path) -> None:
        self.base, self.adapter, self.work = base, adapter, work
        self.prompts = fixed_prompts(load_tokenizer(base), 400)[:3]
        self.model = ReferenceModel(base, read_adapter(adapter), self.prompts)
        (self.references,) = compute_references(self.model, [(True, True)])
        self.passes = 0

    def changed(self, change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> Path:
        """The adapter with its tensors changed, on disk."""
        target = self.work / f"adapter-{len(list(self.work.iterdir()))}"
        target.mkdir()
        for name in FILES:
            tensors = load_file(self.adapter / name)
            save_file({k: t.contiguous() for k, t in change(tensors).items()} or tensors, target / name)
        config = json.loads((self.adapter / "adapter_config.json").read_text())
        (target / "adapter_config.json").write_text(json.dumps(config))
        return target

    def served(self, adapter: Path) -> list[float]:
        """Logprobs of the merged checkpoint by transformers alone, in bfloat16."""
        merged = adapter.with_suffix(".merged")
        merge_adapter(adapter, base_model=self.base, output=merged)
        return whole_logprobs(merged, self.prompts, torch.bfloat16)

    def verdict(self, vector: list[float], base: list[float] | None = None) -> Verification:
        """What is found about a served model that should be the full adapter, beside ``base``."""
        arms = {"m": ("full", vector)} | ({} if base is None else {"b": ("base", base)})
        result = judge("m", arms, self.references)
        self.passes = 0
        if not result.in_doubt:
            return result

        def compute(variants: list[Variant]) -> list[list[float]]:
            self.passes += 1
            return self.model.logprobs(variants)

        facts = adapter_facts(read_adapter(self.adapter))
        return explain(result, vector, self.references, facts, compute)


def whole_logprobs(path: Path, prompts: list[list[int]], dtype: torch.dtype) -> list[float]:
    model, found = load_model(path, dtype), []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            found += logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices of a tiny model are not worth a barrier
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench(base, adapter, tmp_path_factory):
    return Bench(base, adapter, tmp_path_factory.mktemp("broken"))


def scaled(factor: float, *words: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {
            k: t * factor if k.lower().endswith(("_b", "b.weight")) and any(w in k for w in words) else t
            for k, t in tensors.items()
        }

    return change


def swapped(tensors: Tensors) -> Tensors:
    names = {"gate_lora": "up_lora", "up_lora": "gate_lora"}
    return {
        next((k.replace(old, new) for old, new in names.items() if old in k), k): t
        for k, t in tensors.items()
    }


def rolled(tensors: Tensors) -> Tensors:
    return {k: t.roll(1, 0) if ".experts." in k else t for k, t in tensors.items()}


def without(*words: str) -> Callable[[Tensors], Tensors]:
    """B = 0 wherever all of ``words`` are in the name."""
    return lambda tensors: {
        k: torch.zeros_like(t) if all(w in k for w in words) else t for k, t in tensors.items()
    }


CASES = {
    "right": (scaled(1), "applied", None),
    "alpha doubled": (scaled(2, "experts", "attn"), "wrong scale", "≈ ×2"),
    "experts at 3": (scaled(3, "experts"), "wrong scale", "experts ≈ ×"),
    "alpha/r for rsLoRA's alpha/sqrt(r)": (scaled(0.5, "self_attn"), "wrong scale", "attention ≈ ×0.5"),
    "gate and up": (swapped, "not applied", "gate and up swapped"),
    "off by one": (rolled, "not applied", "experts permuted by one: each has the LoRA of the previous"),
    "no experts in 1": (without("layers.1.experts"), "not applied", "the experts' LoRA missing in layer 1"),
    "no attention in 0": (without("layers.0.self"), "not applied", "attention's LoRA missing in layer 0"),
    "no experts": (without("experts"), "only attention", None),
    "no attention": (without("self_attn"), "only experts", None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_mistake_is_named(bench, name):
    change, verdict, looks_like = CASES[name]
    result = bench.verdict(bench.served(bench.changed(change)))
    assert result.verdict == verdict, result.reason
    assert result.ok == result.arm.as_expected == (verdict == "applied")
    assert (looks_like is None) == (result.looks_like is None) == (not bench.passes)
    if looks_like:
        assert looks_like in result.looks_like
        assert result.told_by == "hypotheses"
        assert result.hypotheses[0].distance < 0.5 * min(result.arm.distances.values())
    scales = {
        "alpha doubled": (2, 2),
        "experts at 3": (3, 1),
        "alpha/r for rsLoRA's alpha/sqrt(r)": (1, 0.5),
    }
    if name in scales:
        assert tuple(result.scale.values()) == pytest.approx(scales[name], rel=0.1)


def test_what_nothing_explains_stays_unexplained(bench):
    draw = random.Random(3)
    stranger = [-3 + draw.gauss(0, 1) for _ in bench.references.logprobs["base"]]
    result = bench.verdict(stranger)
    assert (result.verdict, result.looks_like) == ("can't tell", None)
    assert bench.passes <= 2  # no searching on where nothing comes nearer


def test_drift_is_applied_with_a_warning(bench):
    """Nearest to the right reference, at the right share, far above the noise: said, not hidden."""
    draw = random.Random(4)
    right = bench.references.logprobs["full"]
    size = 6 * max(bench.references.noise.values())
    drifted = [x + draw.gauss(0, size) for x in right]
    base = bench.references.logprobs["base"]
    for beside in (None, [x + draw.gauss(0, size) for x in base]):  # with quantized experts it drifts, too
        result = bench.verdict(drifted, beside)
        assert (result.verdict, result.ok, result.looks_like) == ("applied", True, None)
        (problem,) = result.problems
    result = bench.verdict(drifted, base)
    assert (result.verdict, result.ok) == ("can't tell", False)
    assert "the base is at its own" in result.reason
    result = bench.verdict(drifted)
    (problem,) = result.problems
    assert (problem.code, problem.severity, problem.where) == ("KTV002", "warning", result.model)
