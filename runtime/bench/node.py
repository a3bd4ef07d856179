# SPDX-License-Identifier: Apache-2.0
"""All ranks of a node on one table: loading, memory, lookups of one rank alone and of all at once,
and a rank that is killed under load. Ranks are processes (tables_rank.py) that check rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..devices import num_gpus
from . import tables

LAYERS = (1, 14)  # V4.1-Flash's
TOKENS = (1, 64, 1024, 8192)
PLACEMENTS = ("host", "device_sharded")
_SEED = 0
_WORK_SECONDS, _KILLED_AFTER_SECONDS = 2.0, 0.5


def bench_node(
    store: Path,
    num_ranks: int,
    placement: str,
    memory: str,
    tokens: Sequence[int],
    note: Callable[[str], None],
) -> dict[str, Any]:
    """What one bind of made-up tables by `num_ranks` processes shows; GPUs are taken in turn.

    seconds are those until all had their tables, without registered_seconds; bytes_by_rank are what
    each has mapped or, of parts of GPU memory, holds; used_bytes what the machine has less of free
    memory. Rates are tokens of a lookup of one layer, a second and rank.
    """
    options: dict[str, Any] = {"formula_seed": _SEED}
    options |= {"memory": memory} if placement == "host" else {"placement": placement}
    note("bind")
    with tables.weighed_ranks(store, num_ranks, options) as (started, used_bytes):
        loaded = [rank.loaded for rank in started]
        rates = []
        for count in tokens:
            note(f"{count} tokens")
            rates.append(_rates(started, count))
        killed = _kill_last(started) if num_ranks > 1 else None
    held = [tables.bytes_of(one) for one in loaded]
    return {
        "ranks": num_ranks,
        "gpus": min(num_ranks, num_gpus()),
        "placement": placement,
        "memory": memory if placement == "host" else "",
        "table_bytes": held[0] if placement == "host" else sum(held),
        "seconds": tables.bind_seconds(loaded),
        "registered_seconds": tables.registered_seconds(loaded),
        "bytes_by_rank": held,
        "used_bytes": used_bytes,
        "rates": rates,
        "killed": killed,
    }


def _rates(started: Sequence[tables.Rank], count: int) -> dict[str, Any]:
    alone = started[0].ask("rate", tokens=count)["tokens_per_s"]
    for rank in started:
        rank.go_on("rate", tokens=count)
    together = [rank.answer()["tokens_per_s"] for rank in started]
    return {"tokens": count, "alone": alone, "together": together}


def _kill_last(started: Sequence[tables.Rank]) -> dict[str, Any]:
    """kill -9 while all look up; who is left goes on, and finds the right rows at the end."""
    for rank in started:
        rank.go_on("work", seconds=_WORK_SECONDS)
    time.sleep(_KILLED_AFTER_SECONDS)
    *survivors, victim = started
    victim.kill()
    lookups = [rank.answer()["lookups"] for rank in survivors]
    return {"rank": len(survivors), "lookups_of_the_others": lookups}
