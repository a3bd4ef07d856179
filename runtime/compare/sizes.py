# SPDX-License-Identifier: Apache-2.0
"""How many tokens in how many requests a call has, as options say it: TxB."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence

from trtllm_engram.plugins.errors import InputError

Size = tuple[int, int]

DEFAULT_SIZES: tuple[Size, ...] = ((1, 1), (37, 3))


def parse_size(text: str) -> Size:
    """For argparse."""
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    if match is None or (int(match[1]) > 0 and int(match[2]) == 0):
        raise argparse.ArgumentTypeError(f"expected TOKENSxREQUESTS, such as 37x3, found {text!r}")
    return int(match[1]), int(match[2])


def falling(sizes: Sequence[Size]) -> list[Size]:
    """The sizes in an order in which neither tokens nor requests grow; InputError without one.

    polygraphy keeps the first iteration's host buffers, which can shrink but not grow: those of
    streams with the tokens, that of next_lookback_ids with the requests.
    """
    ordered = sorted(sizes, reverse=True)
    for larger, smaller in itertools.pairwise(ordered):
        if smaller[1] > larger[1]:
            raise InputError(
                f"sizes: expected no more requests in a call of fewer tokens, as polygraphy's "
                f"buffers cannot grow, found {_text(larger)} and {_text(smaller)}: run them apart"
            )
    return ordered


def _text(size: Size) -> str:
    return "x".join(map(str, size))
