# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: a measured rate beside the ceiling measured in the same run."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..machine import read_text


@dataclass(frozen=True)
class Measurement:
    """A rate, and what it is compared with: another rate of the same run, or a fixed number."""

    name: str
    rate: float  # units a second, the median
    unit: str
    ceiling: str  # what `ceiling_rate` is of
    ceiling_rate: float
    target: float  # share of the ceiling to be reached

    @property
    def share(self) -> float:
        return self.rate / self.ceiling_rate


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
