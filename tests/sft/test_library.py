"""docs/library.md: its scripts run as they stand there, its names are the library's, and its errors show what
they hold."""

from __future__ import annotations

import ast
import json
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import ktbridge
from ktbridge import sft
from ktbridge.adapter import Tensor, read_adapter, validate_adapter
from ktbridge.adapter.adapter import FUSED_FILE, MODEL_FILE
from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
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
    for part in (
        "raw", str(adapter.path), "rank 8, alpha 16", "2 layers", "q_proj", "gate_proj", "tiny",
    ):  # fmt: skip
        assert part in repr(adapter)
    adapter.config.pop("lora_alpha")  # a damaged one is shown as well
    assert "no alpha" in repr(adapter)
    tensor = adapter.expert_tensor(0, "down_lora_b")
    assert repr(tensor) == "Tensor('layers.0.experts.down_lora_b', BF16, shape=[8, 64, 8])"
    assert (tensor.torch().dtype, tensor.numpy().dtype) == (torch.bfloat16, "float32")
    assert torch.equal(torch.from_numpy(tensor.numpy()), tensor.torch().float())
    tensor.numpy()[:] = 0  # a copy
    assert tensor.torch().any()


def test_a_tensor_says_what_numpy_and_torch_lack():
    half = Tensor("x", "F8_E5M2", (2,), b"\x3c\x40")
    assert half.torch().float().tolist() == [1.0, 2.0]
    with pytest.raises(KtbridgeError, match="numpy doesn't have") as caught:
        half.numpy()
    assert caught.value.next_step
    with pytest.raises(KtbridgeError, match="torch doesn't have"):
        Tensor("x", "F4", (2,), b"\x00").torch()
    assert Tensor("x", "I64", (1,), (5).to_bytes(8, "little")).numpy().tolist() == [5]
    empty = Tensor("x", "F32", (0, 3), b"")
    assert empty.numpy().shape == empty.torch().shape == (0, 3)


# --- errors: wherever they are printed, and messages made of others stay one sentence ---------------------


CLASS = re.compile(r"^\s*class (\w+)\(([^)]*)\)", re.MULTILINE)
CAUGHT = re.compile(r"^\s*except ([^:]*) as (\w+):", re.MULTILINE)


def problems(count: int) -> list[Problem]:
    return [Problem("KTX001", "error", f"file{i}", f"found {i}", "another", "do this") for i in range(count)]


def test_a_printed_error_has_its_problems_and_what_to_do():
    plain = KtbridgeError("the sentence.", "the next step")
    assert str(plain) == "the sentence.\n  next: the next step"
    assert str(KtbridgeError("alone")) == "alone"
    error = ProblemsError("it can't be done.", problems(1000), "ask for help")
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    assert lines[0].endswith("it can't be done.")
    assert sum("KTX001" in line for line in lines) == ProblemsError.SHOWN
    assert "KTX001  file0: found 0 (expected another)" in lines[1]
    assert lines.count("    next: do this") == 1  # shared by all
    assert "992 more" in lines[-2]
    assert lines[-1] == "  next: ask for help"
    assert str(ProblemsError("nothing found", [])) == "nothing found"


def test_the_command_line_shows_them_once_and_json_is_as_it_was():
    @click.command(cls=Command)
    @click.option("--json", "as_json", is_flag=True)
    def fail(as_json: bool) -> None:
        raise ProblemsError("it can't be done.", problems(2), "ask for help")

    done = CliRunner().invoke(fail, ["--json"])
    assert done.exit_code == 1
    for text in ("found 0", "found 1", "it can't be done", "ask for help"):
        assert done.stderr.count(text) == 1, text
    document = json.loads(done.stdout)
    assert (document["error"], document["next_step"]) == ("it can't be done.", "ask for help")
    assert set(document) == {"ok", "error", "next_step", "problems"}


def own_errors(sources: Iterable[str]) -> set[str]:
    """Names of KtbridgeError and all that derives from it."""
    classes = [each for source in sources for each in CLASS.findall(source)]
    names, before = {"KtbridgeError"}, set[str]()
    while names != before:
        before = set(names)
        names |= {name for name, bases in classes if names & {*re.findall(r"\w+", bases)}}
    return names


def whole_texts(source: str, names: set[str]) -> list[int]:
    """Lines that put a caught error of ours into a text with str() or an f-string."""
    given = {name for caught, name in CAUGHT.findall(source) if names & {*re.findall(r"\w+", caught)}}
    if not any(re.search(rf"\bstr\(\s*{name}\b|{{\s*{name}\s*[}}!:=]", source) for name in given):
        return []  # parsing is what takes time
    found = []
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or not handler.name or not handler.type:
            continue
        if not {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} & names:
            continue
        for node in ast.walk(handler):
            value = node.value if isinstance(node, ast.FormattedValue) else None
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str" and node.args:
                value = node.args[0]
            if isinstance(value, ast.Name) and value.id == handler.name:
                found.append(node.lineno)
    return found


def test_no_message_takes_in_the_lines_of_another_error():
    package = Path(ktbridge.__file__).parent
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    names = own_errors(sources.values())
    assert {"UsageError", "ProblemsError", "TensorFileError", "UnmappableError"} < names
    wrong = "try:\n    pass\nexcept UsageError as error:\n    raise ValueError(f'no: {error}')\n"
    assert whole_texts(wrong, names) == [4]
    found = {str(path): whole_texts(source, names) for path, source in sources.items()}
    assert not any(found.values()), "compose messages from error.sentence"
