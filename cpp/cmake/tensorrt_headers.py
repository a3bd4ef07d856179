# SPDX-License-Identifier: Apache-2.0
"""TensorRT's headers: the machine's, else the Apache-2.0 headers that a pinned PyPI wheel carries.

Run as a program it prints "<folder>;<version>", a CMake list. Of the wheel only the headers are
used, and only those whose SHA-256 stands in tensorrt_headers.sha256.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OLDEST_VERSION = (10, 3)  # IPluginV3 with aliased outputs
WHEEL = "kernel-lens==2.0.1"
WHEEL_FOLDER = "kernel_lens/include/tensorrt"
SUMS = Path(__file__).with_suffix(".sha256")
DOWNLOADED = Path(__file__).resolve().parents[2] / "build/tensorrt-headers"


def version(folder: Path) -> tuple[int, ...]:
    """The headers' version, (0,) where the folder holds none."""
    try:
        text = (folder / "NvInferVersion.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return (0,)
    pattern = r"#define (?:NV_TENSORRT|TRT)_(?:MAJOR|MINOR|PATCH)(?:_ENTERPRISE)? +(\d+)"
    return tuple(map(int, re.findall(pattern, text)[:3])) or (0,)


def find() -> Path | None:
    """TENSORRT_ROOT, else a system folder, an installed package or an earlier download, or None."""
    root = os.environ.get("TENSORRT_ROOT")
    folders = [Path(root) / "include"] if root else []
    folders += [Path("/usr/include/x86_64-linux-gnu"), Path("/usr/include/aarch64-linux-gnu")]
    folders += [Path("/usr/include"), Path("/usr/local/tensorrt/include")]
    spec = importlib.util.find_spec("tensorrt")
    if spec:
        folders += [Path(place) / "include" for place in spec.submodule_search_locations or []]
    folders += [DOWNLOADED]
    return next((folder for folder in folders if version(folder) >= OLDEST_VERSION), None)


def expected_sums() -> dict[str, str]:
    """Header name to SHA-256."""
    lines = SUMS.read_text(encoding="ascii").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def unpack(wheel: Path, folder: Path) -> None:
    """Writes the listed headers of a wheel into a folder, which appears only once all are right."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=folder.name, dir=folder.parent) as scratch:
        aside = Path(scratch, "headers")
        aside.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name, expected in expected_sums().items():
                content = archive.read(f"{WHEEL_FOLDER}/{name}")
                found = hashlib.sha256(content).hexdigest()
                if found != expected:
                    raise SystemExit(
                        f"{wheel.name}: {name}: SHA-256 expected {expected}, found {found}"
                    )
                (aside / name).write_bytes(content)
        try:
            aside.rename(folder)
        except OSError:  # another build was faster
            if version(folder) < OLDEST_VERSION:
                raise


def download() -> Path:
    """Fetches the pinned wheel through pip and unpacks its headers."""
    with tempfile.TemporaryDirectory() as scratch:
        result = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, WHEEL],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise SystemExit(
                "TensorRT headers: none on this machine (TENSORRT_ROOT names a place), and "
                f"pip download {WHEEL} failed: {reason}"
            )
        unpack(next(Path(scratch).glob("*.whl")), DOWNLOADED)
    return DOWNLOADED


if __name__ == "__main__":
    headers = find() or download()
    print(f"{headers};{'.'.join(map(str, version(headers)))}", end="")
