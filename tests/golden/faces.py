"""Contracts of the command line's words, the published schemas and the registry of codes."""

from __future__ import annotations

import runpy
from pathlib import Path

from click.testing import CliRunner
from golden.store import contract

from ktbridge.cli import COMMANDS, main
from ktbridge.codes import CODES

ROOT = Path(__file__).parents[2]


@contract
def help(directory: Path) -> dict[str, str]:
    """``--help`` of every command, 100 columns wide."""
    found = {}
    for name in ("", *COMMANDS):
        words = [name, "--help"] if name else ["--help"]
        done = CliRunner().invoke(main, words, prog_name="ktbridge", terminal_width=100)
        assert done.exit_code == 0, done.output
        found[f"{name or 'ktbridge'}.txt"] = done.output
    return found


@contract
def schemas(directory: Path) -> dict[str, str]:
    """The published schemas, of which that of results is made from the types."""
    made = runpy.run_path(str(ROOT / "scripts/make_schema.py"))["render"]()
    return {
        "results.schema.json": made,
        "validate.schema.json": (ROOT / "docs/validate.schema.json").read_text("utf-8"),
    }


@contract
def codes(directory: Path) -> dict[str, str]:
    """Severity of every problem code. A code never changes its meaning and is never used again."""
    return {code: row.severity for code, row in CODES.items()}
