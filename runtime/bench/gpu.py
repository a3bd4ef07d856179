# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmarks share: CUDA-graph replays with a cold L2, ours and rivals in turns.

The L2 is emptied before each replay: 256 MiB are written, then another 256 MiB read, so that no
dirty line is left to be written back during the measurement. Ceilings (an empty kernel's node, the
node of a kernel that reads one cold value and writes it, or one that another value says where it
is, the rates of a reduction, of a copy, and of cuBLAS's products of large BF16 matrices) are
measured in the same run and in the same way, and beside each case a plain copy that reads and
writes as many bytes in all.
"""

from __future__ import annotations

import functools
import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_engram.plugins.errors import EngramError, InputError

from ..devices import require_gpu

TOKENS = (1, 8, 64, 256, 1024, 8192)
OURS = "ours"
EMPTY = "empty node"  # what a target of `over_us` is measured against
_COPY = "copy"

_FLUSH_FLOATS = 1 << 26  # 256 MiB
_CEILING_FLOATS = 1 << 30
_CEILING_WIDTH = 8192  # of the matrices
_WARM_UP_TURNS = 3
_TURNS = 51
_EVENT_TURNS = 5


@functools.cache
def load_torch() -> Any:
    """torch, which allocates, captures and times here."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise InputError(
            "expected torch for a benchmark on a GPU, found none: pip install torch"
        ) from None
    require_gpu("bench")
    if not torch.cuda.is_available():
        raise InputError("expected torch with CUDA for a benchmark on a GPU, found one without")
    return torch


