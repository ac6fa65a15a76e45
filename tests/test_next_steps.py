"""Each next step that is a command runs as it is printed, and doesn't end in its own code."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapterfaults import add, drop, edit, edit_config, rename
from click.testing import CliRunner
from rawadapter import write_base, write_config, write_raw
from tensorfiles import write_tensor_file

import ktbridge
from ktbridge.adapter import Tensor, convert_adapter
from ktbridge.cli import main
from ktbridge.codes import CODES

PACKAGE = Path(ktbridge.__file__).parent
COMMAND = re.compile(r"\bktbridge (?:convert|validate|merge|push|serve|verify|plan|eval|run|predict) ")
P = "base_model.model."
Build = Callable[[Path], "list[str]"]


def merged(folder: Path, **kind: Any) -> Path:
    raw = write_raw(folder / "raw", **kind)
    convert_adapter(raw, to="kt-merged", output_dir=folder / "m")
    return folder / "m"


def changed(*changes: Any, args: tuple[str, ...] = (), **config: Any) -> Build:
    """``ktbridge validate`` of a merged directory after ``changes`` of its tensors and configuration."""

    def build(folder: Path) -> list[str]:
        path = merged(folder)
        for change in changes:
            edit(path, change)
        if config:
            edit_config(path, **config)
        return ["validate", str(path), *args]

    return build


def as_experts(table: dict[str, Tensor]) -> None:
    """PEFT's fused form, of PEFT 0.19.1 and later."""
    drop(".experts.")(table)
    shapes = {"base_layer.lora_A": (12, 16), "base_layer.lora_B": (16, 12),
              "lora_A": (12, 8), "lora_B": (16, 12)}  # fmt: skip
    for layer in (1, 2):
        for name, shape in shapes.items():
            add(f"{P}model.layers.{layer}.mlp.experts.{name}.weight", shape)(table)


def stacked(names: tuple[str, ...]) -> Callable[[dict[str, Tensor]], None]:
    def change(table: dict[str, Tensor]) -> None:
        drop(".experts.")(table)
        for layer in (1, 2):
            for name, (reads, writes) in zip(names, ((16, 8), (16, 8), (8, 16)), strict=True):
                at = f"{P}model.layers.{layer}.mlp.experts.{name}"
                add(f"{at}.lora_A.weight", (3, 4, reads))(table)
                add(f"{at}.lora_B.weight", (3, writes, 4))(table)

    return change


def mlx(folder: Path) -> list[str]:
    tensors = [Tensor(f"model.layers.0.self_attn.q_proj.lora_{half}", "F32", shape, bytes(512))
               for half, shape in (("a", (32, 4)), ("b", (4, 32)))]  # fmt: skip
    (folder / "a").mkdir()
    write_tensor_file(folder / "a" / "adapters.safetensors", tensors)
    settings = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0}}
    (folder / "a" / "adapter_config.json").write_text(json.dumps(settings))
    return ["validate", str(folder / "a")]


def gguf(folder: Path) -> list[str]:
    raw = write_raw(folder / "raw", base_model=str(write_base(folder / "base")), layers=(0, 1))
    convert_adapter(raw, to="gguf", output_dir=folder / "g")
    return ["validate", str(folder / "g")]


def under(prefix: str, model_type: str = "qwen3_moe") -> Build:
    def build(folder: Path) -> list[str]:
        base = write_base(folder / "base", model_type=model_type)
        raw = write_raw(folder / "raw", layers=(0, 1), prefix=prefix)
        convert_adapter(raw, to="vllm", output_dir=folder / "v")
        return ["validate", str(folder / "v"), "--engine", "vllm", "--base-model", str(base)]

    return build


def holder(folder: Path) -> list[str]:
    (folder / "runs").mkdir()
    merged(folder).rename(folder / "runs" / "checkpoint-2")
    return ["validate", str(folder / "runs")]


def raw_served(folder: Path) -> list[str]:
    return ["validate", str(write_raw(folder / "raw")), "--engine", "vllm"]


def in_a_checkpoint(folder: Path) -> list[str]:
    path = merged(folder)
    (path / "trainer_state.json").write_text("{}")
    (path / "optimizer.safetensors").write_bytes(b"")
    return ["validate", str(path), "--engine", "sglang-kt==0.7.2"]


def sharded(folder: Path) -> list[str]:
    path = edit(merged(folder), drop("no tensor"))
    whole = path / "adapter_model.safetensors"
    whole.rename(path / "adapter_model-00001-of-00001.safetensors")
    return ["validate", str(path)]


def narrower(table: dict[str, Tensor]) -> None:
    for layer in (1, 2):
        at = f"{P}model.layers.{layer}.self_attn.q_proj.lora_"
        add(f"{at}A.weight", (2, 16))(table)
        add(f"{at}B.weight", (24, 2))(table)


