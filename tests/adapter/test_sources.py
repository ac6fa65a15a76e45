"""Sources of convert and merge that are damaged, or change while they are read: nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rawadapter import random_bits, write_base, write_config, write_raw

from ktbridge.adapter import (
    Tensor,
    convert_adapter,
    execute_plan,
    merge_adapter,
    plan_convert,
    validate_adapter,
)
from ktbridge.errors import ProblemsError
from ktbridge.files import digests
from ktbridge.model import open_tensor_file
from ktbridge.model.tensorfile import build_header

FUSED, MODEL = "fused_expert_lora.safetensors", "adapter_model.safetensors"


@pytest.fixture
def raw(tmp_path):
    return aged(write_raw(tmp_path / "raw", layers=(0, 1)))


@pytest.fixture
def base(tmp_path):
    return aged(write_base(tmp_path / "base"))


def aged(directory: Path) -> Path:
    """Date its files an hour back: clocks of file systems are coarse, and a change must show."""
    for path in directory.iterdir():
        os.utime(path, (path.stat().st_mtime - 3600,) * 2)
    return directory


def flip(path: Path, place: int = -7) -> None:
    """Flip one bit, and leave the time of change as it was: only the hash can tell."""
    data, times = bytearray(path.read_bytes()), os.stat(path)
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def refused(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """(code, file name) of a refusal's errors."""
    with pytest.raises(ProblemsError) as caught:
        call()
    errors = [item for item in caught.value.problems if item.severity == "error"]
    assert all(item.next_step for item in errors)
    return [(item.code, Path(item.where).name) for item in errors]


