# SPDX-License-Identifier: Apache-2.0
"""`bench lookup`: where the table is, and what is looked up in one in host memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from trtllm_engram.plugins.errors import InputError

from ..bench import gpu, lookup, lookup_host, lookup_text
from ..bench.rivals import Rivals
from . import shared_options

OPTIONS = ("place", "explain", "calibrate", "text", "hot_text", "hot_gib", "hot_adaptive")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("lookup")
    group.add_argument(
        "--place",
        choices=("device", "host", "disk"),
        help="where the table is (default: device); disk: by the CPU, of files in --dir",
    )
    group.add_argument(
        "--explain",
        action="store_true",
        default=None,
        help="--place host: every path beside the one that is chosen",
    )
    group.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        help="--explain: write from how many tokens on which path is best, for "
        "TRTLLM_ENGRAM_CALIBRATION",
    )
    group.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="--place host: rows that these texts read, in place of random ones",
    )
    group.add_argument(
        "--hot-text",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="--text: the rows that these others read most are kept by the GPU",
    )
    group.add_argument(
        "--hot-gib",
        metavar="GIB",
        type=shared_options.number(0.001, 1e6),
        help=f"--hot-text: of its memory for them (default: {shared_options.HOT_GIB:g})",
    )
    group.add_argument(
        "--hot-adaptive",
        metavar="SHARE",
        type=shared_options.number(0, 1),
        help="--hot-text: of --hot-gib, for rows as they are read, which are counted (default: 0)",
    )


def check(args: argparse.Namespace) -> None:
    for option in ("explain", "text"):
        if getattr(args, option) and args.place != "host":
            found = args.place or "device"
            raise InputError(f"--{option}: expected with --place host, found {found}")
    if args.calibrate and not args.explain:
        raise InputError("--calibrate: expected with --explain, found it without")
    if args.explain and args.text:
        raise InputError("--explain: expected with random rows, found --text")
    if args.hot_text and not args.text:
        raise InputError("--hot-text: expected with --text, found it without")
    for option in ("hot_gib", "hot_adaptive"):
        if getattr(args, option) is not None and not args.hot_text:
            words = option.replace("_", "-")
            raise InputError(f"--{words}: expected with --hot-text, found it without")


def cases(args: argparse.Namespace, tokens: list[int], rivals: Rivals | None) -> Iterator[gpu.Case]:
    if args.text:
        hot_gib = args.hot_gib or shared_options.HOT_GIB
        texts = lookup_text.Texts(args.text, args.hot_text or [], hot_gib, args.hot_adaptive or 0.0)
        return lookup_text.cases(tokens, args.table_gb, rivals, texts)
    if args.place == "host":
        return lookup_host.cases(tokens, args.table_gb, rivals, bool(args.explain))
    return lookup.cases(tokens, args.table_gb, rivals)
