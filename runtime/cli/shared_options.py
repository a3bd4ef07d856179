# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from trtllm_engram.builder.model import HIDDEN_DTYPES
from trtllm_engram.plugins.errors import InputError

PLACEMENTS = ("host", "device", "device_sharded", "disk")
SCALES = ("with_rows", "device", "host")
MAX_SEED = 2**63 - 1
HOT_GIB = 1.0  # of a table, as the library has it


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, found {text!r}")
        return value

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """A type for argparse: numbers from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least:g} to {most:g}, found {text!r}")
        return value

    return parse


def add_checkpoint(parser: argparse.ArgumentParser, store: str = "the store") -> None:
    parser.add_argument("--checkpoint", metavar="DIR", help=f"where {store}'s checkpoint lies now")


def add_hot_rows(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--hot-rows",
        metavar="FILE.npy",
        type=Path,
        help="--placement host: rows that GPUs keep, of `tables count`",
    )
    parser.add_argument(
        "--hot-gib",
        metavar="GIB",
        type=number(0, 1e6),
        help="of each table, --placement disk: RAM for rows that were read before; host: memory "
        f"of each GPU for them and those of --hot-rows (default: {HOT_GIB:g} with those or disk)",
    )
    parser.add_argument(
        "--hot-adaptive",
        metavar="SHARE",
        type=number(0, 1),
        help="--hot-rows: of --hot-gib, for rows that were read before (default: 0)",
    )


def check_keeper(args: argparse.Namespace) -> None:
    """Refuses --keeper where its memory is not wanted."""
    if args.keeper is not None and args.memory != "keeper":
        raise InputError(f"--keeper: expected with --memory keeper, found {args.keeper} without")


def add_hidden_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hidden-dtype",
        choices=HIDDEN_DTYPES,
        default="bfloat16",
        help="of the residual stream (default: bfloat16)",
    )
