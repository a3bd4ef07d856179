# SPDX-License-Identifier: Apache-2.0
"""`tables status`: who holds tables, and in which memory."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import datetime

from ...holders import Holder, find_holders
from .. import console

SUMMARY = "which processes hold tables"
DESCRIPTION = "Say which of this user's processes hold tables, and in which memory."
EXAMPLE = "trtllm-engram tables status --json"


def add_arguments(_: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> int:
    holders = find_holders()
    if args.json:
        console.print_json({"holders": [asdict(one) for one in holders]})
        return 0
    if not holders:
        console.stdout().print("no tables")
        return 0
    rows = []
    for holder in holders:
        since = datetime.fromtimestamp(holder.since).isoformat(" ", "seconds")
        if not holder.tables:
            rows.append((_who(holder), holder.pid, "loading", "", "", "", "", since))
        for table in holder.tables:
            share = f"{table.huge_bytes / max(1, table.num_bytes):.0%}"
            size = console.human_bytes(table.num_bytes)
            where = (table.kind, share, table.placement)
            rows.append((_who(holder), holder.pid, table.name, size, *where, since))
    headings = ("who", ">pid", "table", ">bytes", "memory", ">2 MiB pages", "placement", "since")
    console.print_table(headings, rows)
    return 0


def _who(holder: Holder) -> str:
    if holder.role == "rank":
        return f"{holder.name} rank {holder.rank} of {holder.size}"
    return f"{holder.role} {holder.name}"
