# SPDX-License-Identifier: Apache-2.0
"""`library-path`: for `trtexec --staticPlugins=$(trtllm-engram library-path)` and the like."""

from __future__ import annotations

import argparse

from trtllm_engram.plugins import library_path

EXAMPLE = "polygraphy run model.onnx --trt --plugins $(trtllm-engram library-path)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # takes none


def run(args: argparse.Namespace) -> int:
    del args
    print(library_path())
    return 0