@dataclass(frozen=True)
class Timing:
    """Microseconds of one contender's replays."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Target:
    """At most `ratio` of the time of `against`, or at most `over_us` more than its time."""

    against: str
    ratio: float | None = None
    over_us: float | None = None

    def is_met(self, ours_us: float, against_us: float) -> bool:
        if self.ratio is not None:
            return ours_us <= self.ratio * against_us
        return ours_us <= against_us + (self.over_us or 0.0)

    def __str__(self) -> str:
        return f"<= {self.ratio:g}" if self.ratio is not None else f"<= +{self.over_us:g} us"


@dataclass(frozen=True)
class Case:
    """One size of one row of the report. Contenders enqueue on torch's current stream and return
    what they wrote; `check` raises EngramError for a result that is wrong."""

    row: str
    num_tokens: int
    num_bytes: int  # each input read once, each output written once
    contenders: Mapping[str, Callable[[], Any]]
    check: Callable[[str, Any], None]
    targets: Sequence[Target] = ()
    depth: int = 1  # of reads that wait for each other: 2 where one says where the other is
    num_products: int = 0  # of BF16, each with its addition, on tensor cores
    # Bytes a second of what bounds it, where that is not the GPU's memory; shares are of the first.
    read_rates: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # that go with the times, for JSON
    note: str = ""  # the same, for readers
    # Called with the turn before each replay: puts other inputs of the same kind in place.
    refresh: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Ceilings:
    empty: Timing
    cold_reads: Mapping[int, Timing]  # by how many wait for each other
    read_rate: float  # bytes a second
    copy_rate: float  # bytes read and written a second
    product_rate: float  # of BF16, with their additions, a second


@dataclass(frozen=True)
class Result:
    case: Case
    timings: Mapping[str, Timing]
    ceilings: Ceilings = field(repr=False)
    copy_us: float | None = None  # of as many bytes, where GPU memory is the bound

    @property
    def rate(self) -> float:
        """Counted bytes a second."""
        return self.case.num_bytes / self.timings[OURS].median * 1e6

    @property
    def read_rate(self) -> float:
        """The measured ceiling."""
        return next(iter(self.case.read_rates.values()), self.ceilings.read_rate)

    @property
    def share(self) -> float:
        """Of the measured read rate."""
        return self.rate / self.read_rate

    @property
    def cold_reads_us(self) -> float:
        """A kernel that waits for as many reads and does nothing else."""
        return self.ceilings.cold_reads[self.case.depth].median

    @property
    def products_us(self) -> float | None:
        """What its products take cuBLAS in a large matrix; None where it has none."""
        return self.case.num_products / self.ceilings.product_rate * 1e6 or None

    def against_us(self, target: Target) -> float | None:
        """Time of what a target names; None where that was not measured."""
        if target.against == EMPTY:
            return self.ceilings.empty.median
        timing = self.timings.get(target.against)
        return timing.median if timing else None


class Bench:
    """The GPU, the buffers that empty its L2, and its ceilings."""

    def __init__(self, turns: int = _TURNS) -> None:
        self._torch = load_torch()
        self._turns = turns
        self._written = self._empty(_FLUSH_FLOATS)
        self._read = self._empty(_FLUSH_FLOATS).fill_(1.0)
        self._sum = self._empty(1).squeeze()
        self.ceilings = self._measure_ceilings()

    def run(self, cases: Iterator[Case]) -> Iterator[Result]:
        """Checks, then measures each case before the next one is made."""
        for case in cases:
            for name, contender in case.contenders.items():
                case.check(name, contender())
            contenders = dict(case.contenders)
            if not case.read_rates:
                contenders[_COPY] = self._copy_of(case.num_bytes)
            timings = self.time(contenders, case.refresh)
            copy = timings.pop(_COPY, None)
            yield Result(case, timings, self.ceilings, copy.median if copy else None)

    def time(
        self,
        contenders: Mapping[str, Callable[[], Any]],
        refresh: Callable[[int], None] | None = None,
    ) -> dict[str, Timing]:
        """Graph replays in turns, so that clocks and temperature are the same for all."""
        torch = self._torch
        graphs = {name: self._capture(contender) for name, contender in contenders.items()}
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
        for turn in range(_WARM_UP_TURNS + self._turns):
            for name, graph in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if refresh:
                    refresh(turn)
                self._empty_l2()
                start.record()
                graph.replay()
                end.record()
                if turn >= _WARM_UP_TURNS:
                    events[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: _timing([start.elapsed_time(end) * 1e3 for start, end in pairs])
            for name, pairs in events.items()
        }

    def _capture(self, contender: Callable[[], Any]) -> Any:
        torch = self._torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            contender()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            contender()
        return graph

    def _empty_l2(self) -> None:
        self._written.fill_(2.0)
        self._torch.sum(self._read, dim=0, out=self._sum)

    def _measure_ceilings(self) -> Ceilings:
        torch = self._torch
        source = self._empty(_CEILING_FLOATS).fill_(1.0)
        target = torch.empty_like(source)
        total = torch.empty_like(self._sum)
        value, place = source[:1], torch.zeros(1, dtype=torch.int64, device="cuda")
        written = torch.empty_like(value)
        shape = (_CEILING_WIDTH, _CEILING_WIDTH)
        left, right = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        product = torch.empty_like(left)
        timings = self.time(
            {
                EMPTY: lambda: torch.cuda._sleep(0),
                "1": lambda: torch.neg(value, out=written),
                "2": lambda: torch.gather(value, 0, place, out=written),
                "read": lambda: torch.sum(source, dim=0, out=total),
                "copy": lambda: torch.neg(source, out=target),  # a kernel: copy_ is a memcpy node
                "products": lambda: torch.mm(left, right, out=product),
            }
        )
        num_bytes = source.nbytes
        return Ceilings(
            empty=timings[EMPTY],
            cold_reads={1: timings["1"], 2: timings["2"]},
            read_rate=num_bytes / timings["read"].median * 1e6,
            copy_rate=2 * num_bytes / timings["copy"].median * 1e6,
            product_rate=_CEILING_WIDTH**3 / timings["products"].median * 1e6,
        )

    def _copy_of(self, num_bytes: int) -> Callable[[], Any]:
        """Half of the bytes are read, half written."""
        source = self._empty(max(1, num_bytes // 8)).fill_(1.0)
        target = self._torch.empty_like(source)
        return lambda: self._torch.neg(source, out=target)

    def _empty(self, num_floats: int) -> Any:
        return self._torch.empty(num_floats, dtype=self._torch.float32, device="cuda")


def expect(holds: bool, row: str, num_tokens: int, name: str) -> None:
    """Raises EngramError where a contender's result is not what it should be."""
    if not holds:
        raise EngramError(f"{row}, T = {num_tokens}: {name} gave another result")


def event_us(work: Callable[[], Any], turns: int = _EVENT_TURNS) -> float:
    """Microseconds of work on torch's current stream, the median, with whatever the L2 holds."""
    torch = load_torch()
    samples: list[float] = []
    for turn in range(1 + turns):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if turn > 0:
            samples.append(start.elapsed_time(end) * 1e3)
    return statistics.median(samples)


def machine() -> dict[str, str]:
    """GPU, driver and versions, for the head of a report."""
    torch = load_torch()
    from ..gpus import probe_driver

    return {
        "machine": torch.cuda.get_device_name(),
        "driver": probe_driver().version or "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
    }


def _timing(samples: Sequence[float]) -> Timing:
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), tenths[0], tenths[-1])
