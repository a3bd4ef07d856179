# SPDX-License-Identifier: Apache-2.0
"""Tables by name: the C++ registry through runtime.tables, the C ABI and TRTLLM_ENGRAM_TABLES."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import small_checkpoint
from table_files import HEAD, prepared_store, toml_file

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import _native
from trtllm_engram.runtime.store import open_store
from trtllm_engram.runtime.tables import Tables, describe_tables


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_store(tmp_path_factory.mktemp("tables"))


@pytest.fixture(autouse=True)
def nothing_left_bound():
    yield
    assert describe_tables() == {}


def test_bind_describe_unbind(store: Path) -> None:
    opened = open_store(store)
    with Tables() as tables:
        tables.bind("engram_1", store, layer=1)
        tables.bind("ünïcode name", str(store), layer=5)
        described = tables.describe()
        assert described["engram_1"] == {
            "store": str(store),
            "layer": 1,
            "fingerprint": opened.manifest.fingerprint,
            "content_id": opened.manifest.content_id,
            "num_rows": opened.config.num_embeddings[0],
            "first_column": 0,
            "num_columns": opened.config.num_columns,
            "head_dim": opened.config.head_dim,
            "placement": "host",
            "scales": "host",
            "memory": "memfd",
            "pages": "auto",
            "numa": "default",
            "num_bytes": opened.config.num_embeddings[0] * opened.config.head_dim * 33 // 32,
            "huge_bytes": 0,  # of less than one such page
            "rank": 0,
            "size": 1,
            "keeper": None,
            "since": pytest.approx(time.time(), abs=60),
            "load_seconds": pytest.approx(0, abs=60),
            "registered_seconds": None,  # until a GPU asks
            "disk": None,
            "hot": None,
        }
        assert described["ünïcode name"]["layer"] == 5
        tables.unbind("engram_1")
        assert list(describe_tables()) == ["ünïcode name"]


def test_file_with_relative_paths(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = HEAD + "".join(
        f'[tables.engram_{layer}]\nstore = "{os.path.relpath(store, tmp_path)}"\nlayer = {layer}\n'
        for layer in (1, 5)
    )
    path = toml_file(tmp_path, text)
    monkeypatch.chdir("/")
    with Tables.from_toml(path) as tables:
        assert {name: table["layer"] for name, table in tables.describe().items()} == {
            "engram_1": 1,
            "engram_5": 5,
        }
        assert tables.describe()["engram_1"]["store"] == str(store)


def test_folder_that_is_no_utf8(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "store").symlink_to(store)
    path = toml_file(folder, HEAD + '[tables.engram_1]\nstore = "store"\nlayer = 1\n')
    with Tables.from_toml(path) as tables:
        assert tables.describe()["engram_1"]["store"] == str(tmp_path / "caf\ufffd" / "store")


def test_copied_store_moves(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "checkpoint")
    prepare(checkpoint, tmp_path / "store", copy=True)
    moved = (tmp_path / "store").rename(tmp_path / "moved")
    with Tables() as tables:
        tables.bind("engram_1", moved, layer=1)


def test_checkpoint_moves(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "checkpoint")
    prepare(checkpoint, tmp_path / "store")
    moved = checkpoint.rename(tmp_path / "moved")
    with Tables() as tables:
        with pytest.raises(InputError, match=r"checkpoint/.*: cannot read: No such file"):
            tables.bind("engram_1", tmp_path / "store", layer=1)
        tables.bind("engram_1", tmp_path / "store", layer=1, checkpoint=moved)


def test_a_bound_name_is_refused(store: Path) -> None:
    with Tables() as tables:
        tables.bind("engram_1", store, layer=1)
        with pytest.raises(
            InputError,
            match=r"table 'engram_1': expected a free name, found it bound to .* layer 1",
        ):
            tables.bind("engram_1", store, layer=5)


def test_all_names_or_none(store: Path, tmp_path: Path) -> None:
    text = HEAD + "".join(
        f'[tables.{name}]\nstore = "{store}"\nlayer = {layer}\n'
        for name, layer in (("a", 1), ("b", 2))
    )
    with pytest.raises(
        InputError, match=r"table 'b': .*expected a table of layer 2, found those of layers .1,5."
    ):
        Tables.from_toml(toml_file(tmp_path, text))
    assert describe_tables() == {}


def test_expect_content(store: Path) -> None:
    content = open_store(store).manifest.content_id
    with Tables() as tables:
        tables.bind("engram_1", store, layer=1, expect_content=content)
        with pytest.raises(
            InputError, match=f"expected tables with content id 00, found {content}"
        ):
            tables.bind("engram_5", store, layer=5, expect_content="00")


def test_environment_binds_at_the_first_look(store: Path, tmp_path: Path) -> None:
    path = toml_file(tmp_path, f'{HEAD}[tables.engram_1]\nstore = "{store}"\nlayer = 1\n')
    look = (
        "from trtllm_engram.runtime import _native\n"
        "assert _native.describe_tables() == {}\n"
        "try: _native.table_view('other', 0)\n"
        "except ValueError as error: print(error)\n"
        "print(*_native.describe_tables())\n"
    )
    environment = {**os.environ, "TRTLLM_ENGRAM_TABLES": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True
    )
    refusal = (
        "tables: table 'other': expected a bound name, found engram_1; "
        f"TRTLLM_ENGRAM_TABLES, {path}, does not name it"
    )
    assert done.stdout.splitlines() == [refusal, "engram_1"]


def test_view_needs_cuda(store: Path) -> None:
    with Tables() as tables:
        tables.bind("engram_1", store, layer=1)
        with pytest.raises(EngramError, match="CUDA"):
            _native.table_view("engram_1", 1 << 20)
    with pytest.raises(
        InputError, match=r"found no tables; bind it through trtllm_engram\.runtime"
    ):
        _native.table_view("engram_1", 0)
