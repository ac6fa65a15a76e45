"""The package's face, and how light it is."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from rawadapter import random_bits, write_config, write_raw
from tensorfiles import write_tensor_file

import ktbridge.adapter
import ktbridge.model
from ktbridge.adapter import (
    RULES,
    Tensor,
    convert_adapter,
    merge_adapter,
    read_adapter,
    validate_adapter,
)


@pytest.mark.parametrize("package", [ktbridge.adapter, ktbridge.model])
def test_face_is_complete_and_sorted(package) -> None:  # type: ignore[no-untyped-def]
    assert package.__all__ == sorted(package.__all__, key=lambda name: (not name.isupper(), name))
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }
    assert public == set(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__doc__


def test_importing_adapters_imports_no_framework() -> None:
    code = "import sys, ktbridge.adapter; print([m for m in sys.modules if '.' not in m])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    ).stdout
    for name in ("torch", "transformers", "peft", "click", "rich", "yaml"):
        assert f"'{name}'" not in out


def test_the_rules_are_the_codes_that_adapters_have() -> None:
    folder = Path(ktbridge.adapter.__file__).parent
    used = {
        code
        for path in folder.rglob("*.py")
        for code in re.findall(r"KT[BH]\d{3}", path.read_text())
    }
    assert {rule.code for rule in RULES} == used


FACES = (read_adapter, validate_adapter, convert_adapter, merge_adapter)


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_examples_in_docstrings_run(face, tmp_path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """Where the examples say raw, out/expert, out/nonexpert and models/base, there are such."""
    text = inspect.cleandoc(face.__doc__)
    example = textwrap.dedent(text.partition("Example::")[2])
    assert example.strip()
    sizes = {"layers": (0, 1), "experts": 3, "modules": {"q_proj": (16, 16), "v_proj": (16, 16)}}
    write_raw(tmp_path / "raw", **sizes)
    write_checkpoint(tmp_path / "models" / "base")
    monkeypatch.chdir(tmp_path)
    if face is validate_adapter:
        convert_adapter("raw", expert_output_dir="out/expert", nonexpert_output_dir="out/nonexpert")
    names = {name: getattr(ktbridge.adapter, name) for name in ktbridge.adapter.__all__}
    exec(example, names)
    assert capsys.readouterr().out.strip()


def write_checkpoint(path: Path) -> None:
    """A Qwen3-MoE of two layers that ``write_raw``'s adapter fits, in bfloat16."""
    path.parent.mkdir()
    write_config(path, num_hidden_layers=2)
    shapes = {"self_attn.q_proj": (16, 16), "self_attn.v_proj": (16, 16)}
    for expert in range(3):
        shapes |= {f"mlp.experts.{expert}.{name}_proj": (8, 16) for name in ("gate", "up")}
        shapes[f"mlp.experts.{expert}.down_proj"] = (16, 8)
    rng = np.random.default_rng(1)
    tensors = [
        Tensor(f"model.layers.{layer}.{name}.weight", "BF16", shape, random_bits(rng, shape))
        for layer in range(2)
        for name, shape in shapes.items()
    ]
    write_tensor_file(path / "model.safetensors", tensors)
