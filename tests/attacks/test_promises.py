"""What SECURITY.md promises of the sources and of models that bring their own code."""

from __future__ import annotations

import ast
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

from tinyserver import ENVIRONMENT

import ktbridge

PACKAGE = Path(ktbridge.__file__).parent
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
UNSAFE = {"yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "builtins.eval", "builtins.exec"}


def calls() -> list[tuple[str, ast.Call, str]]:
    """Place, call and name ("os.system") of every call in the package."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                function = node.func
                name = ast.unparse(function)
                if isinstance(function, ast.Name):
                    name = f"builtins.{function.id}"
                found.append((f"{path.name}:{node.lineno}", node, name))
    return found


def test_no_shell_and_no_text_run_as_code() -> None:
    wrong = []
    for place, call, name in calls():
        if name in SHELLS | UNSAFE:
            wrong.append(f"{place}: {name}")
        for given in call.keywords:
            if given.arg == "shell":
                wrong.append(f"{place}: shell=")
            # Only what transformers and the engine are told: never yes, unless the user says so.
            if given.arg == "trust_remote_code" and ast.unparse(given.value) == "True":
                wrong.append(f"{place}: trust_remote_code=True")
        if name == "yaml.load" and "Loader" not in {given.arg for given in call.keywords}:
            wrong.append(f"{place}: yaml.load without a Loader")
        # Programs are lists of arguments, not one text.
        if name in ("subprocess.run", "subprocess.Popen") and isinstance(
            call.args[0], ast.Constant
        ):
            wrong.append(f"{place}: {name} of a text")
    assert wrong == []


def test_nothing_of_transformers_is_left_to_ask_whether_code_may_run() -> None:
    """Without the argument it asks on the terminal, and a y runs the code."""
    asked = [
        place
        for place, call, name in calls()
        if name.startswith("Auto")
        and name.endswith(".from_pretrained")
        and "trust_remote_code" not in {given.arg for given in call.keywords}
    ]
    assert asked == []


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


def test_a_models_own_code_never_runs(base: Path, tmp_path: Path) -> None:
    """Not even where somebody answers each question with y."""
    model = tmp_path / "model"
    shutil.copytree(base, model)
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nTok = Conf = object\n")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["evil.Tok", "evil.Tok"]}, "tokenizer_class": "Tok"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "evil", "architectures": ["Evil"]}
    config["auto_map"] = {"AutoConfig": "evil.Conf", "AutoModelForCausalLM": "evil.Conf"}
    (model / "config.json").write_text(json.dumps(config))
    asked, terminal = pty.openpty()
    os.write(asked, b"y\n" * 20)
    found = subprocess.run(
        [sys.executable, "-c", LOAD, str(model)],
        stdin=terminal,
        capture_output=True,
        text=True,
        timeout=100,
        env=ENVIRONMENT,
    )
    os.close(asked)
    os.close(terminal)
    assert found.returncode == 0
    assert len(found.stdout.split()) == 2  # neither loads
    assert "[y/N]" not in found.stdout + found.stderr
    assert not (tmp_path / "ran").exists()
