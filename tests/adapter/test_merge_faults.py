"""What isn't merged, and why; full disks and memory, of merging and converting alike."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest
from click.testing import CliRunner
from rawadapter import nonexpert_tensors, write_base, write_config
from tensorfiles import write_tensor_file

from ktbridge.adapter import Tensor, merge_adapter
from ktbridge.adapter.merge import plan_merge
from ktbridge.cli import main
from ktbridge.errors import KtbridgeError, ProblemsError

H, I = 16, 8  # noqa: E741
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def filled(name: str, shape: tuple[int, ...], bits: int = 0x3F80) -> Tensor:
    """One value of bfloat16, of itself one."""
    return Tensor(name, "BF16", shape, np.full(shape, bits, np.uint16).tobytes())


def pair(module: str, rows: int, columns: int = H) -> dict[str, Tensor]:
    """LoRA of one further module."""
    halves = {"A": (4, columns), "B": (rows, 4)}
    names = {f"base_model.model.{module}.lora_{half}.weight": halves[half] for half in halves}
    return {name: filled(name, shape) for name, shape in names.items()}


FP8 = Tensor(f"{EXPERT}.weight", "F8_E4M3", (I, H), bytes(I * H))
PACKED = Tensor(f"{EXPERT}.weight_packed", "I32", (I, H // 8), bytes(I * H // 2))
Z_PROJ, LM_HEAD = pair("model.layers.0.self_attn.z_proj", 9), pair("lm_head", 32)


@pytest.mark.parametrize(
    ("stored", "trained", "code", "places"),
    [
        ({FP8.name: FP8}, {}, "KTB732", [EXPERT]),
        ({FP8.name: None, PACKED.name: PACKED}, {}, "KTB732", [EXPERT]),
        ({FP8.name: None}, Z_PROJ, "KTB731", ["up_proj", "z_proj"]),
        ({}, LM_HEAD, "KTB733", ["lm_head"]),  # tied to the embedding
        ({FP8.name: filled(FP8.name, (I, H + 1))}, {}, "KTB734", [EXPERT]),
    ],
    ids=["FP8", "packed", "no weight", "tied", "another shape"],
)
def test_weights_that_lora_cannot_be_added_to_are_named(make_raw, tmp_path, stored, trained, code, places):
    base = write_base(tmp_path / "base", replace=stored)
    raw = make_raw(nonexpert=nonexpert_tensors() | trained, target_modules=None)
    with pytest.raises(ProblemsError) as caught:
        merge_adapter(raw, base_model=base, output=tmp_path / "out")
    errors = [item for item in caught.value.problems if item.severity == "error"]
    assert {item.code for item in errors} == {code}
    assert all(item.next_step for item in errors)
    assert len(errors) == len(places)
    for place in places:
        assert any(place in f"{item.where} {item.found}" for item in errors)
    assert not (tmp_path / "out").exists()


def test_a_merge_is_not_written_into_its_base(make_raw, tmp_path):
    base = write_base(tmp_path / "base")
    with pytest.raises(ProblemsError, match="KTB736"):
        merge_adapter(make_raw(), base_model=base, output=base / "inside")


def test_values_that_make_no_model_are_refused_while_merging(make_raw, tmp_path):
    rest = nonexpert_tensors()
    base = write_base(tmp_path / "base")
    half = write_base(tmp_path / "half", dtype="F16")
    name = min(rest)
    zero = {key: filled(key, tensor.shape, 0) for key, tensor in rest.items()}
    bad = rest | {name: filled(name, rest[name].shape, 0x7FC0)}
    for raw, model, says in (
        (make_raw("zero", expert={}, nonexpert=zero), base, "changes no weight"),
        (make_raw("bad", nonexpert=bad), base, "NaN or infinite"),
        (make_raw("big", alpha=4e5), half, "F16 can't hold"),
    ):
        with pytest.raises(KtbridgeError, match=says):
            merge_adapter(raw, base_model=model, output=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["bad", "base", "big", "half", "zero"]


# The kernel refuses to let a file grow beyond the limit: a write fails halfway through.
FULL = """
import resource, signal, sys
from ktbridge.adapter import convert_adapter, merge_adapter
from ktbridge.errors import KtbridgeError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
raw, base, out, act = sys.argv[1:]
try:
    if act == "merge":
        merge_adapter(raw, base_model=base, output=out)
    else:
        convert_adapter(raw, to=act, output_dir=out)
except KtbridgeError as error:
    print(error)
"""


@pytest.mark.parametrize("act", ["merge", "kt-merged", "vllm"])
def test_a_full_disk_leaves_nothing(make_raw, tmp_path, warm, act):
    raw, base = make_raw(), write_base(tmp_path / "base")
    done = warm.run("-c", FULL, raw, base, tmp_path / "out", act)
    assert done.returncode == 0, done.stderr
    assert "nothing was written" in done.stdout
    assert os.strerror(errno.EFBIG) in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["base", "raw"]


def test_no_space_is_said_before_and_while_writing(make_raw, tmp_path, monkeypatch):
    raw, base, out = make_raw(), write_base(tmp_path / "base"), tmp_path / "out"
    plan = plan_merge(raw, base_model=base, output=out)
    assert plan.bytes == sum(path.stat().st_size for path in base.iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(KtbridgeError, match="disk is full"):
            merge_adapter(raw, base_model=base, output=out)
    usage = type("Usage", (), {"free": plan.bytes - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ProblemsError, match="KTB737"):
        merge_adapter(raw, base_model=base, output=out)
    assert sorted(os.listdir(tmp_path)) == ["base", "raw"]


GROWN = """
import resource, sys
from ktbridge.adapter.merge import merge_adapter
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge_adapter(sys.argv[1], base_model=sys.argv[2], output=sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_follow_the_checkpoint(make_raw, tmp_path, warm):
    rows, columns = 60_000, 1024
    base = write_config(tmp_path / "base", num_hidden_layers=1, hidden_size=columns, num_experts=0)
    module = "model.layers.0.self_attn.q_proj"
    weight = Tensor(f"{module}.weight", "BF16", (rows, columns), bytes(2 * rows * columns))
    write_tensor_file(base / "model.safetensors", [weight])
    raw = make_raw(expert={}, nonexpert=pair(module, rows, columns))
    del weight
    done = warm.run("-c", GROWN, raw, base, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40_000  # KB; the shard has 123,000


def test_an_index_without_its_shards_says_what_is_missing_and_what_to_do(make_raw, tmp_path):
    raw, base = make_raw(), write_base(tmp_path / "base", shards=5)
    for number, gone in ((1, "1 of the 5 weight files"), (2, "2 of the 5"), (4, "3 of the 5")):
        (base / f"model-{number}.safetensors").unlink()
        command = ["merge", str(raw), "--base-model", str(base), "--output", str(tmp_path / "out")]
        result = CliRunner().invoke(main, [*command, "--json"])
        told = json.loads(result.stdout)
        assert result.exit_code == 1
        assert gone in told["error"]
        assert "model-1.safetensors" in told["error"]
        assert "download the rest, or copy them there" in told["next_step"]
    assert not (tmp_path / "out").exists()
