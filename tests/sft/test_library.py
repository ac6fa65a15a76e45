"""docs/library.md: its scripts run as they stand there, and its names are the library's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ktbridge import sft
from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.adapter.adapter import FUSED_FILE, MODEL_FILE
from ktbridge.sft.output import IN_CHECKPOINT

PAGE = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
SCRIPTS = {
    text.split(":")[0].removeprefix("# "): text
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}


def test_the_page_lists_every_public_name_and_no_other():
    table = PAGE.partition("## Public names")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")][1:]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(sft.__all__)
    assert set(SCRIPTS) == {"trainer.py", "sft.py", "loop.py", "run.py", "adapters.py"}
    for script in SCRIPTS.values():
        ours, _, rest = script.partition("import ktbridge.sft  # before torch")
        assert "import torch" not in (ours if rest else script)


@pytest.fixture(scope="module")
def trained(warm, base_dir, tmp_path_factory):
    """Runs a script of the page once, and says where its adapter is."""
    root = tmp_path_factory.mktemp("library")
    outputs: dict[str, Path] = {}

    def run(name: str, *arguments: object) -> Path:
        if name not in outputs:
            (root / name).write_text(SCRIPTS[name])
            outputs[name] = root / name.removesuffix(".py")
            done = warm.run(root / name, base_dir, *arguments, outputs[name], cwd=root)
            assert done.returncode == 0, done.stderr
        return outputs[name]

    return run


def check_both_halves(path: Path, base: Path) -> None:
    assert (path / FUSED_FILE).is_file()
    assert (path / MODEL_FILE).is_file()
    assert validate_adapter([path], base_model=base).ok
    adapter = read_adapter(path)
    assert adapter.expert_layers() == (0, 1)
    for layer in adapter.expert_layers():
        for name in ("gate_lora_b", "up_lora_b", "down_lora_b"):
            assert adapter.expert_tensor(layer, name).torch().any()
    for key in adapter.nonexpert_keys():
        assert adapter.nonexpert_tensor(key).torch().any(), key
    assert adapter.base_model == str(base)


@pytest.mark.parametrize("name", ["trainer.py", "sft.py", "loop.py"])
def test_a_script_trains_and_leaves_both_halves(name, trained, base_dir):
    out = trained(name)
    if name == "loop.py":
        check_both_halves(out, base_dir)
        return
    check_both_halves(out / "raw_adapter", base_dir)
    for step in (3, 6):
        check_both_halves(out / f"checkpoint-{step}" / IN_CHECKPOINT, base_dir)


def test_the_adapter_is_run_trained_on_and_converted(trained, base_dir):
    before = trained("loop.py")
    after = trained("run.py", before)
    check_both_halves(after, base_dir)
    first, second = (read_adapter(path).expert_tensor(1, "up_lora_b") for path in (before, after))
    assert not torch.equal(first.torch(), second.torch())
    assert read_adapter(trained("adapters.py", before)).layout == "merged"


def test_an_adapter_and_its_tensors_show_what_they_are(trained):
    adapter = read_adapter(trained("loop.py"))
    shown = repr(adapter)
    for part in (
        "raw",
        str(adapter.path),
        "rank 8, alpha 16",
        "2 layers",
        "q_proj",
        "gate_proj",
        "tiny",
    ):
        assert part in shown
    adapter.config.pop("lora_alpha")  # a damaged one is shown as well
    assert "no alpha" in repr(adapter)
    tensor = adapter.expert_tensor(0, "down_lora_b")
    assert repr(tensor) == "Tensor('layers.0.experts.down_lora_b', BF16, shape=[8, 64, 8])"
    assert tensor.torch().dtype == torch.bfloat16
    assert tensor.numpy().dtype == "float32"
    assert torch.equal(torch.from_numpy(tensor.numpy()), tensor.torch().float())
    tensor.numpy()[:] = 0  # a copy
    assert tensor.torch().any()
