# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: a measured rate beside the ceiling measured in the same run."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..machine import read_text


@dataclass(frozen=True)
class Measurement:
    """A rate, and what it is compared with: another rate of the same run, or a fixed number."""

    name: str
    rate: float  # units a second, the median
    unit: str
    ceiling: str  # what `ceiling_rate` is of
    ceiling_rate: float
    target: float | None  # share of the ceiling to be reached; None: it only says what is left

    @property
    def share(self) -> float:
        return self.rate / self.ceiling_rate

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.share >= self.target


def median_seconds(
    contenders: Sequence[Callable[[int], object]],
    turns: int,
    before: Callable[[], None] = lambda: None,
) -> list[float]:
    """Median time of each contender, called with the number of its turn; `before` runs before each.

    Contenders take turns, so that what the machine does besides meets all of them.
    """
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(turns):
        for contender, seconds in zip(contenders, times, strict=True):
            before()
            started = time.perf_counter()
            contender(turn)
            seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in times]


def touch_memory(num_bytes: int) -> None:
    """Takes this much memory on huge pages where there are any, writes to it and gives it back.

    A virtual machine may hand free huge pages back to its host, two seconds after Linux has them,
    and never what lies free between pages in use. Who then allocates large pages waits for the host
    to clear them, several times as long as for Linux to do so, and who allocates small ones does
    not. Contenders that allocate right after this call both get memory that the host has given.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, num_bytes, flags=private) as memory:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


def machine_name() -> str:
    """Processor and cores, for the head of a report."""
    names = [
        line.partition(":")[2].strip()
        for line in read_text(Path("/proc/cpuinfo")).splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {num_cores()} cores"


def num_cores() -> int:
    """Cores that this process may use, which is how many threads the ops start."""
    return len(os.sched_getaffinity(0))
