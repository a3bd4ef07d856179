# SPDX-License-Identifier: Apache-2.0
"""`tables count`: how often texts read each row, and what a set of hot rows answers of it."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from trtllm_engram.builder.files import refuse_to_replace, write_aside
from trtllm_engram.plugins.errors import InputError

from ...row import packed_row_bytes
from ...row_counts import OrderShare, count_rows, shares, to_array
from ...store import open_store
from ...text import encode, read_text
from .. import console, shared_options

SUMMARY = "how often texts read each row, and what hot rows answer of it"
DESCRIPTION = (
    "Count how often texts read each row of a store's tables, and what the most read rows, as\n"
    "many as fit, would answer of those reads, by n-gram order."
)
EXAMPLE = "trtllm-engram tables count STORE --text README.md --output hot.npy"
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", type=Path)
    parser.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        required=True,
        help="UTF-8 texts, each by itself (- is standard input)",
    )
    parser.add_argument(
        "--gib",
        type=_budgets,
        default=[shared_options.HOT_GIB],
        help="of hot rows, of each table, or A,B,...: of each n-gram order (default: "
        f"{shared_options.HOT_GIB:g}, as hot_gib's); as many rows fill a GPU's index, which then "
        "leaves the least read seventh out",
    )
    parser.add_argument(
        "--output",
        metavar="FILE.npy",
        type=Path,
        help="write the hot rows here: layer, row, count, the most read of a layer first",
    )
    shared_options.add_checkpoint(parser)


def run(args: argparse.Namespace) -> int:
    store = open_store(args.store, checkpoint=args.checkpoint)
    texts = [Path(name) for name in args.text if name != "-"]
    if args.output is not None:
        store.check_output(args.output)
        refuse_to_replace(args.output, texts)
    layout = store.layout
    num_orders = layout.config.max_ngram_size - 1
    if len(args.gib) not in (1, num_orders):
        raise InputError(
            f"--gib: expected 1 or {num_orders} numbers, those of n-gram orders 2 to "
            f"{num_orders + 1}, found {len(args.gib)}"
        )
    budgets = [int(gib * _GIB) for gib in args.gib]
    row_bytes = packed_row_bytes(layout.config.head_dim)
    if args.output is not None and max(budgets) < row_bytes:
        raise InputError(
            f"--gib: expected room for a row with --output, {row_bytes} bytes, found {max(budgets)}"
        )
    with console.progress(args, "counting", "texts") as report:
        tokens = []
        for done, name in enumerate(args.text, start=1):
            tokens.append(encode(store.tokenizer_json, read_text(name)))
            report(done, len(args.text))
    counted = count_rows(layout, store.token_map, tokens)
    by_layer = {
        layer_id: shares(layout, layer_idx, counted[layer_idx], budgets)
        for layer_idx, layer_id in enumerate(layout.config.layer_ids)
    }
    if args.output is not None:
        with write_aside(args.output) as scratch, scratch.open("wb") as file:
            np.save(file, to_array(layout, counted, budgets))
    num_tokens = sum(text.size for text in tokens)
    if args.json:
        layers = [
            {"layer": layer_id, "orders": [share._asdict() for share in orders]}
            for layer_id, orders in by_layer.items()
        ]
        console.print_json({"tokens": num_tokens, "hot_bytes": sum(budgets), "layers": layers})
        return 0
    console.stdout().print(f"{num_tokens} tokens, hot rows of {sum(args.gib):g} GiB a table")
    headings = (">layer", ">order", ">reads", ">rows", ">hot rows", ">answer")
    console.print_table(
        headings,
        [_line(layer_id, share) for layer_id, orders in by_layer.items() for share in orders],
    )
    return 0


def _budgets(text: str) -> list[float]:
    number = shared_options.number(0, 1e6)
    return [number(part) for part in text.split(",")]


def _line(layer_id: int, share: OrderShare) -> tuple[object, ...]:
    answered = share.hot_reads / max(1, share.reads)
    return layer_id, share.order, share.reads, share.rows, share.hot_rows, f"{answered:.0%}"
