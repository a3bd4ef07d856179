# SPDX-License-Identifier: Apache-2.0
"""`compare`: does an engine give out what the store says it should?"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from trtllm_engram.builder.model import ModelOptions, hidden_name
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.plugins.registration import import_tensorrt

from .. import _native
from ..compare import Comparison, Reference, compare, make_feeds
from ..compare.plot import write_histogram
from ..compare.report import HIDDEN_LIMIT_BF16_ULPS, merge, require_rows
from ..compare.sizes import DEFAULT_SIZES, parse_size
from ..compare.text import bound, histogram, rows_note, verdict
from ..engine import Engine
from ..engine_session import check_engine
from ..figure import new_figure
from ..gpus import probe_driver
from ..store import Store, open_store
from ..tables import Tables
from ..text import read_text
from . import console, shared_options
from .version import package_version

EXAMPLE = "trtllm-engram compare STORE --engine engine.plan --sizes 1x1 37x3 1024x8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run an engine of `build` on pieces of real text and hold its outputs against the CPU's:\n"
        "row ids and rows bit by bit, hidden states in BF16 ulps. Exit code 1 where a bound is\n"
        "broken. Rows are outputs of engines built with --check-outputs or --check-mxfp8 alone;\n"
        "without them a table's single wrong byte may pass, so that such an engine is refused\n"
        "unless --hidden-only is given."
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--engine", metavar="PLAN", type=Path, required=True)
    parser.add_argument(
        "--sizes",
        metavar="TxB",
        nargs="+",
        type=parse_size,
        default=list(DEFAULT_SIZES),
        help="tokens x requests of each call (default: 1x1 37x3)",
    )
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text instead of the built-in one")
    parser.add_argument(
        "--seed",
        type=shared_options.integer(0, shared_options.MAX_SEED),
        default=0,
        help="of the data (default: 0)",
    )
    parser.add_argument(
        "--limit",
        metavar="ULPS",
        type=shared_options.number(0, 1e6),
        default=HIDDEN_LIMIT_BF16_ULPS,
        help=f"bound of hidden states (default: {HIDDEN_LIMIT_BF16_ULPS:g} BF16 ulps)",
    )
    parser.add_argument(
        "--hidden-only",
        action="store_true",
        help="accept an engine whose outputs have no rows",
    )
    parser.add_argument(
        "--tables",
        metavar="FILE.toml",
        type=Path,
        help="binds the engine's tables (default: the store's own)",
    )
    parser.add_argument(
        "--placement",
        choices=("host", "device"),
        help="of the tables, without --tables (default: host)",
    )
    parser.add_argument("--png", metavar="FILE", type=Path, help="write the histogram of ulps")
    shared_options.add_checkpoint(parser)
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.tables is not None and args.placement is not None:
        raise InputError("--placement: expected without --tables, whose file has it, found both")
    store = open_store(args.store, checkpoint=args.checkpoint)
    if args.tables is not None:
        _native.check_tables_file(str(args.tables))
    if args.png is not None:
        store.check_output(args.png)
        new_figure("png", 1, 1)  # is matplotlib there?
    text = None if args.text is None else read_text(args.text)
    with contextlib.ExitStack() as stack:
        note = stack.enter_context(console.status(args))
        note("loading the engine")
        engine = Engine(args.engine)
        check_engine(engine, store)
        if not args.hidden_only:
            require_rows(engine.outputs, "--hidden-only")
        note("loading the tables")
        stack.enter_context(_tables(args, store))
        comparisons = _compare(args, store, engine, text, note)
    # First: a picture that cannot be written loses no result.
    _print(args, comparisons, _about(engine))
    if args.png is not None:
        write_histogram(args.png, comparisons)
    return 0 if all(comparison.passed for comparison in comparisons) else 1


def _tables(args: argparse.Namespace, store: Store) -> contextlib.AbstractContextManager[Tables]:
    if args.tables is not None:
        return Tables.from_toml(args.tables)
    return Tables.of_store(store, placement=args.placement or "host")


def _compare(
    args: argparse.Namespace,
    store: Store,
    engine: Engine,
    text: str | None,
    note: Callable[[str], None],
) -> list[Comparison]:
    options = ModelOptions(
        hidden_dtype=engine.inputs[hidden_name(store.config.layer_ids[0])].dtype,
        history="explicit" if "lookback_ids" in engine.inputs else "whole_prompt",
    )
    reference, parts = Reference(store), []
    feeds = make_feeds(store, args.sizes, text=text, options=options, seed=args.seed)
    for feed, (num_tokens, num_requests) in zip(feeds, args.sizes, strict=True):
        note(f"{num_tokens} tokens in {num_requests} requests")
        profile = engine.find_profile({name: array.shape for name, array in feed.items()})
        found = engine.execution(profile).run(feed)
        parts.append(compare(found, reference(feed), args.limit))
    return merge(parts)


def _about(engine: Engine) -> dict[str, str]:
    """What the engine ran on, for a record of the result."""
    driver = probe_driver()
    return {
        "machine": driver.gpus[engine.device].name,
        "driver": driver.version or "unknown",
        "tensorrt": import_tensorrt().__version__,
        "trtllm_engram": package_version(),
        "command": shlex.join(["trtllm-engram", *sys.argv[1:]]),
    }


def _print(
    args: argparse.Namespace, comparisons: list[Comparison], about: Mapping[str, str]
) -> None:
    if args.json:
        verdicts: dict[str, object] = {
            "passed": all(comparison.passed for comparison in comparisons),
            "rows_compared": not rows_note(comparisons),
        }
        outputs = [comparison.to_json() for comparison in comparisons]
        console.print_json({**verdicts, **about, "outputs": outputs})
        return
    headings = (
        "output",
        ">values",
        ">different",
        ">max",
        ">mean",
        ">max ulps",
        ">mean ulps",
        "bound",
        "",
    )
    rows = [
        (
            one.name,
            one.count,
            one.num_different,
            f"{one.max_abs:.3g}",
            f"{one.mean_abs:.3g}",
            f"{one.max_ulps:.3g}" if one.histogram else "",
            f"{one.mean_ulps:.3g}" if one.histogram else "",
            bound(one),
            verdict(one),
        )
        for one in comparisons
    ]
    console.print_table(headings, rows)
    shown = [(one.name, histogram(one)) for one in comparisons if one.histogram]
    if shown:
        console.stdout().print()
        console.print_table(("output", "values by BF16 ulps"), shown)
    if note := rows_note(comparisons):
        console.stdout().print(note)
