# SPDX-License-Identifier: Apache-2.0
"""Rows of host tables that GPUs keep: chosen by a file of counts, never another bit of the result,
and counted. What they keep beside them as they read is test_adaptive_rows.py's."""

import json

import numpy as np
import pytest
import reference
from command_line import only_line
from devices import Numpy, Torch, capture
from lookup_cases import every_form, formula_rows, look_up, some_ids, twin

from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import Tables, _native
from trtllm_engram.runtime.metrics import Metrics
from trtllm_engram.runtime.row_counts import COUNTS_DTYPE
from trtllm_engram.runtime.tables import describe_tables, to_toml

pytest_plugins = ["command_line_fixtures", "lookup_fixtures"]

ANY_PATH = pytest.mark.parametrize("path", list(_native.LookupPath), ids=lambda path: path.name)


def write_counts(path, rows, layer=1):
    """Of rows, the most read first."""
    counts = np.zeros(len(rows), COUNTS_DTYPE)
    counts["layer"], counts["row"] = layer, rows
    counts["count"] = np.arange(len(rows), 0, -1)
    np.save(path, counts)
    return path


@pytest.fixture
def bound(made_up_store, tmp_path):
    """Binds a table with hot rows under a name; the tables of all calls are freed at the end."""
    config, folder = made_up_store
    opened = []

    def bind(rows, **options):
        tables = Tables()
        opened.append(tables)
        counts = write_counts(tmp_path / f"{len(opened)}.npy", rows)
        options = {"formula_seed": 3, "gather_threads": 4, **options}
        tables.bind("hot", folder, layer=1, hot_rows=counts, **options)
        return tables

    yield config, bind
    for tables in opened:
        tables.close()


def half_of(config, ids):
    """Every other row that is asked for, the most of those that `some_ids` repeats too."""
    rows = np.unique(ids[ids >= 0])
    return np.random.default_rng(4).permutation(rows)[: rows.size // 2]


def test_described_before_any_gpu_has_them(bound):
    _, bind = bound
    about = bind(np.arange(1000)).describe()["hot"]
    hot = about["hot"]
    assert 980 <= hot["num_rows"] <= 1000
    assert hot["num_rows"] < hot["capacity"] <= 2008
    assert (hot["num_bytes"], about["disk"]) == (0, None)
    assert hot["adaptive_capacity"] == 0
    assert hot["asked"] == hot["found"] == hot["adaptive_found"] == {"2": 0, "3": 0, "4": 0}
    metrics = Metrics()
    metrics.note_tables({"hot": about})
    text = metrics.prometheus_text()
    assert 'engram_gpu_rows_total{table="hot",order="2"} 0' in text
    for part in ("static", "adaptive"):
        labels = f'{{table="hot",order="2",part="{part}"}}'
        assert f"engram_gpu_hot_rows_total{labels} 0" in text


@pytest.mark.parametrize("scales", ["with_rows", pytest.param("device", marks=pytest.mark.gpu)])
def test_no_more_than_the_budget(bound, scales):
    _, bind = bound
    row_bytes = 256 + (8 if scales == "with_rows" else 0)
    gib = 800 * (row_bytes + 4) / 2**30
    options = {"hot_gib": gib, "scales": scales}
    for share in (0, 0.25, 1):
        tables = bind(np.arange(5000), hot_adaptive=share, **options)
        hot = tables.describe()["hot"]["hot"]
        assert 0.8 * hot["capacity"] <= hot["num_rows"] <= hot["capacity"]
        taken = hot["capacity"] * (row_bytes + 4) + hot["adaptive_capacity"] * (row_bytes + 8)
        assert 0.98 * gib * 2**30 < taken <= gib * 2**30
        assert abs(hot["adaptive_capacity"] - share * 790) < 10
        tables.close()


def test_no_room(bound):
    _, bind = bound
    hot = bind(np.arange(9), hot_gib=0).describe()["hot"]["hot"]
    assert hot["capacity"] == hot["adaptive_capacity"] == 0


def test_lookups_on_the_cpu_take_none(bound):
    config, bind = bound
    ids = some_ids(config, 5, 130)
    tables = bind(half_of(config, ids))
    expected = reference.lookup(*formula_rows(config, ids))
    np.testing.assert_array_equal(Numpy().get(tables.lookup("hot", ids)), expected)
    assert tables.describe()["hot"]["hot"]["num_bytes"] == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"placement": "device"}, "hot_rows: expected with placement host, found device"),
        ({"placement": "disk"}, "hot_rows: expected with placement host, found disk"),
        ({"hot_gib": -1}, "hot_gib: expected GiB, 0 to 65536, found -1"),
        (
            {"hot_rows": None, "placement": "device", "hot_gib": 1},
            "hot_gib: expected with placement host or disk, found device",
        ),
        ({"hot_adaptive": 1.5}, "hot_adaptive: expected a share, 0 to 1, found 1.5"),
        ({"hot_rows": None, "hot_adaptive": 0.5}, "hot_adaptive: expected with hot_rows, without"),
        ({"hot_rows": "nowhere.npy"}, "nowhere.npy"),
    ],
    ids=str,
)
def test_refused(made_up_store, tmp_path, options, expected):
    _, folder = made_up_store
    given = {"hot_rows": write_counts(tmp_path / "counts.npy", [1]), "formula_seed": 3, **options}
    with Tables() as tables, pytest.raises(InputError, match=expected) as refused:
        tables.bind("hot", folder, layer=1, **given)
    only_line(str(refused.value))
    assert describe_tables() == {}


