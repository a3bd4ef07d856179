# SPDX-License-Identifier: Apache-2.0
"""What `trtllm-engram --version` prints."""

from __future__ import annotations

import importlib.metadata

from trtllm_engram.plugins.errors import EngramError

from .. import _native


def version_lines() -> list[str]:
    """The package's version, then the library's build information, or why there is none."""
    lines = [f"trtllm-engram {package_version()}"]
    try:
        info = _native.build_info()
    except EngramError as error:
        return [*lines, f"library: {error}"]
    for name, value in info.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        lines.append(f"{name.replace('_', ' ')}: {shown if shown not in ('', None) else 'none'}")
    return lines


def package_version() -> str:
    try:
        return importlib.metadata.version("trtllm-engram")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
