# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine from /proc and /sys.

Every function takes the root folder, so that tests can make a machine up.
"""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path("/")
_Number = TypeVar("_Number", int, float)
_CGROUP_V1_NO_LIMIT = 1 << 60  # v1 writes "no limit" as a number near 2^63


@dataclass(frozen=True)
class HugePages:
    page_bytes: int
    total: int
    free: int


@dataclass(frozen=True)
class NumaNode:
    index: int
    cpus: str
    total_bytes: int


@dataclass(frozen=True)
class ContainerLimits:
    """cgroup limits of this process; None: unlimited."""

    version: int  # 1 or 2; 0 where no cgroup is to be seen
    memory_bytes: int | None
    cpus: float | None


def read_text(path: Path) -> str:
    """The file's text without the white space around it; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def memory_info(root: Path = ROOT) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo."""
    lines = re.findall(r"^(\S+):\s+(\d+) kB$", read_text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in lines}


def shm_bytes(root: Path = ROOT) -> tuple[int, int] | None:
    """(size, free) of /dev/shm."""
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def memlock_limits() -> tuple[int | None, int | None]:
    """(soft, hard) limit of locked memory; None: unlimited."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return soft, hard


def huge_pages(root: Path = ROOT) -> list[HugePages]:
    """Pools of reserved huge pages, small pages first."""
    pools = []
    for folder in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        size = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        counts = (int(read_text(folder / name) or 0) for name in ("nr_hugepages", "free_hugepages"))
        pools.append(HugePages(size, *counts))
    return sorted(pools, key=lambda pool: pool.page_bytes)


def thp_setting(name: str, root: Path = ROOT) -> str:
    """The chosen word of a transparent huge page setting: "always" of "[always] madvise never"."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage" / name)
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else ""


def numa_nodes(root: Path = ROOT) -> list[NumaNode]:
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s+(\d+) kB", read_text(folder / "meminfo"))
        bytes_of_node = int(total[1]) * 1024 if total else 0
        index = int(folder.name.removeprefix("node"))
        nodes.append(NumaNode(index, read_text(folder / "cpulist"), bytes_of_node))
    return sorted(nodes, key=lambda node: node.index)


def nvidia_pci_devices(root: Path = ROOT) -> list[str]:
    """PCI addresses of NVIDIA's display and 3D controllers, whether or not a driver serves them."""
    return sorted(
        folder.name
        for folder in (root / "sys/bus/pci/devices").glob("*")
        if read_text(folder / "vendor") == "0x10de"
        and read_text(folder / "class").startswith("0x03")
    )


def in_container(root: Path = ROOT) -> bool:
    return any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))


def container_limits(root: Path = ROOT) -> ContainerLimits:
    """The tightest limits on the way from this process's cgroup up to the root, version 2 or 1."""
    lines = [line.split(":", 2) for line in read_text(root / "proc/self/cgroup").splitlines()]
    groups = {
        controllers: path for _, controllers, path in (line for line in lines if len(line) == 3)
    }
    mount = root / "sys/fs/cgroup"
    if (mount / "cgroup.controllers").exists():
        folders = _folders_up(mount, groups.get("", "/"))
        memory = [_number(read_text(folder / "memory.max")) for folder in folders]
        quotas = [_cpus_v2(read_text(folder / "cpu.max")) for folder in folders]
        return ContainerLimits(2, _smallest(memory), _smallest(quotas))
    memory_path = next(
        (path for names, path in groups.items() if "memory" in names.split(",")), None
    )
    cpu_path = next((path for names, path in groups.items() if "cpu" in names.split(",")), None)
    if memory_path is None and cpu_path is None:
        return ContainerLimits(0, None, None)
    memory = [
        _number(read_text(folder / "memory.limit_in_bytes"))
        for folder in _folders_up(mount / "memory", memory_path or "/")
    ]
    quotas = [_cpus_v1(folder) for folder in _folders_up(mount / "cpu", cpu_path or "/")]
    return ContainerLimits(1, _smallest(memory), _smallest(quotas))


def usable_memory_bytes(root: Path = ROOT) -> int:
    """RAM that this process may use: the machine's, or the container's limit where that is less."""
    total = memory_info(root).get("MemTotal", 0)
    limit = container_limits(root).memory_bytes
    return total if limit is None else min(total, limit)


def _folders_up(mount: Path, path: str) -> list[Path]:
    # Where only the container's own group is mounted, the path may not exist: its limits are the
    # mount's.
    relative = Path(path.lstrip("/"))
    return [mount / part for part in (relative, *relative.parents)] if path != "/" else [mount]


def _number(text: str) -> int | None:
    if not text.isdecimal():
        return None
    return int(text) if int(text) < _CGROUP_V1_NO_LIMIT else None


def _cpus_v2(text: str) -> float | None:
    words = text.split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdecimal() else None


def _cpus_v1(folder: Path) -> float | None:
    quota, period = (read_text(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _smallest(limits: list[_Number | None]) -> _Number | None:
    return min((limit for limit in limits if limit is not None), default=None)
