"""No pickle, ever: not in the code, not at run time, whatever a directory holds."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import ktbridge

PACKAGE = Path(ktbridge.__file__).parent
_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
_TRAPS = {"load": {"torch"}, "loads": _MODULES, "save": {"torch"}}


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploded",)


def _loads_tensors_alone(node: ast.AST) -> bool:
    """Return whether a call says ``weights_only=True``, with which torch runs nothing of a file."""
    return isinstance(node, ast.Call) and any(
        word.arg == "weights_only"
        and isinstance(word.value, ast.Constant)
        and word.value.value is True
        for word in node.keywords
    )


def test_no_module_can_unpickle() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tensors_alone = {node.func for node in ast.walk(tree) if _loads_tensors_alone(node)}
        for node in ast.walk(tree):
            if node in tensors_alone:
                continue
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                trapped = node.value.id in _TRAPS.get(node.attr, set())
                names = {f"{node.value.id}.{node.attr}"} if trapped else set()
            elif isinstance(node, ast.keyword):
                allowed = isinstance(node.value, ast.Constant) and node.value.value is True
                names = {"allow_pickle"} if node.arg == "allow_pickle" and allowed else set()
            else:
                continue
            bad = names & (_MODULES | {"torch.load", "torch.save", "allow_pickle"})
            found += [f"{path}:{node.lineno}: {name}" for name in bad]  # type: ignore[attr-defined]
    assert found == []


def test_a_bomb_in_any_directory_does_not_go_off(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ktbridge.adapter import read_adapter, validate_adapter\n"
        "from ktbridge.adapter.merge import plan_merge\n"
        "from ktbridge.errors import KtbridgeError\n"
        "from ktbridge.model import open_checkpoint, resolve_model\n"
        "events = []\n"
        "sys.addaudithook(lambda event, args: events.append(event) if event.startswith(\n"
        "    ('pickle.', 'os.system', 'subprocess.', 'exec')) else None)\n"
        "for place in (Path('adapter'), Path('base')):\n"
        "    for call in (read_adapter, lambda p: validate_adapter([p]), open_checkpoint, resolve_model,\n"
        "                 lambda p: plan_merge(p, base_model=p, output='out')):\n"
        "        try: call(place)\n"
        "        except KtbridgeError as error: print(error)\n"
        "print('events', [e for e in events if e != 'exec'])\n"
    )
    bomb = pickle.dumps(Bomb())
    for place, names in {
        "adapter": ("adapter_model.bin", "adapter_model.safetensors", "training_args.bin"),
        "base": ("pytorch_model.bin", "model.safetensors", "pytorch_model-00001-of-00002.bin"),
    }.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
        (tmp_path / place / "config.json").write_text(
            '{"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 8}'
        )
        for name in names:
            (tmp_path / place / name).write_bytes(bomb)
            if name.endswith(".bin"):  # torch's own container
                with zipfile.ZipFile(tmp_path / place / name, "w") as archive:
                    archive.writestr("archive/data.pkl", bomb)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "events []"
        assert not (tmp_path / "exploded").exists()
        # The second time there is nothing but pickle.
        for name in ("adapter/adapter_model.safetensors", "base/model.safetensors"):
            (tmp_path / name).unlink(missing_ok=True)
    assert "is a pickle file" in done.stdout
    assert "pickled weights" in done.stdout
