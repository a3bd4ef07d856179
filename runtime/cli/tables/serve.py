# SPDX-License-Identifier: Apache-2.0
"""`tables serve`: tables held for servers that come and go."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ...group import Group
from ...holders import Holder
from ...keeper import serve
from ...tables import to_toml
from .. import console
from .options import add_memory, add_store, chosen_tables, said_once, stop_event

SUMMARY = "hold tables for servers that come and go"
DESCRIPTION = (
    "Load a store's tables into host memory and hold them until `tables stop`, SIGTERM or\n"
    'Ctrl-C. Servers that bind with memory = "keeper" attach without reading the store, and\n'
    "keep what they have when this ends."
)
EXAMPLE = "trtllm-engram tables serve STORE --name flash --numa interleave &"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument("--name", default="tables", help="of the keeper (default: tables)")
    add_memory(parser, "memfd (default), shm or cumem", "default, local, interleave or node:N")
    parser.add_argument("--socket", metavar="PATH", help="listen there, for containers")


def run(args: argparse.Namespace) -> int:
    stop = stop_event(signal.SIGTERM)
    started = time.perf_counter()
    ready = False

    def on_ready(holder: Holder) -> None:
        nonlocal ready
        ready = True
        bar.close()
        _print_serving(args, holder, time.perf_counter() - started)

    with (
        chosen_tables(args, Group(rank=0, size=1)) as tables,
        contextlib.ExitStack() as bar,
        said_once(),
    ):
        report = bar.enter_context(console.progress(args, "load"))
        try:
            serve(
                to_toml(tables, None),
                args.name,
                str(Path(args.socket).absolute()) if args.socket else "",
                stop=stop,
                on_ready=on_ready,
                progress=report,
            )
        except KeyboardInterrupt:
            if not ready:
                raise
    return 0


def _print_serving(args: argparse.Namespace, holder: Holder, seconds: float) -> None:
    total = sum(table.num_bytes for table in holder.tables)
    if args.json:
        console.print_json({"seconds": seconds, "keeper": asdict(holder)})
    else:
        console.stdout().print(
            f"keeper {holder.name}, pid {holder.pid}, holds {len(holder.tables)} tables of "
            f"{console.human_bytes(total)}, loaded in {console.human_seconds(seconds)}"
        )
    sys.stdout.flush()
