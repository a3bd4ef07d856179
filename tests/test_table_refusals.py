# SPDX-License-Identifier: Apache-2.0
"""Files of tables, and stores, that are refused before anything is bound: what is wrong, where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import small_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from table_files import HEAD, prepared_store, toml_file

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import _native
from trtllm_engram.runtime.tables import Tables, describe_tables


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_store(tmp_path_factory.mktemp("tables"))


@pytest.fixture(autouse=True)
def nothing_left_bound():
    yield
    assert describe_tables() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "format_version: expected 1, found none"),
        ("format_version = 2", "format_version: expected 1, found 2"),
        ('format_version = "1"', "format_version: expected 1, found none"),
        (HEAD + "[table.a]", "found 'table'; did you mean 'tables'"),
        (HEAD + "tables = 1", "tables: expected .tables.NAME., found no table"),
        (HEAD + "tables.a = 1", "table 'a': expected a table of keys"),
        (HEAD + "[tables.a]\nlayer = 1", "table 'a': store: expected a folder, found none"),
        (
            HEAD + '[tables.a]\nstore = "s"',
            "table 'a': layer: expected the model's number of a layer, found none",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1.0',
            "layer: expected the model's number of a layer",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = -1',
            "layer: expected the model's number of a layer",
        ),
        (HEAD + "[tables.a]\nstore = 1\nlayer = 1", "store: expected text"),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nplacment = "host"',
            "found 'placment'; did you mean 'placement'",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nplacement = "gpu"',
            "placement: expected host, device, device_sharded or disk, found 'gpu'",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nmemory = "memdf"',
            "memory: expected memfd, shm, cumem, private or keeper, found 'memdf'",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nmemory = ""',
            "memory: expected memfd, shm, cumem, private or keeper, found ''",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nmemory = "keeper"\nplacement = "device"',
            "placement: expected host, which is where a keeper's memory is, found device",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\npages = "1g"',
            "pages: expected auto, 4k or 2m, found '1g'",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nnuma = "node:x"',
            "a': numa: expected .*node:x",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nverify = 1',
            "verify: expected true or false",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nformula_seed = -1',
            "formula_seed: expected an integer of 63 bits, found -1",
        ),
        (HEAD + "group = 1", "group: expected .group., found no table"),
        (HEAD + "[group]\nnmae = 'x'", "group: expected known keys, found 'nmae'; .*'name'"),
        (HEAD + "[group]\nrank = 0", "group: expected rank and size, or neither, found rank alone"),
        (HEAD + "[group]\nsize = 2", "found size alone"),
        (HEAD + "[group]\nrank = 2\nsize = 2", "rank: expected 0 to 1, found 2"),
        (HEAD + "[group]\nrank = 0\nsize = 0", "size: expected 1 to 4096 ranks, found 0"),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nmemory = "keeper"\nnuma = "local"',
            "numa: expected of memory that is allocated here, found it with memory keeper",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nmemory = "keeper"\npages = "4k"',
            "pages: expected of memory that is allocated here, found it with memory keeper",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nmemory = "keeper"\nverify = true',
            "verify: expected with bytes that are loaded from files, found it with memory keeper",
        ),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nformula_seed = 0\nverify = true',
            "verify: expected with bytes that are loaded from files, found it with formula_seed",
        ),
        (HEAD + "[group]\ntimeout_s = 0", "timeout_s: expected seconds, more than 0.*, found 0"),
        (HEAD + "[group]\ntimeout_s = nan", "timeout_s: expected seconds, more than 0"),
        (HEAD + "[group]\nassume_ram = 0.5", "assume_ram: expected bytes, found another value"),
        (
            HEAD + '[tables.a]\nstore = "s"\nlayer = 1\nscales = "host"',
            "scales: expected host with placement disk, found it with host",
        ),
        (HEAD + '[tables.a]\nstore = "s', "line 3: expected TOML: "),
        (HEAD + "[tables.a]\n[tables.a]", "line 3: expected TOML: "),
        (HEAD + '[tables.""]\nstore = "s"\nlayer = 1', "expected a name, found none"),
    ],
)
def test_bad_toml(tmp_path: Path, text: str, message: str) -> None:
    path = toml_file(tmp_path, text)
    with pytest.raises(InputError, match=message) as refused:
        Tables.from_toml(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_what_others_can_write_is_refused(store: Path, tmp_path: Path, mode: int) -> None:
    path = toml_file(tmp_path, HEAD)
    path.chmod(mode)
    with pytest.raises(InputError, match=rf"found mode {mode:o}; chmod go-w takes it away"):
        Tables.from_toml(path)
    before = store.stat().st_mode
    store.chmod(0o777)
    try:
        with pytest.raises(InputError, match="found mode 777"):
            Tables().bind("engram_1", store, layer=1)
    finally:
        store.chmod(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = toml_file(tmp_path, HEAD)
    os.chown(path, 65534, 65534)
    with pytest.raises(
        InputError, match=r"expected an owner that is this user .0. or root, found user 65534"
    ):
        Tables.from_toml(path)


@pytest.mark.parametrize("name", ["missing.toml", ".", "pipe"])
def test_no_such_file(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InputError, match=r"cannot read: No such file|expected a regular file"):
        Tables.from_toml(tmp_path / name)


def change_manifest(tmp_path: Path, change: Any) -> Path:
    prepare(small_checkpoint(tmp_path / "checkpoint"), tmp_path / "store", copy=True)
    path = tmp_path / "store" / "engram.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return tmp_path / "store"


def values_of(data: Any) -> Any:
    return data["layers"][0]["tensors"]["embed.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data.update(format_version=2, requires="0.9"),
            "expected at most 1, found 2: use trtllm-engram 0.9",
        ),
        (
            lambda data: data.update(format="other"),
            "format: expected 'trtllm-engram store', found 'other'",
        ),
        (lambda data: data.pop("fingerprint"), "fingerprint: expected text, found none"),
        (
            lambda data: data["config"].update(engram_head_dim=33),
            "engram_head_dim: expected a multiple of 32, found 33",
        ),
        (
            lambda data: data["config"].update(engram_head_dim=2**63),
            "engram_head_dim: expected at least 1, found 92233",
        ),
        (
            lambda data: values_of(data).update(file="../x"),
            "file: expected a relative name without '..', found '../x'",
        ),
        (lambda data: values_of(data).update(file="/x"), "file: expected a relative name"),
        (lambda data: values_of(data).update(file="a/../../x"), "file: expected a relative name"),
        (
            lambda data: values_of(data).update(offset=1),
            "offset: expected .* rows of 64 bytes inside",
        ),
        (
            lambda data: values_of(data).update(offset=2**63 - 1),
            "offset: expected .* rows of 64 bytes inside",
        ),
        (lambda data: values_of(data).update(offset=-1), "offset: expected at least 0, found -1"),
        (lambda data: values_of(data).update(dtype="U8"), "dtype: expected F8_E4M3, found U8"),
        (lambda data: values_of(data)["shape"].append(1), "shape: expected "),
        (lambda data: values_of(data).update(file_size=7), "offset: expected"),
        (
            lambda data: values_of(data).update(file_size=2**40),
            "changed since prepare: expected 1099511627776 bytes",
        ),
        (lambda data: values_of(data).update(root="disk"), "root: expected store"),
        (lambda data: data.update(layers=[]), "expected one entry per layer"),
        (lambda data: values_of(data).update(shape=[[1]]), "shape: .* found a nested array"),
    ],
)
def test_bad_manifest(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tables().bind("engram_1", change_manifest(tmp_path, change), layer=1)


def test_deep_json_is_told_in_a_line(tmp_path: Path) -> None:
    store = change_manifest(tmp_path, lambda data: None)
    path = store / "engram.json"
    path.write_text('{"format": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(InputError, match=r"format: expected text, found a nested array"):
        Tables().bind("engram_1", store, layer=1)


def test_a_pipe_is_no_table(tmp_path: Path) -> None:
    store = change_manifest(tmp_path, lambda data: values_of(data).update(file="pipe"))
    os.mkfifo(store / "pipe")
    with pytest.raises(InputError, match="pipe: expected a regular file"):
        Tables().bind("engram_1", store, layer=1)


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_toml_or_refused(content: bytes) -> None:
    status = _native.load().engram_table_bind(
        HEAD.encode() + content.replace(b"\0", b""), b".", b"fuzz"
    )
    if status == _native.Status.OK:
        for name in describe_tables():
            _native.unbind_table(name)
    else:
        assert status == _native.Status.INVALID_ARGUMENT


@given(data=st.data())
@settings(max_examples=200)
def test_spoilt_manifests_are_refused(store: Path, tmp_path: Path, data: st.DataObject) -> None:
    """A few bytes of engram.json replaced: a table or one line, never anything else."""
    content = bytearray((store / "engram.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "engram.json").write_bytes(content)
    tables = Tables()
    try:
        tables.bind("engram_1", tmp_path, layer=1)
    except InputError:
        pass
    finally:
        tables.close()
