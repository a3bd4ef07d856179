# SPDX-License-Identifier: Apache-2.0
"""Protocol buffers' text form, in which Triton reads a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class Word(str):
    """An enumerator's name: written without quotes."""


def to_pbtxt(message: Mapping[str, Any], indent: str = "") -> str:
    """Fields by name: a mapping is a message, a list a repeated field, one per element where those
    are messages."""
    lines = []
    for name, value in message.items():
        many = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
        for one in value if many else [value]:
            if isinstance(one, Mapping):
                lines.append(f"{indent}{name} {{\n{to_pbtxt(one, indent + '  ')}{indent}}}\n")
            elif isinstance(one, list):
                lines.append(f"{indent}{name}: [{', '.join(map(_scalar, one))}]\n")
            else:
                lines.append(f"{indent}{name}: {_scalar(one)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    if isinstance(value, Word):
        return value
    return json.dumps(value, ensure_ascii=False)
