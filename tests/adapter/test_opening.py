"""Every command reads an adapter of any format as a conversion would have made it, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from foreignadapter import E, R, peft_tensors, random, save
from rawadapter import nonexpert_tensors, write_base, write_raw
from safetensors.numpy import save_file

from ktbridge.adapter import convert_adapter, merge_adapter, open_adapter, validate_adapter
from ktbridge.adapter.formats import FORMATS, READABLE, WRITABLE
from ktbridge.adapter.merge import execute_merge, plan_merge
from ktbridge.adapter.opening import format_code
from ktbridge.cli import main
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.model import Tensor, open_checkpoint

OWN = ("raw", "kt-split", "kt-merged", "vllm")
KT = "sglang-kt==0.7.2"
TRAINING_ALONE = ("megatron-packed", "mcore")
WHOLE = [row.name for row in FORMATS if row.name not in ("kt-split", "mlx")]


def given_as(name: str, folder: Path, base: Path) -> Path:
    """An adapter in format ``name`` that fits ``base``."""
    if name in WRITABLE:
        raw = write_raw(folder / "raw-of-it", layers=(0, 1), base_model=str(base))
        convert_adapter(raw, to=name, output_dir=folder / "given", base_model=str(base))
        return folder / "given"
    tensors: dict[str, np.ndarray] = {}
    for layer in (0, 1):
        parts = {
            "gate_up": (random(E, R, 16), random(E, 16, R)),
            "down": (random(E, R, 8), random(E, 16, R)),
        }
        if name != "mcore":
            tensors |= peft_tensors(name, parts, layer)
            continue
        for part, (a, b) in parts.items():
            for e in range(E):
                stem = f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{part}_proj"
                tensors |= {f"{stem}.lora_A.weight": a[e], f"{stem}.lora_B.weight": b[e]}
    return save(folder / "given", tensors, base_model_name_or_path=str(base))


def weights(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


@pytest.mark.parametrize("name", WHOLE)
def test_merge_and_validate_read_any_format_as_its_conversion(tmp_path, name):
    base = write_base(tmp_path / "base")
    given = given_as(name, tmp_path, base)
    convert_adapter(given, to="raw", from_format=name, output_dir=tmp_path / "made")
    merge_adapter(tmp_path / "made", base_model=base, output=tmp_path / "expected")
    plan = plan_merge(given, base_model=base, output=tmp_path / "merged", from_format=name)
    assert (plan.adapter.reading == "") == (name in OWN)
    execute_merge(plan)
    assert weights(tmp_path / "merged") == weights(tmp_path / "expected") != weights(base)
    report = validate_adapter([given], base_model=base, from_format=name)
    errors = {item.code for item in report.problems if item.severity == "error"}
    assert errors == ({format_code(name)} if name in TRAINING_ALONE else set())  # no engine loads those
    (summary,) = report.adapters
    assert (summary["expert_layers"], summary["num_experts"]) == (2, E)
    assert summary["layout"] == {"kt-merged": "merged", "vllm": "merged"}.get(name, name)
    both = validate_adapter([tmp_path / "made", given], base_model=base, from_format=name)
    assert "KTB504" not in {item.code for item in both.problems}  # the same values


@pytest.mark.parametrize(
    ("name", "takers"),
    [
        ("peft-fused", {"vllm": "", "sglang": "--to sglang-3d", KT: "--to kt-merged"}),
        ("peft-0.18", {"vllm": "--to vllm", KT: "--to kt-merged"}),
        ("sglang-3d", {"vllm": "--to vllm", "sglang": "", KT: "--to kt-merged"}),
        ("gguf", {"vllm": "--to vllm", "sglang": "--to sglang-3d", KT: "--to kt-merged"}),
    ],
)
def test_an_engine_takes_a_format_or_the_command_that_converts_it_is_said(tmp_path, name, takers):
    base = write_base(tmp_path / "base")
    given = given_as(name, tmp_path, base)
    codes = {"gguf": "KTB016", "sglang-3d": "KTB216"}
    for engine, to in takers.items():
        report = validate_adapter([given], base_model=base, engine=engine, from_format=name)
        told = [item for item in report.problems if item.code == codes.get(name, "KTB208")]
        assert [item.severity for item in told] == (["error"] if to else [])
        assert all(f"--from {name} {to} --output D" in item.next_step for item in told)
        assert all(f"--base-model {base}" in item.next_step for item in told)


@pytest.mark.parametrize("parameter", ["gate_up", "down"])
def test_lora_on_one_parameter_alone_is_merged(tmp_path, parameter):
    base = write_base(tmp_path / "base")
    gate_up = random(E, R, 16), random(E, 16, R)
    gate_up[1][:, 8:] = 0  # up_proj's B: nothing is added there
    pair = {"gate_up": gate_up, "down": (random(E, R, 8), random(E, 16, R))}[parameter]
    tensors: dict[str, np.ndarray] = {}
    for layer in (0, 1):
        tensors |= peft_tensors("peft-fused", {parameter: pair}, layer)
    targets = [f"mlp.experts.{parameter}_proj"]
    given = save(
        tmp_path / "given", tensors, base_model_name_or_path=str(base),
        target_parameters=targets, peft_version="0.21.0",
    )  # fmt: skip
    merge_adapter(given, base_model=base, output=tmp_path / "out")
    old, new = open_checkpoint(base), open_checkpoint(tmp_path / "out")
    changed = {key for key in old if bytes(old.tensor(key).data) != bytes(new.tensor(key).data)}
    name = "gate" if parameter == "gate_up" else "down"
    stems = [f"model.layers.{layer}.mlp.experts.{e}" for layer in (0, 1) for e in range(E)]
    assert changed == {f"{stem}.{name}_proj.weight" for stem in stems}
    assert validate_adapter([given], base_model=base).ok
    problems = validate_adapter([given], base_model=base, engine=KT).problems
    assert "KTB203" in {item.code for item in problems}


def test_an_adapter_of_mlx_lm_for_the_last_layers_alone_is_whole(tmp_path):
    """mlx-lm trains the last 16 layers unless it is told otherwise."""
    base = write_base(tmp_path / "base")
    stem = "model.layers.1.mlp.switch_mlp"
    tensors = {
        "model.layers.1.self_attn.q_proj.lora_a": random(16, R),
        "model.layers.1.self_attn.q_proj.lora_b": random(R, 24),
    }
    for name, wide, high in (("gate", 16, 8), ("up", 16, 8), ("down", 8, 16)):
        tensors |= {f"{stem}.{name}_proj.lora_a": random(E, R, wide)}
        tensors |= {f"{stem}.{name}_proj.lora_b": random(E, high, R)}
    given = tmp_path / "given"
    given.mkdir()
    save_file(tensors, given / "adapters.safetensors")
    for count, there in ((-1, False), (2, False), (1, True)):
        numbers = {"rank": R, "scale": 2.0}
        told = {"model": str(base), "num_layers": count, "lora_parameters": numbers}
        (given / "adapter_config.json").write_text(json.dumps(told))
        report = validate_adapter([given], base_model=base)
        lacking = {item.code for item in report.problems} & {"KTB603", "KTB607"}
        assert bool(lacking) is not there
    convert_adapter(given, to="raw", output_dir=tmp_path / "raw")
    for adapter in (given, tmp_path / "raw"):
        report = merge_adapter(adapter, base_model=base, output=tmp_path / f"{adapter.name}-merged")
        assert report.changed


def test_half_precision_at_several_scales_is_merged(tmp_path):
    """The smallest values of float16 have no half there: float32 has."""
    base = write_base(tmp_path / "base", dtype="F32")
    layer = {"gate_up": (random(E, R, 16), random(E, 16, R)), "down": (random(E, R, 8), random(E, 16, R))}
    tensors = peft_tensors("peft-fused", layer, 1) | peft_tensors("peft-fused", layer, 0)
    short = {name: (each * 2**-15).astype(np.float16) for name, each in tensors.items()}
    alphas = {"layers.1.mlp.experts.down_proj": 3}
    given = save(tmp_path / "given", short, base_model_name_or_path=str(base), alpha_pattern=alphas)
    merge_adapter(given, base_model=base, output=tmp_path / "merged", from_format="peft-fused")
    before, after = open_checkpoint(base), open_checkpoint(tmp_path / "merged")
    a, b = ((each * 2**-15).astype(np.float16).astype(np.float32) for each in layer["down"])
    for number, scale in ((0, 6 / R), (1, 3 / R)):
        name = f"model.layers.{number}.mlp.experts.1.down_proj.weight"
        was, now = (np.frombuffer(each.tensor(name).data, np.float32) for each in (before, after))
        assert np.array_equal(now, was + np.float32(scale) * (b[1] @ a[1]).ravel())


def test_lora_by_target_parameters_without_experts_is_read_again(tmp_path):
    """PEFT finds dense MLPs and routers by target_parameters, so that peft-fused lists them there."""
    modules = {"mlp.gate": (3, 16)}
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)]
    routers = {name: Tensor(name, "BF16", (3, 16), bytes(96)) for name in names}
    base = write_base(tmp_path / "base", replace=routers)
    rest = nonexpert_tensors(modules=modules, block="")
    raw = write_raw(tmp_path / "raw", expert={}, nonexpert=rest, modules=modules, base_model=str(base))
    convert_adapter(raw, to="peft-fused", output_dir=tmp_path / "peft")
    given = tmp_path / "peft"
    assert json.loads((given / "adapter_config.json").read_text())["target_parameters"]
    for number, adapter in enumerate((raw, given)):
        merge_adapter(adapter, base_model=base, output=tmp_path / f"merged-{number}")
    assert weights(tmp_path / "merged-0") == weights(tmp_path / "merged-1")
    convert_adapter(given, to="raw", output_dir=tmp_path / "again")
    assert weights(tmp_path / "again") == weights(raw)


def test_the_command_says_once_what_it_read_and_errors_come_first(tmp_path):
    base = write_base(tmp_path / "base")
    given = given_as("peft-fused", tmp_path, base)
    (given / "adapter_model.safetensors").chmod(0o600)
    words = ["merge", str(given), "--base-model", str(base), "--output"]
    done = CliRunner().invoke(main, [*words, str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.stderr.count("read as peft-fused (found: base_model.model.") == 1
    again = CliRunner().invoke(main, [*words, str(tmp_path / "out")])
    raw = write_raw(tmp_path / "raw", layers=(0, 1), base_model=str(base))
    (raw / "adapter_model.safetensors").chmod(0o600)
    again = CliRunner().invoke(main, ["merge", str(raw), *words[2:], str(tmp_path / "out")])
    levels = [line.split()[0] for line in again.stderr.splitlines() if " KTB" in line]
    assert levels == ["error", "info"]


def test_what_is_ambiguous_or_unknown_is_refused_with_the_option(tmp_path):
    base = write_base(tmp_path / "base")
    given = given_as("unsloth-legacy", tmp_path, base)
    config = json.loads((given / "adapter_config.json").read_text())
    config["auto_mapping"] = {"unsloth_fixed": True}
    (given / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="ambiguous") as refused:
        open_adapter(given)
    assert "--from unsloth-legacy" in refused.value.next_step
    (told,) = validate_adapter([given]).problems
    assert (told.code, told.severity, told.next_step) == (
        "KTB018", "error", refused.value.next_step,
    )  # fmt: skip
    assert open_adapter(given, "unsloth-legacy", base).format == "unsloth-legacy"
    with pytest.raises(UsageError, match="not a name we know"):
        open_adapter(given, "lora")
    with pytest.raises(KtbridgeError, match="does not exist"):
        open_adapter(tmp_path / "nothing", "peft-fused")


def test_the_schema_of_reports_lists_every_format():
    schema = Path(__file__).parents[2] / "docs" / "validate.schema.json"
    listed = set(json.loads(schema.read_text())["$defs"]["readable"]["properties"]["layout"]["enum"])
    assert listed == {*READABLE} - {*OWN} | {"raw", "expert", "nonexpert", "merged"}
