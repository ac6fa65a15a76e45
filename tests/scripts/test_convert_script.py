"""scripts/convert_kt_to_sglang_adapter.py stands in for the reference script of that name."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from ktbridge.model import open_tensor_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "convert_kt_to_sglang_adapter.py"
GOLDEN = ROOT.parent / "shared" / "golden" / "convert"
PREFIX = "base_model.model."

pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the shared golden files are not in this checkout"
)


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, args)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )


def test_the_reference_command_line_gives_the_reference_tensors(tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    places = {layout: tmp_path / "out" / layout for layout in expected}
    command = (
        GOLDEN / "raw",
        places["merged"],
        "--base-model-name-or-path",
        "org/served",
        "--lora-alpha",
        "99",
        "--expert-output-dir",
        places["expert"],
        "--nonexpert-output-dir",
        places["nonexpert"],
    )
    done = run(*command)
    assert (done.returncode, "--lora-alpha is not used" in done.stderr) == (0, True)
    for layout, reference in expected.items():
        file = open_tensor_file(places[layout] / "adapter_model.safetensors")
        ours = {
            name if layout == "expert" else name.removeprefix(PREFIX): (
                entry.dtype,
                list(entry.shape),
                hashlib.sha256(file.tensor(name).data).hexdigest(),
            )
            for name, entry in file.entries.items()
        }
        assert ours == {
            name: (value["dtype"], value["shape"], value["sha256"])
            for name, value in reference["tensors"].items()
        }
        config = json.loads((places[layout] / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "org/served"
        for name in ("r", "lora_alpha", "bias", "task_type", "peft_type"):
            assert config[name] == reference["config"][name]
    again = run(*command)
    assert (again.returncode, "--overwrite" in again.stderr) == (1, True)
    assert run(*command, "--overwrite").returncode == 0


def test_experts_alone_and_an_alpha_that_only_the_command_gives(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    shutil.copytree(GOLDEN / "raw", raw)
    (raw / "adapter_model.safetensors").unlink()
    config = json.loads((raw / "adapter_config.json").read_text())
    del config["lora_alpha"]
    (raw / "adapter_config.json").write_text(json.dumps(config))
    base = ("--base-model-name-or-path", "b")
    assert run(raw, tmp_path / "m", *base).returncode == 1
    assert not (tmp_path / "m").exists()
    done = run(raw, tmp_path / "m", *base, "--lora-alpha", "12")
    assert done.returncode == 0
    assert "no non-expert LoRA" in done.stderr  # said, not refused: the reference takes it
    assert json.loads((tmp_path / "m" / "adapter_config.json").read_text())["lora_alpha"] == 12
    with safe_open(tmp_path / "m" / "adapter_model.safetensors", framework="np") as file:
        assert len(file.keys()) == 3 * 5 * 6


def test_usage_errors(tmp_path: Path) -> None:
    for args in ((), (GOLDEN / "raw", tmp_path / "m"), (GOLDEN / "raw", "--overwrite")):
        done = run(*args)
        assert (done.returncode, "usage:" in done.stderr) == (2, True)
    missing = run(tmp_path / "nowhere", tmp_path / "m", "--base-model-name-or-path", "b")
    assert (missing.returncode, "Traceback" in missing.stderr) == (1, False)
