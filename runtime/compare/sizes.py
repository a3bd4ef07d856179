# SPDX-License-Identifier: Apache-2.0
"""How many tokens in how many requests a call has, as options say it: TxB."""

from __future__ import annotations

import argparse
import re

Size = tuple[int, int]

DEFAULT_SIZES: tuple[Size, ...] = ((1, 1), (37, 3))


def parse_size(text: str) -> Size:
    """For argparse."""
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    if match is None or match[2] == "0":
        raise argparse.ArgumentTypeError(f"expected TOKENSxREQUESTS, such as 37x3, found {text!r}")
    return int(match[1]), int(match[2])
