# SPDX-License-Identifier: Apache-2.0
"""The reference as a polygraphy runner, with the data loader and the comparison that go with it.

polygraphy_args.py puts them into `polygraphy run`. One setup serves a process, as the functions
that polygraphy takes from scripts have no arguments.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.datatype import DataType
from polygraphy.logger import G_LOGGER

from trtllm_engram.builder.model import ModelOptions, input_shapes
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.plugins.registration import import_tensorrt, register

from ..figure import new_figure
from ..store import Store, open_store
from ..tables import Tables
from .feeds import make_feeds
from .plot import write_histogram
from .reference import MAGNITUDE, Reference
from .report import HIDDEN_LIMIT_BF16_ULPS, Comparison, compare, merge, require_rows
from .sizes import falling
from .text import line, rows_note
from .torch_arrays import as_input, as_output, to_numpy


@dataclass
class Setup:
    store: Store
    options: ModelOptions
    sizes: list[tuple[int, int]]
    seed: int
    limit: float
    tables: Tables | None  # None: bound by TRTLLM_ENGRAM_TABLES
    hidden_only: bool
    png: Path | None
    parts: list[list[Comparison]] = field(default_factory=list)  # by iteration, for the picture


_setup: Setup | None = None


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What is wrong as polygraphy tells it: one line, exit code 1."""
    try:
        yield
    except (InputError, EngramError, OSError) as error:
        G_LOGGER.critical(f"--engram-ref: {error}")


@_told()
def configure(
    store: str,
    *,
    checkpoint: str | None = None,
    hidden_dtype: str = "bfloat16",
    history: str = "explicit",
    sizes: list[tuple[int, int]],
    seed: int = 0,
    limit: float = HIDDEN_LIMIT_BF16_ULPS,
    placement: str = "host",
    hidden_only: bool = False,
    png: str | None = None,
) -> None:
    """Says what runner, data and comparison are about; binds the store's tables, unless placement
    is "none". Outputs without rows are refused unless hidden_only. A picture of ulps in png, where
    one is named, grows with each iteration."""
    global _setup
    opened = open_store(store, checkpoint)
    if png is not None:
        opened.check_output(Path(png))
        new_figure("png", 1, 1)  # is matplotlib there?
    tables = None if placement == "none" else Tables.of_store(opened, placement=placement)
    with contextlib.suppress(EngramError):  # no TensorRT: other runners are fine too
        # The library is loaded by now, so polygraphy's --plugins would not register it any more.
        register(import_tensorrt())
    options = ModelOptions(hidden_dtype, history)
    picture = None if png is None else Path(png)
    _setup = Setup(opened, options, falling(sizes), seed, limit, tables, hidden_only, picture)


def setup() -> Setup:
    if _setup is None:
        raise EngramError("engram-ref: expected configure() first, as --engram-ref does")
    return _setup


def load_data() -> Iterator[dict[str, Any]]:
    """polygraphy's data loader."""
    chosen = setup()
    with _told():
        feeds = make_feeds(chosen.store, chosen.sizes, options=chosen.options, seed=chosen.seed)
        for feed in feeds:
            yield {name: as_input(array) for name, array in feed.items()}


@_told()
def compare_outputs(one: Any, other: Any) -> OrderedDict[str, bool]:
    """polygraphy's comparison of two runners' iterations; either may be the reference, which alone
    has magnitudes."""
    first, second = ({name: to_numpy(side[name]) for name in side} for side in (one, other))
    is_first = any(name.endswith(MAGNITUDE) for name in first)
    found, expected = (second, first) if is_first else (first, second)
    results: OrderedDict[str, bool] = OrderedDict()
    chosen = setup()
    if not chosen.hidden_only:
        require_rows(found, "--engram-hidden-only")
    comparisons = compare(found, expected, chosen.limit)
    for comparison in comparisons:
        (G_LOGGER.finish if comparison.passed else G_LOGGER.error)(line(comparison))
        results[comparison.name] = comparison.passed
    if note := rows_note(comparisons):
        G_LOGGER.warning(note)
    if chosen.png is not None:
        chosen.parts.append(comparisons)
        write_histogram(chosen.png, merge(chosen.parts))
    return results


class EngramReferenceRunner(BaseRunner):  # type: ignore[misc]
    """Computes what an engine of the configured store should give out, on the CPU."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name, prefix="engram-reference")
        self._reference: Reference | None = None

    def activate_impl(self) -> None:
        self._reference = Reference(setup().store)

    def get_input_metadata_impl(self) -> Any:
        chosen = setup()
        metadata = TensorMetadata()
        known = {"token_ids": "int32", "positions": "int64", "cu_seqlens": "int32"}
        known["lookback_ids"] = "int32"
        for name, shape in input_shapes(chosen.store, chosen.options, -1, -1).items():
            # The number of tokens or requests, which comes first, is dynamic.
            dims = (None, *shape[1:])
            dtype = known.get(name, chosen.options.hidden_dtype)
            metadata.add(name, dtype=getattr(DataType, dtype.upper()), shape=dims)
        return metadata

    @_told()
    def infer_impl(self, feed_dict: dict[str, Any]) -> OrderedDict[str, Any]:
        if self._reference is None:
            raise EngramError("engram-ref: expected an active runner, found an inactive one")
        started = time.perf_counter()
        feed = {name: to_numpy(array) for name, array in feed_dict.items()}
        outputs = self._reference(feed)
        self.inference_time = time.perf_counter() - started
        return OrderedDict((name, as_output(array)) for name, array in outputs.items())

    def deactivate_impl(self) -> None:
        self._reference = None
