# SPDX-License-Identifier: Apache-2.0
"""Who holds tables on this machine, from what each process says of itself.

A process that holds tables keeps a memfd of this name whose content is JSON (record.h). It
goes with the process however that ends, so what is found here is always true and nobody cleans up.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .machine import ROOT, read_text

_LINK = "/memfd:trtllm-engram.tables (deleted)"
_FORMAT_VERSION = 1
_MAX_BYTES = 1 << 20

KEEPER = "keeper"


@dataclass(frozen=True)
class HeldTable:
    name: str
    store: str
    layer: int
    content_id: str
    kind: str  # of memory
    placement: str
    num_bytes: int
    huge_bytes: int  # of them, those on pages of 2 MiB
    keeper: str = ""  # id of the one whose memory it is


@dataclass(frozen=True)
class Holder:
    """A process and its tables."""

    pid: int  # as this process's /proc counts
    role: str  # "keeper" or "rank"
    name: str  # the keeper's or the group's
    rank: int
    size: int
    since: float  # seconds since 1970
    tables: tuple[HeldTable, ...]  # none yet: a keeper that loads them
    id: str = ""  # the keeper's, which no other has


def find_holders(root: Path = ROOT) -> list[Holder]:
    """This user's processes that hold tables, or load them as a keeper; keepers first."""
    numbers = [int(entry.name) for entry in (root / "proc").glob("[0-9]*")]
    found = [holder for pid in numbers if (holder := find_holder(pid, root)) is not None]
    return sorted(found, key=lambda one: (one.role != KEEPER, one.name, one.rank, one.pid))


def find_holder(pid: int, root: Path = ROOT) -> Holder | None:
    """What a process of this user holds; None where it is gone, another user's, or holds none."""
    folder = root / "proc" / str(pid)
    # Not the folder's owner, which is root where a process has changed its user.
    user = re.search(r"^Uid:\s+\d+\s+(\d+)", read_text(folder / "status"), re.MULTILINE)
    if user is None or int(user[1]) != os.geteuid():
        return None
    try:
        for file in _records(folder / "fd"):
            holder = _read(pid, file)
            if holder is not None:
                return holder
    except OSError:  # it ended meanwhile, or shows its files to nobody
        pass
    return None


def _records(folder: Path) -> Iterator[Path]:
    for link in folder.iterdir():
        try:
            if str(link.readlink()) == _LINK:
                yield link
        except OSError:  # closed meanwhile
            continue


def _read(pid: int, file: Path) -> Holder | None:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES)
        return _parse(pid, json.loads(content))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # no record, or one that was replaced meanwhile


def _parse(pid: int, data: dict[str, Any]) -> Holder | None:
    if data["format_version"] != _FORMAT_VERSION:
        return None
    tables = tuple(
        HeldTable(
            name=str(one["name"]),
            store=str(one["store"]),
            layer=int(one["layer"]),
            content_id=str(one["content_id"]),
            kind=str(one["kind"]),
            placement=str(one["placement"]),
            num_bytes=int(one["bytes"]),
            huge_bytes=int(one["huge_bytes"]),
            keeper=str(one["keeper"]),
        )
        for one in data["tables"]
    )
    return Holder(
        pid=pid,
        role=str(data["role"]),
        name=str(data["name"]),
        rank=int(data["rank"]),
        size=int(data["size"]),
        since=float(data["since"]),
        tables=tables,
        id=str(data["id"]),
    )
