# SPDX-License-Identifier: Apache-2.0
"""`bench`: measures this machine; each rate stands beside its ceiling, measured in the same run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trtllm_engram.builder.files import writing
from trtllm_engram.plugins.errors import InputError

from ..bench import (
    GPU_BENCHES,
    gpu,
    lookup_disk,
    ops,
    prefetch,
    report,
    tables,
    timeline,
)
from ..bench.calibration import calibration
from ..bench.files import bench_files
from ..bench.measure import Measurement, machine_name
from ..bench.rivals import Rivals
from ..figure import new_figure
from . import bench_lookup, bench_node, bench_serving, console, shared_options

EXAMPLE = "trtllm-engram bench lookup --tokens 1,8192 --plot lookup.png"

_GB = 10**9
_OPS_TABLE_GB = 2.0
_GPU_TABLE_GB = 13.0
_HOST_TABLE_GB = 71.0  # 64 GiB of values
_FILE_GB = 2.0
_RANKS = 4
_STYLES = {True: "green", False: "yellow", None: ""}  # of a target met, missed, or none
# The options of each kind of benchmark that not all have.
_OPTIONS = {
    "ops": ("file_gb", "dir"),
    "tables": ("file_gb", "dir", "ranks", "memory"),
    "node": ("ranks", "memory", "tokens", "output", *bench_node.OPTIONS),
    "serving": bench_serving.OPTIONS,
    "gpu": ("tokens", "rivals", "plot", "output"),
    "lookup": ("tokens", "rivals", "plot", "output", *bench_lookup.OPTIONS),
    "prefetch": ("tokens", "plot", "output"),
    "disk": ("tokens", "place", "file_gb", "dir"),
}
_CALLED = {
    "gpu": ", ".join([name for name in GPU_BENCHES if name != "lookup"] + ["gpu"]),
    "disk": "lookup --place disk",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure this machine. ops: the CPU lookup against random reads by the same cores, and\n"
        "against these with the writes of its result; the hash; and prepare's passes over files\n"
        "against cat and cp with a cold page cache.\n"
        "tables: shared tables' loading against dd from warm page cache to memory, the memory of\n"
        "all ranks against the table's, and how fast a rank attaches to a keeper.\n"
        "node: all ranks of a node on one table: their lookups alone and at once, and one killed.\n"
        "serving: a mixed load on a running Triton server, every answer checked, and its memory.\n"
        f"{', '.join(GPU_BENCHES)}: one op on the GPU, or the layer of\n"
        "three, CUDA-graph replays with a cold L2, against the time of an empty kernel and the\n"
        "measured read rate; gpu: all of these.\n"
        "prefetch: lookups of a table in host memory beside GEMMs; --plot draws its timeline."
    )
    names = ["ops", "tables", "node", "serving", *GPU_BENCHES, "gpu", "prefetch"]
    parser.add_argument(
        "name", metavar="NAME", choices=names, help=f"which benchmark: {', '.join(names)}"
    )
    parser.add_argument(
        "--table-gb",
        metavar="GB",
        type=shared_options.number(0.001, 10_000),
        help=f"table in memory (default: {_OPS_TABLE_GB:g}, on the GPU {_GPU_TABLE_GB:g}, "
        f"read by it from host memory {_HOST_TABLE_GB:g})",
    )
    parser.add_argument(
        "--file-gb",
        metavar="GB",
        type=shared_options.number(0.001, 10_000),
        help=f"ops, tables: files to read (default: {_FILE_GB:g})",
    )
    parser.add_argument(
        "--dir",
        metavar="DIR",
        type=Path,
        help="ops, tables: on the disk to measure (default: the temporary folder)",
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=shared_options.integer(1, 1024),
        help=f"tables, node: processes that share (default: {_RANKS})",
    )
    parser.add_argument(
        "--memory", metavar="KIND", help="tables, node: memfd (default), shm, cumem or private"
    )
    parser.add_argument(
        "--tokens",
        metavar="T,...",
        type=_token_counts,
        help=f"GPU: token counts (default: {','.join(map(str, gpu.TOKENS))})",
    )
    parser.add_argument(
        "--rivals",
        metavar="DIR",
        type=Path,
        help="GPU: kernels of vLLM and SGLang, measured in turns with ours",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="GPU: write a picture (PNG)")
    parser.add_argument(
        "--output",
        metavar="FILE.json",
        type=Path,
        help="GPU: write the results there, where rows of other benchmarks stay",
    )
    bench_lookup.add_arguments(parser)
    bench_node.add_arguments(parser)
    bench_serving.add_arguments(parser)
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    kind = args.name if args.name in _OPTIONS else "gpu"
    if kind == "lookup" and args.place == "disk":
        kind = "disk"
    for option in {option for options in _OPTIONS.values() for option in options}:
        if getattr(args, option) is not None and option not in _OPTIONS[kind]:
            having = [_CALLED.get(name, name) for name in _OPTIONS if option in _OPTIONS[name]]
            name, names = option.replace("_", "-"), ", ".join(having)
            found = _CALLED["disk"] if kind == "disk" else args.name
            raise InputError(f"--{name}: expected with the benchmarks {names}, found {found}")
    if args.table_gb is None:
        args.table_gb = _default_table_gb(args, kind)
    if args.file_gb is None:
        args.file_gb = _FILE_GB
    if args.ranks is None:
        args.ranks = _RANKS
    bench_lookup.check(args)
    runners = {
        "ops": _run_ops,
        "tables": _run_tables,
        "node": bench_node.run,
        "serving": bench_serving.run,
        "gpu": _run_gpu,
        "lookup": _run_gpu,
        "prefetch": _run_gpu,
        "disk": _run_disk,
    }
    return runners[kind](args)


def _run_gpu(args: argparse.Namespace) -> int:
    tokens = args.tokens or list(gpu.TOKENS)
    rivals = Rivals(args.rivals) if args.rivals else None
    if args.plot:
        new_figure("--plot", 1, 1)  # is matplotlib there?
    if args.output:
        report.read_entries(args.output)  # refused before anything is measured
    bench = gpu.Bench()
    about = gpu.machine() | {"command": shlex.join(["trtllm-engram", *sys.argv[1:]])}
    results = []
    timelines: dict[str, list[timeline.Span]] = {}
    with console.status(args) as note:
        for name in GPU_BENCHES if args.name == "gpu" else [args.name]:
            for result in bench.run(_cases(name, args, tokens, rivals, timelines)):
                note(f"{result.case.row}, T = {result.case.num_tokens}")
                results.append(result)
    entries = report.entries(results, about)
    if args.json:
        console.print_json({"results": entries})
    else:
        _print_gpu(results, bench.ceilings, about)
    if args.output:
        report.write_entries(args.output, entries)
    if args.calibrate:
        report.write_document(args.calibrate, calibration(results, about))
    if args.plot and timelines:
        title = f"{prefetch.TWO_LAYERS}, T = {tokens[-1]}, {about['machine']}"
        timeline.plot(args.plot, timelines, title)
    elif args.plot:
        report.plot(args.plot, entries)
    return 0


def _cases(
    name: str,
    args: argparse.Namespace,
    tokens: list[int],
    rivals: Rivals | None,
    timelines: dict[str, list[timeline.Span]],
) -> Iterator[gpu.Case]:
    if name == "prefetch":
        return prefetch.cases(tokens, args.table_gb, timelines)
    if name == "lookup":
        return bench_lookup.cases(args, tokens, rivals)
    module = importlib.import_module(f"..bench.{name}", __package__)
    cases: Iterator[gpu.Case] = module.cases(tokens, args.table_gb, rivals)
    return cases


def _print_gpu(results: list[gpu.Result], ceilings: gpu.Ceilings, about: dict[str, str]) -> None:
    out = console.stdout()
    pairs: list[tuple[str, object]] = [(name, about[name]) for name in ("machine", "driver")]
    pairs += [
        ("versions", f"torch {about['torch']}, CUDA {about['cuda']}"),
        (gpu.EMPTY, f"{ceilings.empty.median:.1f} us"),
        ("one cold read", f"{ceilings.cold_reads[1].median:.1f} us, with its node and one write"),
        (
            "and another",
            f"{ceilings.cold_reads[2].median:.1f} us, the second awaits the first",
        ),
        ("read rate", f"{console.human_bytes(ceilings.read_rate)}/s (share is of this)"),
        ("copy rate", f"{console.human_bytes(ceilings.copy_rate)}/s, read and written"),
        ("copy", "us that a copy takes which reads and writes as many bytes in all"),
        ("product rate", f"{2 * ceilings.product_rate / 1e12:.0f} TFLOP/s, cuBLAS in BF16"),
        ("products", "us that as many products take at that rate"),
    ]
    rates = {name: rate for one in results for name, rate in one.case.read_rates.items()}
    shares = (f"{console.human_bytes(rate)}/s from host memory" for rate in rates.values())
    pairs += zip(rates, shares, strict=True)
    console.print_pairs(pairs, out)
    for row, group in groupby(results, key=lambda result: result.case.row):
        of_row = list(group)
        rivals = [name for name in of_row[0].timings if name != gpu.OURS]
        headings = [row, ">us", ">p10", ">p90", ">rate", ">share"]
        headings += [f">{name}" for name in _least(of_row[0])]
        for name in rivals:
            headings += [f">{name}", ">ratio"]
        out.print()
        lines = [_gpu_line(result, rivals) for result in of_row]
        console.print_table((*headings, "target"), lines, out)


def _least(result: gpu.Result) -> dict[str, float]:
    """What a size takes at the least, in microseconds."""
    least = {"copy": result.copy_us, "products": result.products_us}
    return {name: us for name, us in least.items() if us is not None}


def _gpu_line(result: gpu.Result, rivals: list[str]) -> list[object]:
    ours = result.timings[gpu.OURS]
    line: list[object] = [f"T = {result.case.num_tokens}"]
    line += [f"{time:.1f}" for time in (ours.median, ours.p10, ours.p90)]
    line += [f"{console.human_bytes(result.rate)}/s", f"{result.share:.0%}"]
    line += [f"{us:.1f}" for us in _least(result).values()]
    for name in rivals:
        rival_us = result.timings[name].median
        line += [f"{rival_us:.1f}", f"{ours.median / rival_us:.2f}"]
    notes = Text(f"{result.case.note}  " if result.case.note else "")
    for target in result.case.targets:
        against_us = result.against_us(target)
        if against_us is not None:
            met = target.is_met(ours.median, against_us)
            text = f"{target.against} {target}: {'met' if met else 'missed'}  "
            notes.append(text, style="green" if met else "yellow")
    notes.rstrip()
    return [*line, notes]


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder in this one, for files to measure; gone at the end."""
    with writing(folder):
        scratch = tempfile.TemporaryDirectory(prefix="trtllm-engram-bench-", dir=folder)
    with scratch as name:
        yield Path(name)


