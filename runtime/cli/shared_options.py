# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have."""

from __future__ import annotations

import argparse

from trtllm_engram.builder.model import HIDDEN_DTYPES

PLACEMENTS = ("host", "device", "device_sharded")
SCALES = ("with_rows", "device")


def add_checkpoint(parser: argparse.ArgumentParser, store: str = "the store") -> None:
    parser.add_argument("--checkpoint", metavar="DIR", help=f"where {store}'s checkpoint lies now")


def add_hidden_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hidden-dtype",
        choices=HIDDEN_DTYPES,
        default="bfloat16",
        help="of the residual stream (default: bfloat16)",
    )
