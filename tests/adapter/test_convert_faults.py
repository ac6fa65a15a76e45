"""What a conversion leaves behind when it fails or is interrupted, what it overwrites, and in which order."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
from pathlib import Path

import pytest
from findings import codes, placed
from rawadapter import convert_to, write_config

from ktbridge.adapter import Tensor, convert_adapter, write_raw_adapter
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.files.publish import Staging


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def base_of(directory: Path) -> str:
    return json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"]


@pytest.mark.parametrize("to", ["kt-merged", "vllm", "gguf"])
def test_overwrite_replaces_an_adapter_and_nothing_else(make_raw, tmp_path, to):
    raw, target = make_raw(base_model=str(write_config(tmp_path / "base"))), tmp_path / "m"

    def refused(place, words, overwrite=True):
        before = contents(place)
        with pytest.raises(ProblemsError, match="can't be converted") as caught:
            convert_adapter(raw, to=to, output_dir=place, overwrite=overwrite)
        assert placed(caught)[-1] == ("KTB701", str(place))
        problem = caught.value.problems[-1]
        assert words in problem.found + problem.next_step
        assert contents(place) == before

    target.mkdir()  # an empty directory is free
    convert_adapter(raw, to=to, output_dir=target)
    refused(target, "--overwrite", overwrite=False)
    convert_adapter(raw, to=to, output_dir=target, overwrite=True, base_model="new")
    assert base_of(target) == "new"
    (target / "notes.txt").write_text("mine")
    refused(target, "notes.txt")
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_text("meow")
    refused(photos, "is not an adapter directory")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "linked", target_is_directory=True)
    convert_adapter(raw, to=to, output_dir=link)
    assert link.is_symlink()
    assert base_of(tmp_path / "linked") == str(tmp_path / "base")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("mark", ["fused_expert_lora.safetensors", "trainer_log.jsonl", "training_loss.png"])
@pytest.mark.parametrize("to", ["kt-merged", "vllm"])
def test_a_training_output_gives_way_to_another_only(make_raw, tmp_path, mark, to):
    source, victim = make_raw(), make_raw("victim", expert={})
    (victim / mark).write_bytes(b"days of training")
    before = contents(victim)
    with pytest.raises(ProblemsError) as error:
        convert_adapter(source, to=to, output_dir=victim, overwrite=True)
    (said,) = [item.found for item in error.value.problems if item.code == "KTB701"]
    assert (mark in said, "training output" in said) == (True, True)
    assert contents(victim) == before
    convert_adapter(source, to="raw", output_dir=victim, overwrite=True)
    assert make_raw("victim", overwrite=True) == victim  # and training itself may


def test_outputs_may_not_overlap(make_raw, tmp_path):
    raw = make_raw()
    for kwargs in (
        {"merged_output_dir": raw},
        {"merged_output_dir": raw / "inside"},
        {"expert_output_dir": tmp_path / "a", "nonexpert_output_dir": tmp_path / "a" / "b"},
        {"expert_output_dir": tmp_path / "a", "merged_output_dir": tmp_path / "a"},
        {"to": "vllm", "output_dir": raw / "inside"},
        {"to": "raw", "output_dir": raw},
    ):
        with pytest.raises(ProblemsError) as caught:
            convert_adapter(raw, overwrite=True, **kwargs)
        assert "KTB706" in codes(caught, "error")


@pytest.mark.parametrize("to", ["kt-merged", "peft-fused", "gguf"])
def test_modes_follow_the_umask(make_raw, tmp_path, to):
    before = os.umask(0o027)
    try:
        raw = make_raw(base_model=str(write_config(tmp_path / "base")))
        convert_adapter(raw, to=to, output_dir=tmp_path / "deep" / "m")
    finally:
        os.umask(before)
    for directory in (raw, tmp_path / "deep" / "m"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o750
        assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o640}


@pytest.mark.parametrize("to", ["kt-merged", "vllm"])
@pytest.mark.parametrize(
    ("number", "says", "step"),
    [
        (errno.ENOSPC, r"the disk is full: 1?\d\.\d kB are needed", "free space"),
        (errno.EROFS, "nothing was written.*Read-only", "choose another output directory"),
        (errno.EIO, "nothing was written", "try again"),
    ],
)
def test_a_failure_while_writing_leaves_nothing(make_raw, tmp_path, monkeypatch, to, number, says, step):
    raw, real = make_raw(), os.fsync

    def failing(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(KtbridgeError, match=says) as caught:
        convert_adapter(raw, to=to, output_dir=tmp_path / "new" / "parents" / "m")
    assert caught.value.next_step.startswith(step)
    assert os.listdir(tmp_path) == ["raw"]


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("source", ["raw", "peft"])
def test_a_stop_between_two_outputs_says_which_one_is_in_place(make_raw, tmp_path, monkeypatch, stop, source):
    convert_adapter(make_raw(), to="peft-fused", output_dir=tmp_path / "peft")
    commit, calls = Staging.commit, []

    def failing(self):
        calls.append(self)
        if len(calls) == 2:
            raise stop
        commit(self)

    monkeypatch.setattr(Staging, "commit", failing)
    first = tmp_path / "e"
    with pytest.raises((KtbridgeError, KeyboardInterrupt), match=rf"only {first} is in place"):
        convert_to(tmp_path / source, "en")
    assert sorted(os.listdir(tmp_path)) == ["e", "peft", "raw"]
    assert (first / "adapter_config.json").exists()


# Python tells its audit hooks of every file opened, made or renamed.
AUDITED = """
import json, os, sys
seen = []
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, os.PathLike)) and args[2] & os.O_CREAT:
        seen.append(["write", os.fspath(args[0])])
    elif event == "os.rename":
        seen.append(["rename", os.fspath(args[0])])
