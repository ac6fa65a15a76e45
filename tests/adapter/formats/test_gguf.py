"""GGUF, looked at with the gguf package: names, order of axes, types, metadata, scale."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from findings import codes
from rawadapter import random_bits, write_config, write_raw

from ktbridge.adapter import convert_adapter, read_adapter
from ktbridge.adapter.blocks import as_float32
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError

gguf = pytest.importorskip("gguf")


def opened(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = gguf.GGUFReader(path / "adapter_model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def test_names_axes_types_and_metadata(tmp_path):
    base = write_config(tmp_path / "base", "qwen3_5_moe")
    modules = {"q_proj": (24, 16), "o_proj": (16, 24)}
    raw = write_raw(tmp_path / "raw", layers=(3,), modules=modules, alpha=6.0, base_model=str(base),
                    prefix="model.language_model.")  # fmt: skip
    convert_adapter(raw, to="gguf", output_dir=tmp_path / "out")
    fields, tensors = opened(tmp_path / "out")
    expected = {"general.architecture": "qwen35moe", "general.type": "adapter",
                "adapter.type": "lora", "adapter.lora.alpha": 6.0}  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    source = read_adapter(raw)
    names = {f"ffn_{name}_exps": f"{name}_lora_" for name in ("gate", "up", "down")}
    for name, fused in names.items():
        for half in "ab":
            ours = tensors.pop(f"blk.3.{name}.weight.lora_{half}")
            theirs = source.expert_tensor(3, fused + half)
            # ggml counts axes from the fastest one: [E, r, in] is ne = (in, r, E).
            assert tuple(reversed(ours.shape.tolist())) == theirs.shape
            assert ours.tensor_type == gguf.GGMLQuantizationType.BF16
            assert ours.data.tobytes() == bytes(theirs.data)
    for module, name in (("q_proj", "attn_q"), ("o_proj", "attn_output")):
        for half in "ab":
            ours = tensors.pop(f"blk.3.{name}.weight.lora_{half}")
            key = f"base_model.model.model.language_model.layers.3.self_attn.{module}"
            theirs = source.nonexpert_tensor(f"{key}.lora_{half.upper()}.weight")
            assert tuple(reversed(ours.shape.tolist())) == theirs.shape
            assert ours.data.tobytes() == bytes(theirs.data)
    assert not tensors


def test_every_module_of_a_family_has_its_name(tmp_path):
    base = write_config(tmp_path / "base", "qwen2_moe")
    modules = {"gate": (3, 16), "shared_expert.gate_proj": (8, 16), "shared_expert_gate": (1, 16)}
    raw = write_raw(tmp_path / "raw", modules=modules, block="mlp", base_model=str(base))
    convert_adapter(raw, to="gguf", output_dir=tmp_path / "out")
    _, tensors = opened(tmp_path / "out")
    for name in ("ffn_gate_inp", "ffn_gate_shexp", "ffn_gate_inp_shexp"):
        assert f"blk.1.{name}.weight.lora_a" in tensors
    convert_adapter(tmp_path / "out", to="raw", output_dir=tmp_path / "back")
    assert read_adapter(tmp_path / "back").nonexpert_keys() == read_adapter(raw).nonexpert_keys()


def test_what_llama_cpp_would_ignore_is_refused(tmp_path):
    """Projections that DeepSeek's graph has without LoRA; another number of experts. Each is said once."""
    base = write_config(tmp_path / "base", "deepseek_v2", num_experts=5)
    modules = {"q_proj": (24, 16), "kv_a_proj_with_mqa": (12, 16), "o_proj": (16, 24)}
    raw = write_raw(tmp_path / "raw", modules=modules, base_model=str(base))
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, to="gguf", output_dir=tmp_path / "out")
    ignored, experts = caught.value.problems
    assert (ignored.code, experts.code) == ("KTB630", "KTB604")
    assert "kv_a_proj_with_mqa, q_proj in 2 layers, which llama.cpp's deepseek2 never" in ignored.found
    assert "3 experts" in experts.found
    assert not (tmp_path / "out").exists()


