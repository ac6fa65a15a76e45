"""Conversions and merges killed at each moment: what is there is the old output, the new one, or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mergedmodels import TinyMoE, meant

# Does the same again and again, each time killed after another step: a file that is opened, made or renamed,
# or a call that writes. Prints what each kill left: None, or whether it is valid and its files.
KILLED = """
import hashlib, json, os, shutil, signal, sys
from pathlib import Path
from ktbridge.adapter import convert_adapter, merge_adapter, validate_adapter

act, source, base, place, to, overwrite = sys.argv[1:]
target, steps = Path(place) / "m", 0
RECORDS = ("kt_adapter_manifest.json", "ktbridge_merge.json")  # which have the time

def run(base_model="new"):
    if act == "merge":
        merge_adapter(source, base_model=base, output=target, overwrite=True)
    else:
        convert_adapter(source, to=to, output_dir=target, overwrite=True, base_model=base_model)

def run_until(fatal):
    def step(event="", args=()):
        global steps
        if event in ("", "open", "os.mkdir", "os.rename", "shutil.rmtree", "ctypes.dlopen"):
            steps += 1
            if steps == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
    def counted(call):
        return lambda *args: step() or call(*args)
    child = os.fork()
    if child == 0:
        for name in ("pwrite", "copy_file_range", "fsync"):
            setattr(os, name, counted(getattr(os, name)))
        sys.addaudithook(step)
        run()
        os._exit(min(steps, 255))
    status = os.waitpid(child, 0)[1]
    print(json.dumps(state()), flush=True)
    return os.waitstatus_to_exitcode(status)

def state():
    if not target.exists():
        return None
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
             for path in target.iterdir() if path.name not in RECORDS}
    return [act == "merge" or validate_adapter([target]).ok, files]

def begin():
    shutil.rmtree(target, ignore_errors=True)
    if overwrite == "True":
        run("old")

begin()
count = run_until(0)
begin()
# The last ones matter most: manifest, flush, exchange, removal of the old directory.
for fatal in (*range(1, count - 12, count // 6 + 1), *range(max(1, count - 12), count + 1)):
    assert run_until(fatal) == -signal.SIGKILL, fatal
run()
print(json.dumps(state()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("act", "kind"),
    [("convert", "kt-merged"), ("convert", "vllm"), ("merge", "BF16"), ("merge", "FP8")],
)
def test_a_kill_at_any_moment_leaves_old_or_new(tmp_path, act, kind, overwrite):
    storage = kind if act == "merge" else "BF16"
    model = TinyMoE("qwen3_moe", layers=1, experts=2)
    model.weights = {name: meant(storage, value) for name, value in model.weights.items()}
    base = model.write(tmp_path / "base", storage=storage)
    raw, place = model.write_adapter(tmp_path / "raw"), tmp_path / "place"
    place.mkdir()
    argv = [sys.executable, "-c", KILLED, act, raw, base, place, kind, str(overwrite)]
    done = subprocess.run(
        argv, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    new, *seen = (json.loads(line) for line in done.stdout.splitlines())
    assert (new[0], new, len(seen) > 12) == (True, seen[-1], True)
    old = [one for one in seen if one != new]
    # Nothing, or the one that was written over, which is whole; merging again gives the same bytes.
    assert all(one == old[0] for one in old)
    assert bool(old) == (act == "convert" or not overwrite)
    assert not old or (old[0][0] if overwrite else old[0] is None)
    assert [path.name for path in place.iterdir()] == ["m"]  # later runs swept up what was left
