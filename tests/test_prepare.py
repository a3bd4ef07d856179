# SPDX-License-Identifier: Apache-2.0
"""prepare as it is used: real files and folders, one and two at once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import (
    IN_PLACE,
    SIZES,
    TABLES,
    change_header,
    names_below,
    refusal,
    shard_of,
    small_checkpoint,
    small_tokenizer,
)
from safetensors import safe_open

from trtllm_engram.builder import prepare as prepare_module
from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.verify import verify
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import open_store


@pytest.fixture
def checkpoint(tmp_path):
    return small_checkpoint(tmp_path / "mein Modell ✓")


def refused(checkpoint, store, *texts, **options):
    with refusal(*texts):
        prepare(checkpoint, store, **options)


@pytest.mark.parametrize("with_copy", [False, True], ids=["in place", "copy"])
def test_store(checkpoint, tmp_path, with_copy):
    path = tmp_path / "neuer Ordner" / "Store ü"
    reports = []
    manifest = prepare(
        checkpoint, path, copy=with_copy, progress=lambda *report: reports.append(report)
    )
    assert names_below(path) == sorted(IN_PLACE + ([*TABLES, "tables"] if with_copy else []))
    assert reports[-1][0] == reports[-1][1]
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    if with_copy:
        shutil.rmtree(checkpoint)  # a copy stands alone
    store = open_store(path)
    assert store.manifest == manifest
    for layer_id, rows in zip(store.config.layer_ids, store.config.num_embeddings, strict=True):
        values, scales = row_bytes(store.config, layer_id, np.arange(rows), 0)
        np.testing.assert_array_equal(store.table(layer_id).values, values)
        np.testing.assert_array_equal(store.table(layer_id).scales, scales)
    np.testing.assert_array_equal(np.load(path / "token_map.npy"), store.token_map)
    assert verify(path) == []


def test_weights_read_with_the_library(checkpoint, tmp_path):
    prepare(checkpoint, tmp_path / "store")
    with safe_open(tmp_path / "store" / "weights.safetensors", "np") as weights:
        names = set(weights.keys())
        q_weight = weights.get_tensor("layers.5.engram.q_weight")
    assert q_weight.shape == (2, 64)
    assert names == {
        f"layers.{layer}.engram.{name}"
        for layer in (1, 5)
        for name in ("wkv.weight", "wkv.scale", "q_weight", "k_weight")
    }


def test_copy_starts_at_a_page_and_is_the_table(checkpoint, tmp_path):
    manifest = prepare(checkpoint, tmp_path / "store", copy=True)
    in_place = prepare(checkpoint, tmp_path / "other")
    assert manifest.content_id == in_place.content_id
    assert all(manifest.layers[1][name].offset == 0 for name in ("embed.weight", "embed.scale"))
    source = in_place.layers[5]["embed.weight"]
    content = (checkpoint / source.file).read_bytes()
    copied = (tmp_path / "store" / "tables" / "layer-5.values").read_bytes()
    assert copied == content[source.offset : source.offset + source.nbytes]


def test_manifest_says_where_everything_lies(checkpoint, tmp_path):
    prepare(checkpoint, tmp_path / "store")
    data = json.loads((tmp_path / "store" / "engram.json").read_text())
    part = data["layers"][0]["tensors"]["embed.weight"]
    file = checkpoint / part["file"]
    assert data["checkpoint"] == str(checkpoint)
    assert part["root"] == "checkpoint"
    assert (part["file_size"], part["mtime_ns"]) == (file.stat().st_size, file.stat().st_mtime_ns)
    assert part["dtype"] == "F8_E4M3"


def test_relative_paths(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(checkpoint.name, "store")
    open_store("store")
    monkeypatch.chdir("/")
    assert open_store(tmp_path / "store").manifest.checkpoint == checkpoint


def test_again_changes_nothing(checkpoint, tmp_path):
    for with_copy in (False, True):
        store = tmp_path / f"store {with_copy}"
        first = prepare(checkpoint, store, copy=with_copy)
        before = (store / "engram.json").stat()
        assert prepare(checkpoint, store, copy=with_copy) == first
        assert (store / "engram.json").stat() == before
        refused(checkpoint, store, str(store), "--copy", copy=not with_copy)


@pytest.mark.parametrize("with_copy", [False, True], ids=["in place", "copy"])
def test_another_checkpoint_leaves_the_store(checkpoint, tmp_path, with_copy):
    store = tmp_path / "store"
    prepare(checkpoint, store, copy=with_copy)
    other = small_checkpoint(tmp_path / "other", seed=1)
    refused(other, store, str(store), "another checkpoint", copy=with_copy)
    assert verify(store) == []


@pytest.mark.parametrize("with_copy", [False, True], ids=["in place", "copy"])
def test_foreign_folder(checkpoint, tmp_path, with_copy):
    store = tmp_path / "store"
    store.mkdir()
    (store / "diary.txt").write_text("dear")
    refused(checkpoint, store, "new or empty folder", "'diary.txt'", copy=with_copy)
    refused(checkpoint, checkpoint, "new or empty folder", copy=with_copy)
    assert names_below(store) == ["diary.txt"]


def test_bad_checkpoint_leaves_nothing(checkpoint, tmp_path):
    os.truncate(shard_of(checkpoint, "norm.weight"), 3)
    refused(checkpoint, tmp_path / "a" / "store")
    assert not (tmp_path / "a").exists()


def test_other_tokenizer(checkpoint, tmp_path):
    small_tokenizer(checkpoint / "tokenizer.json", words=41)
    refused(checkpoint, tmp_path / "store", "expected 42", "found 43", "tokenizer.json")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("with_copy", [False, True], ids=["in place", "copy"])
def test_failure_half_way_leaves_nothing(checkpoint, tmp_path, monkeypatch, with_copy):
    def fail(*_args):
        raise InputError("half way")

    monkeypatch.setattr(prepare_module, "_write_tokenizer", fail)
    refused(checkpoint, tmp_path / "a" / "store", "half way", copy=with_copy)
    assert not (tmp_path / "a").exists()


def test_shard_changes_while_it_is_read(checkpoint, tmp_path):
    shard = shard_of(checkpoint, "norm.weight")

    def touch(done, total):
        if done == total:
            os.utime(shard, ns=(1, 1))

    refused(checkpoint, tmp_path / "store", str(shard), "changed", progress=touch)
    assert not (tmp_path / "store").exists()


def test_shard_shrinks_while_it_is_read(checkpoint, tmp_path):
    shard = shard_of(checkpoint, "layers.5.engram.embed.weight")
    refused(
        checkpoint,
        tmp_path / "store",
        str(shard),
        "changed",
        progress=lambda *_: os.truncate(shard, 5000),
    )


def test_two_at_once(checkpoint, tmp_path):
    store = tmp_path / "store"
    seen = []

    def second(*_report):
        if not seen:
            seen.append(True)
            refused(checkpoint, store, "another prepare")

    prepare(checkpoint, store, progress=second)
    assert seen
    assert names_below(store) == IN_PLACE


def test_stale_lock_file_locks_nothing(checkpoint, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    (store / ".lock").write_text("")
    prepare(checkpoint, store)
    assert names_below(store) == IN_PLACE


def test_lock_is_held_by_another_process(checkpoint, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    with (store / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(checkpoint, store, str(store), "another prepare")
    prepare(checkpoint, store)


def test_memory_is_bounded(tmp_path):
    """A copy of 400 MB within 300 MB of memory, the interpreter's own included."""
    checkpoint = small_checkpoint(tmp_path / "model", engram_vocab_size=750_000, n_heads=1)
    # Not ru_maxrss, which a new process takes over from the one that started it.
    script = (
        "import re, sys; from trtllm_engram.builder.prepare import prepare;"
        "prepare(sys.argv[1], sys.argv[2], copy=True);"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    command = [sys.executable, "-c", script, checkpoint, tmp_path / "store"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 300_000
    assert read_manifest(tmp_path / "store").layers[1]["embed.weight"].block_sums[1:]


def test_header_may_say_anything_of_other_tensors(checkpoint, tmp_path):
    shard = shard_of(checkpoint, "norm.weight")
    change_header(shard, lambda header: header["norm.weight"].update(dtype="F99"))
    prepare(checkpoint, tmp_path / "store")
    assert SIZES["layers"] == read_manifest(tmp_path / "store").config.layer_ids
