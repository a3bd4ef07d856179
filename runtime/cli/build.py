# SPDX-License-Identifier: Apache-2.0
"""`build`: a TensorRT engine, or an ONNX model, of a store's Engram layers."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from trtllm_engram.builder import engine, onnx
from trtllm_engram.builder.layers import PROJECTIONS, table_name
from trtllm_engram.builder.model import HISTORIES, SCALE_ORDERS, ModelOptions
from trtllm_engram.plugins.errors import InputError

from .. import ops
from ..store import Store, open_store
from . import console, shared_options

EXAMPLE = "trtllm-engram build STORE --output engine.plan"

# What an ONNX model says nothing of: whoever builds its engine chooses.
_ENGINE_DEFAULTS = {
    "max_batch": 64,
    "max_tokens": 8192,
    "version_compatible": False,
    "timing_cache": engine.AUTO,
}
_SAMPLED_ROWS = 65536
_MARGIN = 2.0  # FP8 keeps its precision over a wide range, so room above costs nothing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Build a TensorRT engine with all Engram layers of a store, with a profile for decode (a\n"
        "token each of up to --max-batch requests) and one for prefill. The tables stay outside:\n"
        f"bind them at run time, as {table_name(1)} for layer 1 and so on. With --onnx, write the\n"
        "same layers as an ONNX model instead, which needs neither TensorRT nor a GPU."
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--output", metavar="FILE", type=Path, required=True)
    parser.add_argument("--onnx", action="store_true", help="write ONNX, not an engine")
    parser.add_argument(
        "--max-batch",
        metavar="N",
        type=shared_options.integer(1),
        help="requests of a call (default: 64)",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=shared_options.integer(1),
        help="tokens of a prefill call (default: 8192)",
    )
    shared_options.add_hidden_dtype(parser)
    parser.add_argument(
        "--history",
        choices=HISTORIES,
        default="explicit",
        help="explicit: an input holds the tokens before the call (default); "
        "whole_prompt: no request has a past",
    )
    parser.add_argument(
        "--check-outputs", action="store_true", help="give out row ids and rows too, for compare"
    )
    parser.add_argument(
        "--check-mxfp8",
        metavar="ORDER",
        choices=SCALE_ORDERS,
        help="give out rows as MXFP8 values and scales too, for compare; scales linear or 128x4",
    )
    parser.add_argument(
        "--prefetch",
        action="store_true",
        help="look all layers' rows up on a side stream, beside the layers before them",
    )
    parser.add_argument(
        "--flat-hidden",
        action="store_true",
        help="take residual streams without their shape, for `triton --form tensorrt`",
    )
    parser.add_argument(
        "--projection",
        choices=tuple(PROJECTIONS),
        default="plugin",
        help="; ".join(f"{name}: {text}" for name, text in PROJECTIONS.items()),
    )
    parser.add_argument(
        "--version-compatible",
        action="store_true",
        help="for later TensorRT 10 too (such plans have not been run)",
    )
    parser.add_argument(
        "--timing-cache",
        metavar="FILE",
        help="where TensorRT keeps its timings (default: in the cache folder)",
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="where the store's checkpoint lies now")
    parser.set_defaults(**_ENGINE_DEFAULTS)
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    for name, default in _ENGINE_DEFAULTS.items():
        if args.onnx and getattr(args, name) != default:
            raise InputError(
                f"--{name.replace('_', '-')}: expected for an engine, found with --onnx"
            )
    store = open_store(args.store, checkpoint=args.checkpoint)
    store.check_output(args.output)
    options = ModelOptions(
        hidden_dtype=args.hidden_dtype,
        history=args.history,
        check_outputs=args.check_outputs,
        check_mxfp8=args.check_mxfp8,
        prefetch=args.prefetch,
        flat_hidden=args.flat_hidden,
    )
    started = time.perf_counter()
    if args.onnx:
        onnx.export(store, args.output, options=options, projection=args.projection)
    else:
        with console.progress(args, "build", "steps") as report:
            engine.build(
                store,
                args.output,
                max_batch=args.max_batch,
                max_tokens=args.max_tokens,
                options=options,
                projection=args.projection,
                rows_amax=_rows_amax(store) if args.projection == "fp8" else 0.0,
                version_compatible=args.version_compatible,
                timing_cache=args.timing_cache,
                progress=report,
            )
    seconds = time.perf_counter() - started
    tables = {layer_id: table_name(layer_id) for layer_id in store.config.layer_ids}
    _print(args, seconds, tables)
    return 0


def _rows_amax(store: Store) -> float:
    """An estimate of the rows' largest absolute value, with a margin: from some rows of each
    table, so that others may be larger."""
    most = 0.0
    for layer_id in store.config.layer_ids:
        table = store.table(layer_id)
        step = max(1, table.values.shape[0] // _SAMPLED_ROWS)
        ids = np.arange(0, table.values.shape[0], step, dtype=np.int32)[:, None]
        rows = ops.lookup(table.values, table.scales, ids).astype(np.float32)
        most = max(most, float(np.abs(rows).max()))
    if not 0 < most < float("inf"):
        raise InputError(f"projection: expected finite rows that are not all 0, found {most}")
    return _MARGIN * most


def _print(args: argparse.Namespace, seconds: float, tables: dict[int, str]) -> None:
    size = args.output.stat().st_size
    if args.json:
        console.print_json(
            {"output": str(args.output), "bytes": size, "seconds": seconds, "tables": tables}
        )
        return
    pairs: list[tuple[str, object]] = [
        ("output", f"{args.output}, {console.human_bytes(size)}"),
        ("time", console.human_seconds(seconds)),
    ]
    pairs.extend((f"layer {layer_id}", f"table {name}") for layer_id, name in tables.items())
    console.print_pairs(pairs)
