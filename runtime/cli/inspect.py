# SPDX-License-Identifier: Apache-2.0
"""`inspect`: what a path is and what is in it. Reads headers, never tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trtllm_engram.builder import EngramLayout
from trtllm_engram.builder.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER_FILE,
    Checkpoint,
)
from trtllm_engram.builder.config import CONFIG_FILE
from trtllm_engram.builder.files import read_regular, reading
from trtllm_engram.builder.layout import read_layout
from trtllm_engram.builder.manifest import CHECKPOINT, MANIFEST_FILE, read_manifest
from trtllm_engram.builder.token_map import load_token_map
from trtllm_engram.plugins.errors import InputError

from . import console, shared_options

EXAMPLE = "trtllm-engram inspect CHECKPOINT"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="a checkpoint, a store, a config.json or a tokenizer.json",
    )
    shared_options.add_checkpoint(parser, "a store")
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    facts = describe(args.path, args.checkpoint)
    if args.json:
        console.print_json(facts)
        return 0
    tensors = facts.pop("tensors", [])
    console.print_pairs([(name.replace("_", " "), _shown(fact)) for name, fact in facts.items()])
    if tensors:
        console.stdout().print()
        rows = [
            (one["name"], one["dtype"], " x ".join(map(str, one["shape"])), one["file"])
            for one in tensors
        ]
        console.print_table(("tensor", "dtype", "shape", "file"), rows)
    return 0


def describe(path: Path, checkpoint: str | None = None) -> dict[str, Any]:
    """Facts by name, fit for JSON."""
    with reading(path):
        if not path.exists():
            raise InputError(
                f"{path}: expected a checkpoint, store, config or tokenizer, found nothing"
            )
        is_folder = path.is_dir()
        names = {child.name for child in path.iterdir()} if is_folder else set()
    if MANIFEST_FILE in names:
        return _describe_store(path, checkpoint)
    if names & {INDEX_FILE, SINGLE_FILE}:
        return _describe_checkpoint(path)
    if path.suffix == ".safetensors":
        raise InputError(f"{path}: a shard alone: expected its checkpoint's folder, {path.parent}")
    if not is_folder and _is_tokenizer(path):
        return _describe_tokenizer(path)
    if not is_folder or CONFIG_FILE in names:
        return {"kind": "config", "path": str(path)} | _describe_layout(read_layout(path))
    raise InputError(
        f"{path}: expected {MANIFEST_FILE}, {INDEX_FILE}, {SINGLE_FILE} or {CONFIG_FILE} in it"
    )


def _describe_layout(layout: EngramLayout) -> dict[str, Any]:
    config = layout.config
    orders = f"orders 2 to {config.max_ngram_size} of {config.n_heads} heads"
    return {
        "layers": list(config.layer_ids),
        "rows": list(layout.num_embeddings),
        "columns": f"{config.num_columns} rows of {config.head_dim} values a token ({orders})",
        "hidden_size": config.hidden_size,
        "hc_mult": config.hc_mult,
        "compressed_ids": config.compressed_vocab_size,
        "first_prime": int(layout.primes.min()),
    }


def _describe_checkpoint(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint.open(path)
    entries = [entry for layer in checkpoint.tensors.values() for entry in layer.values()]
    return {
        "kind": "checkpoint",
        "path": str(path),
        **_describe_layout(checkpoint.layout),
        "bytes": sum(entry.nbytes for entry in entries),
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "file": entry.file.name,
                "offset": entry.offset,
            }
            for entry in entries
        ],
    }


def _describe_store(path: Path, checkpoint: str | None) -> dict[str, Any]:
    manifest = read_manifest(path, checkpoint)
    if checkpoint is not None:
        manifest.check_checkpoint()
    parts = [(name, part) for name, part in manifest.parts() if name.startswith("layers.")]
    referred = any(part.root == CHECKPOINT for _, part in parts)
    return {
        "kind": "store",
        "path": str(path),
        **_describe_layout(manifest.layout),
        "fingerprint": manifest.fingerprint,
        "content_id": manifest.content_id,
        "tables": f"in the checkpoint {manifest.checkpoint}" if referred else "in the store",
        "bytes": sum(part.nbytes for _, part in parts),
        "tensors": [
            {
                "name": name,
                "dtype": part.dtype,
                "shape": list(part.shape),
                "file": part.file,
                "offset": part.offset,
            }
            for name, part in parts
        ],
    }


def _is_tokenizer(path: Path) -> bool:
    """By its name or, whatever the name, by the tokenization model that it holds."""
    content = read_regular(path)
    if path.name == TOKENIZER_FILE:
        return True
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return False  # nor a config: that reader says what is wrong
    return isinstance(data, dict) and isinstance(data.get("model"), dict)


def _describe_tokenizer(path: Path) -> dict[str, Any]:
    token_map = load_token_map(path)
    return {
        "kind": "tokenizer",
        "path": str(path),
        "ids": int(token_map.size),
        "compressed_ids": int(token_map.max(initial=-1)) + 1,
    }


def _shown(fact: object) -> str:
    return ", ".join(map(str, fact)) if isinstance(fact, list) else str(fact)
