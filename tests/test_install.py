"""What messages say of installing ktbridge and its engine: commands that work as they are printed."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import ktbridge
from ktbridge import install
from ktbridge.adapter.engines import ENGINE, contracts_of
from ktbridge.cli._app import Command
from ktbridge.install import _IN_EXTRAS, install_hint, linear_attention_gaps, reinstall_hint
from ktbridge.serve.doctor import ENGINE_STEP, PACKAGES

SOURCES = Path(ktbridge.__file__).parent
ROOT = SOURCES.parent


def installed(site: Path, record: object) -> None:
    """Metadata of a ktbridge that pip installed from what ``record`` says."""
    info = site / "ktbridge-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ktbridge\nVersion: 9.9\n")
    if record is not None:
        (info / "direct_url.json").write_text(json.dumps(record))


def test_the_checkout_is_named_where_it_is_known(tmp_path, monkeypatch):
    checkout = tmp_path / "my ktbridge"
    checkout.mkdir()
    (checkout / "pyproject.toml").write_text("")
    url = f"file://{checkout}".replace(" ", "%20")
    installed(tmp_path / "site", {"url": url, "dir_info": {"editable": True}})
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert shlex.split(install_hint("train")) == ["pip", "install", "-e", f"{checkout}[train]"]
    assert shlex.split(reinstall_hint())[-1] == str(checkout)
    (checkout / "pyproject.toml").unlink()  # the checkout has gone
    assert install_hint("train") == "pip install 'ktbridge[train]'"


@pytest.mark.parametrize(
    "record", [None, {"url": "https://host/x.whl"}, {}, [], {"url": "file:///x", "dir_info": 3}]
)
def test_without_a_checkout_the_hint_is_of_what_is_installed(record, tmp_path, monkeypatch):
    installed(tmp_path, record)
    monkeypatch.syspath_prepend(tmp_path)
    assert install_hint("eval") == "pip install 'ktbridge[eval]'"  # pip keeps the ktbridge that is here
    assert "ktbridge" not in reinstall_hint()  # pip would ask the index


def test_one_place_says_how_ktbridge_is_installed():
    """There is no such distribution on PyPI, and whoever takes the name could run code."""
    asks = re.compile(r"install[^\n]*\bktbridge(?:\[|['\"]?$|['\"])")
    found = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        if path.name != "install.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if asks.search(line) and "import" not in line
    ]
    assert found == []
    assert {extra for _, extra in PACKAGES.values()} <= set(EXTRAS)


@pytest.mark.parametrize(
    ("module", "of_command", "step"),
    [
        ("torch", "", install_hint("serve")),  # smaller than train
        ("torch", "train", install_hint("train")),
        ("torch._C", "train,serve", install_hint("train,serve")),
        ("jieba", "train", install_hint("eval")),
        ("openai", "demo", install_hint("demo")),
        ("openai", "", install_hint("eval")),
        ("openai", "serve", install_hint("serve")),
        ("huggingface_hub.utils", "", install_hint("hub")),
        ("tensorboard", "train", "pip install tensorboard"),
        ("fcntl", "", "Use Linux"),
    ],
)
def test_a_missing_package_names_the_smallest_extra(module, of_command, step):
    def needs() -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    done = CliRunner().invoke(Command("needs", callback=needs, extra=of_command))
    assert done.exit_code == 1
    assert f"next: {step}\n" in done.stderr


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BASE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "fla": "flash-linear-attention",
}  # whose name isn't the module's
NOT_DECLARED = {
    "triton": "comes with torch on a machine with a GPU",
    "typing_extensions": "for type checkers; comes with pydantic",
    "pydantic_core": "comes with pydantic",
}


def distributions(requirements) -> set[str]:
    return {re.match(r"[\w.-]+", one)[0].lower().replace("_", "-") for one in requirements}


def distribution_of(module: str) -> str:
    return DISTRIBUTIONS.get(module, module).lower().replace("_", "-")


def test_hints_know_what_the_extras_have():
    """Each module of install.py's table is of its extra, and each extra's packages are in the table."""
    for extra, modules in _IN_EXTRAS.items():
        assert {distribution_of(one) for one in modules.split()} <= distributions(EXTRAS[extra]), extra
    known = {one for modules in _IN_EXTRAS.values() for one in modules.split()}
    for extra in EXTRAS.keys() - {"all", "dev"}:
        left = distributions(EXTRAS[extra]) - {distribution_of(one) for one in known} - {"ktbridge"}
        assert left == set(), extra


def imports() -> Iterator[tuple[Path, str]]:
    """Modules that ktbridge/ imports from elsewhere: also inside functions, and by importlib."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "ktbridge":
                    yield path.relative_to(SOURCES), top


