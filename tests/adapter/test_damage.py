"""Damage that loads without a word has its code; adapters that were really trained have none of these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from adapterfaults import Tensors, edit, retype
from rawadapter import write_raw
from trainedadapters import CODES, false_alarms
from trainrun import quiet

from ktbridge.adapter import Tensor, convert_adapter, validate_adapter

MODULES = {
    "q_proj": (64, 64), "k_proj": (16, 64), "qkv_proj": (96, 64), "mlp.gate": (16, 64),
    "embed_tokens": (64, 64),
}  # fmt: skip
Words = np.ndarray
Change = Callable[[Words], Words | None]


@pytest.fixture
def raw(tmp_path):
    """A raw adapter of 4 layers with 8 experts, rank 8."""
    sizes = {"experts": 8, "rank": 8, "hidden": 64, "inter": 32, "modules": MODULES}
    return write_raw(tmp_path / "raw", layers=(0, 1, 2, 3), **sizes)


def words(part: str, change: Change) -> Callable[[Tensors], None]:
    """Change the values, as bits of bfloat16, of each tensor with ``part`` in its name."""

    def apply(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            tensor = tensors[name]
            bits = np.frombuffer(tensor.data, np.uint16).reshape(tensor.shape).copy()
            changed = change(bits)
            data = (bits if changed is None else changed).tobytes()
            tensors[name] = Tensor(name, tensor.dtype, tensor.shape, data)

    return apply


def keep(axis: int, block: slice) -> Change:
    """Zero all but a block of one axis, counted from the end."""

    def change(bits: Words) -> None:
        kept = np.zeros_like(bits)
        place = [slice(None)] * bits.ndim
        place[axis] = block
        kept[tuple(place)] = bits[tuple(place)]
        bits[:] = kept

    return change


def repeat(period: int, half: slice = slice(None)) -> Change:
    """Put the first experts in place of all others."""
    return lambda bits: bits[np.arange(len(bits)) % period]


def neighbors(count: int) -> Change:
    """Put the first of each so many neighboring experts in place of the others."""
    return lambda bits: bits[np.arange(len(bits)) // count * count]


def grow(exponent: int) -> Change:
    """Multiply by a power of two."""
    return lambda bits: (bits.astype(np.int32) + (exponent << 7)).astype(np.uint16)


def found(*paths: Path) -> set[tuple[str, str]]:
    """Damage that validation reports, with severities."""
    problems = validate_adapter(paths).problems
    return {(each.code, each.severity) for each in problems if each.code in CODES}


def experts(change: Change, part: str = "experts") -> tuple[str, Callable[[Tensors], None]]:
    return "fused_expert_lora.safetensors", words(part, change)


def others(part: str, change: Change) -> tuple[str, Callable[[Tensors], None]]:
    return "adapter_model.safetensors", words(part, change)


FAULTS = {
    "one process's rows of each B": (experts(keep(-2, slice(0, 8)), "lora_b"), ("KTB405", "error")),
    "the last process's rows": (experts(keep(-2, slice(-8, None)), "up_lora_b"), ("KTB405", "error")),
    "columns of A": (experts(keep(-1, slice(16, 32)), "gate_lora_a"), ("KTB405", "error")),
    "rows of attention's B": (others("q_proj.lora_B", keep(-2, slice(0, 8))), ("KTB405", "error")),
    "one part of a joined module": (
        others("qkv_proj.lora_B", keep(-2, slice(0, 32))), ("KTB405", "warning")),
    "ranks of A": (experts(keep(-2, slice(0, 2)), "lora_a"), ("KTB406", "error")),
    "ranks of B": (experts(keep(-1, slice(4, 8)), "down_lora_b"), ("KTB406", "error")),
    "ranks of attention's A": (others("k_proj.lora_A", keep(-2, slice(0, 4))), ("KTB406", "error")),
    "the first process's experts for all": (experts(repeat(2)), ("KTB407", "warning")),
    "two experts alike in one layer": (
        experts(lambda bits: bits[[0, 1, 2, 3, 4, 5, 2, 7]], "layers.2.experts.down"),
        ("KTB407", "warning")),
    "all experts alike": (experts(neighbors(8)), ("KTB407", "info")),
    "neighbors alike": (experts(neighbors(4)), ("KTB407", "info")),
    "one process's experts": (experts(keep(0, slice(4, 8)), "lora_b"), ("KTB408", "warning")),
    "a layer that grew": (experts(grow(20), "layers.1.experts.up_lora_b"), ("KTB409", "warning")),
    "a module that shrank": (others("layers.3.self_attn.q_proj.lora_A", grow(-20)),
                             ("KTB409", "warning")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_has_its_code_in_each_layout(raw, tmp_path, fault):
    (file, change), expected = FAULTS[fault]
    edit(raw, change, file)
    assert found(raw) == {expected}
    convert_adapter(raw, merged_output_dir=tmp_path / "merged")
    assert expected in found(tmp_path / "merged")


def test_ranks_that_are_alike_are_told(raw):
    file, change = experts(lambda bits: np.broadcast_to(bits[:, :1], bits.shape), "down_lora_a")
    edit(raw, change, file)
    assert found(raw) == set()  # one of both alone may be of rank 1, as B is after few tokens
    edit(
        raw,
        experts(lambda bits: np.broadcast_to(bits[..., :1], bits.shape), "down_lora_b")[1],
        file,
    )
    assert found(raw) == {("KTB406", "warning")}


SOUND = {
    "ranks that fill up a lower one": [
        experts(keep(-2, slice(0, 2)), "lora_a"), experts(keep(-1, slice(0, 2)), "lora_b")],
    "a router of which some rows were selected": [others("mlp.gate.lora_B", keep(-2, slice(0, 4)))],
    "an embedding of tokens that occurred": [others("embed_tokens.lora_A", keep(-1, slice(0, 16)))],
    "outer sides shared": [
        experts(neighbors(8), "gate_lora_a"), experts(neighbors(8), "up_lora_a"),
        experts(neighbors(8), "down_lora_b")],
    "experts of which few were selected": [
        experts(lambda bits: bits * (np.arange(8) % 3 > 0)[:, None, None].astype(np.uint16),
                "lora_b")],
    "a layer a hundred times larger": [experts(grow(6), "layers.1.")],
    "never trained": [experts(keep(0, slice(0, 0)), "lora_b"), others("lora_B", keep(0, slice(0, 0)))],
    "single zeros at the ends": [
        experts(keep(-1, slice(1, None)), "layers.0.experts.gate_lora_a"),
        others("lora_B", keep(-2, slice(0, -1)))],
}  # fmt: skip


@pytest.mark.parametrize("case", SOUND)
def test_what_training_or_a_conversion_may_leave_is_no_damage(raw, case):
    for file, change in SOUND[case]:
        edit(raw, change, file)
    assert found(raw) == set()
    untouched = {each.code for each in validate_adapter([raw]).problems}
    assert ("KTB402" in untouched) == (case == "never trained")


@pytest.mark.parametrize("file", ["fused_expert_lora", "adapter_model"])
@pytest.mark.parametrize("part", ["lora_", "lora_a", "lora_B", "layers.1."])
def test_what_is_no_float_is_reported_as_that_alone(raw, file, part):
    edit(raw, retype(part, "I16"), f"{file}.safetensors")
    assert found(raw) == set()


@pytest.mark.slow
@quiet
def test_trained_adapters_are_sound(tmp_path):
    """Of three; ``python tests/trainedadapters.py 50`` has fifty, in some two minutes."""
    assert list(false_alarms(tmp_path, 3)) == []