@pytest.mark.parametrize(
    ("rows", "layer", "expected"),
    [
        ([5, 2**31 - 1], 1, "layer 1: expected rows from 0 to [0-9]+, found 2147483647"),
        ([5], 14, "expected rows of layer 1, found none"),
    ],
)
def test_counts_of_another_store(made_up_store, tmp_path, rows, layer, expected):
    _, folder = made_up_store
    counts = write_counts(tmp_path / "counts.npy", rows, layer)
    with Tables() as tables, pytest.raises(InputError, match=f"table 'hot': .*{expected}"):
        tables.bind("hot", folder, layer=1, formula_seed=3, hot_rows=counts)


def test_a_keeper_has_no_gpu(made_up_store, tmp_path):
    _, folder = made_up_store
    counts = write_counts(tmp_path / "counts.npy", [1])
    table = {"store": folder, "layer": 1, "formula_seed": 3}
    for given in ({"hot_rows": counts}, {"hot_gib": 1}):
        toml = to_toml({"hot": {**table, **given}}, None)
        expected = f"{next(iter(given))}: expected of who binds with memory keeper"
        with pytest.raises(InputError, match=expected):
            _native.serve_tables(toml, str(tmp_path), "", "hot", "")


def test_from_counted_texts(run, files, tmp_path):
    """`tables count` writes what TOML and `run` take, and what `env --tables` looks at."""
    code, _, err = run("tables", "count", "store", "--text", "text", "--output", "hot.npy")
    assert (code, err) == (0, "")
    table = "store = 'store'\nlayer = 1\nhot_rows = 'hot.npy'\nhot_gib = 0.001\n"
    (files / "tables.toml").write_text(f"format_version = 1\n[tables.engram_1]\n{table}")
    with Tables.from_toml(files / "tables.toml") as tables:
        assert tables.describe()["engram_1"]["hot"]["num_rows"] > 0
    code, _, err = run("tables", "load", "store", "--hot-rows", "hot.npy", "--json")
    assert (code, err) == (0, "")
    words = ["store", "--device", "cpu", "--text", "text", "--output"]
    placed = ["--placement", "host", "--hot-rows", "hot.npy"]
    assert run("run", *words, tmp_path / "plain.safetensors")[0] == 0
    assert run("run", *words, tmp_path / "hot.safetensors", *placed)[0] == 0
    plain, hot = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("plain", "hot"))
    assert plain == hot
    (files / "hot.npy").write_bytes(b"none")
    code, _, err = run("env", "--tables", "tables.toml")
    assert code == 2
    assert "hot.npy: expected records of layer, row and count" in err


@pytest.mark.gpu
@every_form
@ANY_PATH
@pytest.mark.parametrize(
    ("scales", "adaptive"), [("with_rows", 0), ("device", 0), ("with_rows", 0.25)]
)
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 129, 1025, 9000])
def test_the_same_bits(bound, form, path, scales, adaptive, num_tokens):
    config, bind = bound
    ids = some_ids(config, num_tokens, num_tokens)
    tables = bind(half_of(config, ids), scales=scales, hot_adaptive=adaptive)
    device = Torch()

    def view():
        return _native.table_view("hot", 0)

    found = look_up(form, view, device.put(ids), path)
    for actual, wanted in zip(found, twin(form, *formula_rows(config, ids)), strict=True):
        np.testing.assert_array_equal(device.get(actual), wanted)
    counted = tables.describe()["hot"]["hot"]
    assert sum(counted["asked"].values()) == np.count_nonzero(ids >= 0)
    assert 0 < sum(counted["found"].values()) < np.count_nonzero(ids >= 0)


