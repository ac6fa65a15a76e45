"""Merging: exact rounding, what is refused and how, and that no failure leaves half a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rawadapter import write_base
from tensorfiles import write_tensor_file

from ktbridge import _kernels
from ktbridge.adapter import Tensor, convert_adapter, merge_values
from ktbridge.adapter.merge import MERGE_FILE, merge_adapter, plan_merge
from ktbridge.cli import main
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.model import open_checkpoint

E, H, I = 3, 16, 8  # noqa: E741
CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": H, "num_experts": E,
    "moe_intermediate_size": I, "num_experts_per_tok": 2,
}  # fmt: skip
NUMPY = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
Make = Callable[..., Path]


def values(tensor: Tensor) -> np.ndarray:
    """A tensor in float32."""
    raw = np.frombuffer(tensor.data, NUMPY[tensor.dtype])
    if tensor.dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32).reshape(tensor.shape)


def stored(name: str, array: np.ndarray, dtype: str = "BF16") -> Tensor:
    """float32 values that are exact in ``dtype`` after cutting."""
    if dtype == "BF16":
        data = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        data = array.astype(NUMPY[dtype])
    return Tensor(name, dtype, array.shape, data.tobytes())


@pytest.fixture
def make_base(tmp_path: Path) -> Callable[..., Path]:
    return lambda name="base", **options: write_base(tmp_path / name, **options)


def expected_delta(raw: dict[str, Tensor], rest: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Deltas in float64 for what make_raw writes: r = 4, alpha 8 in both halves."""
    deltas = {}
    for layer in range(2):
        for name in ("gate", "up", "down"):
            a, b = (values(raw[f"layers.{layer}.experts.{name}_lora_{h}"]) for h in "ab")
            for expert in range(E):
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                deltas[stem] = 2.0 * b[expert].astype(np.float64) @ a[expert]
        for name in "qkvo":
            stem = f"model.layers.{layer}.self_attn.{name}_proj"
            a, b = (values(rest[f"base_model.model.{stem}.lora_{h}.weight"]) for h in "AB")
            deltas[f"{stem}.weight"] = 2.0 * b.astype(np.float64) @ a
    return deltas


@pytest.mark.parametrize(("dtype", "bits"), [("BF16", 8), ("F16", 11), ("F32", 23)])
def test_every_value_is_rounded_once(
    make_raw: Make, make_base: Make, experts: Any, nonexperts: Any, tmp_path: Path,
    dtype: str, bits: int,
) -> None:  # fmt: skip
    base = make_base(dtype=dtype)
    merge_adapter(make_raw(), base_model=base, output=tmp_path / "out")
    deltas = expected_delta(experts(), nonexperts())
    old, new = open_checkpoint(base), open_checkpoint(tmp_path / "out")
    for name in old:
        if name not in deltas:
            assert old.tensor(name).data == new.tensor(name).data
            continue
        exact = values(old.tensor(name)).astype(np.float64) + deltas.pop(name)
        got = values(new.tensor(name)).astype(np.float64)
        # Half a unit in the last place, and what float32 itself may be off before rounding.
        half = 2.0 ** (np.frexp(exact)[1] - bits - 1)
        assert (np.abs(got - exact) <= half + 2e-6 * np.abs(exact).max()).all()
    assert not deltas


def test_ties_go_to_even(make_base: Make, make_raw: Make, experts: Any, tmp_path: Path) -> None:
    # W = 1, B·A one of 2**-8 (halfway up from 1) and 3 * 2**-8 (halfway up from 1 + 2**-7).
    expert = experts(rank=1)
    for name, tensor in expert.items():
        half = np.zeros(tensor.shape, np.float32)
        if "gate_lora_a" in name:
            half[:] = np.where(np.arange(H) % 2, 3 * 2.0**-8, 2.0**-8)
        elif "gate_lora_b" in name:
            half[:] = 1
        expert[name] = stored(name, half)
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"
        for layer in range(2)
        for expert in range(E)
    ]
    ones = {name: stored(name, np.ones((I, H), np.float32)) for name in names}
    raw = make_raw(expert=expert, nonexpert={}, rank=1, alpha=1.0)
    report = merge_adapter(raw, base_model=make_base(replace=ones), output=tmp_path / "out")
    new = values(open_checkpoint(tmp_path / "out").tensor(next(iter(ones))))
    assert set(new[:, 0::2].flat) == {1.0}
    assert {Fraction(float(v)) for v in new[:, 1::2].flat} == {1 + Fraction(2, 128)}
    assert report.changed == 2 * E * I * H // 2


