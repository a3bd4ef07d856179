# SPDX-License-Identifier: Apache-2.0
"""Two sets of outputs held against each other, output by output."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.model import packed_names, rows_name
from trtllm_engram.plugins.errors import InputError

from .reference import MAGNITUDE

Host = npt.NDArray[Any]

_OF_BYTES = ("float8_e4m3fn", "int32")
_FLOATS = ("bfloat16", "float16", "float32")
_BF16_FRACTION_BITS = 7
# Upper ends of the histogram's bins but the last; 0 is "the same value".
ULP_BINS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
# Sums in another order may round the value to the BF16 number next to it. A gate just below 1 takes
# that ulp of the value into the binade below, where it is two of the output's. Both outputs are
# rounded: by half an ulp each, or one and a half in all where they lie on both sides of a power of
# two. That is less than 3.5, and so at most 3 of the ulps that BF16 outputs lie apart by. Keys that
# round otherwise move the gate by much less than the half that is left.
# The bound of FP16 and FP32 streams is in BF16 ulps too: the value is BF16.
HIDDEN_LIMIT_BF16_ULPS = 3.0


@dataclass(frozen=True)
class Comparison:
    """One output of an engine against the reference. `limit` None: every bit must be the same."""

    name: str
    count: int  # of elements
    num_different: int
    max_abs: float
    mean_abs: float
    max_ulps: float  # BF16 ulps; 0 for integers
    mean_ulps: float
    histogram: tuple[int, ...]  # elements in each of ULP_BINS, then above; () for integers
    limit: float | None
    problem: str = ""  # why there was nothing to compare

    @property
    def passed(self) -> bool:
        if self.problem:
            return False
        return self.num_different == 0 if self.limit is None else self.max_ulps <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def compare(
    found: Mapping[str, Host],
    expected: Mapping[str, Host],
    limit: float = HIDDEN_LIMIT_BF16_ULPS,
) -> list[Comparison]:
    """Every output that was found, and every hidden_out that is expected, which fails if missing.

    `limit` bounds hidden_out, all else must be the same bits. Row ids and rows may be missing, as
    engines give them out for checks alone: require_rows is for callers who want proof. Where bytes
    are expected, FP8 and INT32 words are taken for theirs: TensorRT has no type for them.
    """
    if not found:
        raise InputError("compare: expected outputs, found none")
    results = []
    for name, array in found.items():
        if name.endswith(MAGNITUDE):
            continue
        bound = limit if _is_hidden(name) else None
        if name not in expected:
            results.append(_broken(name, array, bound, "the reference has no such output"))
        else:
            magnitude = expected.get(name + MAGNITUDE)
            results.append(_compare_one(name, array, expected[name], bound, magnitude))
    for name, array in expected.items():
        if _is_hidden(name) and name not in found:
            results.append(_broken(name, array, limit, "missing among the outputs"))
    return results


def _is_hidden(name: str) -> bool:
    return re.fullmatch(r"layers\.\d+\.hidden_out", name) is not None


def layers_without_rows(outputs: Iterable[str]) -> list[int]:
    """The layers that give out streams, but no rows: neither as they are nor as values and scales.
    Of those no comparison can say that every byte of the table that was read is right."""
    names = set(outputs)
    layer_ids = sorted(int(name.split(".")[1]) for name in names if _is_hidden(name))
    return [layer_id for layer_id in layer_ids if not _has_rows(names, layer_id)]


def _has_rows(names: set[str], layer_id: int) -> bool:
    values, *scales = packed_names(layer_id)
    return rows_name(layer_id) in names or (values in names and not names.isdisjoint(scales))


def require_rows(outputs: Collection[str], option: str) -> None:
    """Refuses outputs that prove nothing of some layer's rows. `option`: what accepts them."""
    if missing := layers_without_rows(outputs):
        raise InputError(
            f"outputs: expected rows of every layer (build --check-outputs), found none of layer "
            f"{', '.join(map(str, missing))}, whose table may hold wrong bytes within the bound of "
            f"hidden states; {option} compares those alone"
        )


def merge(parts: list[list[Comparison]]) -> list[Comparison]:
    """The comparisons of several feeds as one, by output."""
    by_name: dict[str, list[Comparison]] = {}
    for comparison in (one for part in parts for one in part):
        by_name.setdefault(comparison.name, []).append(comparison)
    return [_merge_one(group) for group in by_name.values()]


def _merge_one(group: list[Comparison]) -> Comparison:
    count = sum(one.count for one in group)

    def mean(values: list[float]) -> float:
        return sum(v * one.count for v, one in zip(values, group, strict=True)) / max(count, 1)

    histograms = [one.histogram for one in group if one.histogram]
    return Comparison(
        name=group[0].name,
        count=count,
        num_different=sum(one.num_different for one in group),
        max_abs=max(one.max_abs for one in group),
        mean_abs=mean([one.mean_abs for one in group]),
        max_ulps=max(one.max_ulps for one in group),
        mean_ulps=mean([one.mean_ulps for one in group]),
        histogram=tuple(map(sum, zip(*histograms, strict=True))),
        limit=group[0].limit,
        problem=next((one.problem for one in group if one.problem), ""),
    )


def _compare_one(
    name: str, found: Host, expected: Host, limit: float | None, magnitude: Host | None
) -> Comparison:
    if expected.dtype == np.uint8 and found.dtype.name in _OF_BYTES and found.ndim:
        found = np.ascontiguousarray(found).view(np.uint8)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return _broken(
            name,
            found,
            limit,
            f"expected {expected.dtype} {list(expected.shape)}, "
            f"found {found.dtype} {list(found.shape)}",
        )
    bits = np.dtype(f"u{found.dtype.itemsize}")
    different = np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(expected).view(bits)
    wide_found, wide_expected = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(different, np.abs(wide_found - wide_expected), 0.0)
    error = np.where(np.isnan(error), np.inf, error)  # a NaN on one side, or different NaNs
    ulps = np.zeros(0)
    histogram: tuple[int, ...] = ()
    if found.dtype.name in _FLOATS:
        size = np.abs(wide_expected) if magnitude is None else magnitude.astype(np.float64)
        ulps = error / _bf16_ulp(size)
        histogram = _histogram(ulps)
    return Comparison(
        name=name,
        count=int(found.size),
        num_different=int(np.count_nonzero(different)),
        max_abs=float(error.max(initial=0.0)),
        mean_abs=float(error.mean()) if error.size else 0.0,
        max_ulps=float(ulps.max(initial=0.0)),
        mean_ulps=float(ulps.mean()) if ulps.size else 0.0,
        histogram=histogram,
        limit=limit,
    )


def _bf16_ulp(magnitude: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A BF16 ulp of each number; of the smallest normal one for what is smaller."""
    _, exponent = np.frexp(np.maximum(magnitude, 2.0**-126))
    ulp: npt.NDArray[np.float64] = np.ldexp(1.0, exponent - 1 - _BF16_FRACTION_BITS)
    return ulp


def _histogram(ulps: npt.NDArray[np.float64]) -> tuple[int, ...]:
    places = np.searchsorted(np.array(ULP_BINS), ulps.ravel(), side="left")
    return tuple(int(count) for count in np.bincount(places, minlength=len(ULP_BINS) + 1))


def _broken(name: str, array: Host, limit: float | None, problem: str) -> Comparison:
    return Comparison(name, int(array.size), 0, 0.0, 0.0, 0.0, 0.0, (), limit, problem)
