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

The severity below is the one for serving. It differs where the place does: in a raw adapter rsLoRA
(KTB107), a second alpha (KTB104) and alpha_pattern (KTB109) are infos where `ktbridge convert` folds
them exactly, and a head (KTB213) is a warning, because `ktbridge merge` takes it; KTB502 is a warning
against the source, because conversion may rename the base; KTB608 is an error with `--engine`, because
then SGLang-KT is what will serve.

**Zeros.** Training starts with B = 0. A half whose pairs are all zero changes nothing, so it is an
error (KTB402). One projection, layer or module that is zero beside others that are not (KTB403) is
a warning: serving it gives exactly what training left, but training rarely means to leave it. Single
experts at zero (KTB404) are an info: no token was routed to them.

In the next steps DIR is the directory that was validated, D a new one, FILE a file and RAW_DIR the
directory that training wrote; the command prints real paths in the shell's quotes where it knows them.

**Several directories** are compared with their source: the raw directory, else the first given whose
layout covers all others (merged covers expert and non-expert, each covers its like). So put the input
of a conversion before its outputs. Values count as the same where conversion rounded them to bfloat16
or moved a power of two of the scale into B. Without a source, rank and alpha of an expert and a
non-expert directory are compared alone (KTB501), unless both have manifests that `ktbridge convert`
wrote: training may scale the halves differently, and then each configuration has its own, on purpose.

**Holes.** Without a base model, a module's layers are compared with those of everything else in the
set: a few missing ones are a warning (KTB212), an irregular order is an info (KTB215). Regular orders
(hybrid models) and what the configuration excludes are neither.

**`--engine sglang-kt==X`** applies that version's contract (`ktbridge/adapter/engines.py`): KTB901 and
following. **`--base-model`** needs a config.json only: KTB601 and following. Of families that are not
in `ktbridge/model/families.py` only the hidden size and the number of layers are compared.

**The base model's fingerprint.** Training writes into the manifest which model it trained on: its
config.json, a hash over names, dtypes and shapes of its tensors, and one over a sample of their values
(`base_fingerprint`; conversion carries it on). Where it is there, `--base-model` and `ktbridge merge`
compare it: the model may have moved or been split into other shards, but other values in tensors of the
same names and shapes are another model (KTB612). Tensors of other names, dtypes or shapes may be the same
model in another format, such as FP8 for serving: a warning, but an error for `merge`. Without a
fingerprint, names are compared (KTB601).

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
