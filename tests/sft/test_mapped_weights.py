"""Mapped weights under a run: a shard that shrinks, pages that are dropped, AMX that is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import ROWS, conversation, quiet, train, write_run

from ktbridge.machine import read_machine

pytestmark = quiet
ROWS_OF_TWO = [conversation(*row) for row in ROWS * 4]

TRUNCATING = """
import os, sys
run, base, sys.path = sys.argv[1], sys.argv[2], sys.argv[3:]
import ktbridge.sft
from pathlib import Path
from trainrun import train

shard = next(Path(base).glob("*.safetensors"))
def on_log(record):
    if record.get("step") == 3:
        os.truncate(shard, 4096)
train(Path(run), on_log=on_log)
print("finished")
"""

REFUSED = """
import ctypes, sys
run, sys.path = sys.argv[1], sys.argv[2:]
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(4096)  # less than AMX's registers take
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 4096)), None) == 0
import ktbridge.sft
from pathlib import Path
from trainrun import train
from ktbridge.serve.doctor import diagnose

result = train(Path(run), "max_steps=1")
print(*(note for note in result.notes if note.code == "KTL020"), sep=chr(10))
print(*(check.found for check in diagnose(ask_torch=False).checks), sep=chr(10))
"""


def python(code, *arguments):
    argv = [sys.executable, "-c", code, *map(str, arguments), *sys.path]
    return subprocess.run(argv, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_shard_truncated_under_a_run_ends_it_with_a_sentence(base_dir, tmp_path):
    base = Path(shutil.copytree(base_dir, tmp_path / "base"))
    run = write_run(tmp_path, base, rows=ROWS_OF_TWO, max_steps=6, save_steps=2)
    ended = python(TRUNCATING, run, base)
    shard, last = next(base.glob("*.safetensors")), run / "raw.checkpoints" / "checkpoint-2"
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert "finished" not in ended.stdout
    assert f"error: KTL021  {shard}: it was truncated" in ended.stderr
    assert f"the last good checkpoint is {last};" in ended.stderr


@pytest.mark.skipif("amx_bf16" not in read_machine().isa, reason="needs a CPU with AMX")
def test_amx_that_is_refused_is_said_by_train_and_doctor(base_dir, tmp_path):
    said = python(REFUSED, write_run(tmp_path, base_dir, rows=ROWS_OF_TWO))
    assert said.returncode == 0, said.stderr[-3000:]
    reason = "a thread's alternate signal stack is too small"
    assert f"avx512_bf16 instead of AMX: {reason}" in said.stdout
    assert f"the CPU has AMX, but it isn't used (only scalar, avx2, avx512_bf16): {reason}" in said.stdout


@pytest.mark.slow
def test_a_page_cache_that_does_not_keep_the_experts_is_told_once(tmp_path):
    """Pages dropped for real after each step, while the run has them mapped."""
    base = tmp_path / "base"
    tiny_model(moe_intermediate_size=256, hidden_size=256, num_experts=32).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    shard = next(base.glob("*.safetensors"))
    notes = []

    def drop(step, steps):
        import gc
        import mmap

        gc.unfreeze()  # else what was there before the first step isn't listed
        for file in [each for each in gc.get_objects() if type(each).__name__ == "TensorFile"]:
            if file._map is not None:
                file._map.madvise(mmap.MADV_RANDOM)  # no reading ahead: this file is small
                file.release()
        with open(shard, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    run = write_run(tmp_path, base, rows=ROWS_OF_TWO, max_steps=6)
    os.sync()
    result = train(run, on_progress=drop, on_note=notes.append)
    told = [note for note in notes if note.code == "KTL022"]
    assert len(told) == 1
    assert told[0] in result.notes
    assert "waited for the disk" in told[0].found
