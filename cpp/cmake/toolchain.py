# SPDX-License-Identifier: Apache-2.0
"""The build tools: which of them this machine has, and which requirements bring the rest.

setup.py imports this file; the Makefile runs it, to print the missing requirements.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import tensorrt_headers

OLDEST_NVCC = (12, 8)
NVCC_REQUIREMENT = "cuda-toolkit[nvcc,cudart,crt,nvvm,cccl]==13.0.*"


def option(name: str, default: str) -> str:
    """A CMake option ENGRAM_*, which the environment may set."""
    return os.environ.get(name, "").strip() or default


def wants_cuda() -> bool:
    return option("ENGRAM_CUDA", "ON").upper() in ("ON", "1", "TRUE", "YES")


def nvcc_version(nvcc: Path) -> tuple[int, ...]:
    """Its release, (0,) where it does not run."""
    command = [nvcc, "--version"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0,)
    release = re.search(r"release (\d+)\.(\d+)", text)
    return tuple(map(int, release.groups())) if release else (0,)


def find_nvcc() -> Path | None:
    """The machine's nvcc where it is new enough, else the one from PyPI, else None."""
    candidates = [Path(home) / "bin/nvcc" for home in [os.environ.get("CUDA_HOME")] if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates += [Path("/usr/local/cuda/bin/nvcc")]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        candidates += [Path(folder) / "cu13/bin/nvcc"]
    return next((nvcc for nvcc in candidates if nvcc_version(nvcc) >= OLDEST_NVCC), None)


def find_tool(name: str) -> Path:
    """cmake or ninja: from the PyPI package that this Python sees, else the first in PATH."""
    candidates = []
    spec = importlib.util.find_spec(name)
    if spec and spec.origin:
        package = Path(spec.origin).parent
        # cmake's program lies in its package, ninja's beside the scripts: lib/pythonX/site-packages
        candidates = [package / "data/bin" / name, package.parents[3] / "bin" / name]
    on_path = shutil.which(name)
    candidates += [Path(on_path)] if on_path else []
    found = next((tool for tool in candidates if tool.exists()), None)
    if found is None:
        raise SystemExit(f"trtllm-engram: {name}: expected on PATH or from PyPI, found neither")
    return found


def missing_requirements() -> list[str]:
    """What a build with the current options needs from PyPI beyond pyproject.toml's list."""
    missing = []
    if wants_cuda() and find_nvcc() is None:
        missing.append(NVCC_REQUIREMENT)
    if wants_cuda() and tensorrt_headers.find() is None:
        missing.append("pip")  # downloads the headers; build environments of uv have none
    return missing


if __name__ == "__main__":
    print("\n".join(missing_requirements()))
