# SPDX-License-Identifier: Apache-2.0
"""`cache`: what lies in the cache folder. Anything there can be made anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_engram.plugins import env
from trtllm_engram.plugins.errors import InputError

from . import console

EXAMPLE = "trtllm-engram cache --clear"

# Only files of these names are ours to list and remove: $TRTLLM_ENGRAM_CACHE may be any folder.
# The last two are what a kill leaves of entries that were being written.
_PATTERNS = ("token_map-*.bin", "timing-*.cache", ".token_map-*.part", ".timing-*.part")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove every entry")
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    folder = env.cache_dir()
    if folder is None:
        raise InputError("the cache folder cannot be made or written; all work goes on uncached")
    entries = sorted(file for pattern in _PATTERNS for file in folder.glob(pattern))
    sizes = {file: file.stat().st_size for file in entries}
    if args.clear:
        for file in entries:
            file.unlink(missing_ok=True)
    if args.json:
        listed = [{"name": file.name, "bytes": size} for file, size in sizes.items()]
        console.print_json({"folder": str(folder), "entries": listed, "cleared": args.clear})
    else:
        _print(folder, sizes, args.clear)
    return 0


def _print(folder: Path, sizes: dict[Path, int], cleared: bool) -> None:
    total = f"{len(sizes)} entries, {console.human_bytes(sum(sizes.values()))}"
    console.stdout().print(f"{folder}: {total}{' removed' if cleared and sizes else ''}")
    if sizes and not cleared:
        rows = [(file.name, console.human_bytes(size)) for file, size in sizes.items()]
        console.print_table(("entry", ">size"), rows)
