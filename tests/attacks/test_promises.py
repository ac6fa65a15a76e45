"""What SECURITY.md promises of the sources: no pickle, no shell, no model's own code; and that none runs."""

from __future__ import annotations

import ast
import json
import os
import pickle
import pty
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinyserver import ENVIRONMENT

import ktbridge

PACKAGE = Path(ktbridge.__file__).parent
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load_all",
    "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "torch.load", "torch.save",
}  # fmt: skip


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Every node of the package, and its place."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}", node


def is_yes(value: ast.expr) -> bool:
    return ast.unparse(value) == "True"


def faults(node: ast.AST) -> Iterator[str]:
    """What a node does that is promised not to be done."""
    if isinstance(node, ast.Import):
        yield from PICKLES & {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        yield from PICKLES & {(node.module or "").partition(".")[0]}
    if isinstance(node, ast.Attribute) and node.attr == "loads":
        yield from PICKLES & {ast.unparse(node.value)}
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    given = {word.arg: word.value for word in node.keywords}
    tensors_alone = "weights_only" in given and is_yes(given["weights_only"])
    if name in FORBIDDEN and not tensors_alone:
        yield name
    if name == "yaml.load" and "Loader" not in given:
        yield "yaml.load without a Loader"
    if "shell" in given:
        yield "shell="
    # Programs are lists of arguments, not one text.
    if name in ("subprocess.run", "subprocess.Popen") and isinstance(node.args[0], ast.Constant):
        yield f"{name} of a text"
    # Only what transformers and the engine are told: never yes, unless the user says so. Left out,
    # transformers asks on the terminal, and a y runs the code.
    yield from (arg for arg in ("trust_remote_code", "allow_pickle") if is_yes(given.get(arg, node)))
    loads = name.startswith("Auto") and name.endswith(".from_pretrained")
    if loads and "trust_remote_code" not in given:
        yield f"{name} without trust_remote_code"


def test_nothing_of_the_package_can_unpickle_or_run_text():
    assert [(place, fault) for place, node in nodes() for fault in faults(node)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import dill", "from pickle import loads", "joblib.loads(x)", "torch.load(x)", "os.system(x)",
        "torch.load(x, weights_only=False)", "yaml.load(x)", "run(x, shell=True)",
        "np.load(x, allow_pickle=True)",
        "subprocess.run('ls')", "AutoModel.from_pretrained(x)", "f(trust_remote_code=True)", "eval(x)",
    ],
)  # fmt: skip
def test_each_would_be_found(text):
    assert [fault for node in ast.walk(ast.parse(text)) for fault in faults(node)]


READ = """
import sys
from pathlib import Path
from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.adapter.merge import plan_merge
from ktbridge.errors import KtbridgeError
from ktbridge.model import open_checkpoint, resolve_model
events = []
sys.addaudithook(lambda event, args: events.append(event) if event.startswith(
    ('pickle.', 'os.system', 'subprocess.')) else None)
for place in (Path('adapter'), Path('base')):
    for call in (read_adapter, lambda p: validate_adapter([p]), open_checkpoint, resolve_model,
                 lambda p: plan_merge(p, base_model=p, output='out')):
        try: call(place)
        except KtbridgeError as error: print(error)
print('events', events)
"""


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploded",)


def test_a_bomb_in_any_directory_does_not_go_off(tmp_path):
    bomb = pickle.dumps(Bomb())
    config = {
        "r": 8,
        "lora_alpha": 16,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "hidden_size": 8,
    }
    for place, names in {
        "adapter": ("adapter_model.bin", "adapter_model.safetensors", "training_args.bin"),
        "base": ("pytorch_model.bin", "model.safetensors", "pytorch_model-00001-of-00002.bin"),
    }.items():
        (tmp_path / place).mkdir()
        for name in ("adapter_config.json", "config.json"):
            (tmp_path / place / name).write_text(json.dumps(config))
        for name in names:
            (tmp_path / place / name).write_bytes(bomb)
            if name.endswith(".bin"):  # torch's own container
                with zipfile.ZipFile(tmp_path / place / name, "w") as archive:
                    archive.writestr("archive/data.pkl", bomb)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", READ], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "events []"
        assert not (tmp_path / "exploded").exists()
        # The second time there is nothing but pickle.
        for name in ("adapter/adapter_model.safetensors", "base/model.safetensors"):
            (tmp_path / name).unlink(missing_ok=True)
    assert "is a pickle file" in done.stdout
    assert "pickled weights" in done.stdout


LOAD = """
import sys
from pathlib import Path
from ktbridge.experts.load_model import load_tokenizer, model_config
for load in (model_config, load_tokenizer):
    try:
        load(Path(sys.argv[1]))
    except Exception as error:
        print(type(error).__name__)
"""


def test_a_models_own_code_never_runs(base, tmp_path):
    """Not even where somebody answers each question with y."""
    model = tmp_path / "model"
    shutil.copytree(base, model)
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nTok = Conf = object\n")
    for name, changes in {
        "tokenizer_config.json": {
            "auto_map": {"AutoTokenizer": ["evil.Tok", "evil.Tok"]}, "tokenizer_class": "Tok",
        },
        "config.json": {
            "auto_map": {"AutoConfig": "evil.Conf", "AutoModelForCausalLM": "evil.Conf"},
            "model_type": "evil", "architectures": ["Evil"],
        },
    }.items():  # fmt: skip
        file = model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    asked, terminal = pty.openpty()
    os.write(asked, b"y\n" * 20)
    found = subprocess.run(
        [sys.executable, "-c", LOAD, str(model)], stdin=terminal, capture_output=True, text=True,
        timeout=100, env=ENVIRONMENT,
    )  # fmt: skip
    os.close(asked)
    os.close(terminal)
    assert found.returncode == 0
    assert len(found.stdout.split()) == 2  # neither loads
    assert "[y/N]" not in found.stdout + found.stderr
    assert not (tmp_path / "ran").exists()
