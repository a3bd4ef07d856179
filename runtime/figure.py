# SPDX-License-Identifier: Apache-2.0
"""Pictures by matplotlib, which is optional and needs no display."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from trtllm_engram.builder.files import write_aside
from trtllm_engram.plugins.errors import EngramError

_DPI = 120


def new_figure(option: str, width: float, height: float) -> Any:
    """A matplotlib Figure of so many inches; `option` begins the text of the error.

    Raises:
        EngramError: matplotlib is not installed.
    """
    try:
        figure_class = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise EngramError(
            f"{option}: expected the package matplotlib, found none: pip install matplotlib"
        ) from None
    return figure_class(figsize=(width, height), layout="constrained")


def write_png(path: Path, figure: Any) -> None:
    """The figure in a file, which appears when it is whole."""
    with write_aside(path) as scratch:
        figure.savefig(scratch, format="png", dpi=_DPI)
