# SPDX-License-Identifier: Apache-2.0
"""`env`: what makes any program with TensorRT, trtexec or a server, know the plugins."""

from __future__ import annotations

import argparse

from trtllm_engram.plugins import library_path
from trtllm_engram.plugins.errors import EngramError, InputError

from ..tensorrt_files import find_tensorrt
from . import console

EXAMPLE = 'eval "$(trtllm-engram env) trtexec --loadEngine=engine.plan"'

# The loader splits at the first two; double quotes keep the others from no shell.
_UNFIT = ' :"$`\\'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print LD_PRELOAD for the TensorRT found first: in TENSORRT_ROOT, LD_LIBRARY_PATH,\n"
        "an installed package or the system's folders. Loaded after it, the plugins register\n"
        "themselves."
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
        if set(library) & set(_UNFIT):
            raise InputError(
                f"LD_PRELOAD: expected paths without spaces and any of {_UNFIT.strip()}, "
                f"found {library!r}"
            )
    preload = " ".join(libraries)
    if args.json:
        console.print_json({"LD_PRELOAD": preload, "tensorrt": found[0].version})
    else:
        print(f'LD_PRELOAD="{preload}"')
    return 0