sys.addaudithook(hook)
from ktbridge.adapter import convert_adapter
convert_adapter(sys.argv[1], expert_output_dir=sys.argv[2], nonexpert_output_dir=sys.argv[3])
print(json.dumps(seen))
"""


def test_the_manifest_is_written_last(make_raw, tmp_path, warm):
    done = warm.run("-c", AUDITED, make_raw(), tmp_path / "e", tmp_path / "n")
    assert done.returncode == 0, done.stderr
    events = {"e": [], "n": []}
    for what, name in json.loads(done.stdout):
        for target, rows in events.items():
            if f".{target}.partial-" in name:
                rows.append((what, Path(name).name if what == "write" else "directory"))
    expected = [
        ("write", "adapter_model.safetensors"),
        ("write", "adapter_config.json"),
        ("write", "kt_adapter_manifest.json"),
        ("rename", "directory"),
    ]
    assert events == {"e": expected, "n": expected}


@pytest.mark.parametrize("to", ["kt-merged", "vllm"])
def test_a_file_among_the_parents(make_raw, tmp_path, to):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ProblemsError) as error:
        convert_adapter(make_raw(), to=to, output_dir=tmp_path / "file" / "m")
    (said,) = [item.found for item in error.value.problems if item.severity == "error"]
    assert said == f"lies inside {tmp_path / 'file'}, which is not a directory"


@pytest.mark.parametrize("kind", ["pipe", "directory", "link to nowhere"])
@pytest.mark.parametrize("name", ["in/adapter_model.safetensors", "in/a.gguf", "a.gguf"])
def test_what_is_no_regular_file_is_refused_at_once(make_raw, tmp_path, warm, kind, name):
    make_raw("in", expert={})
    (tmp_path / "in" / "adapter_model.safetensors").unlink()
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    given = path if name == "a.gguf" else path.parent
    done = warm.run("-m", "ktbridge", "convert", given, "--to=raw", f"--output-dir={tmp_path}/o", timeout=60)
    assert (done.returncode in (1, 2), "Traceback" in done.stderr) == (True, False)
    assert "next" in done.stderr
    assert not (tmp_path / "o").exists()


def test_a_file_that_is_a_link_to_nowhere_is_not_a_missing_half(make_raw, tmp_path):
    raw = make_raw()
    (raw / "fused_expert_lora.safetensors").unlink()
    (raw / "fused_expert_lora.safetensors").symlink_to("gone")
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, merged_output_dir=tmp_path / "merged")
    assert codes(caught) == {"KTB005"}
    assert caught.value.problems[0].found == "is a link to nowhere"
    assert not (tmp_path / "merged").exists()


# Sends itself a signal at the first call of a function, and runs the command line.
STOPPED = """
import importlib, os, signal, sys
number, module, name, *argv = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)
place = importlib.import_module(module)
real = getattr(place, name)
def stopping(*args, **kwargs):
    setattr(place, name, real)
    os.kill(os.getpid(), int(number))
    return real(*args, **kwargs)
setattr(place, name, stopping)
from ktbridge.cli import main
main(args=argv, prog_name="ktbridge")
"""


@pytest.mark.quick("fsync-False-kt-merged-2|rmtree-True-vllm-15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to", ["kt-merged", "vllm"])
@pytest.mark.parametrize(("moment", "written"), [("os.fsync", False), ("shutil.rmtree", True)])
def test_an_interrupt_cleans_up_and_says_what_is_in_place(
    make_raw, tmp_path, warm, number, to, moment, written
):
    raw, place = make_raw(), tmp_path / "place"
    target = place / "m"
    if written:  # what is removed is the old directory, after the exchange
        convert_adapter(raw, to=to, output_dir=target, base_model="old")
    argv = ("convert", raw, f"--to={to}", f"--output-dir={target}", "--overwrite", "--json")
    done = warm.run("-c", STOPPED, int(number), *moment.rsplit(".", 1), *argv)
    left = f"{target} is in place" if written else "nothing was written"
    assert done.returncode == 128 + number
    assert json.loads(done.stdout)["error"] == f"interrupted: {left}"
    assert done.stderr.startswith("error: interrupted")
    assert place.exists() == written
    if written:
        assert (os.listdir(place), base_of(target)) == (["m"], "models/base")


def test_a_tensor_with_bytes_of_another_length_is_not_written(tmp_path):
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(KtbridgeError, match="5 bytes"):
        write_raw_adapter(
            tmp_path / "raw", expert={}, nonexpert={key: Tensor(key, "BF16", (1, 3), b"12345")},
            config={}, base_model="b", rank=1, alpha=1.0,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())
