# SPDX-License-Identifier: Apache-2.0
"""Shows that each mutant, a one-line fault, turns a test red: `make test-mutants`.

A mutant is a patch beside this file whose first line is `Test: <pytest node id>`, or, for the C++
tests, `Test: cpp:<doctest name filter>`, or, for those of the plugins (cpp/tests/plugins), `Test:
plugins:<filter>`. All is done in a copy of the checkout. Exit code 1 where a mutant survives, or
where its test fails without it.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
from checkout import copy_checkout  # noqa: E402  (needs the line above)

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Mutant:
    patch: Path
    test: str

    @classmethod
    def read(cls, patch: Path) -> Mutant:
        first = patch.read_text(encoding="utf-8").splitlines()[0]
        if not first.startswith("Test: "):
            raise SystemExit(f"{patch}: expected 'Test: <test>' in line 1, found {first!r}")
        return cls(patch, first.removeprefix("Test: ").strip())


def header_folders() -> list[str]:
    """What the plugins are built with, as the checkout's own build finds it."""
    sys.path.insert(0, str(TESTS.parent / "cpp/cmake"))
    nvcc = importlib.import_module("toolchain").find_nvcc()
    headers = importlib.import_module("tensorrt_headers").find()
    if not nvcc or not headers:
        raise SystemExit("plugins: expected headers of CUDA and TensorRT, found none: make build")
    toolkit = Path(nvcc).parents[1]
    libraries = next(toolkit.glob("lib*/libcudart_static.a")).parent
    return [
        f"-DCUDA_INCLUDE={toolkit / 'include'}",
        f"-DCUDA_LIBRARIES={libraries}",
        f"-DTENSORRT_INCLUDE={headers}",
    ]


class Copy:
    """A copy of the checkout, built for the CPU alone, whose packages hide the installed ones."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        copy_checkout(self.root)
        package = root / "packages/trtllm_engram"
        package.mkdir(parents=True)
        for folder in ("builder", "plugins", "runtime"):
            (package / folder).symlink_to(self.root / folder)
        self.environment = {
            **os.environ,
            "ENGRAM_CUDA": "OFF",
            "GIT_CEILING_DIRECTORIES": str(root.parent),  # git apply skips files of a repository
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(package.parent),
            "PYTHONDONTWRITEBYTECODE": "1",  # a .pyc of the same second and size would be trusted
        }

    def run(self, *command: str) -> int:
        return subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode

    def must(self, what: str, *command: str) -> None:
        if self.run(*command) != 0:
            raise SystemExit(f"{what}: {' '.join(command)} failed in the copy")

    def passes(self, what: str, test: str) -> bool:
        """Builds what the test needs and runs it; anything but passed or failed ends the run."""
        if test.startswith("cpp:"):
            self.must(what, "cmake", "-S", "cpp", "--preset", "sanitize")
            self.must(what, "cmake", "--build", "build/sanitize")
            case = f"--test-case={test.removeprefix('cpp:')}"
            return self.run("build/sanitize/engram_tests", case) == 0
        if test.startswith("plugins:"):
            source = ("-S", "tests/mutants/plugins", "-B", "build/plugins", "-G", "Ninja")
            self.must(what, "cmake", *source, *header_folders())
            self.must(what, "cmake", "--build", "build/plugins")
            case = f"--test-case={test.removeprefix('plugins:')}"
            return self.run("build/plugins/harness", "build/plugins/libtrtllm_engram.so", case) == 0
        build = ("setup.py", "--quiet", "build_library", "--editable-mode")
        self.must(what, sys.executable, *build)
        code = self.run(str(BIN / "pytest"), "-q", "-p", "no:cacheprovider", test)
        if code not in (0, 1):
            raise SystemExit(f"{what}: {test}: expected to pass or fail, pytest ended with {code}")
        return code == 0

    def survives(self, mutant: Mutant) -> bool:
        apply = ("git", "apply", "--unidiff-zero", str(mutant.patch))
        self.must(mutant.patch.stem, *apply)
        survived = self.passes(mutant.patch.stem, mutant.test)
        self.must(mutant.patch.stem, *apply, "--reverse")
        return survived


def main() -> int:
    mutants = [Mutant.read(patch) for patch in sorted(Path(__file__).parent.glob("*.patch"))]
    with tempfile.TemporaryDirectory() as scratch:
        copy = Copy(Path(scratch))
        for test in sorted({mutant.test for mutant in mutants}):
            if not copy.passes("no mutant", test):
                raise SystemExit(f"{test}: expected to pass without a mutant, but it fails")
        survivors = 0
        for mutant in mutants:
            survived = copy.survives(mutant)
            survivors += survived
            verdict = "SURVIVED" if survived else "killed"
            print(f"{mutant.patch.stem:40} {verdict:8} {mutant.test}", flush=True)
    print(f"{len(mutants) - survivors} killed, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