def test_any_layout_merges_to_the_same_bytes(
    make_raw: Make, make_base: Make, tmp_path: Path
) -> None:
    raw, base = make_raw(), make_base()
    convert_adapter(
        raw, expert_output_dir=tmp_path / "e", nonexpert_output_dir=tmp_path / "n",
        merged_output_dir=tmp_path / "m",
    )  # fmt: skip
    for name, source in {"raw-out": raw, "m-out": tmp_path / "m", "e-out": tmp_path / "e",
                         "n-out": tmp_path / "n"}.items():  # fmt: skip
        merge_adapter(source, base_model=base, output=tmp_path / name)
    whole, merged, half, other = (
        open_checkpoint(tmp_path / name) for name in ("raw-out", "m-out", "e-out", "n-out")
    )
    for name in whole:
        data = bytes(whole.tensor(name).data)
        assert data == bytes(merged.tensor(name).data)
        assert data == bytes((half if ".experts." in name else other).tensor(name).data)


def test_own_ranks_and_scales_are_merged_as_trained(
    make_raw: Make, make_base: Make, nonexperts: Any, tmp_path: Path
) -> None:
    rest = nonexperts()
    wide = nonexperts(rank=6)
    rest.update({name: tensor for name, tensor in wide.items() if "o_proj" in name})
    raw = make_raw(
        expert={}, nonexpert=rest, rank_pattern={"o_proj": 6}, alpha_pattern={"q_proj": 3.0}
    )
    plan = plan_merge(raw, base_model=make_base(), output=tmp_path / "out")
    scales = {row["module"]: (row["rank"], row["scale"]) for row in plan.modules()}
    assert scales == {
        "self_attn.q_proj": (4, 0.75),
        "self_attn.k_proj": (4, 2.0),
        "self_attn.v_proj": (4, 2.0),
        "self_attn.o_proj": (6, 8 / 6),
    }


def codes(raw: Path, base: Path, out: Path) -> dict[str, list[str]]:
    """The problems of a refused merge: code -> what each is about."""
    with pytest.raises(ProblemsError) as caught:
        merge_adapter(raw, base_model=base, output=out)
    found: dict[str, list[str]] = {}
    for item in caught.value.problems:
        if item.severity == "error":
            assert item.next_step
            found.setdefault(item.code, []).append(f"{item.where}: {item.found}")
    assert not out.exists()
    return found


EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def test_quantized_weights_are_refused_one_by_one(
    make_raw: Make, make_base: Make, tmp_path: Path
) -> None:
    fp8 = Tensor(f"{EXPERT}.weight", "F8_E4M3", (I, H), bytes(I * H))
    packed = Tensor(f"{EXPERT}.weight_packed", "I32", (I, H // 8), bytes(I * H // 2))
    for number, replace in enumerate(
        ({f"{EXPERT}.weight": fp8}, {f"{EXPERT}.weight": None, packed.name: packed})
    ):
        base = make_base(f"base{number}", replace=replace)
        found = codes(make_raw(f"raw{number}"), base, tmp_path / "out")
        assert list(found) == ["KTB732"]
        assert EXPERT in found["KTB732"][0]


def test_a_tensor_without_a_weight_is_named(
    make_raw: Make, make_base: Make, nonexperts: Any, tmp_path: Path
) -> None:
    rest = nonexperts()
    for half, shape in (("A", (4, H)), ("B", (9, 4))):
        name = f"base_model.model.model.layers.0.self_attn.z_proj.lora_{half}.weight"
        rest[name] = stored(name, np.ones(shape, np.float32))
    raw = make_raw(nonexpert=rest, target_modules=None)
    base = make_base(replace={f"{EXPERT}.weight": None})
    found = codes(raw, base, tmp_path / "out")
    assert list(found) == ["KTB731"]
    assert sorted(text.split(": ")[-2].rpartition(".")[2] for text in found["KTB731"]) == [
        "up_proj", "z_proj",
    ]  # fmt: skip


def test_other_refusals(make_raw: Make, make_base: Make, nonexperts: Any, tmp_path: Path) -> None:
    head = dict(nonexperts())
    for half, shape in (("A", (4, H)), ("B", (32, 4))):
        name = f"base_model.model.lm_head.lora_{half}.weight"
        head[name] = stored(name, np.ones(shape, np.float32))
    base, out = make_base(), tmp_path / "out"
    tied = make_raw("tied", nonexpert=head, target_modules=None)
    assert list(codes(tied, base, out)) == ["KTB733"]
    narrow = stored(f"{EXPERT}.weight", np.ones((I, H + 1), np.float32))
    assert list(codes(make_raw(), make_base("b2", replace={narrow.name: narrow}), out)) == [
        "KTB734"
    ]
    assert list(codes(make_raw("raw3"), base, base / "inside")) == ["KTB736"]


def test_values_that_make_no_model_are_refused_while_merging(
    make_raw: Make, make_base: Make, nonexperts: Any, tmp_path: Path
) -> None:
    rest, out = nonexperts(), tmp_path / "out"
    base, half = make_base(), make_base("half", dtype="F16")
    zero = {name: stored(name, np.zeros(tensor.shape, np.float32)) for name, tensor in rest.items()}
    name = sorted(rest)[0]
    bad = {**rest, name: stored(name, np.full(rest[name].shape, np.nan, np.float32))}
    for raw, model, says in (
        (make_raw("zero", expert={}, nonexpert=zero), base, "changes no weight"),
        (make_raw("bad", nonexpert=bad), base, "NaN or infinite"),
        (make_raw("big", alpha=4e5), half, "F16 can't hold"),
    ):
        with pytest.raises(KtbridgeError, match=says):
            merge_adapter(raw, base_model=model, output=out)
    assert sorted(os.listdir(tmp_path)) == ["bad", "base", "big", "half", "zero"]


def test_kernels_that_arent_there_are_named(
    make_raw: Make, make_base: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, base = make_raw(), make_base()
    monkeypatch.setenv("KTBRIDGE_ISA", "mmx")
    with pytest.raises(KtbridgeError, match="this CPU can't run 'mmx' kernels; it can run: auto, "):
        merge_adapter(raw, base_model=base, output=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["base", "raw"]


@pytest.mark.parametrize("isa", _kernels.isa_available())
def test_every_instruction_set_gives_the_same_bytes(
    make_raw: Make, make_base: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str
) -> None:
    raw, base = make_raw(), make_base()
    for name, chosen in (("best", "auto"), ("forced", isa)):
        monkeypatch.setenv("KTBRIDGE_ISA", chosen)
        merge_adapter(raw, base_model=base, output=tmp_path / name)
    best, forced = (open_checkpoint(tmp_path / name) for name in ("best", "forced"))
    for name in best:
        assert bytes(best.tensor(name).data) == bytes(forced.tensor(name).data)


@pytest.mark.skipif(_kernels.isa_available() == ["scalar"], reason="no fused multiply-add")
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_without_kernels_the_bytes_are_the_same(
    make_raw: Make, make_base: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    raw, base = make_raw(), make_base(dtype=dtype)
    merge_adapter(raw, base_model=base, output=tmp_path / "kernels")
    monkeypatch.setattr(merge_values, "has_kernels", lambda: False)
    monkeypatch.setitem(sys.modules, "ktbridge._kernels", None)
    report = merge_adapter(raw, base_model=base, output=tmp_path / "numpy")
    assert 0 < report.changed <= report.values
    for shard in ("model-0.safetensors", "model-1.safetensors"):
        one, other = ((tmp_path / name / shard).read_bytes() for name in ("kernels", "numpy"))
        assert one == other


def test_what_lies_beside_the_shards(make_raw: Make, make_base: Make, tmp_path: Path) -> None:
    base = make_base()
    (base / "chat_template.jinja").write_text("x")
    (base / "consolidated.safetensors").write_bytes(b"unmerged")
    (base / "pytorch_model.bin").write_bytes(b"unmerged")
    (base / "original").mkdir()
    mask = os.umask(0o027)
    try:
        report = merge_adapter(make_raw(), base_model=base, output=tmp_path / "out")
    finally:
        os.umask(mask)
    assert report.left_out == ("consolidated.safetensors", "original", "pytorch_model.bin")
    copied = {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    }
    shards = {"model-0.safetensors", "model-1.safetensors"}
    assert set(os.listdir(tmp_path / "out")) == {*copied, *shards, MERGE_FILE}
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


def test_overwrite_replaces_a_merge_and_nothing_else(
    make_raw: Make, make_base: Make, tmp_path: Path
) -> None:
    raw, base, out = make_raw(), make_base(), tmp_path / "out"
    merge_adapter(raw, base_model=base, output=out)
    with pytest.raises(ProblemsError):
        merge_adapter(raw, base_model=base, output=out)
    merge_adapter(raw, base_model=base, output=out, overwrite=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ProblemsError) as caught:
        merge_adapter(raw, base_model=base, output=out, overwrite=True)
    assert "notes.txt" in caught.value.problems[-1].found
    other = make_base("other")
    with pytest.raises(ProblemsError):
        merge_adapter(raw, base_model=base, output=other, overwrite=True)
    assert (other / "tokenizer.json").exists()


def test_a_full_disk_leaves_nothing(make_raw: Make, make_base: Make, tmp_path: Path) -> None:
    # The kernel refuses to let a file grow beyond the limit: a write fails halfway through.
    raw, base, out = make_raw(), make_base(), tmp_path / "out"
    code = (
        "import resource, signal, sys, errno, os\n"
        "from ktbridge.adapter.merge import merge_adapter\n"
        "from ktbridge.errors import KtbridgeError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: merge_adapter(*sys.argv[1:2], base_model=sys.argv[2], output=sys.argv[3])\n"
        "except KtbridgeError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, raw, base, out], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert "nothing was written" in done.stdout
    assert os.strerror(errno.EFBIG) in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["base", "raw"]


def test_no_space_is_said_before_and_while_writing(
    make_raw: Make, make_base: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, base, out = make_raw(), make_base(), tmp_path / "out"
    plan = plan_merge(raw, base_model=base, output=out)
    assert plan.bytes == sum(path.stat().st_size for path in base.iterdir())

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(KtbridgeError, match="disk is full"):
            merge_adapter(raw, base_model=base, output=out)
    usage = type("Usage", (), {"free": plan.bytes - 1})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage)
        assert list(codes(raw, base, out)) == ["KTB737"]
    assert sorted(os.listdir(tmp_path)) == ["base", "raw"]


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(
    make_raw: Make, make_base: Make, tmp_path: Path
) -> None:
    raw, base, out = make_raw(), make_base(), tmp_path / "out"
    merge_adapter(raw, base_model=base, output=out)
    whole = {path.name: path.read_bytes() for path in out.iterdir() if path.name != MERGE_FILE}
    # The child kills itself at its n-th write, copy, flush, file or rename.
    code = (
        "import os, signal, sys\n"
        "from ktbridge.adapter.merge import merge_adapter\n"
        "count, limit = 0, int(sys.argv[4])\n"
        "def step():\n"
        "    global count\n"
        "    count += 1\n"
        "    if count > limit: os.kill(os.getpid(), signal.SIGKILL)\n"
        "def hook(event, args):\n"
        "    if event in ('open', 'os.mkdir', 'os.rename', 'shutil.rmtree', 'ctypes.dlopen'): step()\n"
        "def counted(call):\n"
        "    def wrapper(*args):\n"
        "        step()\n"
        "        return call(*args)\n"
        "    return wrapper\n"
        "for name in ('pwrite', 'copy_file_range', 'fsync'):\n"
        "    setattr(os, name, counted(getattr(os, name)))\n"
        "sys.addaudithook(hook)\n"
        "merge_adapter(sys.argv[1], base_model=sys.argv[2], output=sys.argv[3], overwrite=True)\n"
        "print(count)\n"
    )

    def run(limit: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, raw, base, out, str(limit)], capture_output=True,
            text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip

    moments = int(run(10**9).stdout)
    # The last ones matter most: manifest, flush, exchange, removal of the old directory.
    for limit in (*range(1, moments - 12, moments // 5), *range(moments - 12, moments)):
        assert run(limit).returncode == -signal.SIGKILL
        found = {path.name: path.read_bytes() for path in out.iterdir() if path.name != MERGE_FILE}
        assert found == whole, limit
    merge_adapter(raw, base_model=base, output=out, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["base", "out", "raw"]


def test_memory_does_not_follow_the_checkpoint(tmp_path: Path, make_raw: Make) -> None:
    rows, columns, rank = 60_000, 1024, 4
    base = tmp_path / "base"
    base.mkdir()
    config = {**CONFIG, "hidden_size": columns, "num_hidden_layers": 1, "num_experts": 0}
    (base / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.self_attn.q_proj"
    weight = Tensor(f"{name}.weight", "BF16", (rows, columns), bytes(2 * rows * columns))
    write_tensor_file(base / "model.safetensors", [weight])
    rest = {}
    for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
        key = f"base_model.model.{name}.lora_{half}.weight"
        rest[key] = stored(key, np.ones(shape, np.float32))
    raw = make_raw(expert={}, nonexpert=rest)
    del weight
    code = (
        "import resource, sys\n"
        "from ktbridge.adapter.merge import merge_adapter\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "merge_adapter(sys.argv[1], base_model=sys.argv[2], output=sys.argv[3])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    grown = subprocess.run(
        [sys.executable, "-c", code, raw, base, tmp_path / "out"], capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ).stdout  # fmt: skip
    assert int(grown) < 40_000  # KB; the shard has 123,000


def test_an_index_without_its_shards_says_what_is_missing_and_what_to_do(
    make_raw: Make, make_base: Make, tmp_path: Path
) -> None:
    raw, base = make_raw(), make_base(shards=5)
    for number, gone in ((1, "1 of the 5 weight files"), (2, "2 of the 5"), (4, "3 of the 5")):
        (base / f"model-{number}.safetensors").unlink()
        command = ["merge", str(raw), "--base-model", str(base), "--output", str(tmp_path / "out")]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1
        said = " ".join(result.stderr.split())
        assert gone in said
        assert "model-1.safetensors" in said
        assert "next" in said
        assert "download the rest, or copy them there" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_on_the_command_line(make_raw: Make, make_base: Make, tmp_path: Path) -> None:
    make_raw(), make_base()

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        code = "from ktbridge.cli import main; main(prog_name='ktbridge')"
        return subprocess.run(
            [sys.executable, "-c", code, "merge", *args], cwd=tmp_path, capture_output=True,
            text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip

    request = ("raw", "--base-model", "base", "--output", "out")
    dry = run(*request, "--dry-run")
    assert (dry.returncode, "nothing was written" in dry.stderr) == (0, True)
    assert "experts.gate_proj" in dry.stdout
    plan = json.loads(run(*request, "--dry-run", "--json").stdout)
    assert len(plan["deltas"]) == 2 * (3 * E + 4)
    assert not (tmp_path / "out").exists()
    done = json.loads(run(*request, "--json").stdout)
    assert done["tensors"] == 2 * (3 * E + 4)
    again = run(*request)
    assert (again.returncode, "Traceback" in again.stderr) == (1, False)
    assert "--overwrite" in again.stderr
    over = run(*request, "--overwrite")
    assert (over.returncode, "self_attn.q_proj" in over.stdout) == (0, True)
    assert run("raw", "--output", "x").returncode == 2
    assert run("raw", "--base-model", "gone", "--output", "x").returncode == 1
