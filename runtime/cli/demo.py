# SPDX-License-Identifier: Apache-2.0
"""`demo`: prints what runtime/demo.py did, on one screen of 80 by 24."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trtllm_engram.builder.files import new_folder

from ..demo import Check, Report, Timing, run_demo
from ..devices import CPU
from . import console

EXAMPLE = "trtllm-engram demo --keep engram-demo"

_NAMES = {CPU: "CPU", "cuda:0": "GPU"}
_EXAMPLES = "tensorrt_network.py, polygraphy/, trtllm_build/, triton/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a small model in V4.1's shape (0.5 GB), prepare it, run a text in ten languages\n"
        "through it on every kind of device here, and check each step against numpy. Exit code 1\n"
        "where a check fails."
    )
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, help="make the files here, a new folder, and leave them"
    )
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    if args.keep is None:
        with tempfile.TemporaryDirectory(prefix="trtllm-engram-demo-") as folder:
            report = _run(args, Path(folder))
    else:
        with new_folder(args.keep):  # interrupted, it leaves none: the next try takes it again
            report = _run(args, args.keep)
    seconds = time.perf_counter() - started
    if args.json:
        console.print_json(_as_json(report, seconds))
    else:
        print_report(report, seconds, args.keep, console.stdout())
    return 0 if report.passed else 1


def _run(args: argparse.Namespace, folder: Path) -> Report:
    with console.status(args) as note:
        return run_demo(folder, note)


def print_report(report: Report, seconds: float, kept: Path | None, out: Console) -> None:
    """The screen. `seconds` is the time of it all."""
    config = report.config
    layers = " and ".join(map(str, config.layer_ids))
    made = console.human_seconds(report.synthesize_seconds)
    prepared = console.human_seconds(report.prepare_seconds)
    out.print(Text("Engram demo: a small model in DeepSeek V4.1's shape", style="bold"))
    out.print()
    console.print_pairs(
        [
            (
                "model",
                f"layers {layers}, hidden {config.hidden_size} x {config.hc_mult}, "
                f"{config.num_columns} rows of {config.head_dim} values a token",
            ),
            (
                "weights",
                f"{console.human_bytes(report.checkpoint_bytes)} "
                f"written in {made}, prepared with checksums in {prepared}",
            ),
            (
                "text",
                f"{report.num_tokens} tokens in ten languages, {report.num_rows} rows read, "
                f"{report.num_unique_rows} unique",
            ),
        ],
        out,
    )
    out.print()
    _print_checks(report.checks, out)
    out.print()
    cores = len(os.sched_getaffinity(0))
    ran = [f"CPU ({cores} cores)" if device == CPU else "GPU" for device in _devices(report.checks)]
    pairs: list[tuple[str, object]] = [("ran", ", ".join(ran))]
    for place, (part, why) in enumerate(report.not_run.items()):
        pairs.append(("" if place else "not run", f"{part}: {why}"))
    if kept is not None:
        pairs.append(("kept", f"{kept}; try: trtllm-engram inspect {kept / 'store'}"))
    pairs.append(("see", f"examples/: {_EXAMPLES}"))
    console.print_pairs(pairs, out)
    out.print()
    out.print(_verdict(report, seconds))


def _verdict(report: Report, seconds: float) -> Text:
    total = console.human_seconds(seconds)
    failed = [check.step.strip() for check in report.checks if not check.passed]
    if failed:
        return Text(f"FAILED: {', '.join(failed)} ({total})", style="bold red")
    return Text(f"All {len(report.checks)} checks passed in {total}.", style="bold green")


def _print_checks(checks: list[Check], out: Console) -> None:
    devices = _devices(checks)
    headings = ["step", *(f">{_NAMES[device]}" for device in devices)]
    headings.append(">rate" if len(devices) == 1 else f">{_NAMES[devices[-1]]} rate")
    rows = []
    for check in checks:
        seconds = [
            console.human_seconds(check.timings[device].seconds) if device in check.timings else ""
            for device in devices
        ]
        rate = _rate(check.timings[devices[-1]]) if devices[-1] in check.timings else ""
        rows.append([check.step, *seconds, rate, check.reference, _error(check)])
    headings += ["checked with", "largest error"]
    console.print_table(headings, rows, out)


def _devices(checks: list[Check]) -> list[str]:
    """The devices that ran, the fastest kind last."""
    return [device for device in _NAMES if any(device in check.timings for check in checks)]


def _rate(timing: Timing) -> str:
    rate = timing.work / timing.seconds
    if timing.unit == "B":
        return f"{console.human_bytes(rate)}/s"
    separator = "" if timing.unit == "FLOP" else " "
    return f"{console.human_count(rate)}{separator}{timing.unit}/s"


def _error(check: Check) -> Text:
    style = "green" if check.passed else "bold red"
    if check.limit is None:
        return Text("none" if check.passed else f"{check.error:.0f} values", style=style)
    return Text(f"{check.error:.2f} ulp", style=style)


def _as_json(report: Report, seconds: float) -> object:
    config = report.config.to_dict()
    document = asdict(report) | {"config": config, "seconds": seconds, "passed": report.passed}
    return console.as_json_types(document)
