"""Write docs/train.md's tables of keys from the configuration's fields: ``python scripts/make_keys.py``.

A test fails when the page is not what this writes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path

from ktbridge.sft.config import KtConfig, TrainConfig, schema
from ktbridge.sft.config.fields import options
from ktbridge.sft.config.foreign import IN_BLOCK, OUTSIDE, Foreign

PATH = Path(__file__).parents[1] / "docs" / "train.md"
HEAD = """\
## Keys

<!-- From here on written by scripts/make_keys.py from ktbridge/sft/config; edit there. -->

**resumed** says what a resumed run may change against its checkpoint. any: everything. noted: with
`resume_from_checkpoint: true` or a path, and a warning names the change. same: nothing; another value is
another run, which is refused. Contents of paths are compared, not their names: other rows or another base
model are another run, too.

"""
FOREIGN = """\
## Keys without effect

A key that ends in * stands for all keys with that beginning. Values that ask for what happens anyway
(`false`, `0`, the only choice) are accepted without a note.

"""
# A table's first key -> its title.
TITLES = {
    "model_name_or_path": "Model",
    "stage": "What is trained",
    "dataset_dir": "Data",
    "logging_steps": "Output",
    "do_eval": "Held-out rows",
    "per_device_train_batch_size": "Training",
    "max_new_tokens": "Prediction",
    "use_kt": "KTransformers, outside the block",
    "kt_backend": "The `kt_config` block",
}
RESUMED = {"free": "any", "noted": "noted", "weights": "same", "adapter": "same"}


def render(text: str) -> str:
    """Return the page with its tables as the fields are."""
    lines = [*keys(TrainConfig), *keys(KtConfig)]
    foreign = [
        *foreign_keys("In the `kt_config` block", IN_BLOCK),
        *foreign_keys("Outside", OUTSIDE),
    ]
    start = text[: text.index("## Keys\n")]
    return start + HEAD + "\n".join(lines).lstrip() + "\n\n" + FOREIGN + "\n".join(foreign) + "\n"


def keys(cls: type) -> Iterator[str]:
    """Yield the tables of a configuration class, a line each."""
    meanings = docstrings(cls)
    for key, option in options(cls).items():
        if key in TITLES:
            yield from (
                "",
                f"### {TITLES[key]}",
                "",
                "| key | default | resumed | |",
                "| --- | --- | --- | --- |",
            )
        since = f" Since {option.since}." if option.since else ""
        default, resumed = default_text(option.default), RESUMED[option.resume]
        yield f"| `{key}` | {default} | {resumed} | {meanings[key]}{since} |"


def foreign_keys(title: str, table: Foreign) -> Iterator[str]:
    if table is OUTSIDE:
        yield ""
    yield from (
        f"### {title}",
        "",
        "| keys | | what is so here, and what to use |",
        "| --- | --- | --- |",
    )
    for row in table.rows:
        names = " ".join(f"`{key}`" for key in row.keys)
        yield f"| {names} | {'refused' if row.refused else 'noted'} | {row.why}. {row.instead} |"


def docstrings(cls: type) -> dict[str, str]:
    """Return what stands below each field of a class."""
    (node,) = (
        node
        for node in ast.parse(Path(schema.__file__).read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )
    return {
        item.target.id: " ".join(below.value.value.split())
        for item, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def default_text(value: object) -> str:
    if value is MISSING or value is None:
        return "–" if value is None else "required"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value).strip("(),'")


if __name__ == "__main__":
    PATH.write_text(render(PATH.read_text("utf-8")), "utf-8")
    sys.stdout.write(f"{PATH}: {len(options(TrainConfig)) + len(options(KtConfig))} keys\n")
