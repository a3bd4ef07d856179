# SPDX-License-Identifier: Apache-2.0
"""Who holds tables on this machine, from what each process says of itself.

A process that holds tables keeps a memfd with JSON (record.h), which the library finds. It goes
with the process however that ends, so what is found here is always true and nobody cleans up.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from . import _native

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

    pid: int  # by which this process sees it
    role: str  # "keeper" or "rank"
    name: str  # the keeper's or the group's
    rank: int
    size: int
    since: float  # seconds since 1970
    tables: tuple[HeldTable, ...]  # none yet: a keeper that loads them
    id: str = ""  # the keeper's, which no other has


def find_holders() -> list[Holder]:
    """This user's processes that hold tables, or load them as a keeper; keepers first."""
    found = _known(_native.table_holders())
    return sorted(found, key=lambda one: (one.role != KEEPER, one.name, one.rank, one.pid))


def find_holder(pid: int) -> Holder | None:
    """What a process of this user holds; None where it is gone, another user's, or holds none."""
    return next(iter(_known(_native.table_holders(pid))), None)


def _known(records: list[dict[str, Any]]) -> list[Holder]:
    """Without those of other programs, which may say anything."""
    holders = []
    for record in records:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            holders.append(_parse(record))
    return holders


def _parse(data: dict[str, Any]) -> Holder:
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
        pid=int(data["pid"]),
        role=str(data["role"]),
        name=str(data["name"]),
        rank=int(data["rank"]),
        size=int(data["size"]),
        since=float(data["since"]),
        tables=tables,
        id=str(data["id"]),
    )
