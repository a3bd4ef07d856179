# SPDX-License-Identifier: Apache-2.0
"""`tables`: load a store's tables as a server would, hold them for servers, see who holds any."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.layers import table_name
from trtllm_engram.builder.made_up import write_made_up_store
from trtllm_engram.builder.manifest import MANIFEST_FILE, read_manifest
from trtllm_engram.plugins.errors import EngramError, InputError

from ..group import Group
from ..holders import Holder, find_holders
from ..keeper import serve, stop_keeper
from ..tables import Tables, to_toml
from . import common_options, console, shared_options, tables_count

EXAMPLE = "trtllm-engram tables load STORE --verify"

_SUMMARIES = {
    "load": "load tables as a server would, say what that took, free them",
    "status": "which processes hold tables that others share",
    "serve": "hold tables for servers that come and go",
    "stop": "end a process of serve",
    "count": "how often texts read each row, and what hot rows answer of it",
}
_DESCRIPTIONS = {
    "load": (
        "Load a store's tables as a server would, say what that took, and free them. Started by\n"
        "mpirun, srun or torchrun, or with --rank and --size, the processes share one copy."
    ),
    "status": "Say which of this user's processes hold tables that others share.",
    "serve": (
        "Load a store's tables into host memory and hold them until `tables stop`, SIGTERM or\n"
        'Ctrl-C. Servers that bind with memory = "keeper" attach without reading the store, and\n'
        "keep what they have when this ends."
    ),
    "stop": "End a process of `tables serve`. Who has attached to it keeps the tables.",
    "count": (
        "Count how often texts read each row of a store's tables, and what the most read rows, as\n"
        "many as fit, would answer of those reads, by n-gram order."
    ),
}
_EXAMPLES = {
    "load": EXAMPLE,
    "status": "trtllm-engram tables status --json",
    "serve": "trtllm-engram tables serve STORE --name flash --numa interleave &",
    "stop": "trtllm-engram tables stop flash",
    "count": "trtllm-engram tables count STORE --text README.md --output hot.npy",
}
_GB = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Tables in memory that the processes of a node share."
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in _SUMMARIES.items():
        action = actions.add_parser(
            name,
            help=summary,
            description=_DESCRIPTIONS[name],
            epilog=f"example:\n  {_EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common_options()],
        )
        if name in _ADDERS:
            _ADDERS[name](action)
        console.add_json_option(action)


def run(args: argparse.Namespace) -> int:
    actions = {
        "load": _load,
        "status": _status,
        "serve": _serve,
        "stop": _stop,
        "count": tables_count.run,
    }
    return actions[args.action](args)


def _add_load(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
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
    _add_memory(
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


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("--name", default="tables", help="of the keeper (default: tables)")
    _add_memory(parser, "memfd (default), shm or cumem", "default, local, interleave or node:N")
    parser.add_argument("--socket", metavar="PATH", help="listen there, for containers")


def _add_stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="the keeper's, where several run")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=shared_options.number(0, 1e6),
        default=60.0,
        help="for its end (default: 60)",
    )


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", metavar="STORE", type=Path, help="with --formula also a config.json"
    )
    parser.add_argument("--layers", metavar="L,...", help="some layers (default: all)")
    shared_options.add_checkpoint(parser)
    parser.add_argument(
        "--verify", action="store_true", default=None, help="check all bytes against the sums"
    )
    parser.add_argument(
        "--formula",
        action="store_true",
        help="fill tables of the store's sizes by synthesize's formula; no table file is read",
    )
    parser.add_argument(
        "--seed",
        type=shared_options.integer(0, shared_options.MAX_SEED),
        help="of the formula (default: 0)",
    )


def _add_memory(parser: argparse.ArgumentParser, kinds: str, policies: str) -> None:
    parser.add_argument("--memory", metavar="KIND", help=kinds)
    parser.add_argument("--pages", metavar="KIND", help="auto (default), 4k, or 2m: reserved pages")
    parser.add_argument("--numa", metavar="POLICY", help=policies)


_ADDERS = {
    "load": _add_load,
    "serve": _add_serve,
    "stop": _add_stop,
    "count": tables_count.add_arguments,
}


def _load(args: argparse.Namespace) -> int:
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
        with _tables(args, group) as tables, bar as report, _said_once():
            loaded = stack.enter_context(Tables(group, report))
            started = time.perf_counter()
            loaded.bind_all(tables)
            seconds = time.perf_counter() - started
        stop = _stop_event(signal.SIGTERM, signal.SIGINT) if args.hold else None
        _print_loaded(args, loaded.describe(), seconds)
        if stop is not None:
            stop.wait()
    return 0


def _serve(args: argparse.Namespace) -> int:
    stop = _stop_event(signal.SIGTERM)
    started = time.perf_counter()
    ready = False

    def on_ready(holder: Holder) -> None:
        nonlocal ready
        ready = True
        bar.close()
        _print_serving(args, holder, time.perf_counter() - started)

    with (
        _tables(args, Group(rank=0, size=1)) as tables,
        contextlib.ExitStack() as bar,
        _said_once(),
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


def _status(args: argparse.Namespace) -> int:
    holders = find_holders()
    if args.json:
        console.print_json({"holders": [asdict(one) for one in holders]})
        return 0
    if not holders:
        console.stdout().print("no shared tables")
        return 0
    rows = [
        (
            _who(holder),
            holder.pid,
            table.name,
            console.human_bytes(table.num_bytes),
            table.kind,
            f"{table.huge_bytes / max(1, table.num_bytes):.0%}",
            table.placement,
            datetime.fromtimestamp(holder.since).isoformat(" ", "seconds"),
        )
        for holder in holders
        for table in holder.tables
    ]
    headings = ("who", ">pid", "table", ">bytes", "memory", ">2 MiB pages", "placement", "since")
    console.print_table(headings, rows)
    return 0


def _stop(args: argparse.Namespace) -> int:
    keeper = stop_keeper(args.name, args.timeout)
    others = [
        holder
        for holder in find_holders()
        if {one.content_id for one in holder.tables} & {one.content_id for one in keeper.tables}
    ]
    if args.json:
        holders = [asdict(one) for one in others]
        console.print_json({"stopped": asdict(keeper), "still_held_by": holders})
    else:
        kept = f"; {len(others)} others hold the same tables" if others else ""
        console.stdout().print(f"stopped keeper {keeper.name}, pid {keeper.pid}{kept}")
    return 0


@contextlib.contextmanager
def _tables(args: argparse.Namespace, group: Group) -> Iterator[dict[str, dict[str, Any]]]:
    """The keys of each [tables.NAME] that the arguments say; where they are wrong, the group hears
    of it."""
    with contextlib.ExitStack() as stack:
        try:
            tables = _keys(args, stack)
        except (InputError, EngramError) as error:
            Tables(group).decline(str(error))
            raise
        yield tables


def _keys(args: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, dict[str, Any]]:
    store, checkpoint = args.store, args.checkpoint
    if "keeper" in args:
        shared_options.check_keeper(args)
    if args.seed is not None and not args.formula:
        raise InputError(f"--seed: expected with --formula, found {args.seed} without")
    if args.formula and not (store / MANIFEST_FILE).exists():
        config = EngramConfig.from_pretrained(store)
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trtllm-engram-")))
        write_made_up_store(store, config)
    config = read_manifest(store, checkpoint).config
    names = ("placement", "scales", "memory", "pages", "numa", "verify", "heads", "checkpoint")
    options = {name: getattr(args, name, None) for name in names}
    options["formula_seed"] = (args.seed or 0) if args.formula else None
    return {
        table_name(layer_id): {"store": store, "layer": layer_id, **options}
        for layer_id in _layers(args.layers, config)
    }


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """The library's errors begin with the word that is this command's name."""
    try:
        yield
    except (InputError, EngramError) as error:
        raise type(error)(str(error).removeprefix("tables: ")) from error


def _layers(text: str | None, config: EngramConfig) -> list[int]:
    known = list(config.layer_ids)
    if text is None:
        return known
    chosen = [int(part) if part.isdecimal() and len(part) < 10 else -1 for part in text.split(",")]
    if not set(chosen) <= set(known):
        raise InputError(f"--layers: expected some of {','.join(map(str, known))}, found {text!r}")
    return chosen


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


def _who(holder: Holder) -> str:
    if holder.role == "rank":
        return f"{holder.name} rank {holder.rank} of {holder.size}"
    return f"{holder.role} {holder.name}"


def _stop_event(*signals: signal.Signals) -> threading.Event:
    """Set by the first of these signals."""
    stop = threading.Event()
    for number in signals:
        signal.signal(number, lambda *_: stop.set())
    return stop
