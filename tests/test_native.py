# SPDX-License-Identifier: Apache-2.0
"""The ctypes binding: it says what engram.h says, loads late, and turns statuses into errors."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trtllm_engram import plugins
from trtllm_engram.builder import config
from trtllm_engram.plugins import registration
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import _native, row
from trtllm_engram.runtime.arrays import aligned_empty

HEADER = Path(__file__).parents[1] / "cpp" / "include" / "engram" / "engram.h"
CTYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "engram_status": ctypes.c_int32,
    "engram_log_function": _native.LogFunction,
}
STRUCTS = {
    "engram_exec": _native.Exec,
    "engram_hash_args": _native.HashArgs,
    "engram_history_args": _native.HistoryArgs,
    "engram_adaptive_rows": _native.AdaptiveRows,
    "engram_hot_rows": _native.HotRows,
    "engram_lookup_args": _native.LookupArgs,
    "engram_stage_args": _native.StageArgs,
    "engram_project_args": _native.ProjectArgs,
    "engram_gate_args": _native.GateArgs,
}
ENUMS = {
    "engram_status": _native.Status,
    "engram_dtype": _native.Dtype,
    "engram_row_form": _native.RowForm,
    "engram_lookup_path": _native.LookupPath,
    "engram_project_kernel": _native.ProjectKernel,
    "engram_weight_layout": _native.WeightLayout,
}


def header():
    """Without comments, on one line."""
    return " ".join(re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL).split())


def test_every_struct_is_bound():
    assert set(re.findall(r"typedef struct (\w+)", header())) == set(STRUCTS)
    assert set(re.findall(r"typedef enum (\w+)", header())) == set(ENUMS)


@pytest.mark.parametrize(("name", "struct"), STRUCTS.items(), ids=STRUCTS.keys())
def test_struct(name, struct):
    body = re.search(rf"typedef struct {name} \{{(.*?)\}}", header())[1]
    fields = [
        (field, ctypes.c_void_p if star else STRUCTS.get(kind) or CTYPES[kind])
        for kind, star, field in re.findall(r"(?:const )?(\w+)(\*?) (\w+);", body)
    ]
    assert struct._fields_ == fields


@pytest.mark.parametrize(("name", "enum"), ENUMS.items(), ids=ENUMS.keys())
def test_enum(name, enum):
    body = re.search(rf"typedef enum {name} \{{(.*?)\}}", header())[1]
    members = {key: int(value) for key, value in re.findall(r"ENGRAM_(\w+) = (\d+)", body)}
    ours = {member.name: member.value for member in enum}
    prefix = {
        _native.RowForm: "ROWS_",
        _native.LookupPath: "LOOKUP_",
        _native.ProjectKernel: "PROJECT_",
        _native.WeightLayout: "WEIGHT_",
    }.get(enum, "")
    ours = {prefix + key: value for key, value in ours.items()}
    assert ours == members


@pytest.mark.parametrize("name", _native._SYMBOLS)
def test_symbol(name):
    """Result and argument types are those of the prototype; arrays are plain addresses."""
    result, arguments = re.search(rf"ENGRAM_API ([\w ]+\*?) {name}\((.*?)\);", header()).groups()
    types = [ctypes_of(argument) for argument in arguments.split(", ") if argument != "void"]
    assert _native._SYMBOLS[name] == (ctypes_of(result + " "), types)


def ctypes_of(declaration):
    kind, star = re.match(r"(?:const )?(\w+)(\*?) ", declaration).groups()
    if kind == "char":
        return ctypes.c_char_p
    if kind in STRUCTS:
        return ctypes.POINTER(STRUCTS[kind])
    if star and not declaration.startswith("const") and kind in CTYPES:
        return ctypes.POINTER(CTYPES[kind])
    return ctypes.c_void_p if star else CTYPES[kind]


def test_abi_number():
    number = int(re.search(r"#define ENGRAM_ABI_VERSION (\d+)", header())[1])
    assert number == plugins.ABI_VERSION == _native.load().engram_abi_version()


def test_the_row_format_is_one():
    """The headers' constants have twins in builder, and in runtime, whose ops import no builder."""
    row_h = (HEADER.parent / "row.h").read_text(encoding="utf-8")
    number = int(re.search(r"kScaleBlock = (\d+);", row_h)[1])
    assert number == config.SCALE_BLOCK == row.SCALE_BLOCK
    layout_h = (HEADER.parent / "layout.h").read_text(encoding="utf-8")
    assert int(re.search(r"kMaxNgramSize = (\d+);", layout_h)[1]) == config._MAX_NGRAM_SIZE


def test_build_info():
    info = _native.build_info()
    assert info["abi"] == plugins.ABI_VERSION
    assert set(info) >= {"version", "git", "compiler", "cuda", "architectures", "minimum_driver"}


