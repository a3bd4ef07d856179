# SPDX-License-Identifier: Apache-2.0
"""`bench serving`: what its options are, and its results as a table."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import numpy as np

from ..bench import serving
from ..bench.measure import machine_name
from . import console, shared_options

OPTIONS = ("http", "grpc", "pid", "seconds", "model", "sequence_model")
_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving: a Triton server of this machine")
    group.add_argument("--http", metavar="HOST:PORT", help="default: localhost:8000")
    group.add_argument("--grpc", metavar="HOST:PORT", help="default: localhost:8001")
    group.add_argument(
        "--pid", metavar="N", type=shared_options.integer(1), help="default: the only one that runs"
    )
    group.add_argument(
        "--seconds",
        metavar="S",
        type=shared_options.number(1, 1e6),
        help=f"of load (default: {_SECONDS:g})",
    )
    group.add_argument("--model", metavar="NAME", help="written by `triton` (default: engram)")
    group.add_argument(
        "--sequence-model", metavar="NAME", help="one of the same store with --sequences too"
    )


def run(args: argparse.Namespace) -> int:
    """1 where a request failed or got a wrong answer."""
    urls = {"http": args.http or "localhost:8000", "grpc": args.grpc or "localhost:8001"}
    model = args.model or "engram"
    pid = args.pid or serving.find_server()
    store = serving.store_of(urls["grpc"], model)
    kinds = serving.mixed_load(store, model, args.sequence_model)
    with console.progress(args, "serving", "seconds") as report:
        memory = serving.run_load(kinds, urls, pid, args.seconds or _SECONDS, report)
    growth = serving.growth(memory)
    errors = [error for kind in kinds for error in kind.errors]
    rows: list[dict[str, Any]] = [
        {
            "name": kind.name,
            "protocol": kind.protocol,
            "requests": len(kind.seconds),
            "errors": len(kind.errors),
            "p50_seconds": float(np.percentile(kind.seconds, 50)),
            "p99_seconds": float(np.percentile(kind.seconds, 99)),
        }
        for kind in kinds
    ]
    if args.json:
        console.print_json(
            {
                "machine": machine_name(),
                "seconds": memory[-1].seconds,
                "kinds": rows,
                "growth": growth,
                "errors": errors[:10],
                "memory": [asdict(one) for one in memory],
            }
        )
        return 1 if errors else 0
    out = console.stdout()
    peak = max(one.pss for one in memory)
    pairs: list[tuple[str, object]] = [
        ("machine", machine_name()),
        ("load", console.human_seconds(memory[-1].seconds)),
        ("memory", f"PSS at most {console.human_bytes(peak)}, {growth:+.2%} from a fifth on"),
        ("errors", len(errors)),
    ]
    pairs += [("", error) for error in errors[:10]]
    console.print_pairs(pairs, out)
    out.print()
    lines = [
        (
            row["name"],
            row["protocol"],
            row["requests"],
            row["errors"],
            console.human_seconds(row["p50_seconds"]),
            console.human_seconds(row["p99_seconds"]),
        )
        for row in rows
    ]
    headings = ("requests", "over", ">number", ">errors", ">median", ">p99")
    console.print_table(headings, lines, out)
    return 1 if errors else 0
