# SPDX-License-Identifier: Apache-2.0
"""Brings the TensorRT versions that the plugins are tested on into .tensorrt/ of the checkout.

    VERSION/lib/     libnvinfer, its plugin library, the ONNX parser: from a jar of Maven Central
    VERSION/python/  the bindings (module tensorrt_bindings) for this Python, from PyPI; those of
                     another Python are replaced

The jars are fetched by mvn, checked against the SHA-256 below, and removed; the builder's resource
library (over 1 GB) is never unpacked. TensorRT is NVIDIA's, under the NVIDIA TensorRT license; here
it is for tests, and part of no package.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
TARGET = CHECKOUT / ".tensorrt"
ARTIFACT = "org.bytedeco:tensorrt:{version}:jar:linux-x86_64-redist"
GET = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:get"
IN_JAR = "org/bytedeco/tensorrt/linux-x86_64/"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LICENSE = "docs.nvidia.com/deeplearning/tensorrt/sla"


@dataclass(frozen=True)
class Release:
    artifact: str  # version of the jar
    sha256: str  # of the jar
    bindings: str  # PyPI requirement
    major: int

    @property
    def libraries(self) -> tuple[str, ...]:
        names = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
        return tuple(f"{name}.so.{self.major}" for name in names)


RELEASES = {
    "10.6": Release(
        "10.6-1.5.11",
        "e7979693541f996bc284335b05f5e890a82b8b3aba50d680e1343a139cf291c4",
        "tensorrt_cu12_bindings==10.6.0",
        10,
    ),
    "10.15": Release(
        "10.15-1.5.13",
        "8543a6bda95c5d42141d409e1b74024b444e96334a3815d53997cc4ec3cfce83",
        "tensorrt_cu13_bindings==10.15.1.29",
        10,
    ),
    "11.2": Release(
        "11.2-1.5.14",
        "909dea6c768a0db60ab53d76d9f089c78cada1b55ad5d3d78b308b140f669f6d",
        "tensorrt_cu13_bindings==11.2.1.2",
        11,
    ),
}


def fetch(version: str) -> None:
    """Makes .tensorrt/<version>, whole or not at all."""
    release, made = RELEASES[version], TARGET / version
    if are_for_this_python(made / "python"):
        print(f"TensorRT {version}: there")
        return
    what = f"bindings for Python {PYTHON}" if made.exists() else "fetching"
    print(f"TensorRT {version}: {what}", flush=True)
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET, prefix=f".{version}-") as scratch:
        unpacked = Path(scratch, "unpacked")
        fetch_bindings(release, unpacked / "python")  # first: they are small, and may not be there
        if made.exists():
            if (made / "python").exists():
                (made / "python").rename(Path(scratch, "old"))
            (unpacked / "python").rename(made / "python")
            return
        unpack(fetch_jar(release, Path(scratch, "maven")), release, unpacked / "lib")
        unpacked.rename(made)


def are_for_this_python(bindings: Path) -> bool:
    """By the tag of their wheel: bindings of another Python do not load."""
    tag = f"Tag: cp{sys.version_info.major}{sys.version_info.minor}-"
    return any(tag in wheel.read_text() for wheel in bindings.glob("*.dist-info/WHEEL"))


def fetch_jar(release: Release, repository: Path) -> Path:
    """Downloads the jar through mvn into a repository of its own and checks it."""
    artifact = ARTIFACT.format(version=release.artifact)
    command = ["mvn", "--batch-mode", "--quiet", f"-Dmaven.repo.local={repository}", GET]
    run([*command, f"-Dartifact={artifact}", "-Dtransitive=false"], artifact)
    jar = next(repository.glob("org/bytedeco/tensorrt/**/*-redist.jar"))
    digest = hashlib.sha256()
    with jar.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    found = digest.hexdigest()
    if found != release.sha256:
        raise SystemExit(f"{artifact}: SHA-256: expected {release.sha256}, found {found}")
    return jar


def unpack(jar: Path, release: Release, folder: Path) -> None:
    """Writes the few libraries that tests need."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(jar) as archive:
        for name in release.libraries:
            with archive.open(IN_JAR + name) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def fetch_bindings(release: Release, folder: Path) -> None:
    """Installs the bindings alone, for the Python that runs this."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command = [*pip, "--disable-pip-version-check", "--target", str(folder), release.bindings]
    run(command, f"{release.bindings} for Python {PYTHON}")


def run(command: list[str], wanted: str) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]}: not found: apt-get install -y maven") from None
    if result.returncode != 0:
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        reasons = [line for line in lines if "ERROR" in line] or lines or ["no reason given"]
        raise SystemExit(f"{wanted}: {reasons[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(RELEASES)}")
    versions = parser.parse_args().versions or list(RELEASES)
    if unknown := [version for version in versions if version not in RELEASES]:
        raise SystemExit(f"VERSION: expected one of {', '.join(RELEASES)}; found {unknown[0]!r}")
    print(f"TensorRT is NVIDIA's, under the NVIDIA TensorRT license: {LICENSE}", flush=True)
    for version in versions:
        fetch(version)


if __name__ == "__main__":
    main()
