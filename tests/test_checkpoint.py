# SPDX-License-Identifier: Apache-2.0
"""Finding the Engram tensors of a checkpoint, whatever it came as."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
from checkpoints import (
    change_header,
    read_safetensors,
    refusal,
    rename_tensors,
    shard_of,
    small_checkpoint,
    write_safetensors,
)

from trtllm_engram.builder.checkpoint import TENSORS, Checkpoint

SCALE = "layers.1.engram.embed.scale"
VALUES = "layers.5.engram.embed.weight"


@pytest.fixture
def checkpoint(tmp_path):
    return small_checkpoint(tmp_path / "mein Modell ✓")


def refused(checkpoint, *texts):
    with refusal(*texts):
        Checkpoint.open(checkpoint)


def test_tensors_of_several_shards(checkpoint):
    found = Checkpoint.open(checkpoint)
    assert list(found.tensors) == [1, 5]
    for tensors in found.tensors.values():
        assert set(tensors) == set(TENSORS)
    assert len({entry.file for entry in found.tensors[1].values()}) == 2


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_names_of_other_frameworks(checkpoint, prefix):
    def rename(name):
        return prefix + name.replace("wkv.scale", "wkv.weight_scale_inv")

    expected = Checkpoint.open(checkpoint)
    rename_tensors(checkpoint, rename)
    found = Checkpoint.open(checkpoint)
    assert found.tensors[5]["wkv.scale"].name == f"{prefix}layers.5.engram.wkv.weight_scale_inv"
    assert found.tensors[1]["embed.scale"].shape == expected.tensors[1]["embed.scale"].shape


def test_single_file_without_index(checkpoint):
    header, data = {}, b""
    for shard in sorted(checkpoint.glob("*.safetensors")):
        part, content = read_safetensors(shard)
        for name, value in part.items():
            begin, end = value["data_offsets"]
            header[name] = {**value, "data_offsets": [begin + len(data), end + len(data)]}
        data += content
        shard.unlink()
    (checkpoint / "model.safetensors.index.json").unlink()
    refused(checkpoint, "model.safetensors.index.json or model.safetensors, found neither")
    write_safetensors(checkpoint / "model.safetensors", header, data)
    assert Checkpoint.open(checkpoint).tensors[1]["q_weight"].dtype == "BF16"


def test_hub_cache_of_symlinks(checkpoint, tmp_path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for idx, file in enumerate(sorted(checkpoint.iterdir())):
        shutil.move(file, blobs / str(idx))
        (snapshot / file.name).symlink_to(f"../../blobs/{idx}")
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    found = Checkpoint.open(link)
    assert found.path == link
    assert found.tensors[1]["embed.weight"].file.parent == link


def test_unknown_engram_tensors_are_named(checkpoint, caplog):
    extra = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    shard = shard_of(checkpoint, SCALE)
    names = ["layers.1.engram.conv.weight", "layers.9.engram.q_weight"]
    change_header(shard, lambda header: header.update(dict.fromkeys(names, extra)))
    index = checkpoint / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"].update(dict.fromkeys(names, shard.name))
    index.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING, "trtllm_engram"):
        Checkpoint.open(checkpoint)
    assert [name for name in names if name in caplog.text] == names


def test_the_same_tensor_twice(checkpoint):
    extra = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    shard = shard_of(checkpoint, SCALE)
    change_header(shard, lambda header: header.update({f"model.{SCALE}": extra}))
    index = checkpoint / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"][f"model.{SCALE}"] = shard.name
    index.write_text(json.dumps(data))
    refused(checkpoint, SCALE, f"model.{SCALE}", "same")


def test_missing_shard(checkpoint):
    shard = shard_of(checkpoint, SCALE)
    shard.unlink()
    refused(checkpoint, str(shard), "missing shard")


@pytest.mark.parametrize("name", [SCALE, VALUES, "norm.weight"])
def test_truncated_shard(checkpoint, name):
    shard = shard_of(checkpoint, name)
    os.truncate(shard, shard.stat().st_size - 1)
    refused(checkpoint, str(shard), "truncated")


def test_tensor_not_in_its_shard(checkpoint):
    shard = shard_of(checkpoint, SCALE)
    change_header(shard, lambda header: header.pop(SCALE))
    refused(checkpoint, str(shard), repr(SCALE), "found none")


def test_tensor_not_in_the_index(checkpoint):
    index = checkpoint / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    del data["weight_map"][SCALE]
    index.write_text(json.dumps(data))
    refused(checkpoint, SCALE, "found none")


def test_scales_of_another_dtype_are_named(checkpoint):
    def to_fp32(header):
        rows, scales = header[SCALE]["shape"]
        begin = max(value["data_offsets"][1] for value in header.values())
        header[SCALE] = {
            "dtype": "F32",
            "shape": [rows, scales],
            "data_offsets": [begin, begin + 4 * rows * scales],
        }

    shard = shard_of(checkpoint, SCALE)
    change_header(shard, to_fp32)
    with shard.open("ab") as file:
        file.write(bytes(100_000))
    refused(checkpoint, repr(SCALE), "expected dtype F8_E8M0, found F32")


def test_other_number_of_rows(checkpoint):
    rows = Checkpoint.open(checkpoint).config.num_embeddings[1]

    def drop_row(header):
        begin, end = header[VALUES]["data_offsets"]
        header[VALUES].update(shape=[rows - 1, 64], data_offsets=[begin, end - 64])

    change_header(shard_of(checkpoint, VALUES), drop_row)
    refused(checkpoint, VALUES, "layer 5", f"expected {rows} rows", f"found {rows - 1}")


@pytest.mark.parametrize("short", TENSORS)
def test_wrong_shape(checkpoint, short):
    name = f"layers.1.engram.{short}"

    def reshape(header):
        rows, columns = header[name]["shape"]
        header[name]["shape"] = [1, rows * columns]

    change_header(shard_of(checkpoint, name), reshape)
    refused(checkpoint, repr(name), "expected shape", "found [1, ")


@pytest.mark.parametrize(
    "shard", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b", 3, None, "x" * 5000]
)
def test_bad_shard_names(checkpoint, shard):
    index = checkpoint / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"][SCALE] = shard
    index.write_text(json.dumps(data))
    refused(checkpoint)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "\xff"]
)
def test_bad_index(checkpoint, text):
    (checkpoint / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    refused(checkpoint, "model.safetensors.index.json")


@pytest.mark.parametrize("kind", ["missing", "file", "no config"])
def test_no_checkpoint(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("x")
    if kind == "no config":
        path.mkdir()
    refused(path, str(path))