def llama_cpp_adapter(
    path: Path, alpha: float | None, architecture: str = "qwen3moe", **more: tuple[int, ...]
) -> dict[str, Any]:
    """As llama.cpp's own converter writes it: float32, no directory; ``more``: shapes of further tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    rng = np.random.default_rng(2)
    shapes = {"ffn_gate_exps": (3, 2, 8, 6), "ffn_down_exps": (3, 2, 6, 8), "attn_q": (0, 2, 8, 12)}
    tensors = {}
    for name, (experts, rank, inner, out) in shapes.items():
        lead = (experts,) if experts else ()
        for half, shape in (("a", (*lead, rank, inner)), ("b", (*lead, out, rank))):
            values = np.frombuffer(random_bits(rng, shape, "F32"), np.float32).reshape(shape)
            tensors[f"blk.5.{name}.weight.lora_{half}"] = values
            writer.add_tensor(f"blk.5.{name}.weight.lora_{half}", values)
    for name, shape in more.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("alpha", [None, 8.0])
def test_an_adapter_of_llama_cpp_is_read(tmp_path, alpha):
    tensors = llama_cpp_adapter(tmp_path / "a.gguf", alpha)
    with pytest.raises(ProblemsError, match="can't be converted"):  # it names no base model
        convert_adapter(tmp_path / "a.gguf", to="raw", output_dir=tmp_path / "raw")
    convert_adapter(tmp_path / "a.gguf", to="raw", output_dir=tmp_path / "raw", base_model="org/m")
    raw = read_adapter(tmp_path / "raw")
    # Without an alpha llama.cpp's scale is one.
    assert (raw.rank, raw.alpha) == (2, alpha or 2.0)
    assert raw.expert_modules() == ("down_proj", "gate_proj")
    for name, fused in (("ffn_gate_exps", "gate_lora_"), ("ffn_down_exps", "down_lora_")):
        for half in "ab":
            ours = raw.expert_tensor(5, fused + half)
            values = as_float32(ours.data, ours.dtype).reshape(ours.shape)
            np.testing.assert_array_equal(values, tensors[f"blk.5.{name}.weight.lora_{half}"])
    key = "base_model.model.model.layers.5.self_attn.q_proj.lora_A.weight"
    assert key in raw.nonexpert_keys()


def test_tensors_that_are_no_lora_are_named(tmp_path):
    more = {"blk.0.attn_norm.weight": (8,), "blk.5.attn_k.weight.lora_a": (3, 2, 8)}
    llama_cpp_adapter(tmp_path / "a.gguf", 8.0, **more)
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(tmp_path / "a.gguf", to="raw", output_dir=tmp_path / "o", base_model="m")
    assert {"KTB201", "KTB302"} <= codes(caught)


def test_what_is_no_adapter_is_refused_in_a_sentence(tmp_path):
    llama_cpp_adapter(tmp_path / "a.gguf", 8.0)
    whole = (tmp_path / "a.gguf").read_bytes()
    for size in (0, 3, 20, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(KtbridgeError):
            convert_adapter(tmp_path / "cut.gguf", to="raw", output_dir=tmp_path / "o", base_model="m")
    model = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    model.write_header_to_file()
    model.write_kv_data_to_file()
    model.close()
    with pytest.raises(KtbridgeError, match="not a LoRA adapter"):
        convert_adapter(tmp_path / "m.gguf", to="raw", output_dir=tmp_path / "o")
    llama_cpp_adapter(tmp_path / "x.gguf", 8.0, "falcon")
    with pytest.raises(KtbridgeError, match="falcon"):
        convert_adapter(tmp_path / "x.gguf", to="raw", output_dir=tmp_path / "o")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"0 \.gguf files"):
        convert_adapter(tmp_path / "empty", to="raw", from_format="gguf", output_dir=tmp_path / "o")


def test_an_endless_array_ends(tmp_path):
    # 2**60 elements are announced, none is there: gguf's own reader would count them all.
    key = b"endless"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    (tmp_path / "a.gguf").write_bytes(head + struct.pack("<IIQ", 9, 0, 1 << 60))
    with pytest.raises(KtbridgeError, match="1,152,921,504,606,846,976 items"):
        convert_adapter(tmp_path / "a.gguf", to="raw", output_dir=tmp_path / "o", base_model="m")
