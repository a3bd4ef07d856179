# SPDX-License-Identifier: Apache-2.0
"""open_store: what it accepts, what it refuses, and a manifest from outside."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import refusal, shard_of, small_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.verify import verify
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import open_store

FUZZ = settings(max_examples=200)


@pytest.fixture
def checkpoint(tmp_path):
    return small_checkpoint(tmp_path / "model ✓")


@pytest.fixture
def path(checkpoint, tmp_path):
    prepare(checkpoint, tmp_path / "store")
    return tmp_path / "store"


def refused(path, *texts, **options):
    with refusal(*texts):
        open_store(path, **options)


def edit(path, change):
    data = json.loads((path / "engram.json").read_text())
    change(data)
    (path / "engram.json").write_text(json.dumps(data))


def test_arrays(path):
    store = open_store(str(path))
    rows = store.config.num_embeddings[1]
    table, weights = store.table(5), store.weights(5)
    assert (table.values.shape, table.scales.shape) == ((rows, 64), (rows, 2))
    assert table.values.dtype == np.uint8
    assert weights.wkv_weight.shape == (3 * 64, 256)
    assert weights.wkv_scale.shape == (6, 8)
    assert weights.q_weight.dtype == ml_dtypes.bfloat16
    assert weights.k_weight.shape == (2, 64)
    assert store.token_map.dtype == np.int32
    assert store.token_map.shape == (43,)
    assert store.tokenizer_json.read_text()[0] == "{"
    for array in (table.values, table.scales, weights.wkv_weight, store.token_map):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(InputError, match=r"expected one of \[1, 5\], found 2"):
        store.table(2)


def test_importing_and_opening_loads_no_library(path):
    script = (
        "import sys; from trtllm_engram.runtime import open_store; open_store(sys.argv[1]);"
        "print('trtllm_engram.so' in open('/proc/self/maps').read(), 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]


def test_store_of_the_first_release():
    """tests/data/store_1 stays as 0.1.0 wrote it: later versions must read it."""
    folder = Path(__file__).parent / "data" / "store_1"
    store = open_store(folder)
    values, scales = row_bytes(store.config, 1, np.arange(24), 0)
    np.testing.assert_array_equal(store.table(1).values, values)
    np.testing.assert_array_equal(store.table(1).scales, scales)
    assert store.manifest.content_id == "c7d7c8ba1d373c2073931a2bcd011eef"
    assert verify(folder) == []


def test_changed_since_prepare(path, checkpoint):
    shard = shard_of(checkpoint, "layers.5.engram.embed.weight")
    os.utime(shard, ns=(1, 1))
    refused(path, str(shard), "changed since prepare", "mtime_ns", "--restamp")
    with shard.open("ab") as file:
        file.write(b"x")
    refused(path, str(shard), "changed since prepare", "bytes")
    shard.unlink()
    refused(path, str(shard), "No such file")


def test_time_stamps_in_the_future(tmp_path):
    checkpoint = small_checkpoint(tmp_path / "model")
    for file in checkpoint.iterdir():
        os.utime(file, ns=(2**62, 2**62))
    prepare(checkpoint, tmp_path / "store")
    open_store(tmp_path / "store")


def test_moved_checkpoint(path, checkpoint, tmp_path):
    shutil.move(checkpoint, tmp_path / "moved")
    refused(path, str(checkpoint))
    open_store(path, checkpoint=tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "new stamps", copy_function=shutil.copyfile)
    refused(path, "changed since prepare", checkpoint=tmp_path / "new stamps")


def test_copied_store_may_be_moved_about(checkpoint, tmp_path):
    prepare(checkpoint, tmp_path / "store", copy=True)
    shutil.copytree(tmp_path / "store", tmp_path / "new stamps", copy_function=shutil.copyfile)
    shutil.rmtree(checkpoint)
    assert open_store(tmp_path / "new stamps").table(1).values.any()


def test_read_only_file_system(path, checkpoint, tmp_path):
    place = tmp_path / "read-only"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "--bind", path, place], check=False).returncode:
        pytest.skip("mounting takes root")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        assert open_store(place).table(1).values.any()
        assert prepare(checkpoint, place).content_id == open_store(place).manifest.content_id
    finally:
        subprocess.run(["umount", place], check=True)


def test_newer_format_is_refused_with_the_version_that_reads_it(path):
    edit(path, lambda data: data.update(format_version=2, requires="3.1.0", layers="new"))
    refused(path, "format_version", "at most 1, found 2", "trtllm-engram 3.1.0 or newer")
    edit(path, lambda data: data.update(requires=["x"]))
    refused(path, "at most 1, found 2")


def test_unknown_keys_are_no_error(path):
    edit(path, lambda data: (data.update(note=1), data["layers"][0].update(note=2)))
    open_store(path)


@pytest.mark.parametrize(
    "file", ["/etc/passwd", "../model/x", "a/../b", "", ".", "a\0b", 5, None, "nowhere", "tables"]
)
def test_bad_file_names(path, file):
    (path / "tables").mkdir()

    def change(data):
        data["layers"][0]["tensors"]["embed.scale"].update(root="store", file=file)

    edit(path, change)
    refused(path)


def test_fifo_is_no_table(path):
    (path / "token_map.npy").unlink()
    os.mkfifo(path / "token_map.npy")
    refused(path, "token_map.npy", "regular file")


def test_another_token_map(path):
    with (path / "token_map.npy").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\0\0\0")
    refused(path, "token_map.npy", "not the token map")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(format="x"),
        lambda data: data.update(format_version="1"),
        lambda data: data.update(format_version=True),
        lambda data: data.update(format_version=0),
        lambda data: data["config"].update(hidden_size=-1),
        lambda data: data["config"].update(hidden_size=65),
        lambda data: data["config"].update(engram_vocab_size=62),
        lambda data: data["layout"]["primes"][0][0].__setitem__(0, 4),
        lambda data: data["layout"].pop("multipliers"),
        lambda data: data.update(checkpoint=None),
        lambda data: data.update(checkpoint="relative"),
        lambda data: data.update(checkpoint=3),
        lambda data: data.update(content_id="0" * 32),
        lambda data: data.update(fingerprint="0" * 64),
        lambda data: data["layers"].pop(),
        lambda data: data["layers"].reverse(),
        lambda data: data["layers"][0]["tensors"].pop("q_weight"),
        lambda data: data["layers"][0]["tensors"]["q_weight"].update(dtype="F32"),
        lambda data: data["layers"][0]["tensors"]["q_weight"].update(shape=[64, 2]),
        lambda data: data["layers"][0]["tensors"]["q_weight"].update(offset=-2),
        lambda data: data["layers"][0]["tensors"]["q_weight"].update(offset=2**62),
        lambda data: data["layers"][0]["tensors"]["q_weight"].update(file_size=2**62),
        lambda data: data["layers"][0]["tensors"]["q_weight"].update(root="elsewhere"),
        lambda data: data["layers"][0]["tensors"]["q_weight"].update(block_sums=["0" * 31]),
        lambda data: data["layers"][0]["tensors"]["q_weight"].update(block_sums=[]),
        lambda data: data["token_map"].update(shape=[2**61]),
        lambda data: data["token_map"].update(shape=[42]),
        lambda data: data["token_map"].update(shape=[0]),
        lambda data: data["token_map"].update(shape=[]),
    ],
)
def test_bad_manifest(path, change):
    edit(path, change)
    refused(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000, '{"a": 1e999}'])
def test_no_manifest(path, text):
    (path / "engram.json").write_text(text, encoding="latin-1")
    refused(path, "engram.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def places(value, at=()):
    """The way to each value inside a JSON document."""
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    if isinstance(value, list):
        for idx, inner in enumerate(value):
            yield from places(inner, (*at, idx))


@FUZZ
@given(st.data())
def test_any_manifest_is_opened_or_refused(path, data):
    original = getattr(test_any_manifest_is_opened_or_refused, "original", None)
    if original is None or original[0] != path:
        original = (path, json.loads((path / "engram.json").read_text()))
        test_any_manifest_is_opened_or_refused.original = original
    document = copy.deepcopy(original[1])
    for at in data.draw(st.lists(st.sampled_from(list(places(document))), min_size=1, max_size=3)):
        try:
            inner = document
            for step in at[:-1]:
                inner = inner[step]
            if not at:
                document = data.draw(json_values)
            elif data.draw(st.booleans()):
                inner[at[-1]] = data.draw(json_values | st.integers(0, 1000))
            else:
                del inner[at[-1]]
        except (LookupError, TypeError):
            continue  # an earlier change took the place away
    (path / "engram.json").write_text(json.dumps(document))
    try:
        store = open_store(path)
        store.table(store.config.layer_ids[0]).values.sum()
    except InputError:
        pass
