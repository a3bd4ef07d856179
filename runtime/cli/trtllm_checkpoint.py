# SPDX-License-Identifier: Apache-2.0
"""`trtllm-checkpoint`: a checkpoint that trtllm-build makes an engine with Engram layers of."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_engram.builder.trtllm.checkpoint import write_checkpoint
from trtllm_engram.builder.trtllm.section import ARCHITECTURE, HISTORIES
from trtllm_engram.builder.weight_layout import LAYOUTS, ROW_MAJOR

from ..store import open_store
from . import console

EXAMPLE = "trtllm-engram trtllm-checkpoint STORE --base BASE --output DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Add a store's Engram layers to a TensorRT-LLM checkpoint (config.json and\n"
        "rank0.safetensors, as its convert_checkpoint.py writes them). The tables stay in the\n"
        "store. trtllm-build makes an engine of the result with --model_cls_file\n"
        "$(trtllm-engram trtllm-model-file)."
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument(
        "--base", metavar="DIR", type=Path, required=True, help="checkpoint of the decoder alone"
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, required=True, help="new folder to write"
    )
    parser.add_argument(
        "--history",
        choices=tuple(HISTORIES),
        default="explicit",
        help="where the tokens before a call come from (default: explicit). "
        + "; ".join(f"{name}: {text}" for name, text in HISTORIES.items()),
    )
    parser.add_argument(
        "--model-class",
        metavar="NAME",
        default=ARCHITECTURE,
        help=f"what --model_cls_name will be (default: {ARCHITECTURE}, for the Llama family)",
    )
    parser.add_argument(
        "--weight-layout",
        choices=LAYOUTS,
        default=ROW_MAJOR,
        help="of the projection's weight (default: row_major, for any GPU); sm90_v1 is the fastest "
        "on GPUs of compute capability 9.0, and for them alone",
    )
    parser.add_argument(
        "--split-projection",
        action="store_true",
        help="give each tensor-parallel rank its part of the projection's outputs, to be gathered; "
        "without, each rank has the whole of it",
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="where the store's checkpoint lies now")
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    store = open_store(args.store, checkpoint=args.checkpoint)
    started = time.perf_counter()
    with console.progress(args, "write") as report:
        config = write_checkpoint(
            store,
            args.base,
            args.output,
            architecture=args.model_class,
            history=args.history,
            weight_layout=args.weight_layout,
            split_projection=args.split_projection,
            progress=report,
        )
    seconds = time.perf_counter() - started
    engram = config["engram"]
    if args.json:
        console.print_json({"output": str(args.output), "seconds": seconds, "engram": engram})
        return 0
    size = sum(path.stat().st_size for path in args.output.iterdir())
    pairs: list[tuple[str, object]] = [
        ("output", f"{args.output}, {console.human_bytes(size)}"),
        ("time", console.human_seconds(seconds)),
        ("decoder", f"{engram['base_architecture']}, as {args.model_class}"),
        ("history", args.history),
        ("projection", _projection(engram)),
    ]
    pairs += [(f"layer {layer_id}", f"table {name}") for layer_id, name in engram["tables"].items()]
    console.print_pairs(pairs)
    return 0


def _projection(engram: Mapping[str, Any]) -> str:
    parts = engram["projection_ranks"]
    where = "whole on each rank" if parts == 1 else f"split among {parts} ranks"
    return f"{engram['weight_layout']}, {where}"
