# SPDX-License-Identifier: Apache-2.0
"""doctor on made-up machines: what it reads, what it calls a problem, which command mends it."""

from __future__ import annotations

import json

import pytest

from trtllm_engram.runtime import doctor, machine
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.gpus import Driver, Gpu, probe_driver
from trtllm_engram.runtime.tensorrt_files import find_tensorrt

GIB = 1 << 30
NO_DRIVER = Driver("", (0, 0), (), "no CUDA driver (libcuda.so.1 not found)")
H200 = Gpu(0, "NVIDIA H200", (9, 0), 132, 141 * GIB, 140 * GIB, "0000:01:00.0")
DRIVER = Driver("580.95.05", (13, 0), (H200,))
INFO = {"cuda": "13.0", "minimum_driver": "580"}

THP = "sys/kernel/mm/transparent_hugepage"
NODE = "sys/devices/system/node"
MACHINE = {
    "proc/meminfo": "MemTotal:       1048576 kB\nMemAvailable:    524288 kB\nHugePages_Total: 4",
    "proc/self/cgroup": "0::/work/job",
    "proc/sys/kernel/numa_balancing": "1",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory",
    f"{THP}/enabled": "always [madvise] never",
    f"{THP}/shmem_enabled": "always within_size [advise] never deny force",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "8",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "3",
    "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0",
    "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "0",
    f"{NODE}/node0/meminfo": "Node 0 MemTotal:       524288 kB",
    f"{NODE}/node0/cpulist": "0-7",
    f"{NODE}/possible": "0",
    "dev/shm/.keep": "",
}


@pytest.fixture
def make_root(tmp_path):
    def make(changes=()):
        for name, text in {**MACHINE, **dict(changes)}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return tmp_path

    return make


def test_every_check_of_this_machine_has_its_line():
    checks = doctor.examine()
    names = [check.name for check in checks]
    expected = ["library", "CUDA driver", "TensorRT", "CPU", "RAM", "limits", "/dev/shm"]
    expected += ["memlock", "huge pages", "THP", "NUMA nodes"]
    assert [name for name in names if not name.startswith("GPU ")] == expected
    assert all(check.text and "\n" not in check.text for check in checks)


def test_an_empty_root_is_no_crash(tmp_path):
    checks = doctor.examine(tmp_path, NO_DRIVER)
    assert {check.name for check in checks if check.problem} >= {"/dev/shm"}


def test_facts_of_a_made_up_machine(make_root):
    checks = {check.name: check for check in doctor.examine(make_root(), NO_DRIVER)}
    assert checks["RAM"].text == "1 GiB, 512 MiB available"
    assert checks["huge pages"].text == "2 MiB: 3 of 8 free, 1 GiB: 0 of 0 free"
    assert checks["THP"].text == "madvise, for shared memory advise"
    assert checks["NUMA nodes"].text == "0: CPUs 0-7, 512 MiB"
    assert checks["CUDA driver"].text == "none, and no NVIDIA GPU to drive"
    for name in ("RAM", "huge pages", "THP", "NUMA nodes", "limits", "CUDA driver"):
        assert checks[name].problem is None


@pytest.mark.parametrize(
    ("check", "changes", "fix"),
    [
        ("check_thp", {f"{THP}/enabled": "always madvise [never]"}, f"/{THP}/enabled"),
        ("check_thp", {f"{THP}/shmem_enabled": "always [never] deny"}, f"/{THP}/shmem_enabled"),
        (
            "check_numa",
            {f"{NODE}/node1/cpulist": "8-15", f"{NODE}/node1/meminfo": "Node 1 MemTotal: 1 kB"},
            "sysctl -w kernel.numa_balancing=0",
        ),
    ],
)
def test_settings_that_hurt_come_with_their_command(make_root, check, changes, fix):
    problem = getattr(doctor, check)(make_root(changes)).problem
    assert problem is not None
    assert fix in problem.fix
    assert "\n" not in problem.text + problem.fix


def test_a_gpu_without_its_driver(make_root):
    pci = "sys/bus/pci/devices/0000:01:00.0"
    root = make_root({f"{pci}/vendor": "0x10de", f"{pci}/class": "0x030200"})
    check = doctor.check_driver(NO_DRIVER, {}, root)
    assert check.problem.fix == "sudo apt-get install nvidia-driver"
    (root / ".dockerenv").touch()
    assert doctor.check_driver(NO_DRIVER, {}, root).problem.fix == "docker run --gpus all ..."


def test_an_old_driver_names_both_versions(tmp_path):
    old = Driver("570.10", (12, 8), (H200,))
    check = doctor.check_driver(old, INFO, tmp_path)
    assert "580" in check.problem.text
    assert "570.10" in check.problem.text
    assert check.problem.fix == "sudo apt-get install nvidia-driver-580"
    assert doctor.check_driver(DRIVER, INFO, tmp_path).problem is None


def test_gpus_and_a_library_that_cannot_use_them():
    (check,) = doctor.check_gpus(DRIVER, INFO)
    assert (check.name, check.text) == ("GPU 0", "NVIDIA H200, sm_90, 141 GiB (140 free)")
    assert check.problem is None
    (check,) = doctor.check_gpus(DRIVER, {"cuda": ""})
    assert "CPU-only" in check.problem.text


