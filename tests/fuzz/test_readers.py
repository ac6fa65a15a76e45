"""Damage to any file ends in a sentence, soon; our reader and safetensors' disagree by decision only."""

from __future__ import annotations

import copy
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from fuzz import attacks
from hypothesis import given, settings
from hypothesis import strategies as st
from rawadapter import write_raw

from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError
from ktbridge.model import open_checkpoint, open_tensor_file, read_model_config

FUZZ = settings(derandomize=True, database=None)
NUMBERS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> attacks.Victim:
    return attacks.Victim(tmp_path_factory.mktemp("victim"))


def test_the_victim_is_healthy(victim: attacks.Victim) -> None:
    assert validate_adapter([victim.adapter], base_model=victim.base).problems == []
    for path, data in victim.files.items():
        if path.suffix == ".safetensors":
            assert attacks.check_tensor_file(victim.folder / "t.safetensors", data) == "both"


@settings(FUZZ, max_examples=150)
@given(number=NUMBERS)
def test_damaged_directories_end_in_sentences(victim: attacks.Victim, number: int) -> None:
    victim.attack(random.Random(number))


@settings(FUZZ, max_examples=300)
@given(number=NUMBERS)
def test_damaged_tensor_files_are_read_as_safetensors_reads_them(
    victim: attacks.Victim, number: int
) -> None:
    good = victim.files[victim.adapter / "adapter_model.safetensors"]
    bad = attacks.mutate_tensor_file(good, random.Random(number))
    attacks.check_tensor_file(victim.folder / "t.safetensors", bad)


@settings(FUZZ, max_examples=100)
@given(data=st.binary(max_size=300))
def test_any_bytes_end_in_sentences(victim: attacks.Victim, data: bytes) -> None:
    attacks.check_tensor_file(victim.folder / "t.safetensors", data)
    for path in random.Random(data).sample(sorted(victim.files), 1):
        victim.try_with(path, data)


def test_every_file_cut_anywhere(victim: attacks.Victim) -> None:
    for path in (
        victim.base / "model.safetensors.index.json",
        victim.adapter / "adapter_config.json",
    ):
        for length in range(0, len(victim.files[path]), 7):
            victim.try_with(path, victim.files[path][:length])
    good = victim.files[victim.base / "model-1.safetensors"]
    for length in range(len(good)):
        taken = attacks.check_tensor_file(victim.folder / "t.safetensors", good[:length])
        assert taken == "neither"


def test_every_field_with_every_hostile_value(victim: attacks.Victim) -> None:
    """Wrong types everywhere: each key of the model's configuration and of its index."""
    for path in (victim.base / "config.json", victim.base / "model.safetensors.index.json"):
        keys = [key for _, key in attacks.places(json.loads(victim.files[path]))]
        for number in range(len(keys)):
            for hostile in attacks.HOSTILE:
                document = json.loads(victim.files[path])
                container, key = list(attacks.places(document))[number]
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


def entry(start: int, end: int, shape: Any = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape,
            "data_offsets": [start, end]}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "taken"),
    [
        # Ours only, or theirs only: the whole list of intended differences, each with its reason in
        # attacks.STRICTER or attacks.LAXER.
        (header({"a": {**entry(0, 1), "more": 1}}, b"x"), "theirs"),
        (header({"a": entry(0, 1, [1] * 33)}, b"x"), "theirs"),
        (header({"__metadata__": None, "a": entry(0, 1)}, b"x"), "theirs"),
        (header(attacks.Token(" " + attacks.dump({"a": entry(0, 1)})), b"x"), "theirs"),
        (header({"a": entry(0, 0, [attacks.Token("-0")])}), "ours"),
        # Both, or neither.
        (header({"a": entry(0, 2)}, b"xy"), "both"),
        (header({}), "both"),
        (header({"a": entry(0, 0, [0, 2**40])}), "both"),
        (header({"a": entry(0, 0), "b": entry(0, 1)}, b"x"), "both"),
        (header({"a": entry(0, 2), "b": entry(1, 3)}, b"xyz"), "neither"),
        (header({"a": entry(0, 1), "b": entry(2, 3)}, b"xyz"), "neither"),
        (header({"a": entry(0, 2)}, b"xyz"), "neither"),
        (header({"a": entry(0, 100, [2**40])}, b"x"), "neither"),
        (header({"a": entry(0, 4, [2**62, 4])}, b"xxxx"), "neither"),
        (header({"a": entry(0, 2**63)}), "neither"),
        (header({"a": attacks.Token("[" * 200)}), "neither"),
        (b"\xff" * 8 + b"{}", "neither"),
    ],
)  # fmt: skip
def test_where_the_two_readers_agree_and_differ(tmp_path: Path, data: bytes, taken: str) -> None:
    assert attacks.check_tensor_file(tmp_path / "t.safetensors", data) == taken


