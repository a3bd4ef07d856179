# SPDX-License-Identifier: Apache-2.0
"""Counters of what is looked up, for Prometheus and for Triton's own metrics.

    metrics = Metrics()
    executor = Executor(session, metrics=metrics)   # or metrics.count_lookup(...) after lookups
    metrics.note_tables(tables.describe())
    answer(metrics.prometheus_text())               # of GET /metrics

The share of unique rows is that of engram_rows_unique_total in engram_rows_examined_total; the hit
rate of a table on disk is that of engram_hot_rows_total in it and engram_disk_rows_total, that of a
host table's rows in GPU memory engram_gpu_hot_rows_total in engram_gpu_rows_total.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .row import num_blocks, packed_row_bytes

COUNTER, GAUGE = "counter", "gauge"
REFUSED, FAILED = "refused", "failed"  # kinds of errors

LOOKUPS = "engram_lookups_total"
ROWS = "engram_rows_total"
EXAMINED = "engram_rows_examined_total"
UNIQUE = "engram_rows_unique_total"
WAIT = "engram_lookup_seconds_total"
ERRORS = "engram_errors_total"
TABLE_BYTES = "engram_table_bytes"
HOT_ROWS = "engram_hot_rows_total"
DISK_ROWS = "engram_disk_rows_total"
DISK_READS = "engram_disk_reads_total"
GPU_ROWS = "engram_gpu_rows_total"
GPU_HOT_ROWS = "engram_gpu_hot_rows_total"

FAMILIES = {
    LOOKUPS: (COUNTER, "Calls that looked rows of a table up."),
    ROWS: (COUNTER, "Rows that they read, repeated ones too."),
    EXAMINED: (COUNTER, "Rows of calls whose repeated rows were counted."),
    UNIQUE: (COUNTER, "Of these, those that were no repetition within their call."),
    WAIT: (COUNTER, "Seconds that callers waited for rows; in an engine they wait for none."),
    ERRORS: (COUNTER, "Requests that got an error: refused as they were, or failed."),
    TABLE_BYTES: (GAUGE, "Bytes of a table that this process maps, by where they lie."),
    HOT_ROWS: (COUNTER, "Rows of tables on disk that were found in RAM."),
    DISK_ROWS: (COUNTER, "Rows of tables on disk that were read from there."),
    DISK_READS: (COUNTER, "Reads that those took."),
    GPU_ROWS: (COUNTER, "Rows of host tables with hot rows that GPUs looked for, by order."),
    GPU_HOT_ROWS: (COUNTER, "Of these, those that were in GPU memory, by its part."),
}
# Sorting more would take longer than a GPU takes to read the rows.
_EXAMINED_IDS = 1 << 14

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sample:
    name: str
    labels: Labels
    value: float


class Metrics:
    """Values by name and labels, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, Labels], float] = {}

    def count_lookup(
        self, table: str, ids: npt.NDArray[np.int32], seconds: float | None = None
    ) -> None:
        """One call in a table: its row ids (-1: no row), and how long the caller waited."""
        self._add(LOOKUPS, 1, table=table)
        self._add(ROWS, int(np.count_nonzero(ids >= 0)), table=table)
        if ids.size <= _EXAMINED_IDS:
            unique = np.unique(ids)
            self._add(EXAMINED, int(np.count_nonzero(ids >= 0)), table=table)
            self._add(UNIQUE, int(np.count_nonzero(unique >= 0)), table=table)
        if seconds is not None:
            self._add(WAIT, seconds, table=table)

    def count_error(self, kind: str) -> None:
        """kind: REFUSED or FAILED."""
        self._add(ERRORS, 1, kind=kind)

    def note_tables(self, described: Mapping[str, Mapping[str, Any]]) -> None:
        """described: Tables.describe's."""
        for table, one in described.items():
            on_gpu = one["num_bytes"]
            if one["placement"] in ("host", "disk"):
                share = num_blocks(one["head_dim"]) if one["scales"] == "device" else 0
                on_gpu = on_gpu * share // packed_row_bytes(one["head_dim"])
            hot = one.get("hot") or {"num_bytes": 0, "asked": {}}
            values = {
                (TABLE_BYTES, _labels(table=table, place="gpu")): on_gpu + hot["num_bytes"],
                (TABLE_BYTES, _labels(table=table, place="host")): one["num_bytes"] - on_gpu,
            }
            for order, count in hot["asked"].items():
                values[GPU_ROWS, _labels(table=table, order=order)] = count
                for part, found in (("static", "found"), ("adaptive", "adaptive_found")):
                    labels = _labels(table=table, order=order, part=part)
                    values[GPU_HOT_ROWS, labels] = hot[found][order]
            if disk := one.get("disk"):
                labels = _labels(table=table)
                values[HOT_ROWS, labels] = disk["hot_rows"]
                values[DISK_ROWS, labels] = disk["disk_rows"]
                values[DISK_READS, labels] = disk["num_reads"]
            with self._lock:
                self._values.update(values)

    def samples(self) -> list[Sample]:
        with self._lock:
            values = sorted(self._values.items())
        return [Sample(name, labels, value) for (name, labels), value in values]

    def prometheus_text(self) -> str:
        """All samples in Prometheus' text format 0.0.4."""
        lines = []
        samples = self.samples()
        for name, (kind, about) in FAMILIES.items():
            own = [one for one in samples if one.name == name]
            if own:
                lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{{{_joined(one.labels)}}} {one.value:.17g}" for one in own]
        return "".join(f"{line}\n" for line in lines)

    def _add(self, name: str, value: float, **labels: str) -> None:
        key = (name, _labels(**labels))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + value


def _labels(**labels: str) -> Labels:
    return tuple(labels.items())


def _joined(labels: Labels) -> str:
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escaped)}"' for name, value in labels)
