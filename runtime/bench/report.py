# SPDX-License-Identifier: Apache-2.0
"""Results of GPU benchmarks as entries of a JSON file, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_engram.builder.files import read_regular, write_aside
from trtllm_engram.plugins.errors import InputError

from ..figure import new_figure, write_png
from .gpu import EMPTY, OURS, Result

Entry = dict[str, Any]

_WIDE = 2  # plots side by side


def entries(results: Sequence[Result], about: Mapping[str, str]) -> list[Entry]:
    """One entry for each contender that ours is compared with, rival null where there is none."""
    return [entry | dict(about) for result in results for entry in _entries(result)]


def write_entries(path: Path, new: Sequence[Entry]) -> None:
    """Replaces the rows of `new` in a file, and keeps those of other benchmarks."""
    measured = {entry["row"] for entry in new}
    kept = [entry for entry in read_entries(path) if entry["row"] not in measured]
    lines = ",\n".join(json.dumps(entry) for entry in [*kept, *new])
    with write_aside(path) as scratch:
        scratch.write_text(f"[\n{lines}\n]\n", encoding="ascii")


def write_document(path: Path, document: object) -> None:
    """As JSON, whole or not at all."""
    with write_aside(path) as scratch:
        scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="ascii")


def read_entries(path: Path) -> list[Entry]:
    """What write_entries has written; nothing where there is no file."""
    if not path.exists():
        return []
    try:
        old = json.loads(read_regular(path))
    except ValueError:
        old = None
    if not isinstance(old, list) or not all(isinstance(one, dict) and "row" in one for one in old):
        raise InputError(f"{path}: expected results of `bench`, found something else")
    return old


def plot(path: Path, measured: Sequence[Entry]) -> None:
    """Time over tokens of each contender, with the time that the read rate allows."""
    rows = list(dict.fromkeys(entry["row"] for entry in measured))
    height = -(-len(rows) // _WIDE)
    figure = new_figure("--plot", 6 * _WIDE, 4 * height)
    axes = figure.subplots(height, _WIDE, squeeze=False)
    for axis, row in zip(axes.flat, rows, strict=False):
        _plot_row(axis, row, [entry for entry in measured if entry["row"] == row])
    for axis in axes.flat[len(rows) :]:
        axis.remove()
    figure.suptitle(f"{measured[0]['machine']}, driver {measured[0]['driver']}: medians, cold L2")
    write_png(path, figure)


def _plot_row(axis: Any, row: str, measured: Sequence[Entry]) -> None:
    ours = list({entry["T"]: entry for entry in measured}.values())
    tokens = [entry["T"] for entry in ours]
    axis.plot(tokens, [entry["ours_us"] for entry in ours], "o-", label=OURS)
    low, high = ([entry[f"{share}_us"] for entry in ours] for share in ("p10", "p90"))
    axis.fill_between(tokens, low, high, alpha=0.2)
    for rival in dict.fromkeys(entry["rival"] for entry in measured if entry["rival"]):
        points = [(entry["T"], entry["rival_us"]) for entry in measured if entry["rival"] == rival]
        axis.plot(*zip(*points, strict=True), "-" if rival == EMPTY else "o-", label=rival)
    limits = [entry["bytes"] / entry["read_ceiling_gb_s"] / 1e3 for entry in ours]
    axis.plot(tokens, limits, "k:", label="counted bytes at the read rate")
    axis.set(xscale="log", yscale="log", title=row, xlabel="tokens", ylabel="us")
    axis.set_ylim(bottom=1)
    axis.legend(fontsize="small")


def _entries(result: Result) -> list[Entry]:
    ours = result.timings[OURS]
    entry: Entry = {
        "row": result.case.row,
        "T": result.case.num_tokens,
        "ours_us": _round(ours.median),
        "p10_us": _round(ours.p10),
        "p90_us": _round(ours.p90),
        "bytes": result.case.num_bytes,
        "read_ceiling_gb_s": round(result.read_rate / 1e9),
        "copy_ceiling_gb_s": round(result.ceilings.copy_rate / 1e9),
        "share": round(result.share, 3),
        "cold_reads_us": _round(result.cold_reads_us),
        "copy_us": result.copy_us and _round(result.copy_us),
        "products_us": result.products_us and _round(result.products_us),
        "rival": None,
        "rival_us": None,
        "ratio": None,
        "target": None,
        "met": None,
        **result.case.facts,
    }
    targets = {target.against: target for target in result.case.targets}
    against = {name: timing.median for name, timing in result.timings.items() if name != OURS}
    if EMPTY in targets:
        against[EMPTY] = result.ceilings.empty.median
    made = []
    for name, rival_us in against.items():
        target = targets.get(name)
        made.append(
            entry
            | {
                "rival": name,
                "rival_us": _round(rival_us),
                "ratio": round(ours.median / rival_us, 3),
                "target": str(target) if target else None,
                "met": target.is_met(ours.median, rival_us) if target else None,
            }
        )
    return made or [entry]


def _round(microseconds: float) -> float:
    return round(microseconds, 2)