def _run_ops(args: argparse.Namespace) -> int:
    folder = Path(args.dir or tempfile.gettempdir())
    with console.status(args) as note:
        note("lookup")
        measurements = ops.bench_lookup(int(args.table_gb * _GB))
        note("hash")
        measurements += ops.bench_hash()
        note("files")
        with _scratch(folder) as scratch:
            measurements += bench_files(scratch, int(args.file_gb * _GB))
    sizes = {"table_gb": args.table_gb, "file_gb": args.file_gb, "folder": str(folder)}
    _report(args, measurements, sizes)
    return 0


def _report(
    args: argparse.Namespace, measurements: list[Measurement], sizes: dict[str, object]
) -> None:
    if args.json:
        rows = [asdict(one) | {"share": one.share} for one in measurements]
        console.print_json({"machine": machine_name(), **sizes, "measurements": rows})
    else:
        _print_ops(measurements, sizes)


def _run_disk(args: argparse.Namespace) -> int:
    folder = Path(args.dir or tempfile.gettempdir())
    measurements = []
    with console.status(args) as note:
        note("files")
        with _scratch(folder) as scratch:
            file_bytes, tokens = int(args.file_gb * _GB), args.tokens or lookup_disk.TOKENS
            for one in lookup_disk.bench_lookup_disk(scratch, file_bytes, tokens):
                note(one.name)
                measurements.append(one)
    _report(args, measurements, {"file_gb": args.file_gb, "folder": str(folder)})
    return 0


