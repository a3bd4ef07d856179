# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints in the true layout, and ways to spoil and rewrite them."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trtllm_engram.builder.synthesize import synthesize
from trtllm_engram.plugins.errors import InputError

SIZES: dict[str, Any] = {
    "engram_vocab_size": 60,
    "layers": (1, 5),
    "hidden_size": 64,
    "hc_mult": 2,
    "n_heads": 2,
    "head_dim": 64,
    "max_ngram_size": 3,
}
# What a store of such a checkpoint has, and what --copy adds.
IN_PLACE = ["engram.json", "token_map.npy", "tokenizer.json", "weights.safetensors"]
TABLES = [f"tables/layer-{layer}.{part}" for layer in (1, 5) for part in ("scales", "values")]
NOBODY = 65534


def small_tokenizer(path: Path, words: int = 40) -> Path:
    vocab = {token: idx for idx, token in enumerate(["a", "A", "pad", *map(str, range(words))])}
    data = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
    }
    path.write_text(json.dumps(data))
    return path


def small_checkpoint(folder: Path, **changes: Any) -> Path:
    """A synthesized checkpoint of some 100 kB; `folder` is made beside its tokenizer's source."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = small_tokenizer(folder.parent / f"{folder.name}.tokenizer.json")
    synthesize(folder, **{**SIZES, "tokenizer": tokenizer, **changes})
    tokenizer.unlink()
    return folder


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_safetensors(path: Path, header: Any, data: bytes = b"") -> Path:
    """header: what JSON it is, or its bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def change_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    header, data = read_safetensors(path)
    change(header)
    write_safetensors(path, header, data)


def rename_tensors(checkpoint: Path, rename: Callable[[str], str]) -> None:
    """Gives every tensor of a checkpoint another name, as other frameworks do."""
    index = checkpoint / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] = {rename(name): file for name, file in data["weight_map"].items()}
    index.write_text(json.dumps(data))
    for shard in checkpoint.glob("*.safetensors"):
        header, content = read_safetensors(shard)
        write_safetensors(shard, {rename(name): value for name, value in header.items()}, content)


def shard_of(checkpoint: Path, name: str) -> Path:
    data = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    return checkpoint / data["weight_map"][name]


@contextlib.contextmanager
def refusal(*texts: str) -> Iterator[None]:
    """Expects an InputError of one line that holds these texts."""
    with pytest.raises(InputError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for text in texts:
        assert text in message


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's power to read and write everything; other users have none to begin with."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
