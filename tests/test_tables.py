# SPDX-License-Identifier: Apache-2.0
"""runtime.tables: names bound, described and freed; TOML files; what is refused."""

import inspect
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from checkout import ROOT
from devices import Torch
from engines import small_store

from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import Tables, _native, ops
from trtllm_engram.runtime.group import Group
from trtllm_engram.runtime.tables import describe_tables


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("tables"))


def toml(folder, text, mode=0o600):
    path = folder / "tables.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_bind_and_describe(store):
    with Tables() as tables:
        tables.bind("mine", store, layer=5, placement="host")
        assert tables.describe() == describe_tables()
        found = tables.describe()["mine"]
        assert found["load_seconds"] > 0
        assert abs(time.time() - found["since"]) < 600
        assert found["num_bytes"] >= store.config.num_embeddings[1] * (64 + 2)
        del found["load_seconds"], found["since"], found["num_bytes"], found["registered_seconds"]
        assert found == {
            "store": str(store.path),
            "layer": 5,
            "fingerprint": store.manifest.fingerprint,
            "content_id": store.manifest.content_id,
            "num_rows": store.config.num_embeddings[1],
            "first_column": 0,
            "num_columns": store.config.num_columns,
            "head_dim": store.config.head_dim,
            "placement": "host",
            "scales": "host",
            "memory": "memfd",
            "pages": "auto",
            "numa": "default",
            "huge_bytes": 0,
            "rank": 0,
            "size": 1,
            "keeper": None,
            "disk": None,
            "hot": None,
        }
    assert describe_tables() == {}
    assert tables.describe() == {}


def test_store_by_path(store, monkeypatch):
    """A relative one is relative to the working folder."""
    monkeypatch.chdir(store.path.parent)
    with Tables() as tables:
        tables.bind("mine", "store", layer=1)
        assert tables.describe()["mine"]["store"] == str(store.path)


@pytest.mark.parametrize("name", ['a "quoted" name', "Größe 表 \x7f\t\n\\", "a.b", "[x]", "'"])
def test_any_name(store, name):
    with Tables() as tables:
        tables.bind(name, store, layer=1)
        assert list(tables.describe()) == [name]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"layer": 2}, "layer"),
        ({"layer": 1, "placement": "hots"}, "placement: expected host, device, device_sharded or"),
        ({"layer": 1, "scales": "gpu"}, "scales: expected with_rows, device or host, found 'gpu'"),
        ({"layer": 1, "expect_content": "0" * 32}, "expected tables with content id 0000"),
        ({"layer": "1"}, "layer"),
        ({"layer": None}, "layer: expected text or a number, found None"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refused_options(store, options, expected):
    with Tables() as tables, pytest.raises(InputError, match=expected):
        tables.bind("mine", store, **options)
    assert describe_tables() == {}


def test_expected_content(store):
    with Tables() as tables:
        tables.bind("mine", store, layer=1, expect_content=store.manifest.content_id)


def test_names_are_taken_once(store):
    with Tables() as tables, Tables() as others:
        tables.bind("mine", store, layer=1)
        with pytest.raises(InputError, match="'mine': expected a free name, found it bound to"):
            others.bind("mine", store, layer=5)
        assert others.describe() == {}
        tables.unbind("mine")
        others.bind("mine", store, layer=5)
        assert tables.describe() == {}
        with pytest.raises(InputError, match="'mine': expected a name bound here, found none"):
            tables.unbind("mine")


def test_all_or_none(store):
    with Tables() as tables:
        tables.bind("engram_5", store, layer=5)
        with pytest.raises(InputError, match="engram_5"):
            Tables.of_store(store)
        assert list(describe_tables()) == ["engram_5"]


def test_close_twice(store):
    tables = Tables.of_store(store)
    assert list(tables.describe()) == ["engram_1", "engram_5"]
    tables.close()
    tables.close()
    assert describe_tables() == {}


def test_toml_file(store):
    """Paths are relative to the file, and only its own tables are the object's."""
    text = 'format_version = 1\n[tables.one]\nstore = "store"\nlayer = 1\n'
    with Tables() as before:
        before.bind("before", store, layer=5)
        with Tables.from_toml(toml(store.path.parent, text)) as tables:
            assert list(tables.describe()) == ["one"]
            assert tables.describe()["one"]["layer"] == 1
        assert list(describe_tables()) == ["before"]


def keys_of(section):
    """The keys that the parser knows in [tables.NAME] ("read_table") or [group] ("read_group")."""
    parser = (ROOT / "cpp/src/table/toml.cpp").read_text(encoding="utf-8")
    known = re.search(rf" {section}\(.*?\{{(\"[^}}]*)\}}", parser, re.DOTALL)
    return set(re.findall(r'"(\w+)"', known[1]))


def test_readme_lists_every_key():
    """As the parser has them, and each is an argument of Tables.bind."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([a-z_]+) = ", readme, re.MULTILINE))
    assert listed == keys_of("read_table")
    assert listed == inspect.signature(Tables.bind).parameters.keys() - {"self", "name"}


def test_readme_lists_every_key_of_a_group():
    """Each is an argument of Group."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^\[group\]\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    listed = set(re.findall(r"^(\w+) = ", block[1], re.MULTILINE))
    assert listed == keys_of("read_group")
    assert listed == inspect.signature(Group).parameters.keys()


def test_moved_checkpoint(store, tmp_path):
    """Where the store was opened elsewhere, its tables come from there too."""
    from trtllm_engram.runtime import open_store

    moved = tmp_path / "moved"
    (store.path.parent / "checkpoint").rename(moved)
    try:
        with Tables() as tables:
            with pytest.raises(InputError, match="checkpoint"):
                tables.bind("mine", store.path, layer=1)
            tables.bind("mine", open_store(store.path, moved), layer=1)
            tables.bind("too", store.path, layer=1, checkpoint=moved)
    finally:
        moved.rename(store.path.parent / "checkpoint")


def test_threads(store):
    """Files bound at the same time: each object has its own names."""
    found, folder = {}, store.path.parent

    def work(index):
        path = folder / f"{index}.toml"
        path.write_text(f'format_version = 1\n[tables.t{index}]\nstore = "store"\nlayer = 1\n')
        path.chmod(0o600)
        found[index] = Tables.from_toml(path)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {index: list(tables.describe()) for index, tables in found.items()} == {
        index: [f"t{index}"] for index in range(8)
    }
    for tables in found.values():
        tables.close()


def all_ids(store, layer):
    """Every row of a layer once, as tokens."""
    count = store.table(layer).values.shape[0] // store.config.num_columns
    return np.arange(count * store.config.num_columns, dtype=np.int32).reshape(count, -1)


@pytest.mark.parametrize("memory", ["memfd", "shm", "private"])
def test_lookup_reads_the_rows(store, memory):
    table, ids = store.table(5), all_ids(store, 5)
    expected = ops.lookup(table.values, table.scales, ids)
    with Tables() as tables:
        tables.bind("mine", store, layer=5, memory=memory, verify=True)
        found = tables.lookup("mine", ids)
        np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))
        out = np.empty_like(found)
        tables.lookup("mine", ids, out=out)
        np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
        with pytest.raises(InputError, match="'other': expected a name bound here, found mine"):
            tables.lookup("other", ids)
    with pytest.raises(InputError, match="expected a name bound here, found none"):
        tables.lookup("mine", ids)


