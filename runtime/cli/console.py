# SPDX-License-Identifier: Apache-2.0
"""What commands print: results on stdout, progress on stderr; plain in pipes, NO_COLOR holds."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import progress as progress_bar
from rich.console import Console
from rich.text import Text

from trtllm_engram.builder.block_sums import Progress

PROGRESS_DELAY_S = 2.0  # what is over sooner shows no bar


def stdout() -> Console:
    """A console that never wraps, guesses no colours and cuts nothing off in a pipe."""
    width = None if sys.stdout.isatty() else 10_000
    return Console(width=width, highlight=False, markup=False, soft_wrap=True, emoji=False)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def print_json(document: object, *, compact: bool = False) -> None:
    """The one document on stdout of a command under --json; compact for long lists of numbers."""
    indent = None if compact else 2
    try:
        text = json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        document = as_json_types(document)
        text = json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # JSON has escapes of its own
        text = json.dumps(document, indent=indent)
    print(text)


def print_pairs(pairs: Sequence[tuple[str, object]], console: Console | None = None) -> None:
    """Lines of `name   value`, the values in one column."""
    console = console or stdout()
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        console.print(Text(f"{name:<{width}}  ", style="dim").append(str(value), style="not dim"))


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], console: Console | None = None
) -> None:
    """A table without lines; columns whose heading starts with '>' are right-aligned."""
    console = console or stdout()
    names = [Text(heading.lstrip(">"), style="dim") for heading in headings]
    table = [names] + [
        [cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows
    ]
    widths = [max(cell.cell_len for cell in column) for column in zip(*table, strict=True)]
    for row in table:
        line = Text()
        for heading, width, cell in zip(headings, widths, row, strict=True):
            space = " " * (width - cell.cell_len)
            line = Text.assemble(
                line, *((space, cell) if heading.startswith(">") else (cell, space))
            )
            line.append("  ")
        line.rstrip()
        console.print(line)


@contextmanager
def progress(args: argparse.Namespace, label: str, unit: str = "bytes") -> Iterator[Progress]:
    """Yields report(done, total), numbers of `unit`. A bar shows on a terminal once the work has
    lasted a while."""
    if args.quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    amount: progress_bar.ProgressColumn = progress_bar.DownloadColumn(binary_units=False)
    if unit != "bytes":
        amount = progress_bar.TextColumn(f"{{task.completed}} of {{task.total}} {unit}")
    bar = progress_bar.Progress(
        progress_bar.TextColumn("{task.description}"),
        progress_bar.BarColumn(bar_width=30),
        amount,
        progress_bar.TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    )
    task = bar.add_task(label, total=None)
    shown_from = time.monotonic() + PROGRESS_DELAY_S

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() >= shown_from:
            bar.start()
            bar.refresh()

    try:
        yield report
    finally:
        bar.stop()


@contextmanager
def status(args: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Yields note(text), which shows on a terminal what is being done."""
    if args.quiet or not sys.stderr.isatty():
        yield lambda _text: None
        return
    with Console(stderr=True).status("starting", spinner_style="dim") as spinner:
        yield spinner.update


def human_bytes(num_bytes: float) -> str:
    """`1.5 GB`: decimal units, as disks and bandwidths are given."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
    return f"{num_bytes / 1000:.3g} TB"


def human_seconds(seconds: float) -> str:
    """Three digits and a unit that suits them."""
    if seconds < 999.5e-6:  # what is more would be rounded to 1e+03
        return f"{seconds * 1e6:.3g} us"
    if seconds < 999.5e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def human_count(count: float) -> str:
    """`1234` below ten thousand, else `12.3 k`, `12.3 M`, `12.3 G`, `12.3 T`."""
    if count < 10_000:
        return f"{count:.0f}" if count >= 100 or count == int(count) else f"{count:.3g}"
    for unit in ("k", "M", "G"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} T"


def as_json_types(value: Any) -> Any:
    """numpy numbers, tuples and paths as json.dumps takes them; null for what JSON has no number
    for, infinities and NaN."""
    if isinstance(value, dict):
        return {str(key): as_json_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json_types(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
