# SPDX-License-Identifier: Apache-2.0
"""TensorRT's Python package: absent, broken, too old, or its bindings alone; what is said of it.
And the values that fields take."""

import importlib
import importlib.util
import sys

import numpy as np
import pytest

from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.plugins.registration import (
    TENSORRT_MODULES,
    field_arrays,
    import_tensorrt,
    plugin_fields,
)
from trtllm_engram.runtime import demo
from trtllm_engram.runtime.demo_engine import why_no_tensorrt

NO_LIBRARY = "libnvinfer.so.10: cannot open shared object file"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Makes a package of this name; no other TensorRT can be imported."""
    rest = [folder for folder in sys.path if "tensorrt" not in folder]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *rest])
    for name in TENSORRT_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def make(name, source):
        (tmp_path / f"{name}.py").write_text(source)

    yield make
    for name in TENSORRT_MODULES:
        sys.modules.pop(name, None)


def needs_absence():
    if any(map(importlib.util.find_spec, TENSORRT_MODULES)):
        pytest.skip("TensorRT's Python package is installed")


@pytest.mark.parametrize("name", TENSORRT_MODULES)
def test_either_name_will_do(packages, name):
    if name != TENSORRT_MODULES[0]:
        needs_absence()
    packages(name, "__version__ = '10.6.0'")
    assert import_tensorrt().__name__ == name
    assert why_no_tensorrt() == ""


def test_none(packages):
    needs_absence()
    with pytest.raises(EngramError, match=r"found none; pip install tensorrt$"):
        import_tensorrt()
    assert why_no_tensorrt() == "none is installed: pip install tensorrt"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"raise ImportError('{NO_LIBRARY}:\\n No such file')", f"{NO_LIBRARY}: No such file"),
        (f"raise OSError('{NO_LIBRARY}')", NO_LIBRARY),
        ("import no_such_module_of_tensorrts", "No module named 'no_such_module_of_tensorrts'"),
    ],
    ids=["ImportError", "OSError", "ModuleNotFoundError"],
)
def test_what_does_not_load_is_told_in_a_line(packages, source, found):
    packages("tensorrt", source)
    with pytest.raises(EngramError) as refused:
        import_tensorrt()
    assert str(refused.value) == (
        f"TensorRT: expected the Python package tensorrt to load, found: {found}"
    )
    assert why_no_tensorrt() == f"expected the Python package tensorrt to load, found: {found}"


def test_a_folder_of_that_name_is_no_package(packages, tmp_path):
    needs_absence()
    (tmp_path / "tensorrt").mkdir()
    with pytest.raises(EngramError, match=r"found none; pip install tensorrt$"):
        import_tensorrt()
    packages("tensorrt_bindings", "__version__ = '10.6.0'")
    importlib.invalidate_caches()
    assert import_tensorrt().__name__ == "tensorrt_bindings"


def test_too_old(packages):
    packages("tensorrt", "__version__ = '8.6.1'")
    with pytest.raises(EngramError, match=r"10 or newer, found 8\.6\.1$"):
        import_tensorrt()


@pytest.mark.parametrize(
    ("no_gpu", "no_engine", "expected"),
    [
        ("", "", {}),
        ("", "none is installed", {"TensorRT": "none is installed"}),
        (
            "no CUDA driver",
            "no CUDA driver",
            {"GPU": "no CUDA driver", "TensorRT": "an engine needs a usable GPU"},
        ),
    ],
)
def test_what_the_demo_says(no_gpu, no_engine, expected):
    assert demo._not_run(no_gpu, no_engine) == expected


@pytest.mark.parametrize("number", [1, True, np.int8(1), np.uint64(1)])
def test_whole_numbers_of_any_kind_are_taken(number):
    needs_plugins()
    arrays = field_arrays("EngramGate", {"eps": np.float32(0.5), "in_place": number})
    assert {name: (one.dtype.name, *one) for name, one in arrays.items()} == {
        "eps": ("float32", 0.5),
        "in_place": ("int32", 1),
    }


@pytest.mark.parametrize("number", [2**31, np.int64(-(2**31) - 1), 1.0, np.float32(1), "1"])
def test_other_numbers_are_refused(number):
    needs_plugins()
    with pytest.raises(InputError, match=r"^EngramGate: in_place: expected INT32, found "):
        field_arrays("EngramGate", {"eps": 1e-6, "in_place": number})


def test_no_text_is_cut():
    needs_plugins()
    names = {"table": "engram\0_1", "fingerprint": "0" * 64, "layer": 1}
    names |= {"layer_idx": 0, "head_dim": 64}
    with pytest.raises(InputError, match=r"^EngramLookup: table: expected no zero byte, found 'e"):
        field_arrays("EngramLookup", names)


def needs_plugins():
    if not plugin_fields():
        pytest.skip("a CPU-only library has no plugins")
