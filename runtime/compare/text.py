# SPDX-License-Identifier: Apache-2.0
"""Comparisons in words."""

from __future__ import annotations

from collections.abc import Sequence

from .report import ULP_BINS, Comparison, layers_without_rows

NO_ROWS = "rows: not compared (build --check-outputs)"
BIN_LABELS = ("same", *(f"<= {end:g}" for end in ULP_BINS[1:]), f"> {ULP_BINS[-1]:g}")


def bound(comparison: Comparison) -> str:
    if comparison.limit is None:
        return "same bits"
    return f"{comparison.limit:g} BF16 ulps"


def verdict(comparison: Comparison) -> str:
    if comparison.problem:
        return f"BROKEN: {comparison.problem}"
    return "ok" if comparison.passed else "BROKEN"


def line(comparison: Comparison) -> str:
    """One output in one line."""
    shown = histogram(comparison)
    return (
        f"{comparison.name}: {comparison.count} values, {comparison.num_different} different, "
        f"max {comparison.max_abs:.3g} ({comparison.max_ulps:.3g} BF16 ulps), "
        f"mean {comparison.mean_abs:.3g} ({comparison.mean_ulps:.3g} BF16 ulps), "
        f"bound: {bound(comparison)}: {verdict(comparison)}" + (f" ({shown})" if shown else "")
    )


def histogram(comparison: Comparison) -> str:
    """How many values are so many ulps off, without empty bins; "" for integers."""
    if not comparison.histogram:
        return ""
    counts = zip(BIN_LABELS, comparison.histogram, strict=True)
    return ", ".join(f"{label}: {count}" for label, count in counts if count)


def rows_note(comparisons: Sequence[Comparison]) -> str:
    """What a success leaves open."""
    return NO_ROWS if layers_without_rows(one.name for one in comparisons) else ""
