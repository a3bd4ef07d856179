# SPDX-License-Identifier: Apache-2.0
"""Comparisons in words."""

from __future__ import annotations

from .report import Comparison


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
    return (
        f"{comparison.name}: {comparison.count} values, {comparison.num_different} different, "
        f"max {comparison.max_abs:.3g} ({comparison.max_ulps:.3g} BF16 ulps), "
        f"mean {comparison.mean_abs:.3g}, bound: {bound(comparison)}: {verdict(comparison)}"
    )
