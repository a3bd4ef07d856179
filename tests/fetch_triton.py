# SPDX-License-Identifier: Apache-2.0
"""Brings the Triton Inference Server that tests start into .triton/ of the checkout.

    server/   tritonserver 2.51 (release 24.10) with its Python backend: from PyPI's nvidia-pytriton
    python/   what the backend's Python needs (numpy 1: see runtime/triton/tensors.py), tritonclient

Both are for tests, and part of no package.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / ".triton"
WHEEL = (
    "nvidia-pytriton==0.7.0 "
    "--hash=sha256:21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
)
CLIENT = "tritonclient[grpc,http]==2.73.0"
NUMPY = "numpy==1.26.4"
PYTHONS = ((3, 10), (3, 12))  # that both have wheels for
_STUB = "triton_python_backend_stub"


def fetch_server(target: Path) -> None:
    """Unpacks the server, with the backend's stub of this Python where the backend looks for it."""
    with tempfile.TemporaryDirectory(dir=TARGET) as scratch:
        wanted = Path(scratch, "requirements")
        wanted.write_text(WHEEL)
        pip("download", "--no-deps", "--require-hashes", "--dest", scratch, "-r", str(wanted))
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if wanted_member(name)]
            wheel.extractall(target, names)
    triton = target / "pytriton/tritonserver"
    stub = triton / "backends/python" / _STUB
    shutil.copy(triton / f"python_backend_stubs/{python_version()}" / _STUB, stub)
    for program in (stub, triton / "bin/tritonserver"):
        program.chmod(0o755)


def wanted_member(name: str) -> bool:
    if "python_backend_stubs/" in name:
        return f"/{python_version()}/" in name
    return name.startswith(("pytriton/tritonserver/", "nvidia_pytriton.libs/"))


def fetch_python(target: Path) -> None:
    """Installs the package's own requirements beside numpy 1."""
    required = importlib.metadata.requires("trtllm-engram") or []
    pip(
        *("install", "--no-compile", "--target", str(target), NUMPY, CLIENT),
        *(one for one in required if "extra ==" not in one and not one.startswith("numpy")),
    )


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise SystemExit(f"pip {arguments[0]} failed: {lines[0] if lines else 'no reason given'}")


def main() -> None:
    least, most = PYTHONS
    if not least <= sys.version_info[:2] <= most:
        raise SystemExit(f"Triton: expected Python 3.10 to 3.12, found {python_version()}")
    TARGET.mkdir(exist_ok=True)
    for name, fetch in (("server", fetch_server), ("python", fetch_python)):
        if (TARGET / name).exists():
            print(f"Triton {name}: there")
            continue
        print(f"Triton {name}: fetching", flush=True)
        with tempfile.TemporaryDirectory(dir=TARGET, prefix=f".{name}-") as scratch:
            unpacked = Path(scratch, name)
            fetch(unpacked)
            unpacked.rename(TARGET / name)


if __name__ == "__main__":
    main()
