# SPDX-License-Identifier: Apache-2.0
"""Host lookups on a side stream beside GEMMs, as EngramPrefetch starts them.

GEMMs with lookups beside them for most of their time are held against the same GEMMs alone, for
each way to read host memory with few SMs: our projection, whose blocks stay on their SMs to the end
(persistent), and the generic one, whose blocks come in waves, and cuBLAS as it chooses. Then two
Engram layers amid GEMMs, their lookups started before the first GEMM and awaited by their layers,
against lookups in line; of these there is a timeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_engram.builder import EngramLayout
from trtllm_engram.builder.made_up import config_of_size
from trtllm_engram.builder.nodes import dequantize
from trtllm_engram.builder.weight_layout import ROW_MAJOR, lay_fastest

from .. import _native, ops
from ..row import packed_row_bytes
from .gpu import OURS, Case, Target, event_us, expect, load_torch
from .layer import random_weights, torch_bf16
from .lookup import COLUMNS, HEAD_DIM
from .lookup_host import AUTO, HostTable, Path, bound_table, look_up, measure_rates
from .made_up_rows import uniform_ids
from .timeline import Recorder, Span

ALONE, IN_LINE = "GEMM alone", "in line"
TWO_LAYERS = "two layers amid GEMMs"

_PATHS: Mapping[str, Path] = {"as chosen": AUTO} | {
    f"{path.name.lower()}, {blocks} SMs": (path, blocks)
    for path in (_native.LookupPath.SORTED, _native.LookupPath.GATHERED)
    for blocks in (1, 3)
}
_GEMM_RATIO = 1.03
_GEMM_TOKENS = 1024
_HC_MULT, _HIDDEN, _IN = 4, 5120, COLUMNS * HEAD_DIM
_COVERED = 0.7  # of the GEMMs' time, by lookups: slower beside a GEMM, they must not outlast it
_LEAST_GEMMS = 4

Work = Callable[[], Any]
Run = Callable[[str, str, Work], None]  # of a stream, a kind of work, and the work


def cases(
    tokens: Sequence[int], table_gb: float, timelines: dict[str, list[Span]]
) -> Iterator[Case]:
    """timelines: gets those of the last number of tokens, by contender."""
    torch = load_torch()
    layout = EngramLayout(config_of_size(int(table_gb * 1e9), layers=(1,)))
    gemms = _Gemms()
    with bound_table(table_gb):
        rates = measure_rates(HostTable(with_rivals=False).values)
        for count in tokens:
            rng = np.random.default_rng(count)
            ids = [torch.from_numpy(uniform_ids(layout, count, rng)).cuda() for _ in range(2)]
            for gemm, work in gemms.by_name.items():
                for path, places in _PATHS.items():
                    yield _beside(f"{gemm} GEMM, lookups {path}", work, ids[0], places, rates)
            layers = _TwoLayers(ids, gemms)
            yield layers.case(rates)
            timelines.update(layers.timelines())


class _Gemms:
    """[1024, 6144] x [25600, 6144] by kernels of several kinds, and the projection of rows."""

    def __init__(self) -> None:
        torch = load_torch()
        weights = random_weights(np.random.default_rng(0), _HC_MULT, _HIDDEN, _IN)
        plain, scale = (
            torch.from_numpy(one).cuda() for one in (weights.wkv_weight, weights.wkv_scale)
        )
        laid, layout = lay_fastest(weights.wkv_weight, torch.cuda.get_device_capability())
        self._weight, self._scale, self._layout = torch.from_numpy(laid).cuda(), scale, layout
        factors = torch_bf16(dequantize(weights.wkv_weight, weights.wkv_scale)).T
        x = torch.randn(_GEMM_TOKENS, _IN, device="cuda").bfloat16()
        out = torch.empty(_GEMM_TOKENS, factors.shape[1], device="cuda", dtype=torch.bfloat16)
        self.by_name: dict[str, Work] = {
            "multi-wave": lambda: ops.project(x, plain, scale, kernel="generic", out=out),
            "cuBLAS": lambda: torch.mm(x, factors, out=out),
        }
        if layout != ROW_MAJOR:
            self.by_name["persistent"] = lambda: self.project(x, out)

    def project(self, x: Any, out: Any) -> Any:
        options = {"weight_layout": self._layout, "out": out}
        return ops.project(x, self._weight, self._scale, **options)


def _beside(row: str, gemm: Work, ids: Any, path: Path, rates: Mapping[str, float]) -> Case:
    torch = load_torch()
    num_tokens = ids.shape[0]
    rows, expected = _rows(num_tokens), _rows(num_tokens)
    lookup = look_up(ids, rows, path)
    num_gemms, num_lookups = counts(event_us(gemm), event_us(lookup))
    side = torch.cuda.Stream()

    def gemms() -> None:
        for _ in range(num_gemms):
            gemm()

    def both() -> Any:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(num_lookups):
                lookup()
        gemms()
        main.wait_stream(side)
        return rows

    look_up(ids, expected, AUTO)()

    def check(name: str, found: Any) -> None:
        same = found is None or torch.equal(found.view(torch.int16), expected.view(torch.int16))
        expect(same, row, num_tokens, name)

    num_bytes = num_lookups * ids.numel() * packed_row_bytes(HEAD_DIM)
    contenders = {OURS: both, ALONE: gemms}
    target = Target(ALONE, ratio=_GEMM_RATIO)
    sizes = (row, num_tokens, num_bytes)
    return Case(*sizes, contenders, check, [target], read_rates=rates)


def counts(gemm_us: float, lookup_us: float) -> tuple[int, int]:
    """How many GEMMs, and how many lookups that take most of their time."""
    total_us = max(lookup_us / _COVERED, _LEAST_GEMMS * gemm_us)
    num_gemms = math.ceil(total_us / gemm_us)
    return num_gemms, max(1, int(_COVERED * num_gemms * gemm_us / lookup_us))


@dataclass
class _Layer:
    lookup: Work
    project: Work
    ready: Any  # the event of its rows


class _TwoLayers:
    """GEMMs, a layer, as many GEMMs, another layer; each GEMM group as long as a lookup."""

    def __init__(self, ids: Sequence[Any], gemms: _Gemms) -> None:
        torch = load_torch()
        self._num_tokens = ids[0].shape[0]
        self._num_bytes = sum(one.numel() for one in ids) * packed_row_bytes(HEAD_DIM)
        self._side = torch.cuda.Stream()
        self._gemm = gemms.by_name["cuBLAS"]
        width = (_HC_MULT + 1) * _HIDDEN
        self._out = torch.empty(self._num_tokens, width, device="cuda", dtype=torch.bfloat16)
        self._layers = [self._layer(one, gemms) for one in ids]
        lookup_us, gemm_us = event_us(self._layers[0].lookup), event_us(self._gemm)
        self._num_gemms = math.ceil(lookup_us / gemm_us)

    def case(self, rates: Mapping[str, float]) -> Case:
        torch = load_torch()
        expected = self._in_line(_only_run).clone()

        def check(name: str, found: Any) -> None:
            same = torch.equal(found.view(torch.int16), expected.view(torch.int16))
            expect(same, TWO_LAYERS, self._num_tokens, name)
            found.zero_()

        contenders = {
            OURS: lambda: self._prefetched(_only_run),
            IN_LINE: lambda: self._in_line(_only_run),
        }
        target = Target(IN_LINE, ratio=1.0)
        sizes = (TWO_LAYERS, self._num_tokens, self._num_bytes)
        return Case(*sizes, contenders, check, [target], read_rates=rates)

    def timelines(self) -> dict[str, list[Span]]:
        found = {}
        for name, steps in (("prefetched", self._prefetched), (IN_LINE, self._in_line)):
            recorder = Recorder()
            steps(recorder.run)
            found[name] = recorder.spans()
        return found

    def _layer(self, ids: Any, gemms: _Gemms) -> _Layer:
        rows = _rows(self._num_tokens)
        event = load_torch().cuda.Event()
        return _Layer(look_up(ids, rows, AUTO), lambda: gemms.project(rows, self._out), event)

    def _prefetched(self, run: Run) -> Any:
        """One side stream, layers in the order of need."""
        torch = load_torch()
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            for layer in self._layers:
                run("side stream", "lookup", layer.lookup)
                layer.ready.record()
        for layer in self._layers:
            self._gemms(run)
            main.wait_event(layer.ready)
            run("main stream", "projection", layer.project)
        return self._out

    def _in_line(self, run: Run) -> Any:
        for layer in self._layers:
            self._gemms(run)
            run("main stream", "lookup", layer.lookup)
            run("main stream", "projection", layer.project)
        return self._out

    def _gemms(self, run: Run) -> None:
        for _ in range(self._num_gemms):
            run("main stream", "GEMM", self._gemm)


def _only_run(_stream: str, _kind: str, work: Work) -> None:
    work()


def _rows(num_tokens: int) -> Any:
    torch = load_torch()
    return torch.zeros(num_tokens, _IN, device="cuda", dtype=torch.bfloat16)