def _run_tables(args: argparse.Namespace) -> int:
    folder = Path(args.dir or tempfile.gettempdir())
    memory = args.memory or "memfd"
    with console.status(args) as note:
        note("load")
        with _scratch(folder) as scratch:
            figures = tables.bench_load(scratch, int(args.file_gb * _GB), args.ranks, memory)
        with tables.made_up_store(int(args.table_gb * _GB)) as store:
            note("memory")
            figures += tables.bench_memory(store, args.ranks, memory)
            note("keeper")
            figures += tables.bench_keeper(store)
    sizes = {"table_gb": args.table_gb, "file_gb": args.file_gb, "folder": str(folder)}
    if args.json:
        rows = [asdict(one) | {"share": one.share} for one in figures]
        console.print_json({"machine": machine_name(), **sizes, "figures": rows})
        return 0
    out = console.stdout()
    _print_machine(sizes, out)
    out.print()
    units = {"B/s": lambda value: f"{console.human_bytes(value)}/s", "B": console.human_bytes}
    lines = []
    for one in figures:
        shown = units.get(one.unit, console.human_seconds)
        share = Text(f"{one.share:.1%}", style="yellow" if one.met is False else "green")
        limit = [one.against, shown(one.limit), share] if one.limit else ["", "", ""]
        lines.append((one.name, shown(one.value), *limit, one.target))
    console.print_table(("what", ">value", "against", ">value", ">share", ">target"), lines, out)
    return 0


