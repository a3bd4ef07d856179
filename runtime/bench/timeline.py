# SPDX-License-Identifier: Apache-2.0
"""When what ran on which stream: spans between CUDA events, and a picture of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..figure import new_figure, write_png
from .gpu import load_torch

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


@dataclass(frozen=True)
class Span:
    stream: str
    kind: str  # spans of a kind have one colour
    start_us: float  # since the recorder was made
    end_us: float


@dataclass
class Recorder:
    """Runs work on torch's current stream between two events."""

    _first: Any = field(init=False)
    _marks: list[tuple[str, str, Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = _record()

    def run(self, stream: str, kind: str, work: Callable[[], Any]) -> None:
        start = _record()
        work()
        self._marks.append((stream, kind, start, _record()))

    def spans(self) -> list[Span]:
        """Of what has run, once it is done."""
        load_torch().cuda.synchronize()
        return [
            Span(stream, kind, *(self._first.elapsed_time(event) * 1e3 for event in events))
            for stream, kind, *events in self._marks
        ]


def plot(path: Path, timelines: Mapping[str, Sequence[Span]], title: str) -> None:
    """One below the other on one axis of time, a line for each stream."""
    figure = new_figure("--plot", 11, 1.0 + 1.5 * len(timelines))
    axes = figure.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    kinds = list(dict.fromkeys(span.kind for spans in timelines.values() for span in spans))
    for axis, (name, spans) in zip(axes, timelines.items(), strict=True):
        streams = list(dict.fromkeys(span.stream for span in spans))
        for kind in kinds:
            for line, stream in enumerate(streams):
                bars = [
                    (span.start_us, span.end_us - span.start_us)
                    for span in spans
                    if (span.kind, span.stream) == (kind, stream)
                ]
                color = _COLORS[kinds.index(kind) % len(_COLORS)]
                axis.broken_barh(bars, (line - 0.4, 0.8), color=color, edgecolor="white")
        axis.set_yticks(range(len(streams)), streams)
        axis.set_ylim(len(streams) - 0.5, -0.5)
        axis.set_title(f"{name}: {max(span.end_us for span in spans):.0f} us", loc="left")
    axes[-1].set_xlabel("us")
    patches = [_patch(_COLORS[index % len(_COLORS)], kind) for index, kind in enumerate(kinds)]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(kinds))
    figure.suptitle(title, x=0.01, ha="left")
    write_png(path, figure)


def _patch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


def _record() -> Any:
    event = load_torch().cuda.Event(enable_timing=True)
    event.record()
    return event
