# SPDX-License-Identifier: Apache-2.0
"""From how many tokens on lookups in host memory are to be sorted, or gathered by CPU threads, by
the times of every path (`bench lookup --calibrate`). The library reads the file that
TRTLLM_ENGRAM_CALIBRATION names (cpp/src/ops/lookup_thresholds.h)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .gpu import Result

FORMAT_VERSION = 1
# The paths as --explain names them, by as many blocks as lookups take by themselves.
DIRECT, SORTED, GATHERED = "direct", "sorted, 8", "gathered, 32"

Times = Mapping[int, Mapping[str, float]]  # of a path, in us, by number of tokens


def calibration(results: Sequence[Result], about: Mapping[str, str]) -> dict[str, Any]:
    """The file's content, of what --explain measured."""
    times = {
        result.case.num_tokens: {
            path: result.timings[path].median
            for path in (DIRECT, SORTED, GATHERED)
            if path in result.timings
        }
        for result in results
    }
    return {
        "format_version": FORMAT_VERSION,
        **about,
        "sorted_tokens": fastest_from(times, SORTED, [DIRECT]),
        "gathered_tokens": fastest_from(times, GATHERED, [DIRECT, SORTED]),
        "measured_us": {str(count): dict(each) for count, each in sorted(times.items())},
    }


def fastest_from(times: Times, path: str, others: Sequence[str]) -> int | None:
    """The fewest tokens from which on a path was faster than the others at every number that was
    measured; None: at the most it was not."""
    found = None
    for count in sorted(times, reverse=True):
        each = times[count]
        if path not in each or each[path] >= min(each[other] for other in others):
            break
        found = count
    return found
