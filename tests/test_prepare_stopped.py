# SPDX-License-Identifier: Apache-2.0
"""prepare when it is stopped or the disk says no: what is left, and how it goes on."""

from __future__ import annotations

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
    IN_PLACE,
    TABLES,
    as_nobody,
    names_below,
    refusal,
    shard_of,
    small_checkpoint,
)

from trtllm_engram.builder import block_sums, copy
from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.verify import verify
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import open_store


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks in a small table."""
    monkeypatch.setattr(block_sums, "BLOCK_BYTES", 4096)


def refused(checkpoint, store, *texts, **options):
    with refusal(*texts):
        prepare(checkpoint, store, **options)


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
