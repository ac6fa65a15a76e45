"""A training checkpoint's directory is an adapter too, whatever else training keeps there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from rawadapter import write_base, write_raw

from ktbridge.adapter import convert_adapter, merge_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.sft.config import parse_config
from ktbridge.sft.config.load import check_output_dir

MODEL = "adapter_model.safetensors"
PICKLES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_1.pth", "training_args.bin")


def as_checkpoint(adapter: Path) -> Path:
    """The same adapter among the files that a Trainer and ours leave in a checkpoint."""
    directory = adapter.with_name("checkpoint-26")
    shutil.copytree(adapter, directory)
    for name in PICKLES:
        (directory / name).write_bytes(b"\x80\x04K\x01.")
    for name in ("trainer_state.json", "ktbridge_checkpoint.json"):
        (directory / name).write_text("{}")
    for name in ("trainable.safetensors", "optimizer.safetensors"):
        shutil.copy(adapter / MODEL, directory / name)
    (directory / "README.md").write_text("mine")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_validate_convert_and_merge_take_a_checkpoint(tmp_path):
    base = write_base(tmp_path / "base")
    raw = write_raw(tmp_path / "raw", layers=(0, 1), base_model=str(base))
    checkpoint = as_checkpoint(raw)
    assert validate_adapter([checkpoint], base_model=base).problems == []
    made = {}
    for source in (raw, checkpoint):
        out = tmp_path / f"of-{source.name}"
        places = {f"{name}_output_dir": out / name for name in ("expert", "nonexpert", "merged")}
        convert_adapter(source, **places)
        convert_adapter(source, to="peft-fused", output_dir=out / "peft")
        assert validate_adapter([source, *places.values()]).problems == []
        merge_adapter(source, base_model=base, output=out / "model")
        made[source] = [contents(out / name) for name in sorted(os.listdir(out))]
    for one, other in zip(made[raw], made[checkpoint], strict=True):
        assert one.keys() == other.keys()
        assert all(one[name] == other[name] for name in one if name != "ktbridge_merge.json")


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    """A volume of a container as output: no directory can be renamed to it, empty as it may be."""
    base = write_base(tmp_path / "base")
    raw = write_raw(tmp_path / "raw", layers=(0, 1), base_model=str(base))
    volume, link = tmp_path / "volume", tmp_path / "link"
    volume.mkdir()
    link.symlink_to(volume)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == volume)
    settings = {"model_name_or_path": str(base), "dataset": "none", "output_dir": str(link)}
    writes = (
        lambda: convert_adapter(raw, to="vllm", output_dir=volume),
        lambda: merge_adapter(raw, base_model=base, output=link),
        lambda: check_output_dir(parse_config(settings)),
    )
    for write in writes:
        with pytest.raises(KtbridgeError, match="is a mount point"):
            write()
    assert [*volume.iterdir()] == []
    convert_adapter(raw, to="vllm", output_dir=volume / "adapter")
    assert len([*(volume / "adapter").iterdir()]) == 3


def test_a_checkpoint_is_never_written_over(tmp_path):
    raw = write_raw(tmp_path / "raw")
    checkpoint = as_checkpoint(raw)
    before = contents(checkpoint)
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, to="raw", output_dir=checkpoint, overwrite=True)
    assert [problem.code for problem in caught.value.problems] == ["KTB701"]
    assert contents(checkpoint) == before


def test_half_an_adapter_in_a_checkpoint_is_not_served_from_there(tmp_path):
    """A non-expert loader takes every safetensors file of a directory it is given."""
    checkpoint = as_checkpoint(write_raw(tmp_path / "raw", projections=()))
    found = validate_adapter([checkpoint]).problems
    names = ["optimizer.safetensors", "trainable.safetensors"]
    assert [(p.code, p.severity, Path(p.where).name) for p in found] == [
        ("KTB007", "info", name) for name in names
    ]
    served = validate_adapter([checkpoint], engine="sglang-kt==0.7.2").problems
    errors = [p for p in served if p.severity == "error"]
    assert [(p.code, Path(p.where).name) for p in errors] == [("KTB007", name) for name in names]
    assert all("--nonexpert-output-dir" in p.next_step for p in errors)
    convert_adapter(checkpoint, nonexpert_output_dir=tmp_path / "n")
    assert validate_adapter([checkpoint, tmp_path / "n"], engine="sglang-kt==0.7.2").ok
    (checkpoint / "trainer_state.json").unlink()
    assert {p.severity for p in validate_adapter([checkpoint]).problems} == {"error"}
