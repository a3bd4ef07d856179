# SPDX-License-Identifier: Apache-2.0
"""`hash`: which rows of which table a text reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_engram.builder import EngramConfig, EngramLayout, build_token_map
from trtllm_engram.builder.checkpoint import TOKENIZER_FILE, files_of
from trtllm_engram.builder.files import refuse_to_replace, write_aside
from trtllm_engram.builder.layout import read_layout
from trtllm_engram.builder.manifest import MANIFEST_FILE
from trtllm_engram.plugins.errors import InputError

from .. import ops
from ..store import open_store
from . import console, shared_options
from .tokens import Ids, add_token_arguments, read_tokens, token_files

EXAMPLE = "trtllm-engram hash STORE --text examples/multilingual.txt --output ids.npy"


@dataclass(frozen=True)
class _Hasher:
    layout: EngramLayout
    token_map: Ids
    tokenizer_json: Path
    files: list[Path]  # that all this was read from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a store, a checkpoint folder or a config.json"
    )
    add_token_arguments(parser)
    parser.add_argument(
        "--tokenizer", metavar="FILE", type=Path, help="tokenizer.json (default: the model's own)"
    )
    parser.add_argument(
        "--output", metavar="FILE.npy", type=Path, help="write int32 [tokens, layers, columns] here"
    )
    shared_options.add_checkpoint(parser, "a store")
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    hasher = _open(Path(args.model), args.tokenizer, args.checkpoint)
    if args.output is not None:
        refuse_to_replace(args.output, [*hasher.files, *token_files(args)])
    ids, dead = read_tokens(args, hasher.tokenizer_json)
    hash_ids = ops.hash_ids(
        hasher.layout,
        hasher.token_map,
        ids,
        np.arange(ids.size, dtype=np.int64),
        np.array([0, ids.size], np.int32),
        dead_mask=dead,
    )
    if args.output is not None:
        with write_aside(args.output) as scratch, scratch.open("wb") as file:
            np.save(file, hash_ids)
    if args.json:
        layers = list(hasher.layout.config.layer_ids)
        document = {"layers": layers, "token_ids": ids.tolist(), "hash_ids": hash_ids.tolist()}
        console.print_json(document, compact=True)
    elif args.output is not None:
        console.stdout().print(f"{args.output}: int32 {list(hash_ids.shape)}")
    else:
        for line in _lines(hasher.layout.config, ids, hash_ids):
            print(line)
    return 0


def _open(model: Path, tokenizer: Path | None, checkpoint: str | None) -> _Hasher:
    if (model / MANIFEST_FILE).exists():
        store = open_store(model, checkpoint=checkpoint)
        tokenizer = tokenizer or store.tokenizer_json
        files = [tokenizer, *store.manifest.files(model)]
        return _Hasher(store.layout, store.token_map, tokenizer, files)
    layout = read_layout(model)
    if tokenizer is None:
        if not model.is_dir():
            raise InputError(f"{model}: a config.json has no tokenizer: expected --tokenizer FILE")
        tokenizer = model / TOKENIZER_FILE
    files = [tokenizer, *(files_of(model) if model.is_dir() else [model])]
    return _Hasher(layout, build_token_map(tokenizer, layout.config), tokenizer, files)


def _lines(config: EngramConfig, ids: Ids, hash_ids: Ids) -> Iterator[str]:
    """One line per token, layer and n-gram order."""
    yield f"{'position':>8} {'token':>7} {'layer':>5} {'order':>5}  row of each head"
    orders = config.max_ngram_size - 1
    by_order = hash_ids.reshape(ids.size, config.num_layers, orders, config.n_heads)
    width = len(str(max(config.num_embeddings)))
    for position, token in enumerate(ids):
        for layer, layer_id in enumerate(config.layer_ids):
            for order, rows in enumerate(by_order[position, layer], start=2):
                shown = " ".join(f"{row:>{width}}" for row in rows)
                yield f"{position:>8} {token:>7} {layer_id:>5} {order:>5}  {shown}"
