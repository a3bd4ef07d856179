# SPDX-License-Identifier: Apache-2.0
"""Which device commands run on, and what they say where a GPU cannot be used."""

from __future__ import annotations

import pytest

from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import devices
from trtllm_engram.runtime.gpus import Driver, Gpu

GPU = Gpu(0, "NVIDIA H200", (9, 0), 132, 150 << 30, None, "0000:01:00.0")
OLD_DRIVER = Driver("535.104.05", (12, 2), (GPU,))


@pytest.fixture
def machine(monkeypatch):
    """Sets what the driver and the library say."""

    def pretend(driver, cuda="13.0.88"):
        info = {"cuda": cuda, "minimum_driver": "580.0"}
        monkeypatch.setattr(devices, "probe_driver", lambda: driver)
        monkeypatch.setattr(devices._native, "build_info", lambda: info)
        monkeypatch.setattr(devices.importlib.util, "find_spec", lambda _name: "there")

    return pretend


def test_a_gpu_where_one_can_be_used(machine):
    machine(Driver("580.95.05", (13, 0), (GPU,)))
    assert devices.choose_device("auto") == "cuda:0"
    assert devices.choose_device("cuda:0") == "cuda:0"
    assert devices.choose_device("cpu") == "cpu"


def test_a_gpu_that_is_not_there(machine):
    machine(Driver("580.95.05", (13, 0), (GPU,)))
    with pytest.raises(InputError, match=r"^device: expected cuda:N below cuda:1, found 'cuda:1'$"):
        devices.choose_device("cuda:1")


@pytest.mark.parametrize(
    ("driver", "cuda", "why"),
    [
        (Driver("", (0, 0), (), "no CUDA driver"), "13.0.88", "no CUDA driver"),
        (Driver("580.95.05", (13, 0), ()), "13.0.88", "the driver shows no GPU"),
        (Driver("580.95.05", (13, 0), (GPU,)), "", "the library is a CPU-only build"),
        (
            OLD_DRIVER,
            "13.0.88",
            "the library needs driver 580.0 or newer, found 535.104.05 for CUDA 12.2",
        ),
    ],
    ids=["no driver", "no GPU", "CPU build", "old driver"],
)
def test_why_not(machine, driver, cuda, why):
    machine(driver, cuda)
    assert devices.choose_device("auto") == "cpu"
    with pytest.raises(EngramError, match=f"^cuda:0: expected a usable GPU: {why}$"):
        devices.choose_device("cuda:0")
    assert devices.num_gpus() == 0


def test_gpus_are_the_librarys_without_the_package_too(machine, monkeypatch):
    machine(Driver("580.95.05", (13, 0), (GPU,)))
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda _name: None)
    assert devices.why_no_gpu().startswith("cuda-bindings is missing: ")
    assert devices.num_gpus() == 1


def test_a_library_of_cuda_12_takes_an_older_driver(machine):
    machine(OLD_DRIVER, cuda="12.8.93")
    assert devices.choose_device("auto") == "cuda:0"


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0 "])
def test_no_device(device):
    with pytest.raises(InputError, match=r"^device: expected cpu or cuda:N, found "):
        devices.choose_device(device)
