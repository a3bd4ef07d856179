# SPDX-License-Identifier: Apache-2.0
"""prepare as it is used: real files, kills, full disks, other users' folders."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    SIZES,
    as_nobody,
    change_header,
    names_below,
    shard_of,
    small_checkpoint,
    small_tokenizer,
)
from safetensors import safe_open

from trtllm_engram.builder import block_sums, copy
from trtllm_engram.builder import prepare as prepare_module
from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.verify import verify
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import open_store

IN_PLACE = ["engram.json", "token_map.npy", "tokenizer.json", "weights.safetensors"]
TABLES = [f"tables/layer-{layer}.{part}" for layer in (1, 5) for part in ("scales", "values")]


@pytest.fixture
def checkpoint(tmp_path):
    return small_checkpoint(tmp_path / "mein Modell ✓")


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks in a small table."""
    monkeypatch.setattr(block_sums, "BLOCK_BYTES", 4096)


def refused(checkpoint, store, *texts, **options):
    with pytest.raises(InputError) as caught:
        prepare(checkpoint, store, **options)
    message = str(caught.value)
    assert "\n" not in message
    for text in texts:
        assert text in message


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


class TestKilled:
    """A signal in the middle of --copy, when the tables are many blocks."""

    @pytest.fixture
    def checkpoint(self, tmp_path):
        return small_checkpoint(tmp_path / "model", engram_vocab_size=2000)

    SCRIPT = """
import os, sys
from trtllm_engram.builder import block_sums
block_sums.BLOCK_BYTES = 4096
from trtllm_engram.builder.prepare import prepare
def report(done, total):
    if done > total * float(sys.argv[4]):
        os.kill(os.getpid(), int(sys.argv[3]))
prepare(sys.argv[1], sys.argv[2], copy=True, progress=report, num_threads=2)
"""

    def run(self, checkpoint, store, number, when=0.7):
        arguments = [checkpoint, store, str(int(number)), str(when)]
        command = [sys.executable, "-c", self.SCRIPT, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_ctrl_c_leaves_nothing(self, checkpoint, tmp_path):
        result = self.run(checkpoint, tmp_path / "a" / "store", signal.SIGINT)
        assert "KeyboardInterrupt" in result.stderr
        assert not (tmp_path / "a").exists()

    @pytest.mark.usefixtures("small_blocks")
    @pytest.mark.parametrize("when", [0.4, 0.7, 0.999])
    def test_kill_is_no_store_and_goes_on(self, checkpoint, tmp_path, monkeypatch, when):
        store = tmp_path / "store"
        assert self.run(checkpoint, store, signal.SIGKILL, when).returncode == -signal.SIGKILL
        assert not (store / "engram.json").exists()
        with pytest.raises(InputError, match="expected a store"):
            open_store(store)
        written = []
        write_at = copy.write_at
        monkeypatch.setattr(
            copy, "write_at", lambda *args: (written.append(len(args[1])), write_at(*args))
        )
        manifest = prepare(checkpoint, store, copy=True)
        total = sum(
            manifest.layers[layer][name].nbytes
            for layer in (1, 5)
            for name in ("embed.weight", "embed.scale")
        )
        # What was done is not done again; the weights come first and are some of the share.
        assert sum(written) <= total * (1.2 - when)
        assert names_below(store) == sorted([*IN_PLACE, *TABLES, "tables"])
        assert verify(store) == []
        assert manifest.content_id == prepare(checkpoint, tmp_path / "fresh").content_id

    @pytest.mark.usefixtures("small_blocks")
    def test_finished_blocks_are_not_taken_on_trust(self, checkpoint, tmp_path):
        store = tmp_path / "store"
        self.run(checkpoint, store, signal.SIGKILL)
        for file in (store / "tables").glob("layer-*"):
            with file.open("r+b") as table:
                table.write(b"spoiled by a power cut")
        with (store / "tables" / "journal.jsonl").open("ab") as journal:
            journal.write(b'[0, 1, "torn')
        manifest = prepare(checkpoint, store, copy=True)
        assert verify(store) == []
        assert manifest.content_id == prepare(checkpoint, tmp_path / "fresh").content_id

    def test_leftovers_of_a_copy_do_not_stay(self, checkpoint, tmp_path):
        store = tmp_path / "store"
        self.run(checkpoint, store, signal.SIGKILL)
        assert (store / "tables" / "journal.jsonl").exists()
        prepare(checkpoint, store)
        assert names_below(store) == IN_PLACE

    @pytest.mark.usefixtures("small_blocks")
    def test_another_state_of_the_checkpoint_starts_over(self, checkpoint, tmp_path):
        store = tmp_path / "store"
        self.run(checkpoint, store, signal.SIGKILL)
        shutil.rmtree(checkpoint)
        small_checkpoint(checkpoint, seed=7)
        prepare(checkpoint, store, copy=True)
        assert verify(store) == []
        values, _ = row_bytes(open_store(store).config, 1, np.arange(3), 7)
        np.testing.assert_array_equal(open_store(store).table(1).values[:3], values)


class TestFullDisk:
    @pytest.fixture
    def disk(self, tmp_path):
        """A small disk; its size is well above the weights and below the tables."""
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a tmpfs takes root")
        yield folder
        subprocess.run(["umount", folder], check=True)

    @pytest.fixture
    def big(self, tmp_path):
        return small_checkpoint(tmp_path / "big", engram_vocab_size=5000)

    def test_refused_before_it_begins(self, big, disk):
        refused(big, disk / "store", "disk full", "needed", "free", copy=True)
        assert names_below(disk) == []

    def test_fills_up_on_the_way(self, big, disk, monkeypatch):
        monkeypatch.setattr(copy, "check_free_bytes", lambda *_: None)
        refused(big, disk / "store", "disk full", "free", copy=True)
        assert names_below(disk) == []

    def test_file_size_limit(self, big, tmp_path):
        script = (
            "import resource, sys; from trtllm_engram.builder.prepare import prepare;"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000));"
            "prepare(sys.argv[1], sys.argv[2], copy=True)"
        )
        command = [sys.executable, "-c", script, big, tmp_path / "store"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "InputError" in result.stderr.splitlines()[-1]
        assert "File too large" in result.stderr.splitlines()[-1]
        assert not (tmp_path / "store").exists()


class TestPermissions:
    @pytest.fixture
    def public(self):
        """A folder that others reach; pytest's own belongs to its user alone."""
        with tempfile.TemporaryDirectory() as name:
            Path(name).chmod(0o755)
            yield Path(name)

    def test_unwritable_place(self, public):
        checkpoint = small_checkpoint(public / "model")
        public.chmod(0o555)
        with as_nobody():
            refused(checkpoint, public / "a" / "store", "Permission denied", str(public))
        assert names_below(public) == names_below(public)
        assert not (public / "a").exists()

    @pytest.mark.parametrize(
        "name", ["model.safetensors.index.json", "config.json", "tokenizer.json", "shard", "."]
    )
    def test_unreadable_file(self, public, name):
        checkpoint = small_checkpoint(public / "model")
        path = shard_of(checkpoint, "norm.weight") if name == "shard" else checkpoint / name
        path.chmod(0)
        target = public / "store"
        with as_nobody():
            refused(checkpoint, target, "Permission denied")
        checkpoint.chmod(0o755)
        assert not target.exists()


def test_memory_is_bounded(tmp_path):
    """A copy of 400 MB within 300 MB of memory, the interpreter's own included."""
    checkpoint = small_checkpoint(tmp_path / "model", engram_vocab_size=750_000, n_heads=1)
    script = (
        "import resource, sys; from trtllm_engram.builder.prepare import prepare;"
        "prepare(sys.argv[1], sys.argv[2], copy=True);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
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
