"""Every format, there and back: the same bytes in the same files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rawadapter import ATTENTION, FILES, convert_to, random_bits, write_config, write_raw

from ktbridge.adapter import Tensor, convert_adapter, read_adapter
from ktbridge.model import open_tensor_file

ONE_SCALE = ("kt-merged", "vllm", "sglang-3d", "gguf")
FORMATS = ("raw", "peft-fused", *ONE_SCALE)
PROJECTIONS = ("gate", "up", "down")


def there_and_back(raw: Path, to: str, base: Path | None = None) -> Path:
    """raw -> ``to`` -> raw; the result's directory."""
    there, back = raw.parent / f"{to}-there", raw.parent / f"{to}-back"
    options = {} if base is None else {"base_model": str(base)}
    convert_adapter(raw, to=to, output_dir=there, **options)
    convert_adapter(there, to="raw", from_format=to, output_dir=back)
    return back


def same(first: Path, second: Path) -> None:
    files = [{name: (path / name) for name in FILES if (path / name).exists()} for path in (first, second)]
    assert files[0].keys() == files[1].keys()
    for name, path in files[0].items():
        assert path.read_bytes() == files[1][name].read_bytes(), name
    one, two = read_adapter(first), read_adapter(second)
    assert (one.rank, one.alpha, one.base_model) == (two.rank, two.alpha, two.base_model)
    if one.nonexpert:
        assert one.nonexpert_rank == two.nonexpert_rank
        assert one.nonexpert_scale == two.nonexpert_scale


@given(
    sizes=st.fixed_dictionaries(
        {
            "experts": st.integers(2, 5),
            "rank": st.integers(1, 5),
            "hidden": st.integers(1, 9),
            "inter": st.integers(1, 9),
            "alpha": st.sampled_from([1.0, 8.0, 2.5, 3.0]),
            "dtype": st.sampled_from(["BF16", "F16", "F32"]),
            "layers": st.sets(st.integers(0, 11), min_size=1, max_size=3).map(
                lambda layers: tuple(sorted(layers))
            ),
            "projections": st.sets(st.sampled_from(PROJECTIONS), min_size=1).map(
                lambda some: tuple(name for name in PROJECTIONS if name in some)
            ),
            "modules": st.sampled_from([ATTENTION, {}]),
            "seed": st.integers(0, 1000),
        }
    ),
    zero=st.sampled_from([(), ("gate",), ("up",), ("gate", "up"), ("gate", "up", "down")]),
    shared=st.booleans(),
)
@example(
    sizes={"experts": 2, "rank": 2, "hidden": 4, "inter": 4, "layers": (3, 7),
           "projections": ("gate",)}, zero=("gate",), shared=False,
)  # fmt: skip
def test_there_and_back(sizes, zero, shared):
    """``zero`` B and an A that gate and up share are what could mislead the fused layout."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        base = write_config(
            directory / "base", num_experts=sizes["experts"], hidden_size=sizes["hidden"],
            moe_intermediate_size=sizes["inter"],
        )  # fmt: skip
        replace = special(sizes, zero, shared)
        raw = write_raw(directory / "raw", base_model=str(base), **sizes, replace=replace)
        whole = len(sizes["projections"]) == 3
        for to in FORMATS:
            # KT engines ask for all three, and a merged directory has both halves.
            if to != "kt-merged" or (whole and sizes.get("modules") != {}):
                same(raw, there_and_back(raw, to))
        if whole:
            merged_is_split(raw, directory)


def special(sizes: dict[str, Any], zero: tuple[str, ...], shared: bool) -> dict[str, Tensor]:
    dtype = sizes.get("dtype", "BF16")
    rng, made = np.random.default_rng(9), {}
    for layer in sizes["layers"]:
        a = (sizes["experts"], sizes["rank"], sizes["hidden"])
        bits = random_bits(rng, a, dtype)
        for projection in sizes["projections"]:
            stem = f"layers.{layer}.experts.{projection}_lora_"
            if shared and projection != "down":
                made[stem + "a"] = Tensor(stem + "a", dtype, a, bits)
            if projection in zero:
                high = sizes["hidden" if projection == "down" else "inter"]
                shape = (sizes["experts"], high, sizes["rank"])
                count = int(np.prod(shape)) * (4 if dtype == "F32" else 2)
                made[stem + "b"] = Tensor(stem + "b", dtype, shape, bytes(count))
    return made


def merged_is_split(raw: Path, directory: Path) -> None:
    """From other layouts into KT's: as if the raw adapter had been converted."""
    layouts = "enm" if read_adapter(raw).nonexpert else "e"
    direct = convert_to(raw, layouts, prefix="direct-")
    for there in ("peft-fused-there", "kt-merged-there")[: len(layouts)]:
        for name, path in convert_to(directory / there, layouts, prefix=f"{there}-").items():
            first, second = (
                (open_tensor_file(one / "adapter_model.safetensors"), read_adapter(one).config)
                for one in (direct[name], path)
            )
            assert first[0].entries.keys() == second[0].entries.keys()
            for key in first[0].entries:
                one, two = (file.tensor(key) for file, _ in (first, second))
                assert (one.dtype, bytes(one.data)) == (two.dtype, bytes(two.data))
            for field in ("r", "lora_alpha", "target_modules", "base_model_name_or_path"):
                assert first[1][field] == second[1][field]


