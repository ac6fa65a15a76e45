"""Write docs/rules.md from the table of rules: ``python scripts/make_rules.py``.

A test fails when the file is not what this prints.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ktbridge.adapter import RULES

PATH = Path(__file__).parents[1] / "docs" / "rules.md"

HEAD = """\
<!-- Written by scripts/make_rules.py from ktbridge/adapter/rules.py; edit there. -->
# What `ktbridge validate` finds

Every finding has a code, and codes never change their meaning. The hundreds tell the subject; KTB8xx
are those of `ktbridge eval`.

- **error**: an engine would serve something other than what was trained, nothing at all, or not
  start. Exit code 1.
- **warning**: the adapter may well be served as trained, but something in it is rarely meant. Exit
  code 1 with `--strict`.
- **info**: worth knowing; never changes the exit code.

A command that makes no sense (an unknown engine, no directory) ends with exit code 2.

The severity below is the one for serving. It differs where the place does: rsLoRA in a raw adapter
(KTB107) and a second alpha (KTB104) are infos, because `ktbridge convert` folds them exactly or
refuses; KTB502 is a warning against the raw adapter, because conversion may rename the base; KTB608
is an error with `--engine`, because then SGLang-KT is what will serve.

**Zeros.** Training starts with B = 0. A half whose pairs are all zero changes nothing, so it is an
error (KTB402). One projection, layer or module that is zero beside others that are not (KTB403) is
a warning: serving it gives exactly what training left, but training rarely means to leave it. Single
experts at zero (KTB404) are an info: no token was routed to them.

**`--engine sglang-kt==X`** applies that version's contract (`ktbridge/adapter/engines.py`): KTB901 and
following. **`--base-model`** needs a config.json only: KTB601 and following.

**`--json`** prints one document; `docs/validate.schema.json` is its schema. Fields may be added, and
those there keep name, type and meaning. `ok` is true when nothing is an error; `adapters` has one
summary a directory, in the order given, with `layout` null where it can't be read; `problems` come
errors first.
"""

SUBJECTS = {
    0: "Files and manifest",
    1: "Configuration",
    2: "Keys and inventory",
    3: "Shapes and dtypes",
    4: "Values",
    5: "Several directories together",
    6: "Against the base model",
    7: "Conversion",
    9: "Against an engine version",
}


def render() -> str:
    """The whole file."""
    lines = [HEAD]
    for number, subject in SUBJECTS.items():
        lines += [f"## {number}xx {subject}", "", "| code | severity | reported when | next step |"]
        lines.append("| --- | --- | --- | --- |")
        for rule in RULES:
            if rule.code[3] == str(number):
                cells = (rule.code, rule.severity, rule.meaning, rule.next_step)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{PATH}: {len(RULES)} rules\n")
