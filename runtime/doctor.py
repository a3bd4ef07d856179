# SPDX-License-Identifier: Apache-2.0
"""What this machine offers a deployment.

Each check is a fact and, where something is wrong, the command that mends it. The checks only look
and judge; `trtllm-engram doctor` prints. Facts come from machine.py, gpus.py and tensorrt_files.py.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_engram.plugins.errors import EngramError

from . import _native, machine
from .gpus import Driver, probe_driver
from .tensorrt_files import find_tensorrt

_GIB = 1 << 30
_MIN_SHM_BYTES = _GIB  # NCCL and servers keep their queues there; containers start with 64 MiB
_THP = "/sys/kernel/mm/transparent_hugepage"


@dataclass(frozen=True)
class Problem:
    text: str
    fix: str  # one command


@dataclass(frozen=True)
class Check:
    """One line of the report. `data` holds the same facts as numbers, for --json."""

    name: str
    text: str
    data: dict[str, Any]
    problem: Problem | None = None


def examine(root: Path = machine.ROOT, driver: Driver | None = None) -> list[Check]:
    """All checks. `root` stands for / so that tests can show a made-up machine."""
    driver = driver or probe_driver()
    info, library = check_library()
    return [
        library,
        check_driver(driver, info, root),
        *(check_gpus(driver, info) if driver.gpus else []),
        check_tensorrt(root),
        check_cpu(),
        check_memory(root),
        check_container(root),
        check_shm(root),
        check_memlock(root),
        check_huge_pages(root),
        check_thp(root),
        check_numa(root),
    ]


def check_library() -> tuple[dict[str, Any], Check]:
    """The library's build information too, empty where it cannot be loaded."""
    try:
        info = _native.build_info()
    except EngramError as error:
        problem = Problem(str(error), "pip install --force-reinstall CHECKOUT_OR_WHEEL")
        return {}, Check("library", "not usable", {}, problem)
    cuda = f"CUDA {info['cuda']}" if info["cuda"] else "CPU only"
    text = f"{info['version']}, ABI {info['abi']}, {cuda}"
    if info["architectures"]:
        text += (
            f" for sm {_joined(info['architectures'])}, driver {info['minimum_driver']} or newer"
        )
    return info, Check("library", text, info)


def check_driver(driver: Driver, info: dict[str, Any], root: Path) -> Check:
    data = {"driver": driver.version, "cuda": list(driver.cuda_version), "error": driver.error}
    cuda = ".".join(str(number) for number in driver.cuda_version)
    if driver.error:
        devices = machine.nvidia_pci_devices(root)
        if not devices and driver.cuda_version == (0, 0):
            return Check("CUDA driver", "none, and no NVIDIA GPU to drive", data)
        fix = "sudo nvidia-smi"
        if driver.cuda_version == (0, 0):
            in_container = machine.in_container(root)
            fix = (
                "docker run --gpus all ..."
                if in_container
                else "sudo apt-get install nvidia-driver"
            )
        return Check("CUDA driver", driver.error, data, Problem(driver.error, fix))
    text = f"{driver.version or 'of unknown version'}, CUDA {cuda}"
    minimum = str(info.get("minimum_driver") or "")
    if minimum and driver.version and _numbers(driver.version) < _numbers(minimum):
        problem = Problem(
            f"the library needs driver {minimum}, this is {driver.version}: GPU calls will fail",
            f"sudo apt-get install nvidia-driver-{minimum.split('.')[0]}",
        )
        return Check("CUDA driver", text, data, problem)
    return Check("CUDA driver", text, data)


def check_gpus(driver: Driver, info: dict[str, Any]) -> list[Check]:
    checks = []
    for gpu in driver.gpus:
        major, minor = gpu.compute_capability
        text = f"{gpu.name}, sm_{major}{minor}, {gpu.total_bytes / _GIB:.0f} GiB"
        if gpu.free_bytes is not None:
            text += f" ({gpu.free_bytes / _GIB:.0f} free)"
        problem = None
        if info and not info["cuda"]:
            problem = Problem(
                "the library is a CPU-only build and leaves this GPU alone",
                "ENGRAM_CUDA=ON pip install --force-reinstall CHECKOUT",
            )
        data = {"name": gpu.name, "compute_capability": [major, minor], "sms": gpu.num_sms}
        data |= {
            "total_bytes": gpu.total_bytes,
            "free_bytes": gpu.free_bytes,
            "pci": gpu.pci_address,
        }
        checks.append(Check(f"GPU {gpu.index}", text, data, problem))
    return checks


def check_tensorrt(root: Path) -> Check:
    found = find_tensorrt(root)
    data = {"found": [{"version": one.version, "library": str(one.library)} for one in found]}
    if not found:
        return Check("TensorRT", "none found (not needed for eager ops)", data)
    return Check(
        "TensorRT", "; ".join(f"{one.version} in {one.library.parent}" for one in found), data
    )


