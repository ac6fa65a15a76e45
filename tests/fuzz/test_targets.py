"""Whatever a reader is given ends in a sentence, soon; ours and safetensors' disagree by decision only."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from fuzz import attacks, targets
from hypothesis import given, settings
from hypothesis import strategies as st

from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError
from ktbridge.model import open_checkpoint, read_model_config

DAMAGED = 200
"""Seeds and kept inputs that are damaged anew, of each target."""


@pytest.mark.parametrize("name", targets.TARGETS)
def test_each_reader_ends_in_a_sentence(tmp_path, name):
    """On what fuzzing kept, which reaches most of its code, and on damage by format."""
    target = targets.TARGETS[name](tmp_path / "target")
    outcomes = {target.read(data) for data in target.seeds}  # imports take their time, once
    assert not all("refused" in outcome for outcome in outcomes)  # the target itself works
    kept = [path.read_bytes() for path in sorted((targets.CORPUS / name).iterdir())]
    assert kept
    for data in kept:
        targets.check(target, data)
    rng = random.Random(name)
    for _ in range(DAMAGED):
        data = b""
        with suppress(Exception):  # what is damaged already may be no document any more
            data = target.mutate(rng.choice([*target.seeds, *kept]), rng)
        targets.check(target, data)


def test_the_corpus_stays_small():
    files = [path for path in targets.CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    return attacks.Victim(tmp_path_factory.mktemp("victim"))


def test_the_victim_is_healthy(victim):
    assert validate_adapter([victim.adapter], base_model=victim.base).problems == []
    for path, data in victim.files.items():
        if path.suffix == ".safetensors":
            assert attacks.check_tensor_file(victim.folder / "t.safetensors", data) == "both"


def test_every_field_with_every_hostile_value(victim):
    """Wrong types everywhere: each key of the model's configuration and of its index."""
    for path in (victim.base / "config.json", victim.base / "model.safetensors.index.json"):
        for number in range(len([*attacks.places(json.loads(victim.files[path]))])):
            for hostile in attacks.HOSTILE:
                document = json.loads(victim.files[path])
                container, key = [*attacks.places(document)][number]
                container[key] = copy.deepcopy(hostile)
                path.write_bytes(attacks.dump(document).encode("utf-8", "surrogatepass"))
                with attacks.deadline():
                    for call in (read_model_config, lambda base: open_checkpoint(base).check()):
                        try:
                            call(victim.base)
                        except KtbridgeError as error:
                            attacks.check_sentence(error)
        path.write_bytes(victim.files[path])


def header(table: Any, data: bytes = b"") -> bytes:
    text = attacks.dump(table).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: Any = None) -> dict[str, Any]:
    shape = [end - start] if shape is None else shape
    return {"dtype": "U8", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("data", "taken"),
    [
        # Ours only, or theirs only: the whole list of intended differences, each with its reason in
        # attacks.STRICTER or attacks.LAXER. What neither takes: tests/model/test_tensorfile.py.
        (header({"a": {**entry(0, 1), "more": 1}}, b"x"), "theirs"),
        (header({"a": entry(0, 1, [1] * 33)}, b"x"), "theirs"),
        (header({"__metadata__": None, "a": entry(0, 1)}, b"x"), "theirs"),
        (header(attacks.Token(" " + attacks.dump({"a": entry(0, 1)})), b"x"), "theirs"),
        (header({"a": entry(0, 0, [attacks.Token("-0")])}), "ours"),
        (header({"a": entry(0, 2)}, b"xy"), "both"),
        (header({}), "both"),
        (header({"a": entry(0, 0, [0, 2**40])}), "both"),
        (header({"a": entry(0, 0), "b": entry(0, 1)}, b"x"), "both"),
        (header({"a": entry(0, 2), "b": entry(1, 3)}, b"xyz"), "neither"),
        (header({"a": entry(0, 2**63)}), "neither"),
        (header({"a": attacks.Token("[" * 200)}), "neither"),
        (b"\xff" * 8 + b"{}", "neither"),
    ],
)  # fmt: skip
def test_where_the_two_readers_agree_and_differ(tmp_path, data, taken):
    assert attacks.check_tensor_file(tmp_path / "t.safetensors", data) == taken


def test_small_files_that_promise_much_cost_little(tmp_path):
    """Memory is bounded by what a file holds, not by what it claims."""
    claims = {
        "huge shape": header({"a": entry(0, 2**40, [2**40])}),
        "huge rank": header({"a": entry(0, 1, [1] * 5000)}, b"x"),
        "huge header": (100_000_000).to_bytes(8, "little") + b"{}",
        "many empty": header({str(n): entry(0, 0) for n in range(2000)}),
    }
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2**31, "hidden_size": 2**31,
              "num_experts": 2**31, "full_attention_interval": 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    try:
        for data in claims.values():
            attacks.check_tensor_file(tmp_path / "t.safetensors", data)
        with pytest.raises(KtbridgeError):
            read_model_config(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


@settings(derandomize=True, database=None)
@given(
    names=st.lists(
        st.sampled_from([
            "adapter_config.json", "adapter_model.safetensors", "fused_expert_lora.safetensors",
            "kt_adapter_manifest.json", "adapter_model.bin", "kt_full_experts-0.safetensors",
            "adapter_model-00001-of-00002.safetensors", "adapter_model-0-of-99999999999.safetensors",
            "adapter_model.safetensors.index.json",
        ]),
        max_size=5, unique=True,
    ),
    number=st.integers(0, 2**32),
)  # fmt: skip
def test_any_garbage_directory_is_reported_on(tmp_path, victim, names, number):
    rng = random.Random(number)
    good = {path.name: data for path, data in victim.files.items()}
    for path in tmp_path.iterdir():
        path.unlink()
    for name in names:
        data = good.get(name, b"{}")
        kinds = (data, data, b"", attacks.mutate_bytes(data or b"x", rng))
        (tmp_path / name).write_bytes(rng.choice(kinds))
    with attacks.deadline():
        report = validate_adapter([tmp_path, victim.adapter, tmp_path / "gone"])
    assert not report.ok
    attacks.check_report(report)
    with suppress(KtbridgeError):
        read_adapter(tmp_path)