@pytest.mark.gpu
@every_form
@ANY_PATH
def test_from_a_row_on(bound, form, path):
    """Where the table begins with row 7, as a rank's of heads = true may, ids are still all's."""
    config, bind = bound
    ids = some_ids(config, 8, 700)
    ids[:50] = np.arange(50)[:, None] % 20
    tables = bind(half_of(config, ids))
    device = Torch()

    def view():
        args = _native.table_view("hot", 0)
        args.first_row, args.num_rows = 7, args.num_rows - 7
        args.values += 7 * 256
        args.scales += 7 * 8
        return args

    found = look_up(form, view, device.put(ids), path)
    kept = np.where((ids >= 0) & (ids < 7), -1, ids)
    for actual, wanted in zip(found, twin(form, *formula_rows(config, kept)), strict=True):
        np.testing.assert_array_equal(device.get(actual), wanted)
    assert sum(tables.describe()["hot"]["hot"]["found"].values()) > 0


@pytest.mark.gpu
@ANY_PATH
def test_all_rows_hot_and_none(bound, path):
    config, bind = bound
    ids = some_ids(config, 3, 1500)
    device = Torch()
    for rows, share in ((np.unique(ids[ids >= 0]), 1), (np.array([7, 8]), 0)):
        tables = bind(rows)
        (found,) = look_up("bf16", lambda: _native.table_view("hot", 0), device.put(ids), path)
        expected = reference.lookup(*formula_rows(config, ids))
        np.testing.assert_array_equal(device.get(found), expected)
        counted = tables.describe()["hot"]["hot"]
        found_share = sum(counted["found"].values()) / sum(counted["asked"].values())
        assert abs(found_share - share) < 0.05
        tables.close()


@pytest.mark.gpu
@ANY_PATH
def test_they_come_out_of_gpu_memory(bound, path):
    """Other bytes in the place of the hot rows, and of no other, are in the result."""
    import torch

    config, bind = bound
    ids = some_ids(config, 6, 700)
    hot = np.sort(half_of(config, ids))
    bind(hot)
    device = Torch()
    args = _native.table_view("hot", 0)
    num_slots = args.hot.num_buckets * 8
    keys = torch.empty(num_slots, dtype=torch.int32, device="cuda")
    values = torch.full((num_slots, 256), 0x11, dtype=torch.uint8, device="cuda")
    cuda_copy(keys, args.hot.keys)
    args.hot.values = values.data_ptr()
    (found,) = look_up("packed", lambda: args, device.put(ids), path)
    rows = device.get(found).reshape(*ids.shape, 264)
    kept = keys.cpu().numpy()
    is_hot = np.isin(ids, kept[kept >= 0])
    assert is_hot.any()
    assert (rows[is_hot][:, :256] == 0x11).all()
    (expected,) = twin("packed", *formula_rows(config, ids))
    expected = expected.reshape(*ids.shape, 264)
    np.testing.assert_array_equal(rows[~is_hot], expected[~is_hot])
    np.testing.assert_array_equal(rows[..., 256:], expected[..., 256:])


def cuda_copy(to, address):
    from trtllm_engram.runtime.device_array import constant, cuda

    kind = constant("cudaMemcpyKind.cudaMemcpyDeviceToDevice")
    cuda("cudaMemcpy", to.data_ptr(), address, to.nbytes, kind)


@pytest.mark.gpu
def test_a_thousand_replays(bound):
    """A captured lookup follows the ids of the moment, whichever of their rows are hot."""
    import torch

    config, bind = bound
    device = Torch()
    few = [some_ids(config, seed) for seed in range(20)]
    tables = bind(half_of(config, np.concatenate(few)))
    few = [device.put(ids) for ids in few]
    ids = few[0].clone()
    out = torch.empty((len(ids), config.row_dim), dtype=torch.bfloat16, device="cuda")
    graph = capture(lambda: tables.lookup("hot", ids, out=out))
    expected = []
    for given in few:
        rows = reference.lookup(*formula_rows(config, given.cpu().numpy()))
        expected.append(device.put(rows).view(torch.int16))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        ids.copy_(few[turn % len(few)])
        graph.replay()
        wrong += (out.view(torch.int16) != expected[turn % len(few)]).sum()
        if turn % 100 == 0:
            json.dumps(tables.describe())  # counts are read while graphs run
    assert wrong.item() == 0
