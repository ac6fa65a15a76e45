"""``verify --merged``: planted mistakes are named, right merges are applied, bad input is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from mergedmodels import TinyMoE, meant, planted

from ktbridge.adapter import open_adapter
from ktbridge.adapter.merge import merge_adapter
from ktbridge.cli.verify import command
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.verify.merge_check import MergeCheck, check_merge
from ktbridge.verify.merge_page import build_keys, build_panels, render_merge_page
from ktbridge.verify.merge_verdict import MergeVerdict, judge_merge

# fault: the verdict of all, and that of the experts' matrices which it is about
FAULTS = {
    "not applied": ("not applied", "not applied"),
    "experts left out": ("in part", "not applied"),
    "attention left out": ("in part", "applied"),
    "last layer left out": ("in part", "not applied"),
    "half of the experts": ("in part", "not applied"),
    "scale": ("another scale", "another scale"),
    "twice": ("another scale", "another scale"),
    "some ranks": ("in part", "some ranks only"),
    "one slice": ("in part", "a slice only"),
    "gate and up exchanged": ("gate and up exchanged", "gate and up exchanged"),
    "slices in another order": ("slices in another order", "slices in another order"),
    "interleaving": ("interleaving", "interleaving"),
    "experts shifted": ("another expert's", "another expert's"),
    "layers shifted": ("another layer's", "another layer's"),
    "B packed otherwise": ("B packed otherwise", "B packed otherwise"),
    "A packed otherwise": ("A packed otherwise", "A packed otherwise"),
    "another B": ("another B", "another B"),
    "another adapter": ("another adapter", "another adapter"),
    "a second adapter": ("further changes", "further changes"),
}
STORED = [
    ("qwen3_moe", "BF16"), ("qwen3_moe", "FP8"), ("deepseek_v3", "BF16"), ("deepseek_v3", "INT4"),
    ("gpt_oss", "BF16"), ("gpt_oss", "MXFP4"),
]  # fmt: skip


class Made(NamedTuple):
    model: TinyMoE
    path: Path
    storage: str


def make(path: Path, family: str, storage: str = "BF16", **sizes: Any) -> Made:
    """A base whose weights are what ``storage`` can have, and its adapter."""
    model = TinyMoE(family, **sizes)
    model.weights = {
        name: meant(storage, value) if name[1] >= 0 else value for name, value in model.weights.items()
    }
    model.write(path / "base", storage=storage)
    model.write_adapter(path / "adapter")
    return Made(model, path, storage)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return {
        (family, storage): make(tmp_path_factory.mktemp(family + storage), family, storage)
        for family, storage in STORED
    }


def verified(base: Path, merged: Path, adapter: Path | None = None) -> tuple[MergeCheck, MergeVerdict]:
    opened = None if adapter is None else open_adapter(adapter, base_model=base)
    check = check_merge(base, merged, opened)
    return check, judge_merge(check)


def fault_cases() -> Iterator[Any]:
    """Every fault in every storage; `make test` has each fault and each storage once or twice."""
    for number, (family, storage) in enumerate(STORED):
        for place, fault in enumerate(FAULTS):
            few = number == 0 or place % len(STORED) == number
            yield pytest.param(family, storage, fault, marks=() if few else pytest.mark.slow)


@pytest.mark.quick("^qwen3_moe-BF16-|-scale$")
@pytest.mark.parametrize(("family", "storage", "fault"), [*fault_cases()])
def test_planted_mistakes_are_named(tmp_path, bases, family, storage, fault):
    model, path, _ = bases[family, storage]
    model.write(tmp_path / "merged", model.added(planted(model, fault)), storage=storage)
    check, verdict = verified(path / "base", tmp_path / "merged", path / "adapter")
    expected, of_experts = FAULTS[fault]
    assert verdict.verdict == expected, verdict.sentence
    assert not verdict.ok
    found = Counter(finding.verdict for finding in check.findings if finding.expert >= 0)
    assert set(found) <= {of_experts, "applied"}
    assert of_experts in found


def test_sentences_say_where_and_how(tmp_path, bases):
    model, path, _ = bases["qwen3_moe", "BF16"]
    said = {}
    for fault in ("scale", "some ranks", "experts shifted", "half of the experts", "one slice"):
        merged = model.write(tmp_path / fault, model.added(planted(model, fault)))
        said[fault] = verified(path / "base", merged, path / "adapter")[1].sentence
    assert "at scale 1 instead of 2 (×0.5)" in said["scale"]
    assert "ranks 0-1 of 4" in said["some ranks"]
    assert "expert e has the delta of e+1" in said["experts shifted"]
    assert "of experts 2-3 in layers 0-2" in said["half of the experts"]
    assert "columns: 0 of 2 slices" in said["one slice"]


RIGHT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "as the base": ("qwen3_moe", "BF16", {}),
    "one shard": ("qwen3_moe", "BF16", {"shards": 1}),
    "five shards": ("deepseek_v3", "BF16", {"shards": 5}),
    "float32": ("qwen3_moe", "BF16", {"storage": "F32"}),
    "fused of one by one": ("qwen3_moe", "BF16", {"layout": "fused"}),
    "transposed of one by one": ("deepseek_v3", "BF16", {"layout": "transposed"}),
    "a wrapper's prefix": ("qwen3_moe", "BF16", {"prefix": "model.language_model."}),
    "quantized afterwards to FP8": ("qwen3_moe", "BF16", {"storage": "FP8"}),
    "quantized afterwards to INT8": ("qwen3_moe", "BF16", {"storage": "INT8"}),
    "quantized afterwards to INT4": ("deepseek_v3", "BF16", {"storage": "INT4"}),
    "quantized afterwards to MXFP4": ("gpt_oss", "BF16", {"storage": "MXFP4"}),
    "dequantized from FP8": ("qwen3_moe", "FP8", {}),
    "dequantized from MXFP4": ("gpt_oss", "MXFP4", {}),
    "FP8 to FP8": ("qwen3_moe", "FP8", {"storage": "FP8"}),
    "INT4 to INT4": ("deepseek_v3", "INT4", {"storage": "INT4"}),
    "FP8 to INT4": ("qwen3_moe", "FP8", {"storage": "INT4"}),
    "MXFP4 to MXFP4": ("gpt_oss", "MXFP4", {"storage": "MXFP4"}),
}


@pytest.mark.parametrize("how", RIGHT)
def test_right_merges_are_applied(tmp_path, bases, how):
    family, storage, options = RIGHT[how]
    model, path, _ = bases[family, storage]
    model.write(tmp_path / "merged", model.added(model.deltas()), **options)
    check, verdict = verified(path / "base", tmp_path / "merged", path / "adapter")
    assert verdict.ok, verdict.sentence
    assert verdict.verdict == "applied"
    assert not check.problems
    assert 0.9 < verdict.kept < 1.1


@pytest.mark.parametrize(("family", "layout"), [("qwen3_vl_moe", "transposed"), ("qwen3_vl_moe", "fused"),
                                                ("mixtral", "per-expert")])  # fmt: skip
def test_families_that_store_otherwise(tmp_path, family, layout):
    model, path, _ = make(tmp_path, family)
    model.write(path / "merged", model.added(model.deltas()), layout=layout)
    assert verified(path / "base", path / "merged", path / "adapter")[1].ok


@pytest.mark.parametrize(("family", "storage"), [(*each,) for each in STORED[:4]])
def test_our_own_merge_is_applied(tmp_path, bases, family, storage):
    path = bases[family, storage].path
    merge_adapter(path / "adapter", base_model=path / "base", output=tmp_path / "merged")
    _, verdict = verified(path / "base", tmp_path / "merged", path / "adapter")
    assert verdict.ok, verdict.sentence


def test_a_transposed_square_delta_is_named(tmp_path):
    model, path, _ = make(tmp_path, "mixtral", hidden=32, inner=32)
    turned = {n: d.T if n[2] == "down" else d for n, d in model.deltas().items()}
    model.write(path / "merged", model.added(turned))
    _, verdict = verified(path / "base", path / "merged", path / "adapter")
    assert verdict.verdict == "transposed"
    assert "experts.down" in verdict.sentence


@pytest.mark.parametrize("size", [1e-2, 1e-3])
def test_a_delta_below_the_steps_is_rounded_away(tmp_path, size):
    model, path, _ = make(tmp_path, "deepseek_v3", "INT4", size=size)
    model.write(path / "merged", model.added(model.deltas()), storage="INT4")
    check, verdict = verified(path / "base", path / "merged", path / "adapter")
    experts = [finding for finding in check.findings if finding.expert >= 0]
    assert {finding.verdict for finding in experts} == {"rounded away"}
    assert all(finding.could_keep < 0.5 for finding in experts)
    assert not verdict.ok or verdict.kept > 0.5


def test_small_deltas_in_bfloat16_are_told_from_a_scale(tmp_path):
    """Steps of bfloat16 are as large as the delta: less of it is left, and nothing is wrong."""
    model, path, _ = make(tmp_path, "qwen3_moe", size=1.5e-3)
    model.write(path / "right", model.added(model.deltas()))
    half = {name: delta / 2 for name, delta in model.deltas().items()}
    model.write(path / "half", model.added(half))
    assert verified(path / "base", path / "right", path / "adapter")[1].verdict == "applied"
    assert not verified(path / "base", path / "half", path / "adapter")[1].ok


def test_an_adapter_of_a_step_later_is_another(tmp_path):
    """The same A, and B three percent off: a delta of nearly the right size and direction."""
    model, path, _ = make(tmp_path, "qwen3_moe")
    random = np.random.default_rng(7)
    for name, b in model.b.items():
        model.b[name] = b + 0.03 * b.std() * random.standard_normal(b.shape, np.float32)
    model.write(path / "merged", model.added(model.deltas()))
    check, verdict = verified(path / "base", path / "merged", path / "adapter")
    assert (verdict.ok, verdict.verdict) == (False, "further changes"), verdict.sentence
    assert {f.verdict for f in check.findings if f.has_lora} == {"further changes"}


def test_what_has_no_lora_must_be_the_bases(tmp_path):
    model, path, _ = make(tmp_path, "qwen3_moe")
    model.norms = {name: value * np.float32(1.125) for name, value in model.norms.items()}
    model.write(path / "merged", model.added(model.deltas()))
    _, verdict = verified(path / "base", path / "merged", path / "adapter")
    assert verdict.verdict == "further changes"
    assert [problem.code for problem in verdict.problems] == ["KTV032"]
    assert "another base model" in verdict.sentence


def test_without_an_adapter_ranks_and_sizes_are_told(tmp_path):
    model, path, _ = make(tmp_path, "qwen3_moe")
    model.write(path / "merged", model.added(model.deltas()))
    model.write(path / "copy")
    check, verdict = verified(path / "base", path / "merged")
    assert verdict.verdict == "differs"
    assert verdict.ok
    changed = [finding for finding in check.findings if finding.verdict == "differs"]
    assert {finding.rank for finding in changed} == {model.rank}
    assert all(0.29 < finding.change < 0.31 for finding in changed)
    _, same = verified(path / "base", path / "copy")
    assert (same.verdict, same.ok) == ("unchanged", False)


def test_bad_input_is_refused(tmp_path):
    model, path, _ = make(tmp_path, "qwen3_moe")
    merged = model.write(path / "merged", model.added(model.deltas()))
    adapter = open_adapter(path / "adapter", base_model=path / "base")
    with pytest.raises(UsageError, match="one directory"):
        check_merge(path / "base", path / "base", adapter)
    (merged / "model-00002-of-00002.safetensors").rename(path / "kept")
    with pytest.raises(KtbridgeError, match=r"lacks 1 of the 2 weight files"):
        check_merge(path / "base", merged, adapter)
    shutil.rmtree(merged)
    merged.mkdir()
    (merged / "model.gguf").write_bytes(b"GGUF")
    for named in (merged, merged / "model.gguf"):
        with pytest.raises(KtbridgeError, match="is a GGUF file"):
            check_merge(path / "base", named, adapter)
    with pytest.raises(KtbridgeError, match="is an adapter"):
        check_merge(path / "base", path / "adapter", adapter)
    other = make(path / "other", "qwen3_moe", hidden=32)
    with pytest.raises(ProblemsError) as caught:
        check_merge(path / "base", other.path / "base", adapter)
    assert "KTV031" in {problem.code for problem in caught.value.problems}
    with pytest.raises(ProblemsError):
        check_merge(other.path / "base", path / "base", adapter)


def test_missing_and_added_tensors_are_problems(tmp_path):
    model, path, _ = make(tmp_path, "qwen3_moe")
    gone = "model.layers.1.input_layernorm.weight"
    model.write(path / "merged", model.added(model.deltas()), replace={gone: None})
    check, verdict = verified(path / "base", path / "merged", path / "adapter")
    assert [problem.code for problem in check.problems] == ["KTV030"]
    assert gone in check.problems[0].found
    assert verdict.verdict == "applied"
    assert not verdict.ok


def test_the_page_is_whole_and_escaped(tmp_path):
    model, path, _ = make(tmp_path, "qwen3_moe", experts=8)
    half = {name: d for name, d in model.deltas().items() if name[0] == 0 or 0 <= name[1] < 4}
    merged = model.write(path / "a<b>", model.added(half))
    check, verdict = verified(path / "base", merged, path / "adapter")
    page = render_merge_page(check, verdict)
    assert page.count("<svg") == page.count("</svg>") == 3 + 4  # of the legend, and maps
    assert "a<b>" not in page
    assert "://" not in page
    assert "<title>layer 2, expert 3: applied, k 1</title>" in page
    gate, up, down, others = build_panels(check.findings)
    assert [panel.title for panel in (gate, up, down)] == [
        f"experts.{name}_proj" for name in ("gate", "up", "down")
    ]
    for number, cell in enumerate(gate.cells):
        layer, expert = divmod(number, 8)
        is_there = layer == 0 or expert < 4
        found = "applied, k 1" if is_there else "not applied, k 0"
        assert cell.title == f"layer {layer}, expert {expert}: {found}"
        assert cell.look == gate.cells[0 if is_there else 12].look
        assert (cell.x, cell.y) == (gate.cells[expert].x, gate.cells[8 * layer].y)
    assert {cell.title for cell in others.cells} == {
        f"layer {layer}, self_attn.{name}_proj: {'not ' if layer else ''}applied, k {int(not layer)}"
        for layer in range(3)
        for name in "qo"
    }
    legend = {key.verdict: (key.matrices, key.look) for key in build_keys(check.findings)}
    assert legend["not applied"] == (28, gate.cells[12].look)
    assert legend["applied"][0] == 50


def test_the_map_of_many_experts_joins_what_looks_the_same(tmp_path):
    model, path, _ = make(tmp_path, "qwen3_moe", experts=40, layers=1, hidden=32, inner=16)
    half = {name: d for name, d in model.deltas().items() if name[1] < 16}
    merged = model.write(path / "merged", model.added(half))
    check, _ = verified(path / "base", merged, path / "adapter")
    gate = next(build_panels(check.findings))
    assert [cell.title for cell in gate.cells] == [
        "layer 0, experts 0-15: applied, k 1", "layer 0, experts 16-39: not applied, k 0",
    ]  # fmt: skip
    assert gate.cells[1].x > gate.cells[0].x + gate.cells[0].width
    assert len({cell.look.color for cell in gate.cells}) == 2


def test_the_command(tmp_path):
    model, path, _ = make(tmp_path, "qwen3_moe")
    model.write(path / "merged", model.added(model.deltas()))
    model.write(path / "copy")

    def run(*words):
        return CliRunner().invoke(command, [*words, "--base-model", str(path / "base")])

    adapter = ("--adapter", str(path / "adapter"))
    page = path / "page.html"
    done = run("--merged", str(path / "merged"), *adapter, "--json", "--html", str(page))
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert (report["ok"], report["verdict"], report["scale"]) == (True, "applied", 2.0)
    assert report["matrices"] == {"applied": 42, "unchanged": 4}
    assert page.read_text().endswith("</html>")
    done = run("--merged", str(path / "copy"), *adapter)
    assert done.exit_code == 1
    assert done.stdout.startswith("not applied: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", ["give one of --server URL and --merged DIR"]),
        ("--server u --merged y", ["give one of --server URL and --merged DIR"]),
        (
            "--merged y --model z --repeat 1 --logprobs-from auto --api-key k --expert-model e --reload "
            "--from raw --adapter a --adapter b",
            ["--model and --api-key and --repeat and --logprobs-from go with --server URL: leave them out",
             "--expert-model goes with", "--reload goes with", "compared with one adapter"],
        ),
        ("--merged y --from raw", ["give --adapter DIR"]),
        ("--server u --model z --html f --reload", ["--html goes with --merged DIR: leave it out",
                                                    "--reload goes with", "Missing option '--adapter'"]),
        ("--server u --model z --adapter a --adapter b", ["several adapters go with"]),
        ("--server u --adapter a=b --expert-model e", ["--expert-model goes with --server URL --model"]),
        ("--server u", ["Missing option '--adapter'"]),
    ],
)  # fmt: skip
def test_options_without_a_meaning_are_refused_together(words, said):
    done = CliRunner().invoke(command, [*words.split(), "--base-model", "x"])
    assert done.exit_code == 2
    assert [text for text in said if text not in done.stderr] == []
    assert len(done.stderr.split("Error: ")[1].splitlines()) == len(said)


def test_a_key_of_the_environment_is_no_mistake(tmp_path, monkeypatch):
    monkeypatch.setenv("KTBRIDGE_API_KEY", "k")
    model, path, _ = make(tmp_path, "qwen3_moe")
    model.write(path / "copy")
    words = ["--merged", str(path / "copy"), "--base-model", str(path / "base")]
    done = CliRunner().invoke(command, words)
    assert (done.exit_code, done.stdout[:10]) == (1, "unchanged:")
