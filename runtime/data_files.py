# SPDX-License-Identifier: Apache-2.0
"""The files of runtime/data: a real text, and row ids of vLLM's kernels at V4.1-Flash's size."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

from trtllm_engram.builder import EngramConfig, EngramLayout


def multilingual_text() -> str:
    """A text in ten languages, the same as examples/multilingual.txt."""
    return _read("multilingual.txt").decode("utf-8")


def golden_hash() -> dict[str, Any]:
    """config, text, its token_ids by the DeepSeek V4 tokenizer, and its hash_ids [T, L, C]."""
    golden: dict[str, Any] = json.loads(_read("golden_hash.json"))
    return golden


def flash_layout() -> EngramLayout:
    """V4.1-Flash's layout: two layers of 384 million rows."""
    return EngramLayout(EngramConfig.from_dict(golden_hash()["config"]))


def _read(name: str) -> bytes:
    return importlib.resources.files(__package__).joinpath("data").joinpath(name).read_bytes()
