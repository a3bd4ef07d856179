# SPDX-License-Identifier: Apache-2.0
"""`bench`: measures this machine; each rate stands beside its ceiling, measured in the same run."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from trtllm_engram.builder.files import writing
from trtllm_engram.plugins.errors import InputError

from ..bench.files import bench_files
from ..bench.measure import Measurement, machine_name
from ..bench.ops import TOKENS, bench_hash, bench_lookup
from . import console

EXAMPLE = "trtllm-engram bench ops --dir /data --file-gb 4"

_GB = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure this machine. ops: the CPU lookup against random reads by the same cores, the\n"
        "hash, and prepare's passes over files against cat and cp with a cold page cache."
    )
    parser.add_argument("name", metavar="NAME", choices=["ops"], help="which benchmark: ops")
    parser.add_argument(
        "--table-gb", metavar="GB", type=float, default=2, help="table in memory (default: 2)"
    )
    parser.add_argument(
        "--file-gb", metavar="GB", type=float, default=2, help="file to read and copy (default: 2)"
    )
    parser.add_argument(
        "--dir",
        metavar="DIR",
        type=Path,
        help="on the disk to measure (default: the temporary folder)",
    )
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    for option, size in (("--table-gb", args.table_gb), ("--file-gb", args.file_gb)):
        if not 0.001 <= size <= 10_000:
            raise InputError(f"{option}: expected 0.001 to 10000, found {size:g}")
    folder = Path(args.dir or tempfile.gettempdir())
    with console.status(args) as note:
        note("lookup")
        measurements = bench_lookup(int(args.table_gb * _GB))
        note("hash")
        measurements += bench_hash()
        note("files")
        with writing(folder):
            scratch = tempfile.TemporaryDirectory(prefix="trtllm-engram-bench-", dir=folder)
        with scratch as name:
            measurements += bench_files(Path(name), int(args.file_gb * _GB))
    sizes = {"table_gb": args.table_gb, "file_gb": args.file_gb, "folder": str(folder)}
    if args.json:
        rows = [asdict(one) | {"share": one.share} for one in measurements]
        console.print_json({"machine": machine_name(), **sizes, "measurements": rows})
    else:
        _print(measurements, sizes)
    return 0


def _print(measurements: list[Measurement], sizes: dict[str, object]) -> None:
    out = console.stdout()
    pairs: list[tuple[str, object]] = [
        ("machine", machine_name()),
        ("table", f"{sizes['table_gb']:g} GB in memory, {TOKENS} tokens a call"),
        ("file", f"{sizes['file_gb']:g} GB in {sizes['folder']}"),
    ]
    console.print_pairs(pairs, out)
    out.print()
    rows = [
        (
            one.name,
            _rate(one.rate, one.unit),
            one.ceiling,
            _rate(one.ceiling_rate, one.unit),
            Text(f"{one.share:.0%}", style="green" if one.share >= one.target else "yellow"),
            f"{one.target:.0%}",
        )
        for one in measurements
    ]
    console.print_table(("what", ">rate", "against", ">rate", ">share", ">target"), rows, out)


def _rate(rate: float, unit: str) -> str:
    if unit == "B":
        return f"{console.human_bytes(rate)}/s"
    return f"{console.human_count(rate)} {unit}/s"
