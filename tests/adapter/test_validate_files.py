"""What a loader wouldn't read, would read twice, or can't read; and keys that land elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapterfaults import Tensors, add, copies, drop, edit, edit_config, edit_manifest, rename
from rawadapter import convert_to, write_base, write_config, write_raw
from tensorfiles import write_tensor_file

from ktbridge.adapter import Tensor, convert_adapter, merge_adapter, open_adapter, validate_adapter
from ktbridge.adapter.push import plan_push
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.model import open_tensor_file

P = "base_model.model."
MODEL = "adapter_model.safetensors"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def paths(tmp_path):
    """raw, and e, n and m made of it."""
    raw = write_raw(tmp_path / "raw", layers=(0, 1, 2))
    return {"raw": raw, **convert_to(raw)}


def problems(*dirs: Path, **kwargs: Any) -> list[Problem]:
    return [p for p in validate_adapter(dirs, **kwargs).problems if p.severity != "info"]


def told(*dirs: Path, **kwargs: Any) -> set[str]:
    return {f"{p.code} {p.severity}" for p in validate_adapter(dirs, **kwargs).problems}


def shard(directory: Path, keep: bool = False, numbers: tuple[int, ...] = (1, 2)) -> None:
    """Split the weights into two numbered files; ``keep`` leaves the whole one beside them."""
    file = open_tensor_file(directory / MODEL)
    names = list(file.entries)
    for number in numbers:
        half = [file.tensor(name) for name in names[number - 1 :: 2]]
        write_tensor_file(directory / f"adapter_model-{number:05}-of-00002.safetensors", half)
    (directory / "kt_adapter_manifest.json").unlink(missing_ok=True)
    if not keep:
        (directory / MODEL).unlink()


def rename_fused(path: Path) -> None:
    """A raw directory made to look like a serving one."""
    (path / MODEL).unlink()
    (path / "fused_expert_lora.safetensors").rename(path / MODEL)
    (path / "kt_adapter_manifest.json").unlink()


def stray(path: Path) -> None:
    shutil.copy(path / MODEL, path / "copy.safetensors")


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("raw", rename_fused, {"KTB214 error", "KTB117 warning"}),
        ("e", shard, {"KTB017 error"}),
        ("m", shard, {"KTB017 error"}),
        ("n", shard, set()),
        ("e", lambda path: shard(path, keep=True), {"KTB014 error"}),
        ("raw", lambda path: shard(path, keep=True, numbers=(1,)), {"KTB014 error"}),
        ("e", stray, {"KTB007 info"}),
        ("n", stray, {"KTB007 error"}),
        ("m", stray, {"KTB007 error"}),
        ("n", lambda path: (path / "adapter_model.bin").touch(), {"KTB004 warning"}),
        ("n", lambda path: edit_config(path, peft_type="absent"), {"KTB101 error"}),
        ("m", lambda path: edit_config(path, peft_type="absent"), {"KTB101 error"}),
        ("e", lambda path: edit_config(path, peft_type="absent"), set()),
    ],
)
@pytest.mark.parametrize("engine", [None, "sglang-kt==0.7.2"])
def test_which_files_are_read(paths, name, damage, expected, engine):
    damage(paths[name])
    assert told(paths[name], engine=engine) == expected


def head(*names: str) -> Callable[[Tensors], None]:
    def change(table: Tensors) -> None:
        for name in names:
            add(P + name, (4, 16) if name.endswith("A.weight") else (16, 4))(table)

    return change


LM_HEAD = ("lm_head.lora_A.weight", "lm_head.lora_B.weight")


@pytest.mark.parametrize(
    ("name", "change", "code", "severity", "says"),
    [
        ("n", head(*LM_HEAD), "KTB213", "error", "adapts an embedding or head"),
        ("n", head(*LM_HEAD, "lm_head.weight"), "KTB213", "error", "because lm_head was targeted"),
        ("n", head(*LM_HEAD, "lm_head.base_layer.weight"), "KTB213", "error", "was targeted"),
        ("n", head("model.embed_tokens.lora_A.weight", "model.embed_tokens.lora_B.weight"),
         "KTB213", "error", "adapts an embedding"),
        ("n", rename("model.layers.1.", "model.vision.layers.1."), "KTB206", "error", "tower"),
        ("n", rename("model.model.layers.1.", "model.audio_tower.layers.1."), "KTB206", "error",
         "tower"),
        ("n", rename("model.model.layers.1.", "model.model.resampler.layers.1."), "KTB206", "error",
         "another part"),
        ("n", rename("model.model.layers.", "model.thinker.model.layers."), "", "", ""),
        ("n", rename("model.model.layers.", "model.base.layers."), "", "", ""),
        ("raw", head(*LM_HEAD), "KTB213", "warning", "adapts an embedding or head"),
    ],
)  # fmt: skip
def test_keys_that_engines_put_elsewhere(paths, name, change, code, severity, says):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head", "embed_tokens"]
    found = problems(edit_config(edit(paths[name], change), target_modules=targets))
    found = [p for p in found if p.code != "KTB117"]
    assert {(p.code, p.severity) for p in found} == ({(code, severity)} if code else set())
    assert not code or any(says in p.found for p in found)


def reshape(part: str, *shape: int) -> Callable[[Tensors], None]:
    def change(table: Tensors) -> None:
        for name in [name for name in table if part in name]:
            table[name] = Tensor(name, "BF16", shape, b"\x80\x3f" * (shape[0] * shape[1]))

    return change


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([("layers.1.self_attn.k_proj.lora_B", 9, 4)], {"KTB302 warning"}),
        ([("layers.1.self_attn.q_proj.lora_A", 4, 15)], {"KTB302 warning"}),
        # A whole block of other sizes may be another kind of attention.
        ([("layers.1.self_attn.k_proj.lora_B", 4, 4), ("layers.1.self_attn.v_proj.lora_B", 4, 4)],
         set()),
        ([("self_attn.k_proj.lora_B", 9, 4)], set()),
    ],
)  # fmt: skip
def test_one_tensor_of_another_size(paths, parts, expected):
    for part, rows, columns in parts:
        edit(paths["n"], reshape(part, rows, columns))
    assert told(paths["n"]) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (copies("model.layers.", "mtp.layers."), {"KTB207": "(54 tensors like it)"}),
        (copies("model.layers.", "layers."), {"KTB014": "(54 tensors like it)"}),
        (drop("experts.1.up_proj"), {"KTB203": "(and 5 like it)"}),
        (drop("up_proj"), {"KTB203": "(and 2 like it)"}),
    ],
)  # fmt: skip
def test_a_rule_speaks_once_of_a_directory(paths, change, expected):
    found = [p for p in problems(edit(paths["e"], change)) if p.code != "KTB117"]
    assert sorted(p.code for p in found) == sorted(expected)
    assert all(expected[p.code] in p.found for p in found)


def test_latent_attention_has_no_v_proj(paths, tmp_path):
    sizes = {"q_proj": (40, 16), "o_proj": (16, 40)}
    raw = write_raw(tmp_path / "mla", layers=(0, 1, 2), modules=sizes)
    base = write_config(tmp_path / "base", "deepseek_v2", num_hidden_layers=3, kv_lora_rank=8,
                        qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=10)  # fmt: skip
    assert told(raw, base_model=base) == set()
    assert told(raw) == {"KTB209 warning"}


@pytest.mark.parametrize(
    ("name", "refused"),
    [("Qwen/Qwen3.5-35B-A3B", True), ("models/Qwen3_5-35B-A3B-Base", True),
     ("Qwen/Qwen3.5-9B", False), ("Qwen/Qwen3-30B-A3B", False)],
)  # fmt: skip
def test_a_family_is_known_by_its_name(paths, name, refused):
    edit(paths["n"], rename("model.model.layers", "model.model.language_model.layers"))
    edit_config(paths["n"], base_model_name_or_path=name)
    expected = {"KTB903 error"} if refused else set()
    assert told(paths["n"], engine="sglang-kt==0.6.4") == expected
    assert told(paths["n"], engine="sglang-kt==0.7.2") == set()


def test_next_steps_fit_who_wrote_the_directory(paths):
    for name, step in (("raw", "from training"), ("m", "convert the adapter again")):
        path = paths[name] / MODEL
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert [(p.code, step in p.next_step) for p in problems(paths[name])] == [("KTB012", True)]
        edit_manifest(paths[name], artifacts={"gone": {"size": 1}})
        assert [(p.code, step in p.next_step) for p in problems(paths[name])] == [("KTB011", True)]


# As root, a process of another user asks.
NOBODY = """
import json, os, ktbridge.adapter.checks.values
from ktbridge.adapter import validate_adapter
os.getuid() or os.setuid(65534)
print(json.dumps(validate_adapter(["n"]).as_dict()))
"""


@pytest.mark.quick("safetensors|config|292")
@pytest.mark.parametrize(
    ("name", "mode", "code", "step"),
    [
        (MODEL, 0o000, "KTB005", "chmod a+r n/adapter_model.safetensors"),
        ("adapter_config.json", 0o000, "KTB002", "chmod a+r n/adapter_config.json"),
        ("kt_adapter_manifest.json", 0o000, "KTB010", "chmod a+r n/kt_adapter_manifest.json"),
        ("notes.txt", 0o000, "KTB011", "chmod a+r n/notes.txt"),
        ("", 0o444, "KTB001", "chmod a+rX n"),
        ("", 0o000, "KTB001", "chmod a+rX n"),
    ],
)
def test_files_that_may_not_be_read(paths, tmp_path, warm, name, mode, code, step):
    for place in (tmp_path, *tmp_path.parents[:2]):
        place.chmod(0o755)
    (paths["n"] / "notes.txt").write_text("x")
    edit_manifest(paths["n"], artifacts={"notes.txt": {"size": 1, "sha256": "0" * 64}})
    (paths["n"] / name).chmod(mode)
    done = warm.run("-c", NOBODY, cwd=tmp_path)
    paths["n"].chmod(0o755)
    assert done.returncode == 0, done.stderr
    found = {(p["code"], p["severity"]): p["next_step"] for p in json.loads(done.stdout)["problems"]}
    assert found[code, "error"] == step


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"


@pytest.mark.parametrize(("name", "code"), [(MODEL, "KTB005"), ("adapter_config.json", "KTB002")])
def test_a_git_lfs_pointer_is_no_damage(paths, name, code):
    (paths["e"] / name).write_text(POINTER)
    (finding,) = [item for item in validate_adapter([paths["e"]]).problems if item.code == code]
    assert "Git LFS pointer" in finding.found
    assert finding.next_step.startswith(f"git -C {paths['e']} lfs pull")


@pytest.mark.parametrize(
    ("change", "code", "step"),
    [
        (rename("self_attn.o_proj", "mlp.experts.gate_up_projs.0"), "KTB218", ""),
        (rename("self_attn", "_fsdp_wrapped_module.self_attn"), "KTB217", "--unwrap"),
    ],
    ids=["an expert that isn't read", "a wrapper"],
)
def test_no_command_goes_past_keys_that_nothing_reads(paths, tmp_path, change, code, step):
    base, out = write_base(tmp_path / "base"), tmp_path / "out"
    convert_adapter(paths["n"], to="vllm", output_dir=tmp_path / "plain")
    edit(paths["n"], change)
    errors = [p for p in validate_adapter([paths["n"]]).problems if p.severity == "error"]
    assert [step in p.next_step for p in errors if p.code == code] == [True]
    acts: dict[str, Callable[[], object]] = {
        "convert": lambda: convert_adapter(paths["n"], to="vllm", output_dir=out),
        "merge": lambda: merge_adapter(paths["n"], base_model=base, output=out),
        "push": lambda: plan_push(paths["n"], "org/name"),
        "open": lambda: open_adapter(paths["n"]),
    }
    for name, act in acts.items():
        if name == "open" and not step:  # for validate to judge
            continue
        with pytest.raises(KtbridgeError) as raised:
            act()
        problems = getattr(raised.value, "problems", ())
        told = [raised.value.next_step, *(item.next_step for item in problems)]
        assert step or code in {item.code for item in problems}, name
        assert any(step in text for text in told), name
    assert not out.exists()
    if step:
        convert_adapter(paths["n"], to="vllm", output_dir=out, unwrap=True)
        assert (out / MODEL).read_bytes() == (tmp_path / "plain" / MODEL).read_bytes()


def test_a_module_that_the_base_lacks(paths, tmp_path):
    """An error where the base is given, with its weights or without; an info where it isn't."""
    edit(paths["n"], rename("self_attn.o_proj", "self_attn.oo"))
    told = [item for item in validate_adapter([paths["n"]]).problems if item.code == "KTB219"]
    assert [item.severity for item in told] == ["info"]
    for base in (write_config(tmp_path / "config"), write_base(tmp_path / "base")):
        report = validate_adapter([paths["n"]], base_model=base)
        assert "is of a module that the base model doesn't have" in {
            item.found.partition(" (")[0] for item in report.problems if item.severity == "error"
        }
        with pytest.raises(ProblemsError) as raised:
            convert_adapter(paths["n"], to="vllm", output_dir=tmp_path / "v", base_model=str(base))
        assert [item.code for item in raised.value.problems if item.severity == "error"] == ["KTB610"]


def test_several_adapters_in_one_file_are_named(paths):
    edit(paths["n"], rename("A.weight", "A.sft.weight"))
    edit(paths["n"], rename("B.weight", "B.dpo.weight"))
    errors = [item for item in validate_adapter([paths["n"]]).problems if item.severity == "error"]
    assert [item.code for item in errors] == ["KTB217"]
    assert "dpo, sft" in errors[0].found
