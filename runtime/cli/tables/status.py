# SPDX-License-Identifier: Apache-2.0
"""`tables status`: who holds tables that others share."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import datetime

from ...holders import Holder, find_holders
from .. import console

SUMMARY = "which processes hold tables that others share"
DESCRIPTION = "Say which of this user's processes hold tables that others share."
EXAMPLE = "trtllm-engram tables status --json"


def add_arguments(_: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> int:
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


def _who(holder: Holder) -> str:
    if holder.role == "rank":
        return f"{holder.name} rank {holder.rank} of {holder.size}"
    return f"{holder.role} {holder.name}"