def check_cpu() -> Check:
    cores = len(os.sched_getaffinity(0))
    data = {"cores": cores, "machine": platform.machine(), "python": platform.python_version()}
    data["numpy"] = importlib.metadata.version("numpy")
    text = f"{cores} cores, {data['machine']}, Python {data['python']}, numpy {data['numpy']}"
    return Check("CPU", text, data)


def check_memory(root: Path) -> Check:
    info = machine.memory_info(root)
    total, available = info.get("MemTotal", 0), info.get("MemAvailable", 0)
    data = {"total_bytes": total, "available_bytes": available}
    return Check("RAM", f"{_gib(total)}, {_gib(available)} available", data)


def check_container(root: Path) -> Check:
    limits = machine.container_limits(root)
    inside = machine.in_container(root)
    data: dict[str, Any] = {"container": inside, "cgroup": limits.version}
    data |= {"memory_bytes": limits.memory_bytes, "cpus": limits.cpus}
    memory = (
        "no memory limit"
        if limits.memory_bytes is None
        else f"{_gib(limits.memory_bytes)} of memory"
    )
    cpus = "no CPU limit" if limits.cpus is None else f"{limits.cpus:g} CPUs"
    group = f"cgroup v{limits.version}" if limits.version else "no cgroup"
    text = f"{'container' if inside else 'no container'}, {group}: {memory}, {cpus}"
    return Check("limits", text, data)


def check_shm(root: Path) -> Check:
    sizes = machine.shm_bytes(root)
    if sizes is None:
        problem = Problem("there is no /dev/shm", "sudo mount -t tmpfs -o size=50% tmpfs /dev/shm")
        return Check("/dev/shm", "missing", {}, problem)
    size, free = sizes
    data = {"size_bytes": size, "free_bytes": free}
    text = f"{_gib(size)}, {_gib(free)} free"
    if size >= _MIN_SHM_BYTES:
        return Check("/dev/shm", text, data)
    mount = "sudo mount -o remount,size=50% /dev/shm"
    fix = "docker run --shm-size=16g ..." if machine.in_container(root) else mount
    return Check("/dev/shm", text, data, Problem(f"/dev/shm has only {_gib(size)}", fix))


def check_memlock(root: Path) -> Check:
    soft, hard = machine.memlock_limits()
    data: dict[str, Any] = {"soft_bytes": soft, "hard_bytes": hard}
    text = "unlimited" if soft is None else _gib(soft)
    if soft is None or soft >= machine.usable_memory_bytes(root) // 2:
        return Check("memlock", text, data)
    fix = "sudo prlimit --pid $$ --memlock=unlimited"
    if hard is None:
        fix = "ulimit -l unlimited"
    elif machine.in_container(root):
        fix = "docker run --ulimit memlock=-1 ..."
    problem = Problem(f"only {_gib(soft)} may be locked: a table cannot be kept in RAM", fix)
    return Check("memlock", text, data, problem)


def check_huge_pages(root: Path) -> Check:
    pools = machine.huge_pages(root)
    data = {str(pool.page_bytes): {"total": pool.total, "free": pool.free} for pool in pools}
    texts = [f"{_gib(pool.page_bytes)}: {pool.free} of {pool.total} free" for pool in pools]
    return Check("huge pages", ", ".join(texts) or "not supported", data)


def check_thp(root: Path) -> Check:
    enabled = machine.thp_setting("enabled", root)
    shmem = machine.thp_setting("shmem_enabled", root)
    data = {"enabled": enabled, "shmem_enabled": shmem}
    text = f"{enabled or 'unknown'}, for shared memory {shmem or 'unknown'}"
    problem = None
    if enabled == "never":
        problem = Problem(
            "transparent huge pages are off: random reads of a table miss the TLB",
            f"echo madvise | sudo tee {_THP}/enabled",
        )
    elif shmem in ("never", "deny"):
        problem = Problem(
            "no transparent huge pages in shared memory: shared tables get 4 KiB pages",
            f"echo advise | sudo tee {_THP}/shmem_enabled",
        )
    return Check("THP", text, data, problem)


def check_numa(root: Path) -> Check:
    nodes = machine.numa_nodes(root)
    balancing = machine.read_text(root / "proc/sys/kernel/numa_balancing")
    data = {
        "nodes": [{"node": n.index, "cpus": n.cpus, "bytes": n.total_bytes} for n in nodes],
        "balancing": balancing,
    }
    texts = [f"{node.index}: CPUs {node.cpus}, {_gib(node.total_bytes)}" for node in nodes]
    problem = None
    if len(nodes) > 1 and balancing not in ("", "0"):
        problem = Problem(
            "automatic NUMA balancing moves table pages about and stalls readers",
            "sudo sysctl -w kernel.numa_balancing=0",
        )
    return Check("NUMA nodes", "; ".join(texts) or "not shown by this kernel", data, problem)


def _joined(words: object) -> str:
    return ", ".join(map(str, words)) if isinstance(words, (list, tuple)) else str(words)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def _gib(num_bytes: int) -> str:
    for unit, name in ((_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"
