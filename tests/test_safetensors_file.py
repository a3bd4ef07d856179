# SPDX-License-Identifier: Apache-2.0
"""The header reader against files from outside, and the writer against the safetensors library."""

from __future__ import annotations

import contextlib
import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from trtllm_engram.builder.safetensors_file import TensorSpec, create_file, read_header
from trtllm_engram.plugins.errors import InputError

FUZZ = settings(max_examples=150)


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_library_writes(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "empty": np.zeros((0, 5), np.float32),
        "b": np.ones(3, ml_dtypes.bfloat16),
        "scalar": np.array(2.5),
    }
    path = tmp_path / "x.safetensors"
    save_file(arrays, path, metadata={"format": "np"})
    entries = read_header(path)
    assert set(entries) == set(arrays)
    content = path.read_bytes()
    for name, array in arrays.items():
        found = entries[name]
        assert found.shape == array.shape
        assert content[found.offset : found.offset + found.nbytes] == array.tobytes()
    assert entries["b"].dtype == "BF16"


def test_library_reads_what_create_file_makes(tmp_path):
    path = tmp_path / "x.safetensors"
    entries = create_file(
        path,
        [TensorSpec("ä", "F32", (2, 2)), TensorSpec("b", "U8", (3,)), TensorSpec("c", "U8", (0,))],
    )
    assert read_header(path) == entries
    with path.open("r+b") as file:
        file.seek(entries["ä"].offset)
        file.write(np.arange(4, dtype=np.float32).tobytes())
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {"ä", "b", "c"}
        assert file.get_tensor("ä").tolist() == [[0, 1], [2, 3]]
        assert file.get_tensor("b").tolist() == [0, 0, 0]


BAD_HEADERS = {
    "not JSON": (b"{]", "bad safetensors header"),
    "not UTF-8": (b'{"\xff": 1}', "bad safetensors header"),
    "not an object": ([], "expected a JSON object"),
    "deeply nested": (b'{"a":' + b"[" * 100_000, "bad safetensors header"),
    "huge number": (b'{"a":' + b"9" * 100_000 + b"}", "bad safetensors header"),
    "duplicate": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}',
        "duplicate key 'a'",
    ),
    "entry is no object": ({"a": 3}, "tensor 'a': expected an object, found 3"),
    "dtype missing": ({"a": {"shape": [], "data_offsets": [0, 0]}}, "dtype: expected a string"),
    "dtype no string": ({"a": entry(dtype=["U8"])}, "dtype: expected a string"),
    "shape negative": ({"a": entry(shape=(-4,))}, "shape: expected a list of sizes"),
    "shape bool": ({"a": entry(shape=(True, 4))}, "shape: expected a list of sizes"),
    "shape float": ({"a": entry(shape=(4.0,))}, "shape: expected a list of sizes"),
    "shape over 63 bits": ({"a": entry(shape=(2**40, 2**40))}, "overflows 63 bits"),
    "shape of a million": ({"a": entry(shape=[2**62] * 1_000_000)}, "overflows 63 bits"),
    "offsets backwards": ({"a": entry(offsets=(4, 0))}, "expected begin <= end"),
    "offsets three": ({"a": entry(offsets=(0, 4, 4))}, "expected begin <= end"),
    "offsets null": ({"a": {"dtype": "U8", "shape": [4], "data_offsets": None}}, "data_offsets"),
    "out of range": ({"a": entry(shape=(9,), offsets=(0, 9))}, "truncated or out of range"),
    "far out of range": ({"a": entry(offsets=(2**63 - 5, 2**63 - 1))}, "out of range"),
    "size mismatch": ({"a": entry("F32", (4,), (0, 8))}, "expected 16 bytes for F32 [4], found 8"),
    "overlap": (
        {"a": entry(shape=(4,), offsets=(0, 4)), "b": entry(shape=(4,), offsets=(3, 7))},
        "tensors 'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize(("header", "text"), BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_bad_header(tmp_path, header, text):
    path = write_safetensors(tmp_path / "x.safetensors", header, bytes(8))
    with pytest.raises(InputError) as caught:
        read_header(path)
    message = str(caught.value)
    assert text in message
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "expected a safetensors file, found 0 bytes"),
        (b"\1\0\0", "found 3 bytes"),
        (struct.pack("<Q", 50) + b"{}", "truncated: the header ends at byte 58, the file at 10"),
        (struct.pack("<Q", 100_000_001) + b"{}", "header of at most 100000000 bytes"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", f"found {2**64 - 1}"),
    ],
    ids=["empty", "three bytes", "header longer than the file", "over 100 MB", "u64 max"],
)
def test_bad_length(tmp_path, content, text):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=text):
        read_header(path)


def test_unknown_dtype_of_another_tensor_is_no_error(tmp_path):
    path = write_safetensors(tmp_path / "x", {"a": entry("F3_NEW", (99,), (0, 4))}, bytes(4))
    assert read_header(path)["a"].nbytes == 4


def test_hole_and_metadata_are_no_error(tmp_path):
    header = {"__metadata__": {"a": "b"}, "a": entry(), "b": entry(offsets=(64, 68))}
    entries = read_header(write_safetensors(tmp_path / "x", header, bytes(70)))
    assert set(entries) == {"a", "b"}


@pytest.mark.parametrize("kind", ["folder", "fifo", "missing", "NUL"])
def test_not_a_regular_file(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    if kind == "fifo":
        os.mkfifo(path)  # opening it would wait for ever
    if kind == "NUL":
        path = tmp_path / "x\0"
    with pytest.raises(InputError):
        read_header(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
sizes = st.integers(-1, 12) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64]) | json_values
descriptions = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "F4", "F8_E4M3", "X"]) | json_values,
        "shape": st.lists(sizes, max_size=3) | json_values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | json_values,
    },
)
headers = st.dictionaries(st.text(max_size=3), descriptions | json_values, max_size=4)


@FUZZ
@given(headers, st.binary(max_size=16))
def test_any_header_is_read_or_refused(tmp_path, header, data):
    path = write_safetensors(tmp_path / "x", header, data)
    size = path.stat().st_size
    try:
        entries = read_header(path)
    except InputError:
        return
    for found in entries.values():
        assert 0 < found.offset <= found.offset + found.nbytes <= size


@FUZZ
@given(st.data())
def test_any_flipped_bytes_are_read_or_refused(tmp_path, data):
    header = {"a": entry(), "b": entry("F32", (2, 1), (4, 12)), "__metadata__": {"x": "y"}}
    text = json.dumps(header).encode()
    content = bytearray(struct.pack("<Q", len(text)) + text + bytes(12))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(InputError):
        read_header(path)