def _default_table_gb(args: argparse.Namespace, kind: str) -> float:
    if args.place == "host" or kind == "prefetch":
        return _HOST_TABLE_GB
    return _OPS_TABLE_GB if kind in ("ops", "tables", "node") else _GPU_TABLE_GB


def _print_ops(measurements: list[Measurement], sizes: dict[str, object]) -> None:
    out = console.stdout()
    _print_machine(sizes, out)
    out.print()
    rows = [
        (
            one.name,
            _rate(one.rate, one.unit),
            one.ceiling,
            _rate(one.ceiling_rate, one.unit),
            Text(f"{one.share:.0%}", style=_STYLES[one.met]),
            "" if one.target is None else f"{one.target:.0%}",
        )
        for one in measurements
    ]
    console.print_table(("what", ">rate", "against", ">rate", ">share", ">target"), rows, out)


def _print_machine(sizes: dict[str, object], out: Console) -> None:
    pairs: list[tuple[str, object]] = [("machine", machine_name())]
    if "table_gb" in sizes:
        pairs.append(("table", f"{sizes['table_gb']:g} GB in memory"))
    pairs.append(("file", f"{sizes['file_gb']:g} GB in {sizes['folder']}"))
    console.print_pairs(pairs, out)


def _rate(rate: float, unit: str) -> str:
    if unit == "B":
        return f"{console.human_bytes(rate)}/s"
    return f"{console.human_count(rate)} {unit}/s"


def _token_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"expected counts like 1,64,8192, found {text!r}")
    return counts
