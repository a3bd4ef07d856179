# SPDX-License-Identifier: Apache-2.0
"""What `tables load` and `tables serve` have in common: which tables, in which memory."""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.layers import table_name
from trtllm_engram.builder.made_up import write_made_up_store
from trtllm_engram.builder.manifest import MANIFEST_FILE, read_manifest
from trtllm_engram.plugins.errors import EngramError, InputError

from ...group import Group
from ...tables import Tables
from .. import shared_options


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", metavar="STORE", type=Path, help="with --formula also a config.json"
    )
    parser.add_argument("--layers", metavar="L,...", help="some layers (default: all)")
    shared_options.add_checkpoint(parser)
    parser.add_argument(
        "--verify", action="store_true", default=None, help="check all bytes against the sums"
    )
    parser.add_argument(
        "--formula",
        action="store_true",
        help="fill tables of the store's sizes by synthesize's formula; no table file is read",
    )
    parser.add_argument(
        "--seed",
        type=shared_options.integer(0, shared_options.MAX_SEED),
        help="of the formula (default: 0)",
    )


def add_memory(parser: argparse.ArgumentParser, kinds: str, policies: str) -> None:
    parser.add_argument("--memory", metavar="KIND", help=kinds)
    parser.add_argument("--pages", metavar="KIND", help="auto (default), 4k, or 2m: reserved pages")
    parser.add_argument("--numa", metavar="POLICY", help=policies)


@contextlib.contextmanager
def chosen_tables(args: argparse.Namespace, group: Group) -> Iterator[dict[str, dict[str, Any]]]:
    """The keys of each [tables.NAME] that the arguments say; where they are wrong, the group hears
    of it."""
    with contextlib.ExitStack() as stack:
        try:
            tables = _keys(args, stack)
        except (InputError, EngramError) as error:
            Tables(group).decline(str(error))
            raise
        yield tables


def _keys(args: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, dict[str, Any]]:
    store, checkpoint = args.store, args.checkpoint
    if "keeper" in args:
        shared_options.check_keeper(args)
    if args.seed is not None and not args.formula:
        raise InputError(f"--seed: expected with --formula, found {args.seed} without")
    if args.formula and not (store / MANIFEST_FILE).exists():
        config = EngramConfig.from_pretrained(store)
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trtllm-engram-")))
        write_made_up_store(store, config)
    config = read_manifest(store, checkpoint).config
    names = (
        "placement",
        "scales",
        "hot_gib",
        "hot_rows",
        "hot_adaptive",
        "gather_threads",
        "memory",
        "pages",
        "numa",
        "verify",
        "heads",
        "checkpoint",
    )
    options = {name: getattr(args, name, None) for name in names}
    options["formula_seed"] = (args.seed or 0) if args.formula else None
    return {
        table_name(layer_id): {"store": store, "layer": layer_id, **options}
        for layer_id in _layers(args.layers, config)
    }


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """The library's errors begin with the word that is this command's name."""
    try:
        yield
    except (InputError, EngramError) as error:
        raise type(error)(str(error).removeprefix("tables: ")) from error


def _layers(text: str | None, config: EngramConfig) -> list[int]:
    known = list(config.layer_ids)
    if text is None:
        return known
    chosen = [int(part) if part.isdecimal() and len(part) < 10 else -1 for part in text.split(",")]
    if not set(chosen) <= set(known):
        raise InputError(f"--layers: expected some of {','.join(map(str, known))}, found {text!r}")
    return chosen


def stop_event(*signals: signal.Signals) -> threading.Event:
    """Set by the first of these signals."""
    stop = threading.Event()
    for number in signals:
        signal.signal(number, lambda *_: stop.set())
    return stop