# What a room may import at the top of a module or in a function: its own extras'.
ROOMS = {
    "files": "train",  # Parquet is for who has pyarrow
    "model": "hub serve",  # Tensor.torch is for who has torch
    "adapter": "gguf",
    "experts": "serve train",
    "sft": "train liger fla",
    "serve": "serve",
    "server_api": "eval serve",
    "verify": "serve eval",  # --html is made as reports are
    "eval": "eval",
    "predict": "train serve eval",
    "demo": "demo train serve",
    "cli": "demo gguf",
    "document": "eval",
    "schemas.py": "eval",
}


def test_what_is_imported_is_declared():
    """By an extra of the room that imports it: nothing comes by chance with something else."""
    base, wrong = distributions(BASE), set()
    for path, module in imports():
        extras = ROOMS.get(path.parts[0], "").split()
        has = base.union(*(distributions(EXTRAS[extra]) for extra in extras))
        if distribution_of(module) not in has and module not in NOT_DECLARED:
            wrong.add(f"{path} imports {module}")
    assert sorted(wrong) == []


def test_the_engine_is_named_in_one_way():
    """By doctor, by `serve` and in the documentation: the distribution that brings all its parts, pinned."""
    newest = f"ktransformers[sglang]=={contracts_of(ENGINE)[-1].last}"
    assert newest in ENGINE_STEP
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}
    texts |= {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    for path, text in texts.items():
        for name in re.findall(r"install '?((?:sglang-kt|ktransformers)[^\s'`]*)", text):
            assert re.fullmatch(r"ktransformers\[sglang\]==(?:\{.*|[\d.]+)", name), (path, name)


def versions(*words: str) -> str:
    run = [sys.executable, ROOT / "scripts" / "versions.py", *words]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def test_the_tested_versions_are_within_the_ranges_that_users_get():
    """What pyproject.toml asks for is in the lock, once for each Python, and the ranges admit it."""
    requirements = pytest.importorskip("packaging.requirements")
    pinned: dict[str, list] = {}
    for line in (ROOT / "constraints-tested.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = requirements.Requirement(line)
            pinned.setdefault(pin.name.replace("_", "-").lower(), []).append(pin)
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = (*found["project"]["optional-dependencies"].values(), found["project"]["dependencies"])
    asked = [requirements.Requirement(one) for each in lists for one in each]
    asked = [one for one in asked if not one.name.startswith(("ktbridge", "torch"))]
    assert len(asked) > 25
    for one in asked:
        pins = pinned[one.name.lower()]
        for python in ("3.11", "3.12", "3.13", "3.14"):
            (own,) = (p for p in pins if not p.marker or p.marker.evaluate({"python_version": python}))
            (version,) = (each.version for each in own.specifier)
            assert one.specifier.contains(version), f"{own} is outside {one}"
    assert "torch" not in pinned  # CPU and GPU machines take different ones


def test_oldest_and_changed_versions_are_named():
    oldest = versions("oldest").split()
    assert "numpy==2.0" in oldest
    assert not any(one.startswith("torch==") for one in oldest)
    said = versions("changed", sys.executable)
    lines = said.splitlines()
    assert all(re.fullmatch(r"\S+ \S+ \(tested: \S+\)|nothing: .*", line) for line in lines)


NOISE = """
import logging, warnings
from click.testing import CliRunner
from ktbridge.cli import main
from ktbridge.cli._app import Command

@main.command("noise", cls=Command)
def noise():
    logging.getLogger("peft.tuners").warning("peft talks")
    import transformers
    transformers.utils.logging.get_logger("transformers.models").warning_once("transformers talks")
    for category in (FutureWarning, DeprecationWarning):
        warnings.warn("it will go", category)
    warnings.warn("this is for the user")

main.commands["noise"] = noise
main._table["noise"] = ""
main.get_command = lambda ctx, name: main.commands[name]
main(["noise"])
"""


@pytest.mark.quick("options1")
@pytest.mark.parametrize(
    ("options", "environment", "heard"),
    [
        ([], {}, {"this is for the user"}),
        (["-W", "default"], {}, {"it will go", "this is for the user"}),
        ([], {"TRANSFORMERS_VERBOSITY": "warning"}, {"transformers talks", "this is for the user"}),
    ],
)
def test_a_librarys_words_about_itself_stay_off_the_terminal(options, environment, heard):
    run = [sys.executable, *options, "-c", NOISE]
    done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, **environment}, check=True)
    said = ("it will go", "peft talks", "transformers talks", "this is for the user")
    assert {text for text in said if text in done.stderr} == heard, done.stderr


