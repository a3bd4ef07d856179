# SPDX-License-Identifier: Apache-2.0
"""`prepare`: from a checkpoint to a store."""

from __future__ import annotations

import argparse
import time

from trtllm_engram.builder.prepare import prepare

from . import console

EXAMPLE = "trtllm-engram prepare CHECKPOINT STORE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a store of a checkpoint: a manifest with a checksum per 64 MiB, the token map and\n"
        "the small weights. Tables stay where they are unless --copy is given. Interrupted, it\n"
        "leaves nothing that looks like a store; killed, the next --copy goes on from there."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder with config.json")
    parser.add_argument("store", metavar="STORE", help="the folder to make")
    parser.add_argument("--copy", action="store_true", help="copy the tables into the store")
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    with console.progress(args, "prepare") as report:
        manifest = prepare(args.checkpoint, args.store, copy=args.copy, progress=report)
    seconds = time.perf_counter() - started
    table_bytes = sum(part.nbytes for parts in manifest.layers.values() for part in parts.values())
    if args.json:
        console.print_json(
            {
                "store": args.store,
                "fingerprint": manifest.fingerprint,
                "content_id": manifest.content_id,
                "bytes": table_bytes,
                "seconds": seconds,
            }
        )
    else:
        shown = f"{console.human_bytes(table_bytes)} in {console.human_seconds(seconds)}"
        console.stdout().print(f"{args.store}: {len(manifest.layers)} layers, {shown}")
    return 0
