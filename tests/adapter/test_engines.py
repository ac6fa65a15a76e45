"""The table of engine versions: which row holds, and what validate makes of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
from adapterfaults import edit, edit_config, fill
from click.testing import CliRunner
from rawadapter import nonexpert_tensors

from ktbridge.adapter import RULES, convert_adapter, validate_adapter
from ktbridge.adapter.engines import CONTRACTS, contract_for, contracts_of
from ktbridge.cli import main
from ktbridge.errors import UsageError
from ktbridge.install import version_order
from ktbridge.model import Family, families

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "row", "known"),
    [
        ("0.5.0", "up to 0.6.2.post3", True),
        ("0.6.2", "up to 0.6.2.post3", True),
        ("0.6.2.post3", "up to 0.6.2.post3", True),
        ("0.6.3", "0.6.3 to 0.7.0.post3", True),
        ("0.6.3rc1", "0.6.3 to 0.7.0.post3", True),
        ("0.6.10", "0.6.3 to 0.7.0.post3", True),
        ("0.7", "0.6.3 to 0.7.0.post3", True),
        ("0.7.0", "0.6.3 to 0.7.0.post3", True),
        ("0.7.0.post3", "0.6.3 to 0.7.0.post3", True),
        ("0.7.0-post4", "0.7.0.post4", True),
        ("0.7.0.post4+cu130", "0.7.0.post4", True),
        ("0.7.0.post5", "0.7.2", False),
        ("0.7.1", "0.7.2", False),
        ("0.7.2", "0.7.2", True),
        ("0.7.2.0+cu130", "0.7.2", True),
        ("0.7.3", "0.7.2", False),
        ("0.10", "0.7.2", False),
        ("1.0.0.dev1", "0.7.2", False),
    ],
)
def test_which_contract_holds(version, row, known):
    contract, looked_at = contract_for(f"sglang-kt=={version}")
    assert (contract.name, looked_at) == (row, known)
    assert contract_for(f"SGLang_KT == v{version}") == (contract, known)


def test_rows_are_in_order_and_apart():
    for engine in {row.engine for row in CONTRACTS}:
        rows = contracts_of(engine)
        ends = [version_order(end) for row in rows for end in (row.first, row.last)]
        assert ends == sorted(ends)
        assert all(a.last != b.first for a, b in pairwise(rows))
    assert version_order("0.7.0.post4") == ((0, 7), 4)


@pytest.mark.parametrize(
    "engine",
    ["sglang-kt", "sglang-kt==", "sglang-kt==new", "sglang==new", "0.7.2", "sglang-kt>=0.7.2", "",
     "kt==0.5.2", "sglang-kt==0.7.*", "sglang-kt==1e400", "sglang-kt==" + "9" * 400],
)  # fmt: skip
def test_a_bad_engine_is_a_usage_error(engine, make_raw):
    with pytest.raises(UsageError) as caught:
        validate_adapter([make_raw()], engine=engine)
    assert "sglang-kt==0.7.2" in caught.value.next_step or "0.7.2" in caught.value.next_step


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("0.6.2", {"n"}),
        ("0.6.4", {"e", "n", "e n", "m", "raw e n", "raw m"}),
        ("0.7.2", {"e", "n", "m", "raw m"}),
    ],
)
def test_which_layouts_a_version_serves(converted, version, accepted):
    paths = converted()
    for sets in ("raw", "e", "n", "m", "e n", "raw e n", "raw m"):
        report = validate_adapter([paths[name] for name in sets.split()], engine=f"sglang-kt=={version}")
        refused = {p.code for p in report.problems if p.severity == "error"}
        assert refused == (set() if sets in accepted else {"KTB901"}), sets


def test_a_new_family_is_one_row(converted, tmp_path, monkeypatch):
    """What each engine makes of it follows from the row's columns."""
    settings = {"model_type": "newcomer", "architectures": ["NewcomerForCausalLM"],
                "num_hidden_layers": 2, "hidden_size": 16, "moe_intermediate_size": 8,
                "num_experts": 3}  # fmt: skip
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(settings))
    merged = converted()["m"]

    def codes(engine: str) -> set[str]:
        report = validate_adapter([merged], base_model=base, engine=engine)
        return {problem.code for problem in report.problems}

    assert "KTB602" in codes("sglang-kt==0.7.2")
    with monkeypatch.context() as patched:
        patched.setattr(families, "FAMILIES", (*families.FAMILIES, Family("N", ("newcomer",))))
        assert {"KTB618"} <= codes("sglang-kt==0.7.2")
    row = Family(
        "Newcomer",
        ("newcomer",),
        kt_classes=("NewcomerForCausalLM",),
        kt_unapplied={"self_attn.q_proj": "0.7.0.post3"},
        sglang_run=True,
        vllm_fused=True,
        llama_cpp="qwen3moe",
    )
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, row))
    assert codes("sglang-kt==0.7.2") == set()
    assert codes("sglang-kt==0.6.4") == {"KTB903"}
    assert codes("vllm") == {"KTB640"}
    assert "KTB647" not in codes("sglang")
    pytest.importorskip("gguf")
    convert_adapter(merged, to="gguf", output_dir=tmp_path / "gguf", base_model=str(base))
    assert any((tmp_path / "gguf").glob("*.gguf"))


