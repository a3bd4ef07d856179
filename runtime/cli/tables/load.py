# SPDX-License-Identifier: Apache-2.0
"""`tables load`: tables as a server would load them."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from typing import Any

from ...group import Group
from ...tables import Tables
from .. import console, shared_options
from .options import add_memory, add_store, chosen_tables, said_once, stop_event

SUMMARY = "load tables as a server would, say what that took, free them"
DESCRIPTION = (
    "Load a store's tables as a server would, say what that took, and free them. Started by\n"
    "mpirun, srun or torchrun, or with --rank and --size, the processes share one copy."
)
EXAMPLE = "trtllm-engram tables load STORE --verify"
_GB = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument(
        "--placement",
        choices=shared_options.PLACEMENTS,
        default="host",
        help="host (default), device: on each rank's GPU, device_sharded: a part on each, "
        "disk: only looked for",
    )
    parser.add_argument(
        "--heads", action="store_true", default=None, help="each rank its hash columns alone"
    )
    parser.add_argument(
        "--scales",
        choices=shared_options.SCALES,
        default="with_rows",
        help="device: scales in GPU memory, host: of disk tables, in RAM",
    )
    shared_options.add_hot_rows(parser)
    add_memory(
        parser,
        "memfd (default), shm, cumem, private, or keeper: attach to one",
        "default, local, interleave, node:N or gpu",
    )
    parser.add_argument("--keeper", metavar="NAME", help="which keeper (default: any that has it)")
    group = parser.add_argument_group("ranks (default: as the launcher's variables say)")
    group.add_argument("--rank", metavar="R", type=shared_options.integer(0, 4095))
    group.add_argument(
        "--size", metavar="N", type=shared_options.integer(1, 4096), help="ranks of the group"
    )
    group.add_argument("--group", metavar="NAME", help="the group's name")
    group.add_argument("--socket", metavar="PATH", help="where they meet, for containers")
    group.add_argument(
        "--timeout",
        metavar="S",
        type=shared_options.number(0.001, 604_800),
        help="wait so long (default: 120)",
    )
    parser.add_argument(
        "--assume-ram",
        metavar="GB",
        type=shared_options.number(0.001, 1e9),
        help="in place of what MemAvailable says",
    )
    parser.add_argument(
        "--hold", action="store_true", help="keep the tables until SIGTERM or Ctrl-C"
    )


def run(args: argparse.Namespace) -> int:
    group = Group(
        name=args.group,
        rank=args.rank,
        size=args.size,
        socket=args.socket,
        timeout_s=args.timeout,
        assume_ram=None if args.assume_ram is None else int(args.assume_ram * _GB),
        keeper=args.keeper,
    )
    bar = console.progress(args, "load") if group.is_first else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        with chosen_tables(args, group) as tables, bar as report, said_once():
            loaded = stack.enter_context(Tables(group, report))
            started = time.perf_counter()
            loaded.bind_all(tables)
            seconds = time.perf_counter() - started
        stop = stop_event(signal.SIGTERM, signal.SIGINT) if args.hold else None
        _print_loaded(args, loaded.describe(), seconds)
        if stop is not None:
            stop.wait()
    return 0


def _print_loaded(
    args: argparse.Namespace, tables: dict[str, dict[str, Any]], seconds: float
) -> None:
    if args.json:
        document = {"pid": os.getpid(), "seconds": seconds, "tables": tables}
        console.print_json(document)
        sys.stdout.flush()
        return
    one = next(iter(tables.values()))
    if one["rank"] != 0:  # rank 0 speaks for all
        return
    total = sum(table["num_bytes"] for table in tables.values())
    registered = [table["registered_seconds"] for table in tables.values()]
    registered_s = sum(time_s for time_s in registered if time_s is not None)
    load_s = max(table["load_seconds"] for table in tables.values())  # all of them together
    pairs: list[tuple[str, object]] = []
    if one["size"] > 1:
        pairs.append(("ranks", one["size"]))
    size = console.human_bytes(total)
    if one["keeper"] and one["scales"] == "host":
        pairs.append(("attached to", f"{size} of keeper {one['keeper']}"))
    else:
        rate = console.human_bytes(total / max(load_s, 1e-9))
        pairs.append(("loaded", f"{size} in {console.human_seconds(load_s)}, {rate}/s"))
    if registered_s > 0:
        pairs.append(("registered", f"with the GPU in {console.human_seconds(registered_s)}"))
    pairs.append(("in all", console.human_seconds(seconds)))
    console.print_pairs(pairs)
    console.stdout().print()
    rows = [
        (
            name,
            table["layer"],
            console.human_bytes(table["num_bytes"]),
            table["placement"],
            table["memory"] or "-",
            "-" if table["huge_bytes"] is None else _share(table),
            table["numa"] or "-",
        )
        for name, table in tables.items()
    ]
    headings = ("table", ">layer", ">bytes", "placement", "memory", ">2 MiB pages", "NUMA")
    console.print_table(headings, rows)
    sys.stdout.flush()


def _share(table: dict[str, Any]) -> str:
    return f"{table['huge_bytes'] / max(1, table['num_bytes']):.0%}"