def test_read_blocks():
    """The bench's ceiling reads all it is told to: the checksum follows a change of any block."""
    blocks = np.zeros((16, 256), np.uint8)
    ids = np.arange(16, dtype=np.int64)[::-1].copy()

    def read():
        return _native.read_blocks(blocks.ctypes.data, ids.ctypes.data, 16, 256)

    zeros = read()
    blocks[5, 77] = 1
    assert read() != zeros
    with pytest.raises(InputError, match="block_bytes: expected 1 or more, got 0"):
        _native.read_blocks(blocks.ctypes.data, ids.ctypes.data, 16, 0)


def test_read_blocks_that_write():
    """As many whole lines as the blocks' bytes take, on every thread, and none beyond them."""
    num_blocks, bytes_per_block = 10_000, 264
    blocks = np.ones((4, 8), np.uint8)
    ids = np.arange(num_blocks, dtype=np.int64) % 4
    num_bytes = num_blocks * bytes_per_block // 64 * 64
    out = aligned_empty(num_bytes + 64, np.uint8)
    out[:] = 0

    def read(out):
        return _native.read_blocks(
            blocks.ctypes.data, ids.ctypes.data, num_blocks, 8, out, bytes_per_block
        )

    assert read(out.ctypes.data) == _native.read_blocks(
        blocks.ctypes.data, ids.ctypes.data, num_blocks, 8
    )
    assert out[:num_bytes].view(np.int64).all()
    assert not out[num_bytes:].any()
    with pytest.raises(InputError, match="out: expected an address aligned to 64 bytes"):
        read(out.ctypes.data + 8)
    with pytest.raises(InputError, match="out: expected an array, got NULL"):
        read(0)


STATUS_ERRORS = [
    (status, InputError if status == _native.Status.INVALID_ARGUMENT else EngramError)
    for status in _native.Status
    if status != _native.Status.OK
]


@pytest.mark.parametrize(("status", "error"), STATUS_ERRORS, ids=lambda x: getattr(x, "name", ""))
def test_status_becomes_error(status, error):
    library = SimpleNamespace(engram_last_error=lambda: b"what happened")
    with pytest.raises(error, match=r"^op: what happened$"):
        _native._check(library, "op", status)


def test_cpu_build_refuses_gpu():
    if _native.build_info()["cuda"]:
        pytest.skip("the library is built with CUDA: it may find a GPU")
    with pytest.raises(EngramError, match=r"^cuda:0: "):
        _native.device_fault(0)


def test_missing_library(monkeypatch, tmp_path):
    """Its text says how to build it."""
    monkeypatch.setattr(plugins, "__file__", str(tmp_path / "__init__.py"))
    path = re.escape(str(tmp_path / "libtrtllm_engram.so"))
    with pytest.raises(EngramError, match=rf"^{path}: .* build it with `make`"):
        plugins.library_path()


def test_not_a_library(tmp_path):
    path = tmp_path / "libtrtllm_engram.so"
    path.write_text("not ELF")
    with pytest.raises(EngramError, match=rf"^{re.escape(str(path))}: cannot be loaded: "):
        _native._open(str(path))


def test_other_library():
    """Some library that is not ours."""
    with pytest.raises(EngramError, match=r"^libc\.so\.6: cannot be loaded: .*engram_abi_version"):
        _native._open("libc.so.6")


class OtherAbi:
    def __init__(self, _path):
        def engram_abi_version():
            return 7

        self.engram_abi_version = engram_abi_version


def test_other_abi(monkeypatch):
    monkeypatch.setattr(_native.ctypes, "CDLL", OtherAbi)
    with pytest.raises(
        EngramError, match=rf"^lib: expected ABI {plugins.ABI_VERSION}, found ABI 7: "
    ):
        _native._open("lib")
    monkeypatch.setattr(registration, "library_path", lambda: "lib")
    with pytest.raises(EngramError, match=r"^lib: expected ABI \d+, found ABI 7: "):
        registration._library.__wrapped__()


def test_missing_symbol(monkeypatch):
    class Truncated(OtherAbi):
        def __init__(self, path):
            super().__init__(path)
            self.engram_abi_version = lambda: plugins.ABI_VERSION

    monkeypatch.setattr(_native.ctypes, "CDLL", Truncated)
    text = (
        "lib: expected the symbol engram_hash, found none: "
        "the library is older than the sources: make build"
    )
    with pytest.raises(EngramError, match=f"^{text}$"):
        _native._open("lib")


LATE = """
import sys
from trtllm_engram.runtime import ops
maps = open("/proc/self/maps").read()
assert "libtrtllm_engram" not in maps, "loaded by an import"
import numpy as np
byte = np.zeros((1, 1), np.uint8)
ops.lookup(np.zeros((1, 32), np.uint8), byte, byte.astype(np.int32))
assert "libtrtllm_engram" in open("/proc/self/maps").read()
found = {"torch", "cuda", "tensorrt"} & set(sys.modules)
assert not found, found
"""


def test_imports_load_nothing():
    """Neither the library before it is needed, nor torch, cuda-python or TensorRT at all."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", LATE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
