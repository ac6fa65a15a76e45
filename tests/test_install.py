"""What messages say of installing ktbridge and its engine: commands that work as they are printed."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import ktbridge
from ktbridge.adapter.engines import CONTRACTS
from ktbridge.cli._app import Command
from ktbridge.install import install_hint, reinstall_hint
from ktbridge.serve.doctor_packages import ENGINE_STEP, PACKAGES

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
    assert install_hint("train") == "pip install '.[train]' in the ktbridge checkout"


@pytest.mark.parametrize(
    "record", [None, {"url": "https://host/x.whl"}, {}, [], {"url": "file:///x", "dir_info": 3}]
)
def test_without_a_checkout_the_hint_says_where_to_type_it(record, tmp_path, monkeypatch):
    installed(tmp_path, record)
    monkeypatch.syspath_prepend(tmp_path)
    assert install_hint("eval") == "pip install '.[eval]' in the ktbridge checkout"


def test_no_message_sends_anybody_to_an_index_for_ktbridge():
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
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert {extra for _, _, extra in PACKAGES.values()} <= extras


def test_a_missing_package_names_the_checkout():
    def needs() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    done = CliRunner().invoke(Command("needs", callback=needs))
    assert done.exit_code == 1
    assert f"next: {install_hint()}" in done.stderr


def test_the_engine_is_named_in_one_way():
    """By doctor, by `serve` and in the documentation: the distribution that brings all its parts, pinned."""
    newest = f"ktransformers[sglang]=={CONTRACTS[-1].last}"
    assert newest in ENGINE_STEP
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}
    texts |= {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    for path, text in texts.items():
        for name in re.findall(r"install '?((?:sglang-kt|ktransformers)[^\s'`]*)", text):
            assert re.fullmatch(r"ktransformers\[sglang\]==(?:\{.*|[\d.]+)", name), (path, name)