@pytest.mark.parametrize("to", FORMATS)
def test_prefixes_and_halves_survive(tmp_path, to):
    base = write_config(tmp_path / "base", "qwen3_5_moe")
    for name, options in {
        "vlm": {"prefix": "model.language_model."},
        "rest": {"projections": ()},
        "experts": {"modules": {}},
    }.items():
        if name != "vlm" and to == "kt-merged":
            continue  # both halves, or it isn't one
        (tmp_path / name).mkdir()
        raw = write_raw(tmp_path / name / "raw", base_model=str(base), **options)
        same(raw, there_and_back(raw, to))


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("raw", {"alpha": 3.0, "other_alpha": 5.0}),
        ("peft-fused", {"alpha": 3.0, "other_alpha": 5.0}),
        ("gguf", {}),  # which divides by each tensor's rank
    ],
)
def test_two_ranks_and_two_alphas_survive(tmp_path, to, options):
    base = write_config(tmp_path / "base")
    raw = write_raw(tmp_path / "raw", rank=4, other_rank=2, base_model=str(base), **options)
    same(raw, there_and_back(raw, to))


@pytest.mark.parametrize("to", ONE_SCALE)
def test_a_power_of_two_between_scales_is_folded(tmp_path, to):
    base = write_config(tmp_path / "base")
    raw = write_raw(tmp_path / "raw", alpha=8.0, other_alpha=2.0, base_model=str(base))
    one, two = read_adapter(raw), read_adapter(there_and_back(raw, to))
    assert (two.alpha, two.nonexpert_alpha) == (8.0, 8.0)
    for key in one.nonexpert_keys():
        before, after = (
            np.frombuffer(x.nonexpert_tensor(key).data, np.uint16).astype(np.uint32) << 16 for x in (one, two)
        )
        factor = 0.25 if ".lora_B." in key else 1.0
        assert np.array_equal(before.view(np.float32) * np.float32(factor), after.view(np.float32))


def test_rslora_is_kept_by_raw_and_folded_by_peft(tmp_path):
    raw = write_raw(tmp_path / "raw", rslora=True, rank=4)
    same(raw, there_and_back(raw, "raw"))
    assert read_adapter(tmp_path / "raw-back").config["use_rslora"] is True
    same_scale = read_adapter(there_and_back(raw, "peft-fused"))
    assert same_scale.config["use_rslora"] is False
    assert same_scale.nonexpert_scale == read_adapter(raw).nonexpert_scale == 4.0
    assert (same_scale.alpha, same_scale.rank) == (8.0, 4)


def test_the_manifest_tells_what_was_written(tmp_path):
    raw = write_raw(tmp_path / "raw")
    report = convert_adapter(raw, to="peft-fused", output_dir=tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "kt_adapter_manifest.json").read_text())
    assert (manifest["layout"], manifest["lora"]) == ("peft-fused", {"rank": 4, "alpha": 8.0})
    size = (tmp_path / "out" / "adapter_model.safetensors").stat().st_size
    assert manifest["artifacts"]["adapter_model.safetensors"]["size"] == size
    (output,) = report.outputs
    assert output["tensors"] == 2 * (4 + 8)
    assert {"down_proj", "gate_up_proj", "q_proj"} <= set(output["target_modules"])
