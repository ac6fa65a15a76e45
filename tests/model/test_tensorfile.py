"""The safetensors reader trusts nothing and understands everything valid."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tensorfiles import write_tensor_file

from ktbridge.model import Tensor, TensorFileError, open_tensor_file

SIZES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8}


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict:
    return {
        "dtype": dtype,
        "shape": [end - start] if shape is None else shape,
        "data_offsets": [start, end],
    }


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=6))
    result = []
    for name in names:
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        size = math.prod(shape) * SIZES[dtype]
        result.append(Tensor(name, dtype, shape, draw(st.binary(min_size=size, max_size=size))))
    return result


@given(tensors=tensors())
def test_what_is_written_is_read_back_by_us_and_by_safetensors(tmp_path, tensors):
    path = tmp_path / "t.safetensors"
    path.unlink(missing_ok=True)
    write_tensor_file(path, tensors, {"format": "pt"})
    file = open_tensor_file(path)
    assert file.metadata == {"format": "pt"}
    assert set(file.entries) == {tensor.name for tensor in tensors}
    with safe_open(path, framework="np") as theirs:
        assert set(theirs.keys()) == set(file.entries)
    for tensor in tensors:
        read = file.tensor(tensor.name)
        assert (read.dtype, read.shape, bytes(read.data)) == (
            tensor.dtype,
            tensor.shape,
            tensor.data,
        )
        assert file.entries[tensor.name].start % SIZES[tensor.dtype] == 0


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "overlaps"),
        ({"a": entry(0, 2), "b": entry(4, 6)}, b"123456", "hole"),
        ({"a": entry(1, 4)}, b"1234", "hole"),
        ({"a": entry(0, 4)}, b"12345", "belong to no tensor"),
        ({"a": entry(0, 4)}, b"123", "truncated"),
        ({"a": entry(0, 4, [5])}, b"1234", "4 bytes for U8"),
        ({"a": entry(0, 4, [2**62, 4])}, b"1234", "4 bytes for U8"),
        ({"a": entry(0, 4, [2**64])}, b"1234", "beyond 64 bits"),
        ({"a": entry(0, 1, [2**40] * 40)}, b"1", "not a list of sizes"),
        ({"a": entry(0, 4, [-4])}, b"1234", "not a list of sizes"),
        ({"a": entry(0, 4, [4.0])}, b"1234", "not a list of sizes"),
        ({"a": entry(0, 4, [True, 4])}, b"1234", "not a list of sizes"),
        ({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, b"1234", "not a range"),
        ({"a": {**entry(0, 4), "data_offsets": [0, 2, 4]}}, b"1234", "not a range"),
        ({"a": entry(0, 4, [4], "U9")}, b"1234", "unknown dtype"),
        ({"a": entry(0, 4, [4], ["U8"])}, b"1234", "unknown dtype"),
        ({"a": entry(0, 1, [1], "F4")}, b"1", "bytes for F4"),
        ({"a": {"dtype": "U8", "shape": [0]}}, b"", "other than dtype"),
        ({"a": 3}, b"", "other than dtype"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        (b'{"a":1,"a":1}', b"", "appears twice"),
        (b'{"a":NaN}', b"", "not JSON"),
        (b"[]", b"", "begin with"),
        (b"", b"", "begin with"),
        (b'{"a":' + b"[" * 100_000, b"", "can't be parsed"),
        (b'{"\xff":1}', b"", "can't be parsed"),
        (b'{"a":' + b"9" * 5000 + b"}", b"", "can't be parsed"),
    ],
)
def test_hostile_header_ends_in_a_sentence(tmp_path, header, data, says):
    path = raw_file(tmp_path / "t.safetensors", header, data)
    with pytest.raises(TensorFileError, match=says) as caught:
        open_tensor_file(path)
    assert caught.value.next_step
    assert "\n" not in caught.value.sentence


def test_header_length_is_bounded_before_it_is_read(tmp_path):
    for length, says in ((100_000_001, "limit"), (2**63, "limit"), (1000, "truncated")):
        path = raw_file(tmp_path / "t.safetensors", b"{}", length=length)
        with pytest.raises(TensorFileError, match=says):
            open_tensor_file(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = tmp_path / "whole.safetensors"
    write_tensor_file(whole, [Tensor("a", "BF16", (3,), b"123456"), Tensor("b", "U8", (1,), b"7")])
    data = whole.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises(TensorFileError):
            open_tensor_file(cut)


@given(
    junk=st.binary(max_size=200),
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"]), inner)
        ),
        max_leaves=10,
    ),
)
def test_no_bytes_make_it_fail_in_another_way(tmp_path, junk, header):
    path = tmp_path / "t.safetensors"
    path.write_bytes(junk)
    for candidate in (path, raw_file(tmp_path / "h.safetensors", header, junk)):
        try:
            file = open_tensor_file(candidate)
        except TensorFileError:
            continue
        assert sum(item.nbytes for item in file.entries.values()) <= candidate.stat().st_size


def test_half_a_character_and_mostly_brackets_are_refused_soon(tmp_path):
    for text, expected in (
        ('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "surrogates"),
        ('{"a":[' + "[]," * 1_000_001 + "[]]}", "mostly brackets"),
    ):
        raw = text.encode()
        file = tmp_path / "a.safetensors"
        file.write_bytes(len(raw).to_bytes(8, "little") + raw)
        with pytest.raises(TensorFileError, match=expected):
            open_tensor_file(file)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(TensorFileError, match="not a regular file"):
        open_tensor_file(tmp_path / "pipe.safetensors")
    with pytest.raises(TensorFileError, match="can't be read"):
        open_tensor_file(f"{tmp_path}/a\0b")
    (tmp_path / "folder").mkdir()
    for name in ("missing.safetensors", "folder", "x" * 300):
        with pytest.raises(TensorFileError):
            open_tensor_file(tmp_path / name)
