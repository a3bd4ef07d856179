# SPDX-License-Identifier: Apache-2.0
"""What tests need of the machine. A test that needs more than there is skips and says why.
TRTLLM_ENGRAM_REQUIRE names markers that may not: a machine without what they need starts no test,
and a skip for another reason is a failure."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import pytest
import tensorrt_installs
import triton_server
from hypothesis import HealthCheck, settings
from kept_plans import keep_plans

# A shell's background job ignores Ctrl-C, and so do its children: tests of it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Help and tables are as wide as the terminal, which is the developer's.
os.environ["COLUMNS"] = "80"

# How long an example takes is the machine's affair; a fixture serves all examples of a test.
_UNCHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("suite", deadline=None, suppress_health_check=_UNCHECKED)
settings.load_profile("suite")

# Module and requirement of what tests on a GPU import, beside what the package needs itself.
GPU_PACKAGES = {"cuda.bindings": "cuda-bindings", "torch": "torch"}
PARTS = ("gpu", "gpus", "trt", "triton", "engine", "multiproc", "slow")


@functools.cache
def why_no_gpu() -> str:
    """Empty where CUDA ops can run."""
    from trtllm_engram.runtime import _native, gpus

    if not _native.build_info()["cuda"]:
        return "the library is built for the CPU alone"
    driver = gpus.probe_driver()
    no_driver = driver.error or ("" if driver.gpus else "no CUDA device")
    return no_driver or why_no_packages(GPU_PACKAGES)


def why_no_packages(packages: Mapping[str, str]) -> str:
    """Empty where all are installed: modules, with the requirements that bring them."""
    missing = [name for module, name in packages.items() if not _is_installed(module)]
    command = f".venv/bin/pip install {' '.join(missing)}"
    return f"no packages {', '.join(missing)}: {command}" if missing else ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it lies in
        return False


@functools.cache
def why_no_gpus() -> str:
    """Empty where there are two, or where there is none."""
    from trtllm_engram.runtime import gpus

    one = not why_no_gpu() and len(gpus.probe_driver().gpus) < 2
    return "one CUDA device" if one else ""


def why_no_tensorrt() -> str:
    """Empty where there is a TensorRT to test against."""
    return tensorrt_installs.why_none()


def why_no_triton() -> str:
    """Empty where there is a tritonserver to start."""
    return "" if triton_server.is_there() else "no Triton Inference Server"


@functools.cache
def why_no_engine() -> str:
    """Empty where engines can be built, or where it is the GPU that is missing."""
    from trtllm_engram.plugins.errors import EngramError
    from trtllm_engram.plugins.registration import import_tensorrt

    if why_no_gpu():
        return ""
    try:
        import_tensorrt()
    except EngramError as error:
        return str(error)
    return ""


NEEDS: dict[str, Callable[[], str]] = {
    "gpu": why_no_gpu,
    "gpus": why_no_gpus,
    "trt": why_no_tensorrt,
    "triton": why_no_triton,
    "engine": why_no_engine,
}
# How to run what needs them.
COMMANDS = {
    "gpu": "`make test-gpu` on a machine with one runs them",
    "gpus": "`make test-gpu` on a machine with two runs them",
    "trt": "`make tensorrt`, with no TENSORRT_ROOT, brings one",
    "triton": "`make triton` brings it",
    "engine": "`.venv/bin/pip install tensorrt` brings it",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-plans", metavar="DIR", type=Path, help="see kept_plans.py")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--keep-plans"):
        keep_plans(folder)
    unknown = required_parts() - set(PARTS)
    if unknown:
        raise pytest.UsageError(
            f"TRTLLM_ENGRAM_REQUIRE: expected parts of {', '.join(PARTS)}; "
            f"found {', '.join(sorted(unknown))}"
        )


def pytest_sessionstart() -> None:
    """One line here, in place of one for each test."""
    from trtllm_engram.plugins.errors import EngramError
    from trtllm_engram.runtime import _native

    try:
        _native.load()
    except EngramError as error:
        raise pytest.UsageError(str(error)) from None
    tensorrt_installs.check_named()
    if "trt" in required_parts() and "TENSORRT_ROOT" not in os.environ:
        for line in tensorrt_installs.left_out():
            raise pytest.UsageError(
                f"TRTLLM_ENGRAM_REQUIRE: expected tests of trt in every TensorRT, found {line}"
            )
    for part in sorted(required_parts() & NEEDS.keys()):
        if why := NEEDS[part]():
            raise pytest.UsageError(
                f"TRTLLM_ENGRAM_REQUIRE: expected a machine that runs tests of {part}, found: {why}"
            )


def required_parts() -> set[str]:
    names = os.environ.get("TRTLLM_ENGRAM_REQUIRE", "").split(",")
    return {name.strip() for name in names if name.strip()}


def missing_parts(item: pytest.Item) -> list[str]:
    return [part for part, why in NEEDS.items() if item.get_closest_marker(part) and why()]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for part in missing_parts(item):
        pytest.skip(NEEDS[part]())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # An engine test skipped for want of a GPU misses no TensorRT.
    parts = missing_parts(item) or [marker.name for marker in item.iter_markers()]
    missed = required_parts() & set(parts)
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    # What a container takes away (namespaces, cgroups, huge pages) is no part that was left out.
    taken = "this machine: " in str(reason)
    if report.skipped and missed and not taken and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"TRTLLM_ENGRAM_REQUIRE names {', '.join(sorted(missed))}: {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """The last lines say which parts were left out, why, and what runs them."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    tested = [report for found in terminalreporter.stats.values() for report in found]
    if any("trt" in getattr(report, "keywords", ()) for report in tested):
        for line in tensorrt_installs.left_out():
            terminalreporter.write_line(f"NOT RUN: tests that need trt in {line}")
    for marker in sorted(NEEDS):
        count = sum(marker in report.keywords for report in skipped)
        if count and NEEDS[marker]():
            terminalreporter.write_line(
                f"NOT RUN: {count} tests that need {marker}: {NEEDS[marker]()}; {COMMANDS[marker]}"
            )
