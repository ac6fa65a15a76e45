"""Adapters that attack their reader: refused soon, in little memory, and no terminal obeys them."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from readercommands import READERS, RUN, measured
from tinyserver import ENVIRONMENT

from ktbridge.adapter import convert_adapter, read_adapter
from ktbridge.adapter.push import plan_push
from ktbridge.errors import KtbridgeError, ProblemsError

MODEL, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NASTY = "\x1b[31m\x9b\u202e"


def set_config(adapter: Path, **changes: object) -> None:
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_header(adapter: Path, header: dict[str, object], size: int) -> None:
    """A file with this header and ``size`` bytes behind it, of which none is written."""
    text = json.dumps(header).encode()
    (adapter / MODEL).write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(adapter / MODEL, 8 + len(text) + size)


def entry(*shape: int, dtype: str = "F32", size: int = 4) -> dict[str, object]:
    for side in shape:
        size *= side
    return {"dtype": dtype, "shape": shape, "data_offsets": (0, size)}


def linked(adapter: Path, device: str) -> None:
    (adapter / MODEL).unlink()
    (adapter / MODEL).symlink_to(device)


def linked_out(adapter: Path, name: str) -> None:
    other = adapter.parent / "secret"
    other.mkdir()
    (adapter / name).rename(other / name)
    (adapter / name).symlink_to(other / name)


def piped(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    os.mkfifo(adapter / name)


def set_manifest(adapter: Path, **changes: object) -> None:
    path = adapter / "kt_adapter_manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename_layers(adapter: Path, number: int) -> None:
    """Layer 1's LoRA of attention under another number."""
    data = (adapter / MODEL).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].replace(b"layers.1.", f"layers.{number}.".encode())
    (adapter / MODEL).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


PLACE = "base_model.model.model.layers.0.self_attn."
ATTACKS = {
    "a device": lambda at: linked(at, "/dev/zero"),
    "a pipe": lambda at: piped(at, MODEL),
    "a pipe for a config": lambda at: piped(at, CONFIG),
    "a sparse giant": lambda at: set_header(at, {f"{PLACE}q_proj.lora_A.weight": entry(8, 2**34)}, 2**39),
    "a config of 20 MB": lambda at: set_config(at, junk="x" * 20_000_000),
    "two million targets": lambda at: set_config(at, target_modules=[f"m{i}" for i in range(2**21)]),
    "half a million tensors": lambda at: set_header(
        at, {f"{PLACE}q{i}.lora_A.weight": entry(0) for i in range(500_000)}, 0
    ),
    "a name of a megabyte": lambda at: set_header(at, {NASTY + "n" * 2**20: entry(1)}, 4),
    "a name that terminals obey": lambda at: set_header(at, {f"{PLACE}{NASTY}.lora_A": entry(1)}, 4),
    "alpha of 1e299": lambda at: set_config(at, lora_alpha=1e299),
    "alpha of 1e30 in the manifest": lambda at: set_manifest(at, lora={"rank": 4, "alpha": 1e30}),
    "a manifest of many files": lambda at: set_manifest(
        at, artifacts={f"f{i}": {"size": 1} for i in range(150_000)}
    ),
    "layer 999999": lambda at: rename_layers(at, 999_999),
    "a link to another directory": lambda at: linked_out(at, MODEL),
    "a config that is such a link": lambda at: linked_out(at, CONFIG),
    "patterns": lambda at: set_config(at, alpha_pattern={"(.*)*" * 6 + str(i): 1 for i in range(1000)}),
}


def check_refusal(found: subprocess.CompletedProcess[str]) -> str:
    """A sentence, exit code 1, little memory; returns what it said."""
    told, _, peak = found.stderr.partition("PEAK")
    shown = found.stdout + told
    assert found.returncode == 1, shown
    assert int(peak) < 300_000  # KB
    assert "Traceback" not in shown
    assert len(shown) < 10_000
    assert not set(NASTY) - set("[31m") & set(shown)
    return shown


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_soon_and_shortly(warm, adapter, base, tmp_path, attack, command):
    """Each took over 25 s, up to 3 GB, or megabytes of messages."""
    attacker, out = tmp_path / "attacker", tmp_path / "out"
    shutil.copytree(adapter, attacker)
    ATTACKS[attack](attacker)
    given = READERS[command](attacker, base, out)
    start = time.monotonic()
    said = check_refusal(warm.run("-c", RUN, *given, timeout=60, **ENVIRONMENT))
    assert time.monotonic() - start < 20  # on a machine with other things to do
    # It was the adapter, not the server that isn't there, unless what it says is for verify to judge.
    judged = ("a name that terminals obey", "alpha of 1e299", "patterns")
    assert "127.0.0.1" not in said or (command == "verify" and attack in judged)
    assert not out.exists()


def snapshot(adapter: Path, cache: Path) -> Path:
    """``adapter`` as the Hub's cache has it: links into the repository's blobs."""
    repository = cache / "models--me--mine"
    place = repository / "snapshots" / "0123abcd"
    place.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in adapter.iterdir():
        shutil.copy(path, repository / "blobs" / f"sha-{path.name}")
        (place / path.name).symlink_to(f"../../blobs/sha-{path.name}")
    return place


