# SPDX-License-Identifier: Apache-2.0
"""`env`: what makes any program with TensorRT, trtexec or a server, know the plugins."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from trtllm_engram.plugins import library_path
from trtllm_engram.plugins.errors import EngramError, InputError

from .. import _native
from ..tensorrt_files import TensorRtFiles, find_tensorrt
from . import console

EXAMPLE = 'eval "$(trtllm-engram env) trtexec --loadEngine=engine.plan"'

# Double quotes keep these from no shell; the loader splits at the two besides.
_UNFIT = '"$`\\'
_UNFIT_LIBRARY = " :" + _UNFIT
# Ahead of LD_LIBRARY_PATH, these would hide what containers put there, such as another driver.
_LOADERS_OWN = ("/usr/lib/", "/usr/lib64/")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print LD_PRELOAD for the TensorRT found first: in TENSORRT_ROOT, LD_LIBRARY_PATH,\n"
        "an installed package or the system's folders. Loaded after it, the plugins register\n"
        "themselves: in every rank, where a launcher hands the environment on. LD_LIBRARY_PATH\n"
        "begins with TensorRT's folder, where the loader needs it for TensorRT's other libraries."
    )
    parser.add_argument(
        "--tables",
        metavar="FILE",
        type=Path,
        help="set TRTLLM_ENGRAM_TABLES to this file too, once it and its stores are checked",
    )
    parser.add_argument(
        "--export", action="store_true", help="print lines of `export`, for scripts"
    )
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    tables = {} if args.tables is None else {"TRTLLM_ENGRAM_TABLES": _tables(args.tables)}
    tensorrt = _tensorrt()
    variables = _loader_variables(tensorrt.library.absolute()) | tables
    if args.json:
        console.print_json({**variables, "tensorrt": tensorrt.version})
        return 0
    words = [f'{name}="{value}"' for name, value in variables.items()]
    print("\n".join(f"export {word}" for word in words) if args.export else " ".join(words))
    return 0


def _tables(file: Path) -> str:
    path = str(file.absolute())
    _check(path, _UNFIT, "--tables: expected a path without any of")
    _native.check_tables_file(path)
    return path


def _tensorrt() -> TensorRtFiles:
    root = os.environ.get("TENSORRT_ROOT")
    if root and not any(Path(root, "lib").glob("libnvinfer.so.[0-9]*")):
        raise InputError(f"TENSORRT_ROOT: expected libnvinfer.so.N in {root}/lib, found none")
    found = find_tensorrt()
    if not found:
        raise EngramError(
            "TensorRT: expected libnvinfer.so.N in TENSORRT_ROOT/lib, LD_LIBRARY_PATH, an "
            "installed package or the system's folders, found none"
        )
    return found[0]


def _loader_variables(libnvinfer: Path) -> dict[str, str]:
    libraries = [str(libnvinfer), str(library_path())]
    for library in libraries:
        _check(library, _UNFIT_LIBRARY, "LD_PRELOAD: expected paths without spaces and any of")
    variables = {"LD_PRELOAD": " ".join(libraries)}
    if not str(libnvinfer).startswith(_LOADERS_OWN):
        before = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        folders = dict.fromkeys([str(libnvinfer.parent), *filter(None, before)])
        variables["LD_LIBRARY_PATH"] = ":".join(folders)
        _check(variables["LD_LIBRARY_PATH"], _UNFIT, "LD_LIBRARY_PATH: expected none of")
    return variables


def _check(path: str, unfit: str, expected: str) -> None:
    if set(path) & set(unfit):
        raise InputError(f"{expected} {unfit.strip()}, found {path!r}")
