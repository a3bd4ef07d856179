# SPDX-License-Identifier: Apache-2.0
"""`env`: what makes any program with TensorRT, trtexec or a server, know the plugins."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_engram.builder.files import stat_regular
from trtllm_engram.plugins import library_path
from trtllm_engram.plugins.errors import EngramError, InputError

from ..tensorrt_files import find_tensorrt
from . import console

EXAMPLE = 'eval "$(trtllm-engram env) trtexec --loadEngine=engine.plan"'

# Double quotes keep these from no shell; the loader splits at the two besides.
_UNFIT = '"$`\\'
_UNFIT_LIBRARY = " :" + _UNFIT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print LD_PRELOAD for the TensorRT found first: in TENSORRT_ROOT, LD_LIBRARY_PATH,\n"
        "an installed package or the system's folders. Loaded after it, the plugins register\n"
        "themselves: in every rank, where a launcher hands the environment on."
    )
    parser.add_argument(
        "--tables", metavar="FILE", type=Path, help="set TRTLLM_ENGRAM_TABLES to this file too"
    )
    parser.add_argument(
        "--export", action="store_true", help="print lines of `export`, for scripts"
    )
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    found = find_tensorrt()
    if not found:
        raise EngramError(
            "TensorRT: expected libnvinfer.so.N in TENSORRT_ROOT/lib, LD_LIBRARY_PATH, an "
            "installed package or the system's folders, found none"
        )
    libraries = [str(found[0].library.absolute()), str(library_path())]
    for library in libraries:
        _check(library, _UNFIT_LIBRARY, "LD_PRELOAD: expected paths without spaces and any of")
    variables = {"LD_PRELOAD": " ".join(libraries)}
    if args.tables is not None:
        stat_regular(args.tables)
        tables = str(args.tables.absolute())
        _check(tables, _UNFIT, "--tables: expected a path without any of")
        variables["TRTLLM_ENGRAM_TABLES"] = tables
    if args.json:
        console.print_json({**variables, "tensorrt": found[0].version})
        return 0
    words = [f'{name}="{value}"' for name, value in variables.items()]
    print("\n".join(f"export {word}" for word in words) if args.export else " ".join(words))
    return 0


def _check(path: str, unfit: str, expected: str) -> None:
    if set(path) & set(unfit):
        raise InputError(f"{expected} {unfit.strip()}, found {path!r}")