@pytest.mark.gpu
def test_lookup_of_a_table_that_is_not_in_host_memory(store):
    with Tables() as tables:
        tables.bind("mine", store, layer=5, placement="device")
        with pytest.raises(InputError, match="expected a table in host memory"):
            tables.lookup("mine", all_ids(store, 5))


def test_formula(store):
    with Tables() as tables:
        tables.bind("mine", store, layer=5, formula_seed=9)
        ids = all_ids(store, 5)
        values, scales = row_bytes(store.config, 5, ids.ravel(), 9)
        expected = ops.lookup(values, scales, ids)
        found = tables.lookup("mine", ids)
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_several_at_once_or_none(store):
    """What bind_all takes is bind's, and one bad name leaves none."""
    good = {"store": store, "layer": 1, "memory": "private"}
    with Tables() as tables:
        tables.bind_all({"one": good, "five": {"store": store.path, "layer": 5}})
        assert {name: one["layer"] for name, one in describe_tables().items()} == {
            "one": 1,
            "five": 5,
        }
        with pytest.raises(InputError, match="layer"):
            tables.bind_all({"two": good, "bad": {"store": store, "layer": 2}})
        assert set(describe_tables()) == {"one", "five"}
    assert describe_tables() == {}


def test_progress(store):
    """Told as it goes, to the end; a call that is over at once may tell nothing."""
    told = []
    with Tables(progress=lambda done, total: told.append((done, total))) as tables:
        tables.bind("mine", store, layer=1)
    assert all(0 <= done <= total for done, total in told)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("scales", ["with_rows", "device"])
def test_view_reads_the_rows(store, placement, scales):
    """The view that the C ABI gives: every row as the store has it."""
    device = Torch()
    config, table = store.config, store.table(1)
    count = table.values.shape[0] // config.num_columns
    ids = np.arange(count * config.num_columns, dtype=np.int32).reshape(count, -1)
    with Tables() as tables:
        tables.bind("mine", store, layer=1, placement=placement, scales=scales)
        args = _native.table_view("mine", 0)
        assert (args.num_rows, args.num_columns) == (table.values.shape[0], config.num_columns)
        given, out = device.put(ids), device.put(np.zeros((count, config.row_dim), np.uint16))
        args.ids, args.out = given.data_ptr(), out.data_ptr()
        args.ids_stride, args.num_tokens = config.num_columns, count
        args.form = _native.RowForm.BF16
        _native.run("lookup", args, _native.Exec(device=0, num_threads=0, stream=None))
        found = device.get(out)
    expected = ops.lookup(table.values, table.scales, ids)
    np.testing.assert_array_equal(found, expected.view(np.uint16))


@pytest.mark.gpu
def test_a_thread_that_asks_for_a_gpu_keeps_its_context(store):
    """Here none; and a GPU that nobody chose has none either."""
    script = """if True:
        import sys
        from trtllm_engram.runtime import Tables, _native, gpus
        from trtllm_engram.runtime.device_array import cuda
        last = len(gpus.probe_driver().gpus) - 1
        with Tables() as tables:
            tables.bind("table", sys.argv[1], layer=5)
            _native.table_view("table", last)
            assert int(cuda("cuCtxGetCurrent")) == 0
        assert int(cuda("cuCtxGetCurrent")) == 0
        has_context = [cuda("cuDevicePrimaryCtxGetState", gpu)[1] for gpu in range(last + 1)]
        assert has_context == [0] * last + [1], has_context
        """
    subprocess.run([sys.executable, "-c", script, store.path], check=True)