def test_a_missing_libcuda_is_told():
    driver = probe_driver("libno-such-cuda.so.1")
    assert driver.gpus == ()
    assert driver.error == "no CUDA driver (libno-such-cuda.so.1 not found)"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "max", "cpu.max": "max 100000"}, (2, None, None)),
        ({"memory.max": "2147483648", "cpu.max": "150000 100000"}, (2, 2 * GIB, 1.5)),
    ],
)
def test_limits_of_cgroup_2(make_root, files, expected):
    root = make_root({f"sys/fs/cgroup/work/job/{name}": text for name, text in files.items()})
    limits = machine.container_limits(root)
    assert (limits.version, limits.memory_bytes, limits.cpus) == expected


def test_the_tightest_limit_on_the_way_up_counts(make_root):
    root = make_root(
        {
            "sys/fs/cgroup/work/job/memory.max": "max",
            "sys/fs/cgroup/work/memory.max": str(GIB),
            "sys/fs/cgroup/memory.max": str(4 * GIB),
        }
    )
    assert machine.container_limits(root).memory_bytes == GIB
    assert machine.usable_memory_bytes(root) == GIB


@pytest.mark.parametrize(
    ("limit", "quota", "expected"),
    [("1073741824", "50000", (1, GIB, 0.5)), ("9223372036854771712", "-1", (1, None, None))],
)
def test_limits_of_cgroup_1(make_root, limit, quota, expected):
    root = make_root(
        {
            "proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        }
    )
    (root / "sys/fs/cgroup/cgroup.controllers").unlink()
    limits = machine.container_limits(root)
    assert (limits.version, limits.memory_bytes, limits.cpus) == expected


def test_a_small_shm_and_its_command(monkeypatch, make_root):
    root = make_root()
    monkeypatch.setattr(machine, "shm_bytes", lambda _root: (64 << 20, 60 << 20))
    assert doctor.check_shm(root).problem.fix.startswith("sudo mount -o remount,size=")
    (root / ".dockerenv").touch()
    assert doctor.check_shm(root).problem.fix.startswith("docker run --shm-size=")


@pytest.mark.parametrize(
    ("limits", "fix"),
    [
        ((None, None), None),
        ((8 << 20, None), "ulimit -l unlimited"),
        ((8 << 20, 8 << 20), "sudo prlimit --pid $$ --memlock=unlimited"),
    ],
)
def test_the_memlock_limit(monkeypatch, make_root, limits, fix):
    monkeypatch.setattr(machine, "memlock_limits", lambda: limits)
    problem = doctor.check_memlock(make_root()).problem
    assert (problem and problem.fix) == fix


def test_tensorrt_is_found_where_it_lies(tmp_path):
    system = tmp_path / "usr/lib/x86_64-linux-gnu"
    pip = tmp_path / "site/tensorrt_libs"
    given = tmp_path / "given/lib"
    for folder in (system, pip, given):
        folder.mkdir(parents=True)
    (system / "libnvinfer.so.10.15.1").touch()
    (system / "libnvinfer.so.10").symlink_to("libnvinfer.so.10.15.1")
    (system / "libnvinfer_plugin.so.10").touch()
    (pip / "libnvinfer.so.10").touch()
    metadata = tmp_path / "site/tensorrt_cu12_libs-10.6.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: tensorrt_cu12_libs\nVersion: 10.6.0\n")
    (given / "libnvinfer.so.11.2.1").touch()
    environ = {"TENSORRT_ROOT": str(tmp_path / "given"), "LD_LIBRARY_PATH": f"/no/such:{given}"}
    found = find_tensorrt(tmp_path, environ, (str(tmp_path / "site"),))
    assert [(one.version, one.library.parent) for one in found] == [
        ("11.2.1", given),
        ("10.6.0", pip),
        ("10.15.1", system),
    ]


def test_json_is_all_there_is_on_stdout(capsys):
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"name", "text", "data", "problem", "fix"} == set(document["checks"][0])


def test_strict_exits_1_on_a_problem(monkeypatch, capsys):
    problem = doctor.Problem("the moon is full", "sudo wait")
    checks = [doctor.Check("moon", "full", {}, problem), doctor.Check("sun", "up", {})]
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    assert main(["doctor"]) == 0
    assert main(["doctor", "--strict"]) == 1
    assert "1 problem\n" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda: checks[1:])
    assert main(["doctor", "--strict"]) == 0
    assert "no problems\n" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_gpus_of_this_machine():
    driver = probe_driver()
    assert driver.error == ""
    for gpu in driver.gpus:
        assert gpu.name
        assert gpu.compute_capability >= (5, 0)
        assert 0 < (gpu.free_bytes or 1) <= gpu.total_bytes


def test_the_library_says_which_driver_it_needs():
    info, check = doctor.check_library()
    assert check.problem is None
    assert (f"driver {info['minimum_driver']} or newer" in check.text) == bool(info["cuda"])
