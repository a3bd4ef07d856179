# SPDX-License-Identifier: Apache-2.0
"""The synthesized checkpoint: true layout, and every byte as the formula says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import SIZES, names_below, small_checkpoint, small_tokenizer
from safetensors import safe_open

from trtllm_engram.builder import EngramConfig
from trtllm_engram.builder.checkpoint import TENSORS, Checkpoint
from trtllm_engram.builder.formula import Formula, row_bytes
from trtllm_engram.builder.synthesize import synthesize
from trtllm_engram.plugins.errors import InputError

WORD = 2**64 - 1


def mix(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def byte_at(layer, tensor, place, seed, mask, bias):
    """The documented formula, one byte at a time."""
    key = mix(mix(seed) ^ (layer * 8 + tensor))
    word = (mix(key + (place // 8 + 1) * 0x9E3779B97F4A7C15 & WORD) & mask) + bias
    return word >> place % 8 * 8 & 0xFF


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_formula(tmp_path, seed):
    opened = Checkpoint.open(small_checkpoint(tmp_path / "model", seed=seed))
    patterns = {
        "embed.weight": (0xBFBFBFBFBFBFBFBF, 0),
        "embed.scale": (0x0303030303030303, 0x7C7C7C7C7C7C7C7C),
        "q_weight": (0x00FF00FF00FF00FF, 0x3F003F003F003F00),
        "k_weight": (0x00FF00FF00FF00FF, 0x3F003F003F003F00),
        "wkv.weight": (0xBFBFBFBFBFBFBFBF, 0),
        # C*D = 256: 127 - round(log2(256 / 9) / 2) = 125
        "wkv.scale": (0x0101010101010101, 0x7D7D7D7D7D7D7D7D),
    }
    assert opened.config.row_dim == 256
    rng = np.random.default_rng(3)
    for layer_id, tensors in opened.tensors.items():
        for name, entry in tensors.items():
            data = entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
            places = {0, entry.nbytes - 1, *rng.integers(0, entry.nbytes, 50).tolist()}
            for place in places:
                expected = byte_at(layer_id, TENSORS.index(name), place, seed, *patterns[name])
                assert data[place] == expected, (name, place)


def test_splitmix_vector():
    """The published outputs of SplitMix64 from state 1234567."""
    state, outputs = 1234567, []
    for step in range(1, 4):
        outputs.append(mix(state + step * 0x9E3779B97F4A7C15 & WORD))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_row_bytes_of_any_shape(tmp_path):
    opened = Checkpoint.open(small_checkpoint(tmp_path / "model"))
    entry = opened.tensors[5]["embed.weight"]
    table = np.fromfile(entry.file, np.uint8, entry.nbytes, offset=entry.offset).reshape(
        entry.shape
    )
    rows = np.array([[0, 3], [table.shape[0] - 1, 7]], dtype=np.int32)
    values, scales = row_bytes(opened.config, 5, rows, 0)
    np.testing.assert_array_equal(values, table[rows])
    assert scales.shape == (2, 2, 2)


def test_rows_far_into_a_table_of_true_size():
    config = EngramConfig((1,), (384006168,), 4, 8, 256, 16_000_000, 99092, 2, 5120, 4, 1e-6)
    row = 384006167
    values, scales = row_bytes(config, 1, np.array([row], np.int32), 9)
    expected = [byte_at(1, 0, row * 256 + b, 9, 0xBFBFBFBFBFBFBFBF, 0) for b in range(256)]
    assert values[0].tolist() == expected
    assert ((scales >= 124) & (scales <= 127)).all()


def test_magnitudes(tmp_path):
    opened = Checkpoint.open(small_checkpoint(tmp_path / "model"))
    for tensors in opened.tensors.values():
        entry = tensors["embed.weight"]
        values = np.fromfile(entry.file, np.uint8, entry.nbytes, offset=entry.offset)
        assert ((values & 0x7F) != 0x7F).all()  # NaN
        assert len(np.unique(values)) == 128


def test_files(tmp_path):
    checkpoint = small_checkpoint(tmp_path / "model")
    shards = [f"model-0000{idx}-of-00004.safetensors" for idx in range(1, 5)]
    rest = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert names_below(checkpoint) == sorted(shards + rest)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert "norm.weight" in index["weight_map"]
    for shard in shards:
        with safe_open(checkpoint / shard, "np") as file:
            assert {name for name, at in index["weight_map"].items() if at == shard} == set(
                file.keys()
            )
    config = EngramConfig.from_pretrained(checkpoint)
    assert config.hidden_size == SIZES["hidden_size"]


def test_reproducible_on_any_number_of_threads(tmp_path):
    first = small_checkpoint(tmp_path / "one", num_threads=1, engram_vocab_size=90_000)
    second = small_checkpoint(tmp_path / "two", num_threads=3, engram_vocab_size=90_000)
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seed": -1}, "seed: expected"),
        ({"seed": 2**64}, "seed: expected"),
        ({"engram_vocab_size": 0}, "engram_vocab_size"),
        ({"engram_vocab_size": -5}, "engram_vocab_size"),
        ({"layers": ()}, "engram_layer_ids"),
        ({"layers": (1, 1)}, "engram_layer_ids"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hc_mult": -1}, "hc_mult"),
        ({"head_dim": 33}, "engram_head_dim"),
        ({"engram_vocab_size": 2**31 - 1}, "engram_vocab_size"),
        ({"pad_token_id": 99}, "engram_pad_token_id"),
        ({"tokenizer": "/nowhere"}, "/nowhere"),
    ],
)
def test_bad_sizes_leave_nothing(tmp_path, changes, text):
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=text):
        synthesize(tmp_path / "model", **{**SIZES, "tokenizer": tokenizer, **changes})
    assert names_below(tmp_path) == ["tokenizer.json"]


def test_too_big_for_the_disk(tmp_path):
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    sizes = {"tokenizer": tokenizer, "layers": range(60), "engram_vocab_size": 80_000_000}
    with pytest.raises(InputError, match=r"disk full: needed \d+ bytes, free \d+ bytes"):
        synthesize(tmp_path / "a" / "model", **sizes)
    assert names_below(tmp_path) == ["tokenizer.json"]


def test_folder_with_files_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("x")
    with pytest.raises(InputError, match="new or empty folder"):
        small_checkpoint(tmp_path / "model")
    assert (tmp_path / "model" / "mine").read_text() == "x"


def test_ctrl_c_leaves_nothing(tmp_path):
    script = (
        "import os, sys; from trtllm_engram.builder.synthesize import synthesize;"
        "synthesize(sys.argv[1], tokenizer=sys.argv[2], engram_vocab_size=40_000, hidden_size=64,"
        f"progress=lambda *_: os.kill(os.getpid(), {int(signal.SIGINT)}))"
    )
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    command = [sys.executable, "-c", script, tmp_path / "a" / "model", tokenizer]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert "KeyboardInterrupt" in result.stderr
    assert names_below(tmp_path) == ["tokenizer.json"]


def test_chunks_and_single_bytes_agree():
    config = EngramConfig((3,), (12,), 4, 8, 256, 2, 99, 2, 64, 4, 1e-6)
    formula = Formula(config, 3, "wkv.scale", 5)
    end = 3 * (1 << 18) + 13
    data = b"".join(bytes(chunk) for _, chunk in formula.chunks(8, end))
    assert data == formula.bytes_at(np.arange(8, end)).tobytes()
