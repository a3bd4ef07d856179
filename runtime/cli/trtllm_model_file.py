# SPDX-License-Identifier: Apache-2.0
"""`trtllm-model-file`: for `trtllm-build --model_cls_file $(trtllm-engram trtllm-model-file)`."""

from __future__ import annotations

import argparse

from trtllm_engram.builder.trtllm import MODEL_FILE

EXAMPLE = (
    "trtllm-build --checkpoint_dir DIR --model_cls_file $(trtllm-engram trtllm-model-file) \\\n"
    "      --model_cls_name EngramForCausalLM"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # takes none


def run(args: argparse.Namespace) -> int:
    del args
    print(MODEL_FILE)
    return 0