def on_each_expert(folder: Path) -> list[str]:
    base = write_config(folder / "base", "qwen3_vl_moe")
    path = write_raw(folder / "raw", prefix="model.language_model.")
    convert_adapter(path, to="vllm", output_dir=folder / "v")
    return ["validate", str(folder / "v"), "--engine", "vllm", "--base-model", str(base)]


SITUATIONS: list[tuple[str, Build]] = [
    ("KTB001", holder),
    ("KTB007", in_a_checkpoint),
    ("KTB016", gguf),
    ("KTB017", sharded),
    ("KTB019", mlx),
    ("KTB101", changed(peft_type="absent")),
    ("KTB106", changed(target_modules="all-linear")),
    ("KTB107", changed(drop("no tensor"), use_rslora=True, peft_version="0.21.2")),
    ("KTB108", changed(narrower, rank_pattern={"q_proj": 2})),
    ("KTB109", changed(drop("no tensor"), alpha_pattern={"q_proj": 16})),
    ("KTB118", changed(target_modules=["q_proj"])),
    ("KTB205", changed(rename("model.layers", "model.language_model.layers"))),
    ("KTB208", changed(as_experts, target_modules=[], target_parameters=["experts.gate_up_proj"])),
    ("KTB214", changed(rename(".mlp.experts", ".block_sparse_moe.experts"))),
    ("KTB216", changed(stacked(("gate_proj", "up_proj", "down_proj")))),
    ("KTB216", changed(stacked(("w1", "w3", "w2")))),
    ("KTB217", changed(rename(P, f"{P}_orig_mod."))),
    ("KTB217", changed(rename(P, f"module.{P}"), base_model_name_or_path=None)),
    ("KTB217", changed(rename(P, P + P), base_model_name_or_path=None)),
    ("KTB217", changed(rename(".weight", ".sft.weight"))),
    ("KTB217", changed(rename(".lora_", "_"))),
    ("KTB640", on_each_expert),
    ("KTB641", under("language_model.model.")),
    ("KTB901", raw_served),
]  # fmt: skip


def run(arguments: list[str]) -> tuple[int, list[dict[str, str]]]:
    json_too = [*arguments, "--json"] if "--json" not in arguments else arguments
    result = CliRunner().invoke(main, json_too)
    text = result.stdout.strip()
    found = json.loads(text) if text.startswith("{") else {}
    return result.exit_code, found.get("problems") or found.get("findings") or []


@pytest.mark.parametrize(("code", "build"), SITUATIONS, ids=[code for code, _ in SITUATIONS])
def test_the_command_runs_and_ends_elsewhere(
    code: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, problems = run(build(tmp_path))
    steps = [item["next_step"] for item in problems if item["code"] == code]
    assert steps, problems
    command = steps[0][COMMAND.search(steps[0]).start() :]  # type: ignore[union-attr]
    status, after = run(shlex.split(command)[1:])
    assert status == 0, (command, after)
    assert code not in {item["code"] for item in after if item["severity"] == "error"}
    if Path("D").exists():  # and what it wrote isn't that again
        _, written = run(["validate", "D"])
        assert code not in {item["code"] for item in written if item["severity"] == "error"}


# Codes whose step has a command that isn't run here, with the reason.
ELSEWHERE = {
    "KTB885": "a judge's server has to answer first; tests/eval run the same command twice",
    "KTH001": "uploads to the Hub; tests/adapter/test_push.py has the same command on a Hub of its own",
}


def steps_of_sites() -> Iterator[tuple[str, str]]:
    """(code, source of the step) of each call that raises a code with a step of its own."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            values: dict[str, str] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        names = target.elts if isinstance(target, ast.Tuple) else [target]
                        for name in names:
                            text = ast.unparse(node.value)
                            values[ast.unparse(name)] = values.get(ast.unparse(name), "") + text
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                    step = next((k.value for k in node.keywords if k.arg == "next_step"), None)
                    if step is not None and str(node.args[0].value) in CODES:
                        text = ast.unparse(step)
                        yield str(node.args[0].value), text + values.get(text, "")


def test_every_code_with_a_command_is_tried() -> None:
    """A new code whose step is a command gets a row in ``SITUATIONS``, or a reason in ``ELSEWHERE``."""
    commanding = {code for code, row in CODES.items() if COMMAND.search(row.next_step)}
    commanding |= {code for code, text in steps_of_sites()
                   if COMMAND.search(text) or "convert_step(" in text}  # fmt: skip
    tried = {code for code, _ in SITUATIONS}
    assert sorted(commanding - tried - ELSEWHERE.keys()) == []
    assert sorted(ELSEWHERE.keys() - commanding) == [], "no command in these: take them out"
    assert not tried & ELSEWHERE.keys()