# What is asked for -> the arguments of convert_adapter; of the raw adapter's two files, some use one.
REQUESTS: dict[str, dict[str, str]] = {
    "merged": {"merged_output_dir": "m"},
    "split": {"expert_output_dir": "e", "nonexpert_output_dir": "n"},
    "expert": {"expert_output_dir": "e"},
    "nonexpert": {"nonexpert_output_dir": "n"},
    "vllm": {"to": "vllm", "output_dir": "v"},
    "peft": {"to": "peft-fused", "output_dir": "p"},
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("name", [FUSED, MODEL])
def test_a_flipped_bit_gets_no_new_hash(raw, tmp_path, monkeypatch, name, request_):
    """In the data that is used, in the data that is not, and in the file that is not used at all."""
    monkeypatch.chdir(tmp_path)
    flip(raw / name)
    assert [p.code for p in validate_adapter([raw]).problems] == ["KTB012"]
    assert refused(partial(convert_adapter, "raw", **request_)) == [("KTB012", name)]
    assert os.listdir(tmp_path) == ["raw"]


def test_the_whole_of_a_file_is_compared_in_any_order(tmp_path):
    """Conversion reads wide tensors first, wherever they lie, and leaves a half alone."""
    name, shape = "layers.1.experts.gate_lora_a", (3, 4, 16)
    wide = Tensor(name, "F32", shape, random_bits(np.random.default_rng(2), shape, "F32"))
    write_raw(tmp_path / "raw", replace={name: wide})
    merged = tmp_path / "merged"
    convert_adapter(tmp_path / "raw", merged_output_dir=merged)
    path, manifest = merged / MODEL, merged / "kt_adapter_manifest.json"
    file = open_tensor_file(path)
    entries = sorted(file.entries.values(), key=lambda entry: entry.name)
    data = build_header([entry[:3] for entry in entries])
    places = [len(data), len(data) + (file.size - len(data)) // 2, -1]
    path.write_bytes(b"".join([data, *(bytes(file.read(e.start, e.end)) for e in entries)]))
    changed = json.loads(manifest.read_text())
    changed["artifacts"][MODEL] = {"size": path.stat().st_size, "sha256": digests.of_file(path)}
    manifest.write_text(json.dumps(changed))
    for asked in ("expert", "nonexpert"):
        convert_adapter(merged, **{f"{asked}_output_dir": tmp_path / asked})
        assert validate_adapter([merged, tmp_path / asked]).ok
        for place in places:
            flip(path, place)
            call = partial(convert_adapter, merged, **{f"{asked}_output_dir": tmp_path / "out"})
            assert refused(call) == [("KTB012", MODEL)], (asked, place)
            flip(path, place)
    assert sorted(os.listdir(tmp_path)) == ["expert", "merged", "nonexpert", "raw"]


def test_merge_looks_at_the_hashes(raw, base, tmp_path):
    flip(raw / FUSED)
    call = partial(merge_adapter, raw, base_model=base, output=tmp_path / "out")
    assert refused(call) == [("KTB012", FUSED)]
    assert sorted(os.listdir(tmp_path)) == ["base", "raw"]


def overwrite(path: Path) -> None:
    """Other bytes at the same place, size and inode."""
    with open(path, "r+b") as file:
        file.write(bytes(byte ^ 1 for byte in path.read_bytes()))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    """The same bytes in another file, as a download would put in place."""
    shutil.copy2(path, path.with_name("other"))
    os.replace(path.with_name("other"), path)


CHANGES = [overwrite, truncate, replace, os.unlink]
SOURCES = [
    # what is converted, of that the file that changes, to what
    ("raw", FUSED, "kt-merged"),
    ("raw", "adapter_config.json", "kt-merged"),
    ("raw", FUSED, "vllm"),
    ("raw", "adapter_config.json", "vllm"),
    ("peft-fused", MODEL, "raw"),
    ("gguf", "adapter_model.gguf", "kt-merged"),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("source", "name", "to"), SOURCES)
def test_a_source_that_changes_while_it_is_converted(tmp_path, change, source, name, to):
    """After the plan, or when all has been read: what is published must still be what is there."""
    base = str(write_config(tmp_path / "base"))

    def given(path):
        write_raw(path, base_model=base)
        if source != "raw":
            convert_adapter(path, to=source, output_dir=path.with_suffix(".given"))
            path = path.with_suffix(".given")
        (path / "kt_adapter_manifest.json").unlink()  # so that no hash could tell
        return aged(path)

    one, other, out = given(tmp_path / "1"), given(tmp_path / "2"), tmp_path / "out"
    plan = plan_convert(one, to=to, output_dir=out)
    change(one / name)
    assert refused(partial(execute_plan, plan)) == [("KTB709", name)]
    changed = []

    def on_progress(done, total):
        if done == total and not changed:
            changed.append(change(other / name))

    call = partial(convert_adapter, other, to=to, output_dir=out, on_progress=on_progress)
    assert refused(call) == [("KTB709", name)]
    assert changed
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((f"raw/{FUSED}", change) for change in CHANGES),
        *(("base/model-1.safetensors", change) for change in CHANGES),
        *((f"base/{name}", overwrite) for name in ("tokenizer.json", "config.json")),
    ],
)
def test_merge_and_a_source_that_changes(raw, base, tmp_path, change, name):
    changed = []

    def on_progress(done, total):
        if done > total // 2 and not changed:
            changed.append(change(tmp_path / name))

    out = tmp_path / "out"
    call = partial(merge_adapter, raw, base_model=base, output=out, on_progress=on_progress)
    assert refused(call) == [("KTB709", Path(name).name)]
    assert changed
    assert sorted(os.listdir(tmp_path)) == ["base", "raw"]


# Converts what the first argument names and shortens it at the first report of progress.
SHORTENED = """
import os, sys
from pathlib import Path
from ktbridge.adapter import convert_adapter
from ktbridge.errors import ProblemsError
source, target, to = sys.argv[1:]
done = []
def on_progress(now, total):
    if not done:
        done.append(now < total)
        os.truncate(Path(source) / "adapter_model.safetensors", 100_000)
try:
    convert_adapter(source, to=to, from_format="peft-fused", output_dir=target, on_progress=on_progress)
except ProblemsError as error:
    print(*done, *(problem.code for problem in error.problems))
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["raw", "vllm"])
def test_a_source_that_gets_shorter_in_the_middle_ends_no_process(tmp_path, to):
    """What follows is still to be read: from a memory map, that would be a SIGBUS."""
    sizes = {"experts": 32, "hidden": 16384, "inter": 32, "modules": {"q_proj": (16, 16)}}
    write_raw(tmp_path / "raw", layers=(0, 1, 2, 3, 4), **sizes)
    convert_adapter(tmp_path / "raw", to="peft-fused", output_dir=tmp_path / "peft")
    (tmp_path / "peft" / "kt_adapter_manifest.json").unlink()
    argv = [sys.executable, "-c", SHORTENED, str(tmp_path / "peft"), str(tmp_path / "out"), to]
    ran = subprocess.run(
        argv, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "True KTB709\n"), ran.stderr
    assert sorted(os.listdir(tmp_path)) == ["peft", "raw"]
