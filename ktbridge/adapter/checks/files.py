"""Check one directory's files: which ones an engine loads, modes, dates, the manifest's list."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

from ktbridge.adapter.adapter import CONFIG_FILE, MODEL_FILE, Adapter, convert_step
from ktbridge.adapter.checks.hashes import resave_step, size_of
from ktbridge.adapter.manifest import MANIFEST_FILE, fused_record
from ktbridge.codes import problem
from ktbridge.errors import Problem, Severity
from ktbridge.model import TensorFile

_TRAINER_STATE = "trainer_state.json"  # in every Trainer checkpoint
# Needed to resume training. No engine reads the pickles (optimizer.pt, training_args.bin).
_OF_A_CHECKPOINT = re.compile(r"(?:trainable|optimizer|model)(?:-\d+-of-\d+)?\.safetensors")
_NO_TIME = 315_619_200  # 2 January 1980: the fixed timestamp of zip, Nix and image builders


def check_files(adapter: Adapter, serving: bool, for_engine: bool = False) -> Iterator[Problem]:
    """Every finding about files, except their content.

    A checkpoint's files beside the adapter are an error only if an engine loads the directory as it
    is (``for_engine``).
    """
    ours = {file.name for file in adapter.files}
    if serving:
        yield from _loaded(adapter, ours, for_engine)
    if adapter.layout == "merged":
        for weights in adapter.files:
            if os.stat(weights.path).st_mtime <= _NO_TIME:
                yield problem(
                    "KTB015", str(weights.path), "is dated 1980 or before", "its real time"
                )
    for name in sorted([*ours, CONFIG_FILE]):
        path = adapter.path / name
        if not path.exists():  # another configuration replaces it
            continue
        mode = os.stat(path).st_mode
        if not mode & 0o004 and not mode & 0o040:
            found = f"has mode {mode & 0o777:04o}"
            step = f"chmod a+r {shlex.quote(str(path))}"
            yield problem(
                "KTB009", str(path), found, "readable by the server's user", next_step=step
            )
    yield from _artifacts(adapter)


def _loaded(adapter: Adapter, ours: set[str], for_engine: bool) -> Iterator[Problem]:
    """Extra files that an engine loads, and adapter files that it doesn't load.

    Expert loaders read only adapter_model.safetensors, the non-expert loader every safetensors file.
    """
    checkpoint = (adapter.path / _TRAINER_STATE).is_file()
    for path in sorted(adapter.path.glob("*.safetensors")):
        if path.name in ours:
            continue
        if adapter.layout == "expert":
            found, step = "is no part of the adapter, and not loaded", "nothing"
            yield problem("KTB007", str(path), found, severity="info", next_step=step)
        elif checkpoint and _OF_A_CHECKPOINT.fullmatch(path.name):
            found = "belongs to the checkpoint, and would be loaded as part of the adapter"
            level: Severity = "error" if for_engine else "info"
            step = f"serve a copy without it: {convert_step(adapter)}"
            yield problem("KTB007", str(path), found, severity=level, next_step=step)
        else:
            yield problem("KTB007", str(path), "would be loaded as part of the adapter")
    others = sorted(ours - {MODEL_FILE})
    if adapter.experts and others:
        where, found = str(adapter.path / others[0]), "holds weights that expert loaders don't read"
        yield problem("KTB017", where, found, MODEL_FILE, next_step=convert_step(adapter))


def _artifacts(adapter: Adapter) -> Iterator[Problem]:
    artifacts = (adapter.manifest or {}).get("artifacts")
    if adapter.manifest is None or artifacts is None:
        return
    where = adapter.path / MANIFEST_FILE
    if not isinstance(artifacts, dict) or not all(isinstance(v, dict) for v in artifacts.values()):
        yield problem("KTB010", str(where), "its artifacts are not a table of files")
        return
    for name, record in sorted(artifacts.items()):
        if name != os.path.basename(name):
            yield problem("KTB010", str(where), f"lists {name!r}, which is not a file beside it")
            continue
        path = adapter.path / name
        size = size_of(path)
        if size != record.get("size"):
            found = "is missing" if size is None else f"is {size} bytes"
            expected = f"{record.get('size')} bytes"
            yield problem(
                "KTB011", str(path), found, expected, next_step=resave_step(adapter.manifest)
            )
        file = next((file for file in adapter.files if file.name == name), None)
        if file is not None and record.get("tensors") is not None:
            yield from _listed(f"{where}: {name}", file, record["tensors"])


def _listed(where: str, file: TensorFile, listed: object) -> Iterator[Problem]:
    actual = fused_record(entry[:3] for entry in file.entries.values())["tensors"]
    if listed == actual:
        return
    if not isinstance(listed, dict):
        found = "lists its tensors in an unknown form"
    elif listed.keys() == actual.keys():
        found = "lists other shapes or dtypes than the file has"
    else:
        found = f"lists {len(listed)} tensors, the file has {len(actual)}"
    yield problem("KTB013", where, found)
