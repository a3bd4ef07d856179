# SPDX-License-Identifier: Apache-2.0
"""The ulp histogram of a comparison as a PNG."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from trtllm_engram.builder.files import write_aside
from trtllm_engram.plugins.errors import EngramError, InputError

from .report import ULP_BINS, Comparison


def write_histogram(path: Path, comparisons: list[Comparison]) -> None:
    """One panel for each output that is compared in ulps."""
    shown = [comparison for comparison in comparisons if comparison.histogram]
    if not shown:
        raise InputError("png: expected outputs of floating point, found none")
    figure_class = _figure_class()
    figure = figure_class(figsize=(7, 2.4 * len(shown)), layout="constrained")
    labels = ["same", *(f"<= {end:g}" for end in ULP_BINS[1:]), f"> {ULP_BINS[-1]:g}"]
    for axes, comparison in zip(
        figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True
    ):
        axes.bar(labels, comparison.histogram)
        axes.set_yscale("symlog")
        axes.set_ylabel("elements")
        axes.set_title(f"{comparison.name}: max {comparison.max_ulps:.3g} BF16 ulps", fontsize=10)
    with write_aside(path) as scratch:
        figure.savefig(scratch, format="png", dpi=120)


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise EngramError(
            "png: expected the package matplotlib, found none: pip install 'trtllm-engram[plot]'"
        ) from None
