# SPDX-License-Identifier: Apache-2.0
"""Builds libtrtllm_engram.so with CMake and puts it into trtllm_engram/plugins.

pyproject.toml has the metadata. Here is what must be computed: the packages, the library, the
wheel's tag, and the build requirements that this machine lacks.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cpp/cmake"))
import toolchain  # noqa: E402  (needs the line above)

LIBRARY = "libtrtllm_engram.so"
FOLDERS = ("builder", "plugins", "runtime")
OLDEST_GLIBC = 34  # 2.34: RHEL 9, Debian 12, Ubuntu 22.04


def find_packages() -> list[str]:
    inits = [init for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")]
    folders = sorted(init.parent.relative_to(ROOT) for init in inits)
    return ["trtllm_engram." + ".".join(folder.parts) for folder in folders]


class BuildLibrary(Command):
    """A sub-command of build; editable installs set editable_mode and get the library in place."""

    description = "build the shared library with CMake"
    user_options: ClassVar = [
        ("build-lib=", "b", "folder of the built packages"),
        ("editable-mode", "e", "put the library into the checkout's plugins folder"),
    ]
    boolean_options: ClassVar = ["editable-mode"]

    def initialize_options(self) -> None:
        self.build_lib = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def get_outputs(self) -> list[str]:
        return [f"{self.build_lib}/trtllm_engram/plugins/{LIBRARY}"]

    def get_output_mapping(self) -> dict[str, str]:
        return {self.get_outputs()[0]: f"plugins/{LIBRARY}"} if self.editable_mode else {}

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in lists them

    def run(self) -> None:
        target = ROOT / "plugins" / LIBRARY if self.editable_mode else Path(self.get_outputs()[0])
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_suffix(f".{os.getpid()}")
        shutil.copy2(cmake_build(), aside)
        aside.replace(target)  # processes that run keep the library they loaded


def cmake_build() -> Path:
    """Configures and builds; returns the library.

    The folder's name is a hash of the tools and options: CMake's cache would otherwise name tools
    of an isolated build environment that is gone by the next `pip install .`.
    """
    cmake, ninja = toolchain.find_tool("cmake"), toolchain.find_tool("ninja")
    options = {"CMAKE_MAKE_PROGRAM": ninja, "Python3_EXECUTABLE": sys.executable}
    options["ENGRAM_CUDA"] = "ON" if toolchain.wants_cuda() else "OFF"
    if toolchain.wants_cuda():
        options["CMAKE_CUDA_COMPILER"] = toolchain.find_nvcc()
        options["ENGRAM_CUDA_ARCHITECTURES"] = toolchain.option("ENGRAM_CUDA_ARCHITECTURES", "")
    arguments = [f"-D{name}={value}" for name, value in options.items()]
    key = hashlib.sha256("\n".join([str(cmake), *arguments]).encode()).hexdigest()[:12]
    folder = ROOT / "build" / f"cmake-{key}"
    remove_stale_folders(folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [cmake, "-S", "cpp", "--preset", "release", "-B", folder, *arguments]
        for command in (configure, [cmake, "--build", folder, "--target", "trtllm_engram"]):
            if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
                raise SystemExit("trtllm-engram: the library did not build, see above")
    return folder / LIBRARY


def remove_stale_folders(builds: Path) -> None:
    """Folders of build environments that are gone: nothing can build there again."""
    for cache in builds.glob("cmake-*/CMakeCache.txt"):
        tool = re.search(r"^CMAKE_COMMAND:INTERNAL=(.*)$", cache.read_text(), re.MULTILINE)
        if tool and not Path(tool[1]).exists():
            shutil.rmtree(cache.parent, ignore_errors=True)


class BinaryDistribution(Distribution):
    """Not pure Python, although setuptools sees no extension module."""

    def has_ext_modules(self) -> bool:
        return True


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_library", None)]

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # files since deleted would be packed too
        super().run()


class BdistWheel(bdist_wheel):
    """One wheel for all Pythons: the library is bound through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.get_finalized_command("build_library").get_outputs()[0])
        needed = re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes()) if library.exists() else []
        glibc = max([OLDEST_GLIBC, *map(int, needed)])
        return "py3", "none", f"manylinux_2_{glibc}_{platform.machine()}"


setup(
    distclass=BinaryDistribution,
    cmdclass={"build": Build, "build_library": BuildLibrary, "bdist_wheel": BdistWheel},
    packages=find_packages(),
    package_dir={f"trtllm_engram.{folder}": folder for folder in FOLDERS},
    package_data={"": ["py.typed", "data/*"]},
    setup_requires=toolchain.missing_requirements(),
    zip_safe=False,
)