def test_a_name_given_twice_is_refused_though_safetensors_may_take_it(tmp_path: Path) -> None:
    one = attacks.dump(entry(0, 1))
    data = header(attacks.Token(f'{{"a":{one},"a":{one}}}'), b"x")
    assert attacks.check_tensor_file(tmp_path / "t.safetensors", data) in ("theirs", "neither")


@pytest.mark.parametrize(
    "shard",
    ["../m.safetensors", "/m.safetensors", "a/m.safetensors", "a\x00.safetensors", ".safetensors",
     "\x1b[2J.safetensors", "é\n.safetensors", ".hidden.safetensors", "m.bin", "m.safetensors/",
     "x" * 300 + ".safetensors", "", None, 3, ["m.safetensors"], {}],
)  # fmt: skip
def test_an_index_may_name_plain_files_only(tmp_path: Path, shard: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(KtbridgeError, match="not a shard beside it") as caught:
        open_checkpoint(tmp_path)
    attacks.check_sentence(caught.value)


def test_what_is_not_a_regular_file_is_not_opened(tmp_path: Path) -> None:
    # A pipe without a writer, or a device without an end, would hold a reader for ever.
    os.mkfifo(tmp_path / "config.json")
    os.mkfifo(tmp_path / "m.safetensors")
    index = {"weight_map": {"a": "m.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with attacks.deadline():
        with pytest.raises(KtbridgeError, match="not a regular file"):
            read_model_config(tmp_path)
        with pytest.raises(KtbridgeError, match="not a regular file"):
            open_checkpoint(tmp_path).check()


def test_small_files_that_promise_much_cost_little(tmp_path: Path) -> None:
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


@settings(FUZZ, max_examples=100)
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
    number=NUMBERS,
)  # fmt: skip
def test_any_garbage_directory_is_reported_on(
    tmp_path: Path, victim: attacks.Victim, names: list[str], number: int
) -> None:
    rng = random.Random(number)
    good = {path.name: data for path, data in victim.files.items()}
    for path in tmp_path.iterdir():
        path.unlink()
    for name in names:
        data = good.get(name, b"{}")
        kind = rng.randrange(4)
        (tmp_path / name).write_bytes(
            data if kind <= 1 else b"" if kind == 2 else attacks.mutate_bytes(data or b"x", rng)
        )
    with attacks.deadline():
        report = validate_adapter([tmp_path, victim.adapter, tmp_path / "gone"])
    assert not report.ok
    for item in report.problems:
        attacks.check_text(item.where + item.found)
    try:
        read_adapter(tmp_path)
    except KtbridgeError as error:
        attacks.check_sentence(error)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("missing.safetensors", "folder", "x" * 300):
        with pytest.raises(KtbridgeError) as caught:
            open_tensor_file(tmp_path / name)
        attacks.check_sentence(caught.value)


def test_a_manifest_that_is_a_pipe_or_names_what_no_file_can_be_called(tmp_path: Path) -> None:
    raw = write_raw(tmp_path / "raw")
    manifest = raw / "kt_adapter_manifest.json"
    values = json.loads(manifest.read_text())
    record = {"size": 1, "sha256": "0"}
    for name in ("x" * 5000, "a\0b"):
        manifest.write_text(json.dumps({**values, "artifacts": {name: record}}))
        assert "KTB011" in {finding.code for finding in validate_adapter([raw]).problems}
    manifest.unlink()
    os.mkfifo(manifest)
    assert "KTB010" in {finding.code for finding in validate_adapter([raw]).problems}
