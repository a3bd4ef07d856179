# SPDX-License-Identifier: Apache-2.0
"""The ulp histogram of a comparison as a PNG."""

from __future__ import annotations

from pathlib import Path

from trtllm_engram.plugins.errors import InputError

from ..figure import new_figure, write_png
from .report import Comparison
from .text import BIN_LABELS


def write_histogram(path: Path, comparisons: list[Comparison]) -> None:
    """One panel for each output that is compared in ulps."""
    shown = [comparison for comparison in comparisons if comparison.histogram]
    if not shown:
        raise InputError("png: expected outputs of floating point, found none")
    figure = new_figure("png", 7, 2.4 * len(shown))
    for axes, comparison in zip(
        figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True
    ):
        axes.bar(BIN_LABELS, comparison.histogram)
        axes.set_yscale("symlog")
        axes.set_ylabel("elements")
        axes.set_title(f"{comparison.name}: max {comparison.max_ulps:.3g} BF16 ulps", fontsize=10)
    write_png(path, figure)