ALL = {"flash-linear-attention": "0.6.0", "triton": "3.7.1"}


@pytest.mark.parametrize(
    ("gpus", "versions", "told"),
    [
        (["9.0"], {}, [("without", "linear attention", False)]),
        (["9.0"], {"triton": "3.6.0"}, [("without", "tilelang", False)]),
        (["9.0"], ALL | {"triton": "3.6.0"}, [("Triton 3.6.0", "tilelang", True)]),
        (["8.0", "9.0"], ALL | {"triton": "3.4.0"}, [("wrong gradients", "3.7.1 or newer", True)]),
        (["9.0"], ALL | {"triton": "3.7.0+git1"}, [("Triton 3.7.0", "torch whose Triton", True)]),
        (["9.0"], ALL | {"triton": "3.6.0", "tilelang": "0.1.7"}, []),
        (["9.0"], ALL | {"triton": "3.3.1"}, []),
        (["10.0"], ALL | {"triton": "3.6.0"}, []),
        (["9.0"], ALL, []),
        (
            [""],
            {"fla-core": "0.5.2", "triton": "3.6.0"},
            [("fla-core 0.5.2 has", "--upgrade fla-core", False)],
        ),
        ([], {}, [("without a GPU", "flash-linear-attention", False)]),
    ],
)
def test_what_keeps_linear_attention_from_its_kernels(gpus, versions, told):
    found = linear_attention_gaps(gpus, versions)
    assert [gap.wrong for gap in found] == [wrong for *_, wrong in told]
    for gap, (text, step, _) in zip(found, told, strict=True):
        assert text in gap.found
        assert step.replace("linear attention", "pip install") in gap.remedy


def test_a_package_that_fails_to_import_counts_as_torch(monkeypatch, tmp_path):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla/__init__.py").write_text("raise RuntimeError('no enum at string index')\n")
    info = tmp_path / "flash_linear_attention-0.6.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-linear-attention\nVersion: 0.6.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    install.import_error.cache_clear()
    try:
        assert not install.has_linear_attention_kernels()
        gap = linear_attention_gaps(["9.0"])[-1]
    finally:
        install.import_error.cache_clear()
    assert "fails to import, so torch computes it" in gap.found
    assert "RuntimeError: no enum at string index" in gap.found
    assert "flash-linear-attention" in gap.remedy
