# SPDX-License-Identifier: Apache-2.0
"""`tables stop`: the end of a process of `tables serve`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ...holders import find_holders
from ...keeper import stop_keeper
from .. import console, shared_options

SUMMARY = "end a process of serve"
DESCRIPTION = "End a process of `tables serve`. Who has attached to it keeps the tables."
EXAMPLE = "trtllm-engram tables stop flash"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="the keeper's, where several run")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=shared_options.number(0, 1e6),
        default=60.0,
        help="for its end (default: 60)",
    )


def run(args: argparse.Namespace) -> int:
    keeper = stop_keeper(args.name, args.timeout)
    others = [
        holder for holder in find_holders() if keeper.id in {one.keeper for one in holder.tables}
    ]
    if args.json:
        holders = [asdict(one) for one in others]
        console.print_json({"stopped": asdict(keeper), "still_held_by": holders})
    else:
        kept = f"; {len(others)} others hold its tables" if others else ""
        console.stdout().print(f"stopped keeper {keeper.name}, pid {keeper.pid}{kept}")
    return 0