def test_links_into_the_hubs_cache_and_the_directory_itself_are_followed(adapter, tmp_path):
    place = snapshot(adapter, tmp_path / "hub")
    assert read_adapter(place).rank == 4
    inside = tmp_path / "inside"
    shutil.copytree(adapter, inside)
    (inside / MODEL).rename(inside / "weights")
    (inside / MODEL).symlink_to("weights")
    assert read_adapter(inside).rank == 4
    tmp_path.joinpath("named").symlink_to(place)  # the directory's own name may be a link
    assert read_adapter(tmp_path / "named").rank == 4


def test_no_blobs_but_the_repositorys_own(adapter, tmp_path):
    """A cache made up in an archive: its blobs are a link, or another repository's."""
    place = snapshot(adapter, tmp_path / "hub")
    blobs = place.parents[1] / "blobs"
    blobs.rename(tmp_path / "secret")
    blobs.symlink_to(tmp_path / "secret")
    with pytest.raises(KtbridgeError, match="is a link to"):
        read_adapter(place)


def test_merge_copies_no_file_that_a_link_of_the_base_leads_to(warm, adapter, base, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(base, model)
    (tmp_path / "token").write_text("secret")
    (model / "vocab.txt").symlink_to(tmp_path / "token")
    given = ("merge", adapter, "--base-model", model, "--output", out, "--allow-other-base")
    said = check_refusal(warm.run("-c", RUN, *given, timeout=100, **ENVIRONMENT))
    assert "KTB930" in said
    assert not out.exists()


def test_push_uploads_no_file_that_a_link_leads_to(adapter, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(adapter, mine)
    (tmp_path / "secret").write_text("a token")
    (mine / "trainer_log.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(ProblemsError) as caught:
        plan_push(mine, "me/mine", base_model="org/base")
    assert "KTB930" in {problem.code for problem in caught.value.problems}


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def gguf(fields: bytes = b"", count: int = 0, tensors: bytes = b"", number: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, number, count) + fields + tensors


NESTED = text(b"x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3000


def many_tensors() -> bytes:
    each = (text(b"t%d" % i) + struct.pack("<IQIQ", 1, 1, 0, 0) for i in range(500_000))
    return gguf(number=500_000, tensors=b"".join(each))


def many_fields() -> bytes:
    return gguf(b"".join(text(b"f%d" % i) + bytes(5) for i in range(500_000)), count=500_000)


def a_long_array() -> bytes:
    return gguf(text(b"x") + struct.pack("<IIQ", 9, 0, 8_000_000) + bytes(8_000_000), count=1)


# Beside what tests/fuzz/corpus/gguf has: what takes memory or time where it isn't refused first.
BAD_GGUF: dict[str, bytes | Callable[[], bytes]] = {
    "2^63 tensors": gguf(number=2**63),
    "half a million tensors": many_tensors,
    "half a million fields": many_fields,
    "a text of 2^63": gguf(struct.pack("<Q", 2**63), count=1),
    "a name of a megabyte": gguf(text(b"n" * 2**20) + bytes(5), count=1),
    "arrays in arrays": gguf(NESTED, count=1),
    "an array of 8 million": a_long_array,
    "an array of 2^62": gguf(text(b"x") + struct.pack("<IIQ", 9, 8, 2**62), count=1),
    "2^31 dimensions": gguf(tensors=text(b"t") + struct.pack("<I", 2**31), number=1),
}


@pytest.mark.parametrize("attack", BAD_GGUF)
def test_a_gguf_file_is_refused_soon_and_shortly(warm, tmp_path, attack):
    """Arrays in arrays were a RecursionError's traceback; an array of 8 million took gigabytes."""
    bad = BAD_GGUF[attack]
    (tmp_path / "a.gguf").write_bytes(bad if isinstance(bad, bytes) else bad())
    given = ("convert", tmp_path / "a.gguf", "--from", "gguf", "--to", "raw")
    out = tmp_path / "out"
    found = warm.run("-c", RUN, *given, "--output", out, timeout=60, **ENVIRONMENT)
    check_refusal(found)
    assert not out.exists()


def test_a_gguf_file_that_is_cut_or_a_giant(warm, adapter, base, tmp_path):
    convert_adapter(adapter, to="gguf", output_dir=tmp_path / "good", base_model=str(base))
    file = next((tmp_path / "good").glob("*.gguf"))
    whole = file.read_bytes()
    for size in (40, 3000, len(whole) - 1, 2**40):
        file.write_bytes(whole)
        os.truncate(file, size)
        given = ("convert", file, "--from", "gguf", "--to", "raw", "--output", tmp_path / "out")
        check_refusal(warm.run("-c", RUN, *given, timeout=60, **ENVIRONMENT))
        assert not (tmp_path / "out").exists()


def test_nasty_names_that_pass_are_escaped_in_json(adapter, tmp_path):
    nasty = tmp_path / "nasty"
    shutil.copytree(adapter, nasty)
    set_config(nasty, base_model_name_or_path=f"{NASTY}evil")
    found = measured("validate", nasty, "--json")
    assert NASTY in json.dumps(json.loads(found.stdout), ensure_ascii=False).replace("\\u001b", "\x1b")
    assert not set("\x1b\x9b\u202e") & set(found.stdout)
