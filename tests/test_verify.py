# SPDX-License-Identifier: Apache-2.0
"""verify: every flipped byte is found and named; time stamps are accepted once the sums hold."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from checkpoints import names_below, shard_of, small_checkpoint

from trtllm_engram.builder import block_sums
from trtllm_engram.builder import verify as verify_module
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.verify import verify
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import open_store


@pytest.fixture(params=[False, True], ids=["in place", "copy"])
def store(tmp_path, request, monkeypatch):
    monkeypatch.setattr(block_sums, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(verify_module, "BLOCK_BYTES", 4096)
    prepare(small_checkpoint(tmp_path / "model"), tmp_path / "store", copy=request.param)
    return tmp_path / "store"


def flip(file, place):
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 0x10]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_one_flipped_byte_in_each_part(store):
    manifest = read_manifest(store)
    for name, part in manifest.parts():
        span = manifest.span(store, part)
        for at in (0, span.nbytes // 2, span.nbytes - 1):
            flip(span.file, span.offset + at)
            (problem,) = verify(store)
            assert str(span.file) in problem
            assert f"block {at // 4096} of {name} " in problem
            flip(span.file, span.offset + at)
    assert verify(store) == []


def test_every_problem_is_named(store):
    manifest = read_manifest(store)
    parts = dict(manifest.parts())
    values = manifest.span(store, parts["layers.1.engram.embed.weight"])
    flip(values.file, values.offset)
    flip(values.file, values.offset + 5000)
    (store / "token_map.npy").unlink()
    with (store / "tokenizer.json").open("ab") as file:
        file.write(b" ")
    problems = verify(store)
    assert len(problems) == 4
    assert all("\n" not in problem for problem in problems)
    assert "token_map.npy" in problems[0]
    assert "tokenizer.json: changed since prepare" in problems[1]


def test_restamp(tmp_path):
    checkpoint = small_checkpoint(tmp_path / "model")
    store = tmp_path / "store"
    prepare(checkpoint, store)
    shard = shard_of(checkpoint, "layers.5.engram.embed.weight")
    os.utime(shard, ns=(2**62, 2**62))  # in the year 2116
    with pytest.raises(InputError, match=r"changed since prepare.*--restamp"):
        open_store(store)
    (problem,) = verify(store)
    assert str(shard) in problem
    assert verify(store, restamp=True) == []
    open_store(store)
    assert verify(store) == []


def test_restamp_needs_the_sums(tmp_path):
    checkpoint = small_checkpoint(tmp_path / "model")
    store = tmp_path / "store"
    manifest = prepare(checkpoint, store)
    before = (store / "engram.json").read_bytes()
    span = manifest.span(store, manifest.layers[5]["embed.weight"])
    flip(span.file, span.offset)
    os.utime(span.file, ns=(1, 1))
    assert len(verify(store, restamp=True)) == 1
    assert (store / "engram.json").read_bytes() == before
    assert ".lock" not in names_below(store)


def test_restamp_does_not_bless_what_changes_meanwhile(tmp_path):
    checkpoint = small_checkpoint(tmp_path / "model")
    prepare(checkpoint, tmp_path / "store")
    shard = shard_of(checkpoint, "layers.5.engram.embed.weight")
    os.utime(shard, ns=(1, 1))
    verify(tmp_path / "store", restamp=True, progress=lambda *_: os.utime(shard, ns=(2, 2)))
    with pytest.raises(InputError, match="expected mtime_ns 1, found 2"):
        open_store(tmp_path / "store")


def test_restamp_takes_a_moved_checkpoint(tmp_path):
    checkpoint = small_checkpoint(tmp_path / "model")
    store = tmp_path / "store"
    prepare(checkpoint, store)
    shutil.move(checkpoint, tmp_path / "moved")
    with pytest.raises(InputError, match=r"model: expected the store's checkpoint.*--checkpoint"):
        verify(store)
    assert verify(store, checkpoint=tmp_path / "moved") == []
    assert verify(store, checkpoint=tmp_path / "moved", restamp=True) == []
    assert read_manifest(store).checkpoint == tmp_path / "moved"
    open_store(store)


@pytest.mark.parametrize("restamp", [False, True])
def test_a_checkpoint_that_is_not_there_is_bad_input(tmp_path, restamp):
    prepare(small_checkpoint(tmp_path / "model"), tmp_path / "store")
    for nowhere in (tmp_path / "nowhere", tmp_path / "store/engram.json"):
        with pytest.raises(InputError, match=f"{nowhere}: expected the store's checkpoint"):
            verify(tmp_path / "store", nowhere, restamp=restamp)


def test_a_manifest_that_was_changed(store):
    file = store / "engram.json"
    before = file.read_text()
    file.write_text(before.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert file.read_text() != before
    open_store(store)
    (problem,) = verify(store, restamp=True)
    assert problem.startswith(f"{file}: expected sum '")
    file.write_text(before)
    assert verify(store) == []


def test_a_fingerprint_that_does_not_follow(store):
    file = store / "engram.json"
    manifest = json.loads(file.read_text())
    manifest["fingerprint"] = "0" * 64
    del manifest["manifest_sum"]  # as old stores have none
    file.write_text(json.dumps(manifest))
    (problem,) = verify(store)
    assert problem.startswith(f"{file}: fingerprint: expected 0000")


def test_no_store(tmp_path):
    with pytest.raises(InputError, match="expected a store"):
        verify(tmp_path)