def test_qwen35_is_known_by_its_keys(make_raw):
    """Without a base model, linear attention tells the family that old versions serve in part."""
    kind = {"prefix": "model.language_model.", "block": ""}
    table = nonexpert_tensors((0,), modules={"linear_attn.in_proj_qkv": (8, 16)}, **kind)
    table |= nonexpert_tensors((1,), modules={"self_attn.q_proj": (8, 16)}, **kind)
    raw = make_raw(nonexpert=table, target_modules=["in_proj_qkv", "q_proj"])
    convert_adapter(raw, merged_output_dir=raw.parent / "m")
    for version, expected in (("0.6.4", ["KTB903"]), ("0.7.2", [])):
        report = validate_adapter([raw.parent / "m"], engine=f"sglang-kt=={version}")
        found = [p for p in report.problems if p.severity == "error"]
        assert [p.code for p in found] == expected
        assert all("self_attn.q_proj" in p.where for p in found)


@pytest.fixture
def ktbridge(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(main, ["validate", *args])


def test_exit_codes(make_raw, ktbridge):
    raw = make_raw()
    convert_adapter(raw, merged_output_dir=raw.parent / "m")
    assert ktbridge("m", "--engine", "sglang-kt==0.7.2", "--strict").exit_code == 0
    assert ktbridge("m", "--engine", "sglang-kt==0.6.2").exit_code == 1
    bad = ktbridge("m", "--engine", "tgi==1")
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert "sglang-kt==0.7.2" in bad.stderr
    # An info never fails, a warning does with --strict only, an error always.
    newer = ktbridge("m", "--engine", "sglang-kt==9.9", "--strict")
    assert newer.exit_code == 0
    assert "KTB902" in newer.stderr
    edit(raw.parent / "m", fill("q_proj.lora_B", b"\x00"))
    assert ktbridge("m").exit_code == 0
    assert ktbridge("m", "--strict").exit_code == 1
    edit(raw.parent / "m", fill("lora_B", b"\x00"))
    assert ktbridge("m").exit_code == 1
    assert ktbridge("m", "--structure-only", "--strict").exit_code == 0


def test_json_is_as_its_schema_says(converted, ktbridge):
    schema = json.loads((ROOT / "docs" / "validate.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    paths = converted()
    edit_config(paths["n"], r="four", lora_alpha="absent", base_model_name_or_path="absent")
    edit(paths["m"], fill("lora_B", b"\xff"))
    for args in (
        ["raw"],
        ["raw", "e", "n", "m", "nowhere", "--engine", "sglang-kt==0.7.2"],
        ["e", "--structure-only"],
    ):
        document = json.loads(ktbridge(*args, "--json").stdout)
        check.validate(document)
        assert [a["path"] for a in document["adapters"]] == [a for a in args[:5] if a[0] != "-"]
        order = [problem["severity"] for problem in document["problems"]]
        assert order == sorted(order, key=["error", "warning", "info"].index)
        known = {rule.code for rule in RULES}
        assert {problem["code"] for problem in document["problems"]} <= known
    with pytest.raises(jsonschema.ValidationError):
        check.validate({**document, "ok": "yes"})
