# SPDX-License-Identifier: Apache-2.0
"""`bench node`."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from trtllm_engram.plugins.errors import InputError

from ..bench import node, tables
from ..bench.measure import machine_name
from ..bench.report import write_document
from . import console

OPTIONS = ("placement",)
_GB = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("node")
    group.add_argument(
        "--placement",
        choices=node.PLACEMENTS,
        help="one copy in host memory of the kind --memory, or a part in each GPU (default: host)",
    )


def run(args: argparse.Namespace) -> int:
    placement = args.placement or "host"
    if args.memory and placement != "host":
        raise InputError(f"--memory: expected with --placement host, found {placement}")
    tokens = args.tokens or node.TOKENS
    command = shlex.join(["trtllm-engram", *sys.argv[1:]])
    made_up = tables.made_up_store(int(args.table_gb * _GB), node.LAYERS)
    with console.status(args) as note, made_up as store:
        memory = args.memory or "memfd"
        found = node.bench_node(store, args.ranks, placement, memory, tokens, note)
    found = {"machine": machine_name(), "command": command, **found}
    if args.output:
        write_document(args.output, found)
    if args.json:
        console.print_json(found)
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    out = console.stdout()
    where = found["memory"] or found["placement"]
    held = found["bytes_by_rank"]
    pairs: list[tuple[str, object]] = [
        ("machine", found["machine"]),
        ("ranks", f"{found['ranks']} on {found['gpus'] or 'no'} GPUs"),
        ("table", f"{console.human_bytes(found['table_bytes'])}, {where}"),
        ("bound in", console.human_seconds(found["seconds"])),
        ("registered in", console.human_seconds(found["registered_seconds"])),
        ("of it a rank", console.human_bytes(max(held))),
        ("less free RAM", console.human_bytes(max(0, found["used_bytes"]))),
    ]
    if killed := found["killed"]:
        fewest = min(killed["lookups_of_the_others"])
        pairs.append(("killed", f"rank {killed['rank']}; the others made {fewest} lookups or more"))
    console.print_pairs(pairs, out)
    out.print()
    rows = []
    for rate in found["rates"]:
        alone, together = rate["alone"], rate["together"]
        rows.append(
            (
                str(rate["tokens"]),
                *map(console.human_count, (alone, min(together), sum(together))),
                f"{sum(together) / alone:.2f}",
            )
        )
    columns = (">tokens/call", ">one rank, tokens/s", ">slowest of all", ">all", ">times one")
    console.print_table(columns, rows, out)
