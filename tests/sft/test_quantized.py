"""Experts that a run asks for in INT8 or INT4: quantized once, kept, and never half there."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from findings import codes
from planshapes import plan_run
from safetensors.torch import load_file, save_file
from tinymoe import tiny_model
from trainrun import ROWS, conversation, losses, quiet, run_command, train, write_run

from ktbridge.adapter.quantize import plan_quantize
from ktbridge.adapter.requantize import execute
from ktbridge.errors import ProblemsError
from ktbridge.files.locks import lock_target
from ktbridge.files.publish import CACHE
from ktbridge.sft.config import load_config
from ktbridge.sft.plan.inputs import TargetMachine
from ktbridge.sft.plan.memory import QUANTIZED
from ktbridge.sft.prepare import prepare
from ktbridge.sft.quantized import experts_path, find_quantized, storage_notes

MAKE = """
import os, signal, sys
from pathlib import Path
from ktbridge.sft.config import load_config
from ktbridge.sft.quantized import find_quantized
config = load_config(sys.argv[1], ["kt_config.kt_backend=AMXINT8"])
kill = lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done > total / 2 else None
wait = lambda holder: print("waits for", holder, flush=True)
nothing = lambda done, total: None
found = find_quantized(config, Path(config.model_name_or_path))
found.make(kill if sys.argv[2] == "kill" else nothing, wait)
"""


@pytest.fixture
def run_dir(tmp_path, base_dir):
    shutil.copytree(base_dir, tmp_path / "base")
    rows = [conversation(*turns) for turns in ROWS]
    return write_run(tmp_path, tmp_path / "base", rows, max_steps=2, save_steps=1)


def found_for(run_dir, *overrides):
    config = load_config(run_dir / "run.yaml", overrides)
    return find_quantized(config, Path(config.model_name_or_path))


def kept(directory):
    return sorted(path.name for path in directory.glob("[!.]*-experts-*"))


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_a_run_trains_on_what_the_script_would_make_and_makes_it_once(run_dir, storage):
    """Told by --dry-run and by the plan, whose numbers are those of the files, before and after."""
    asked = f"kt_config.kt_expert_weight_format={storage}"

    def run(*more):
        command = ["train", str(run_dir / "run.yaml"), "--json", asked, *more]
        done = run_command(*command)
        return json.loads(done.stdout)["notes"]

    def plan(*overrides):
        there = TargetMachine(gpu_memory=None, memory=64 * 10**9, disk=10**12, cores=2)
        found = plan_run(load_config(run_dir / "run.yaml", overrides), there, measure=False)
        return found, {part.what: part.size for part in found.parts}

    (note,) = run("--dry-run")
    assert (note["code"], note["severity"]) == ("KTC050", "info")
    assert f"are quantized to {storage.upper()} once, into " in note["found"]
    assert kept(run_dir) == []
    (planned, sizes), (plain, plain_sizes) = plan(asked), plan()

    run()
    (name,) = kept(run_dir)
    files = run_dir / name
    assert sorted(path.name for path in files.iterdir()) == [
        "config.json", "ktbridge_checkpoint.json", "model.safetensors",
    ]  # fmt: skip
    size = sum(tensor.nbytes for tensor in load_file(files / "model.safetensors").values())
    assert sizes[QUANTIZED] == sizes["experts, mapped"] == size
    saved = plain_sizes["experts, mapped"] - size
    assert plain.total("page cache") - planned.total("page cache") == saved
    after, _ = plan(asked)
    assert f"{files}: " in after.notes[0]
    assert after.total("disk") == planned.total("disk") - size
    assert after.total("page cache") == planned.total("page cache")

    whole = run_dir / "whole"
    execute(plan_quantize(run_dir / "base", whole, storage), lambda done, total: None)
    train(run_dir, f"kt_config.kt_weight_path={whole}", f"output_dir={run_dir / 'by-hand'}")
    assert losses(run_dir / "raw") == losses(run_dir / "by-hand")

    made = (files / "model.safetensors").stat()
    assert "that were made before are used" in run("overwrite_output_dir=true")[0]["found"]
    assert (files / "model.safetensors").stat() == made


def test_a_killed_process_leaves_nothing_whole_and_two_make_it_once(run_dir, warm):
    found = found_for(run_dir, "kt_config.kt_backend=AMXINT8")
    killed = warm.run("-c", MAKE, run_dir / "run.yaml", "kill")
    assert killed.returncode == -9
    assert not found.ready
    assert kept(run_dir) == []
    (left,) = [path for path in run_dir.iterdir() if ".partial-" in path.name]

    with lock_target(found.directory):
        others = [warm.start("-c", MAKE, run_dir / "run.yaml", "whole") for _ in range(2)]
        while not all(f"waits for process {os.getpid()} on" in other.said() for other in others):
            time.sleep(0.01)
        assert not found.directory.exists()
    assert [(other.communicate(100)[1], other.returncode) for other in others] == [("", 0)] * 2
    assert found.ready
    assert not left.exists()
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".")] == []


def test_weights_that_changed_are_quantized_anew(run_dir):
    asked = "kt_config.kt_expert_weight_format=int8"
    found = found_for(run_dir, asked)
    found.make()
    assert found_for(run_dir, asked).ready
    file = run_dir / "base" / "model.safetensors"
    os.utime(file)  # the same bytes, for all that is known of them
    touched = found_for(run_dir, asked)
    assert touched.directory == found.directory
    assert not touched.ready
    touched.make()
    assert touched.ready
    tensors = load_file(file)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] += 1
    file.unlink()
    save_file(tensors, file, {"format": "pt"})
    assert found_for(run_dir, asked).directory != found.directory
    (touched.directory / "model.safetensors").write_bytes(b"cut")
    assert not touched.ready


def test_where_they_are_kept_and_what_is_too_small_for_them(run_dir, monkeypatch, tmp_path):
    asked = "kt_config.kt_expert_weight_format=int4"
    assert found_for(run_dir, asked).directory.parent == run_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    hub = tmp_path / "hub" / "models--maker--Name" / "snapshots" / "abc"
    shutil.copytree(run_dir / "base", hub)
    directory = found_for(run_dir, asked, f"model_name_or_path={hub}").directory
    assert directory.parent == tmp_path / "xdg" / "ktbridge"
    assert directory.name.startswith("Name.int4-experts-")
    monkeypatch.setenv(CACHE, str(tmp_path / "mine"))
    assert found_for(run_dir, asked).directory.parent == tmp_path / "mine"

    little = shutil.disk_usage(run_dir)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: little)
    config = load_config(run_dir / "run.yaml", [asked])
    with pytest.raises(ProblemsError) as caught:
        prepare(config)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("KTC052", str(tmp_path))
    assert CACHE in problem.next_step
    assert not (tmp_path / "mine").exists()


def test_other_storages_stay_and_it_is_said(run_dir):
    """What is stored so already needs no word; what isn't in floats, and rows of odd lengths, do."""

    def told(directory, *overrides):
        config = load_config(run_dir / "run.yaml", [f"model_name_or_path={directory}", *overrides])
        base = Path(config.model_name_or_path)
        assert experts_path(config, base) is None
        return storage_notes(config, base)

    stored = run_dir / "stored"
    execute(plan_quantize(run_dir / "base", stored, "int8"), lambda done, total: None)
    assert told(stored, "kt_config.kt_backend=AMXINT8") == []
    (note,) = told(stored, "kt_config.kt_backend=AMXINT4")
    assert (note.code, note.severity) == ("KTC051", "warning")
    assert "AMXINT4, while the experts" in note.found
    assert "are stored as int8, and are read so" in note.found
    assert told(run_dir / "base", "kt_config.kt_backend=AMXBF16") == []
    tiny_model(moe_intermediate_size=40).save_pretrained(run_dir / "odd")
    (note,) = told(run_dir / "odd", "kt_config.kt_expert_weight_format=int4")
    assert note.found.endswith("groups of 32 values don't divide their rows")
    both = ["kt_config.kt_backend=AMXINT8", "kt_config.kt_expert_weight_format=bf16"]
    assert told(run_dir / "base", *both) == []
    config = load_config(run_dir / "run.yaml", both)
    assert codes(config.notes) == {"KTC005"}
    assert "kt_expert_weight_format decides" in config.notes[0].next_step
