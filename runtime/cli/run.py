# SPDX-License-Identifier: Apache-2.0
"""`run`: a text through every Engram layer of a store, into a safetensors file."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder import EngramConfig
from trtllm_engram.builder.dtypes import SAFETENSORS
from trtllm_engram.builder.files import refuse_to_replace, stat_regular, write_aside, write_at
from trtllm_engram.builder.safetensors_file import TensorEntry, TensorSpec, create_file
from trtllm_engram.plugins.errors import InputError

from ..devices import AUTO, choose_device, parse_device
from ..engine import Engine
from ..engine_session import EngineSession
from ..hidden import FileHidden, HiddenSource, SeededHidden
from ..session import DEFAULT_CHUNK, Chunk, EngramSession
from ..store import Store, open_store
from ..tables import Tables
from . import console, shared_options
from .tokens import add_token_arguments, read_tokens, token_files

EXAMPLE = "trtllm-engram run STORE --text examples/multilingual.txt --output out.safetensors"


@dataclass
class _Summary:
    device: str
    tokens: int
    seconds: float
    unique_rows: dict[int, int]
    output: str
    output_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run all Engram layers of a store over a text. OUT.safetensors gets, for each layer i,\n"
        "  layers.{i}.hash_ids  int32 [tokens, columns]\n"
        "  layers.{i}.hidden    [tokens, hc_mult, hidden], what the gate made of the input\n"
        "  layers.{i}.rows      BF16 [tokens, columns * head_dim], with --rows"
    )
    parser.add_argument("store", metavar="STORE")
    add_token_arguments(parser)
    parser.add_argument("--output", metavar="OUT.safetensors", type=Path, required=True)
    parser.add_argument("--device", default=AUTO, help="auto (default), cpu or cuda:N")
    parser.add_argument(
        "--engine", metavar="PLAN", type=Path, help="run an engine of `build` instead of the ops"
    )
    parser.add_argument(
        "--chunk",
        metavar="N",
        type=shared_options.integer(1),
        default=DEFAULT_CHUNK,
        help=f"tokens at a time, at most what an engine takes (default: {DEFAULT_CHUNK})",
    )
    hidden = parser.add_mutually_exclusive_group()
    hidden.add_argument(
        "--hidden",
        metavar="FILE",
        type=Path,
        help="safetensors with layers.{i}.hidden, or one hidden for all layers",
    )
    hidden.add_argument(
        "--seed",
        type=shared_options.integer(0, shared_options.MAX_SEED),
        default=0,
        help="of the hidden states' formula, without --hidden",
    )
    parser.add_argument("--rows", action="store_true", help="write the looked-up rows too")
    _add_placement(parser)
    shared_options.add_checkpoint(parser)
    console.add_json_option(parser)


def _add_placement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--placement",
        choices=shared_options.PLACEMENTS,
        help="bind the tables there; disk: rows are read as they are asked for",
    )
    parser.add_argument(
        "--scales",
        choices=shared_options.SCALES,
        help="of --placement (default: with_rows); host: in RAM",
    )
    shared_options.add_hot_rows(parser)


def _placement_options(args: argparse.Namespace) -> dict[str, Any]:
    """Tables.bind's options that _add_placement's are; empty where none was given."""
    names = ("placement", "scales", "hot_gib", "hot_rows", "hot_adaptive")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if options and "placement" not in options:
        raise InputError(f"--{next(iter(options)).replace('_', '-')}: expected with --placement")
    return options


def run(args: argparse.Namespace) -> int:
    store = open_store(args.store, checkpoint=args.checkpoint)
    store.check_output(args.output)
    inputs = [*token_files(args), *(file for file in (args.hidden, args.engine) if file)]
    refuse_to_replace(args.output, inputs)
    if args.engine is not None:
        stat_regular(args.engine)
    ids, dead = read_tokens(args, store.tokenizer_json)
    of_file = None if args.hidden is None else FileHidden(args.hidden, store.config, ids.size)
    started = time.perf_counter()
    seen: dict[int, list[npt.NDArray[np.int32]]] = {layer: [] for layer in store.config.layer_ids}
    with write_aside(args.output) as scratch, _session(args, store) as session:
        dtype = session.hidden_dtype if isinstance(session, EngineSession) else "bfloat16"
        hidden: HiddenSource = of_file or SeededHidden(store.config, args.seed, dtype)
        entries = create_file(scratch, _specs(store.config, ids.size, hidden, args.rows))
        with (
            _Writer(scratch, entries, args.rows) as writer,
            console.progress(args, "run", "tokens") as report,
        ):
            for chunk in session.run(ids, hidden, args.chunk, dead):
                writer.write(store.config, chunk)
                report(chunk.stop, ids.size)
                for index, layer_id in enumerate(store.config.layer_ids):
                    seen[layer_id].append(np.unique(chunk.hash_ids[:, index]))
    summary = _Summary(
        device=session.device,
        tokens=ids.size,
        seconds=time.perf_counter() - started,
        unique_rows={layer: _count_unique(parts) for layer, parts in seen.items()},
        output=str(args.output),
        output_bytes=args.output.stat().st_size,
    )
    _print(args, summary, store.config)
    return 0


@contextlib.contextmanager
def _session(args: argparse.Namespace, store: Store) -> Iterator[EngramSession | EngineSession]:
    options = _placement_options(args)
    if args.engine is None:
        device = choose_device(args.device)
        if not options:
            yield EngramSession(store, device)
            return
        with Tables.of_store(store, **options) as tables:
            yield EngramSession(store, device, tables)
        return
    ordinal = 0 if args.device == AUTO else parse_device(choose_device(args.device))
    if ordinal is None:
        raise InputError(f"--device: expected cuda:N with --engine, found {args.device}")
    session = EngineSession(Engine(args.engine, ordinal), store)
    if args.rows and not session.has_rows:
        raise InputError(f"{args.engine}: expected rows, built with --check-outputs, for --rows")
    with Tables.of_store(store, **options):
        yield session


def _specs(
    config: EngramConfig, num_tokens: int, hidden: HiddenSource, with_rows: bool
) -> list[TensorSpec]:
    specs = []
    for layer_id in config.layer_ids:
        name = f"layers.{layer_id}"
        shape = (num_tokens, config.hc_mult, config.hidden_size)
        dtype = SAFETENSORS[hidden(layer_id, 0, 0).dtype.name]  # no tokens, but of the right dtype
        specs.append(TensorSpec(f"{name}.hidden", dtype, shape))
        specs.append(TensorSpec(f"{name}.hash_ids", "I32", (num_tokens, config.num_columns)))
        if with_rows:
            specs.append(TensorSpec(f"{name}.rows", "BF16", (num_tokens, config.row_dim)))
    return specs


class _Writer:
    """Puts each chunk's results in their place in the file: memory stays that of one chunk."""

    def __init__(self, path: Path, entries: dict[str, TensorEntry], with_rows: bool) -> None:
        self._entries = entries
        self._with_rows = with_rows
        self._handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def write(self, config: EngramConfig, chunk: Chunk) -> None:
        for index, layer_id in enumerate(config.layer_ids):
            name = f"layers.{layer_id}"
            self._put(f"{name}.hidden", chunk.start, chunk.hidden[layer_id])
            self._put(f"{name}.hash_ids", chunk.start, chunk.hash_ids[:, index])
            if self._with_rows:
                self._put(f"{name}.rows", chunk.start, chunk.rows[layer_id])

    def _put(self, name: str, start: int, array: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(array)
        row_bytes = data.nbytes // data.shape[0]
        write_at(self._handle, data.tobytes(), self._entries[name].offset + start * row_bytes)


def _count_unique(parts: list[npt.NDArray[np.int32]]) -> int:
    rows = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int32)
    return int((rows >= 0).sum())


def _print(args: argparse.Namespace, summary: _Summary, config: EngramConfig) -> None:
    if args.json:
        console.print_json(vars(summary))
        return
    read = summary.tokens * config.num_columns
    pairs: list[tuple[str, object]] = [
        ("device", summary.device),
        ("tokens", f"{summary.tokens} in {console.human_seconds(summary.seconds)}"),
    ]
    for layer_id, unique in summary.unique_rows.items():
        pairs.append((f"layer {layer_id}", f"{read} rows read, {unique} of them unique"))
    size = console.human_bytes(summary.output_bytes)
    pairs.append(("output", f"{summary.output}, {size}"))
    console.print_pairs(pairs)
