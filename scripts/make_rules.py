"""Write docs/rules.md from the registry of problem codes: ``python scripts/make_rules.py``.

A test fails when the file is not what this prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from ktbridge.codes import CODES, SUBJECTS, Subject

PATH = Path(__file__).parents[1] / "docs" / "rules.md"

HEAD = """\
<!-- Written by scripts/make_rules.py from ktbridge/codes; edit there. -->
# Problem codes

Every finding has a code, and codes never change their meaning. Here are all of them, by the part of
ktbridge that reports them.

- **error**: the command fails with exit code 1. Of an adapter: an engine would serve something other
  than what was trained, nothing at all, or not start.
- **warning**: the work goes on, but something in it is rarely meant. Of an adapter: it may well be served
  as trained. Exit code 1 with `ktbridge validate --strict`.
- **info**: worth knowing; never changes the exit code.

A command that makes no sense (an unknown engine, no directory) ends with exit code 2.

The severity is the usual one; where it depends on the extent or on the place, the row or the text above
its table says so. A message may have a next step that fits its case better than the one here.
"""

ADAPTERS = """\
The severity is the one for serving. It differs where the place does: in a raw adapter rsLoRA
(KTB107), a second alpha (KTB104) and alpha_pattern (KTB109) are infos where `ktbridge convert` folds
them exactly, and a head (KTB213) is a warning, because `ktbridge merge` takes it; KTB502 is a warning
against the source, because conversion may rename the base; KTB608 is an error with `--engine`, because
then SGLang-KT is what will serve. Milder too: a pickle beside safetensors (KTB004) and one tensor that
alone has another shape (KTB302) are warnings; a further file in an expert directory, or a training
checkpoint's own beside its adapter (KTB007), is an info. Of a conversion, these are warnings: rsLoRA with
per-expert tensors and no manifest (KTB107), a merged output without one half (KTB704), a `--lora-alpha`
that isn't used (KTB707).

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

# A room's title, and what its tables don't say.
ROOMS = {
    "adapter": ("Adapters: `ktbridge validate`, `convert`, `merge`, `push`", ADAPTERS),
    "serve": (
        "Serving: `ktbridge serve`, `verify`",
        """\
`serve` checks before it starts an engine, and `--dry-run` shows what it found
([serving.md](serving.md)). `--allow CODE` turns an error of the first table into a warning. What
`verify` concludes is in [verify.md](verify.md).
""",
    ),
    "sft": (
        "Training: `ktbridge train`, `plan`",
        """\
Errors are reported all at once, before anything is started ([train.md](train.md), [data.md](data.md)). A
message of KTC001 to KTC006 names the key, and its next step is about that key.
""",
    ),
    "predict": (
        "Predictions: `ktbridge predict`",
        "A killed run goes on with the same command ([predict.md](predict.md)).\n",
    ),
    "experts": (
        "Routed experts: `ktbridge.sft` as a library, and `ktbridge train`",
        "Raised where a model is wrapped or given an adapter ([library.md](library.md)).\n",
    ),
    "eval": (
        "Evaluation: `ktbridge eval`, `report`",
        """\
When answers and judges make a run fail is in [eval.md](eval.md) and [judge.md](judge.md).
""",
    ),
    "recipe": (
        "Recipes: `ktbridge run`",
        "Reported all at once, before anything is started ([recipes.md](recipes.md)).\n",
    ),
}


def render() -> str:
    """The whole file."""
    parts = [HEAD]
    for room, (title, text) in ROOMS.items():
        parts.append(f"## {title}\n\n{text}")
        parts += ["\n".join(table(one)) + "\n" for one in SUBJECTS if one.room == room]
    return "\n".join(parts)


def table(subject: Subject) -> Iterator[str]:
    """A subject's heading and its codes, a line each."""
    first, last = subject.codes[0].code, subject.codes[-1].code
    yield f"### {subject.title} ({first if first == last else f'{first} – {last}'})"
    yield from ("", "| code | severity | reported when | next step |", "| --- | --- | --- | --- |")
    for row in subject.codes:
        yield ("| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row) + " |")


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{PATH}: {len(CODES)} codes\n")
