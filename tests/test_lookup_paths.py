# SPDX-License-Identifier: Apache-2.0
"""The paths of a lookup on a GPU: all give the rows of the definition, bit for bit."""

import generators
import numpy as np
import pytest
import reference
from devices import DeviceArrays, Numpy, Torch, capture
from lookup_cases import every_form, formula_rows, look_up, some_ids, twin

from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import Tables, _native

pytest_plugins = "lookup_fixtures"

# Of the fixture host_table.
HOST_TABLES = ["with_rows", "device", "with_rows, gathered", "device, gathered"]
# Around a block's sizes, a run's pieces and a scale tile.
TOKENS = [1, 2, 31, 33, 127, 129, 511, 512, 513, 1024, 1025, 8192, 8193]


def table_of(values, scales, first_row=0):
    """A table in the memory of tensors, which the result keeps."""

    def view():
        return _native.LookupArgs(
            values=values.data_ptr(),
            scales=scales.data_ptr(),
            first_row=first_row,
            num_rows=values.shape[0],
            head_dim=values.shape[1],
        )

    return view


def check(form, values, scales, ids, first_row=0, **how):
    device = Torch()
    table = table_of(device.put(values), device.put(scales), first_row)
    found = look_up(form, table, device.put(ids), **how)
    for actual, wanted in zip(found, twin(form, values, scales, ids, first_row), strict=True):
        np.testing.assert_array_equal(device.get(actual), wanted)


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_token_counts(form, num_tokens):
    values, scales = generators.table(1013)
    ids = generators.row_ids(np.random.default_rng(num_tokens), num_tokens, 3, 1013)
    check(form, values, scales, ids)


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256, 512], ids="D{}".format)
@pytest.mark.parametrize("num_columns", [1, 5, 24], ids="C{}".format)
def test_row_sizes(form, head_dim, num_columns):
    values, scales = generators.table(211, head_dim)
    ids = generators.row_ids(np.random.default_rng(head_dim), 300, num_columns, 211)
    check(form, values, scales, ids)


IDS = {
    "none": np.full((700, 2), -1),
    "all_equal": np.full((700, 2), 70),
    "one_row_once": np.where(np.arange(1400).reshape(700, 2) == 801, 70, -1),
    "ends_of_the_table": np.tile([[0, 100], [100, 0]], (350, 1)),
    "ends_of_int32": np.tile([[2**31 - 1, -(2**31)], [101, -1]], (350, 1)),
    "rising": np.arange(1400).reshape(700, 2) % 101,
    "falling": 100 - np.arange(1400).reshape(700, 2) % 101,
}


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_ids(form, ids):
    values, scales = generators.table(101)
    check(form, values, scales, ids.astype(np.int32))
    check(form, values, scales, ids.astype(np.int32), first_row=7)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 3, 132, 1000])
def test_blocks(blocks):
    values, scales = generators.table(1013)
    ids = generators.row_ids(np.random.default_rng(blocks), 1000, 24, 1013)
    check("bf16", values, scales, ids, blocks=blocks)


@pytest.mark.gpu
def test_no_tokens():
    values, scales = generators.table(7)
    check("bf16", values, scales, np.zeros((0, 24), np.int32))


@pytest.mark.gpu
def test_far_rows():
    """Rows past offsets of 2 and 4 GiB, in a table of more than 2^32 bytes."""
    import torch

    num_rows = 2**24 + 5
    values = torch.zeros((num_rows, 256), dtype=torch.uint8, device="cuda")
    scales = torch.zeros((num_rows, 8), dtype=torch.uint8, device="cuda")
    near_values, near_scales = map(Torch().put, generators.table(3))
    rows = [2**23, 2**24 + 3, num_rows - 1]
    values[rows], scales[rows] = near_values, near_scales
    ids = np.array([rows, rows[::-1], [-1, 0, num_rows]], np.int32)
    (found,) = look_up("packed", table_of(values, scales), Torch().put(ids))
    near_ids = np.array([[0, 1, 2], [2, 1, 0]], np.int32)
    expected = reference.lookup_packed(*generators.table(3), near_ids)
    np.testing.assert_array_equal(Torch().get(found)[:2], expected)
    assert not found[2].any()


@pytest.mark.gpu
def test_ids_of_one_layer():
    values, scales = generators.table(101)
    device = Torch()
    ids = generators.row_ids(np.random.default_rng(2), 300, 3 * 5, 101).reshape(300, 3, 5)
    table = table_of(device.put(values), device.put(scales))
    (found,) = look_up("bf16", table, device.put(ids)[:, 1])
    np.testing.assert_array_equal(device.get(found), reference.lookup(values, scales, ids[:, 1]))


def by_name(tables, form, name, ids):
    if form == "bf16":
        return [tables.lookup(name, ids)]
    if form == "packed":
        return [tables.lookup_packed(name, ids)]
    return list(tables.lookup_mxfp8(name, ids, scale_order=form))


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("name", HOST_TABLES)
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 256, 511, 512, 1024, 9000])
@pytest.mark.parametrize("device", [Torch(), DeviceArrays()], ids=["torch", "device_array"])
def test_a_table_in_host_memory(host_table, form, name, num_tokens, device):
    config, tables = host_table
    ids = some_ids(config, num_tokens, num_tokens)
    found = by_name(tables, form, name, device.put(ids))
    for actual, wanted in zip(found, twin(form, *formula_rows(config, ids)), strict=True):
        np.testing.assert_array_equal(device.get(actual), wanted)


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("name", HOST_TABLES[2:])
@pytest.mark.parametrize("num_tokens", [1, 31, 129, 255, 1025, 8193, 20000])
def test_gathered_rows(host_table, form, name, num_tokens):
    """By threads of the CPU, also of few tokens, which AUTO has the GPU read."""
    config, _ = host_table
    ids = some_ids(config, num_tokens + 1, num_tokens)
    view = _native.table_view(name, 0)
    gathered = _native.LookupPath.GATHERED
    found = look_up(form, lambda: view, Torch().put(ids), gathered, blocks=3)
    for actual, wanted in zip(found, twin(form, *formula_rows(config, ids)), strict=True):
        np.testing.assert_array_equal(Torch().get(actual), wanted)


@pytest.mark.gpu
def test_no_lanes_to_gather_by(host_table):
    view = _native.table_view("device", 0)
    ids = Torch().put(np.zeros((300, 24), np.int32))
    with pytest.raises(InputError, match="lanes: expected an array, got NULL"):
        look_up("bf16", lambda: view, ids, _native.LookupPath.GATHERED)


@pytest.mark.gpu
def test_a_graph_keeps_the_table_that_it_gathers_from(made_up_store):
    import torch

    config, folder = made_up_store
    device = Torch()
    ids = device.put(some_ids(config, 1))
    out = torch.empty((len(ids), config.row_dim), dtype=torch.bfloat16, device="cuda")
    with Tables() as tables:
        tables.bind("left", folder, layer=1, gather_threads=2, formula_seed=3)
        graph = capture(lambda: tables.lookup("left", ids, out=out))
    for seed in (2, 3):
        wanted = some_ids(config, seed)
        ids.copy_(device.put(wanted))
        graph.replay()
        expected = reference.lookup(*formula_rows(config, wanted))
        np.testing.assert_array_equal(device.get(out), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["device", "device, gathered"])
def test_a_thousand_replays(host_table, name):
    """A captured lookup follows the ids of the moment, however often their runs change."""
    import torch

    config, tables = host_table
    device = Torch()
    ids = device.put(some_ids(config, 0))
    out = torch.empty((len(ids), config.row_dim), dtype=torch.bfloat16, device="cuda")
    direct = torch.empty_like(out)
    graph = capture(lambda: tables.lookup(name, ids, out=out))

    def view():
        return _native.table_view("device", 0)

    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    few = [device.put(some_ids(config, seed)) for seed in range(20)]
    for turn in range(1000):
        ids.copy_(torch.roll(few[turn % len(few)], turn, 0))
        graph.replay()
        look_up("bf16", view, ids, _native.LookupPath.DIRECT, out=direct)
        wrong += (out.view(torch.int16) != direct.view(torch.int16)).sum()
    assert wrong.item() == 0
    last = ids.cpu().numpy()
    np.testing.assert_array_equal(device.get(out), reference.lookup(*formula_rows(config, last)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["device", "device, gathered"])
def test_two_streams(host_table, name):
    """Lookups that overlap have workspaces of their own."""
    import torch

    config, tables = host_table
    device = Torch()
    streams = [torch.cuda.Stream() for _ in range(2)]
    ids = [some_ids(config, seed, 2000) for seed in (11, 12)]
    given = [device.put(array) for array in ids]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, array in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(tables.lookup(name, array))
    torch.cuda.synchronize()
    expected = [device.put(reference.lookup(*formula_rows(config, array))) for array in ids]
    for turn, rows in enumerate(found):
        assert torch.equal(rows.view(torch.int16), expected[turn % 2].view(torch.int16))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"placement": "device"}, "gather_threads: expected with placement host, found device"),
        ({"placement": "disk"}, "gather_threads: expected with placement host, found disk"),
        ({"gather_threads": -1}, "gather_threads: expected 0 to 1024, found -1"),
        ({"gather_threads": 1025}, "gather_threads: expected 0 to 1024, found 1025"),
    ],
    ids=str,
)
def test_threads_that_are_refused(made_up_store, options, expected):
    _, folder = made_up_store
    with Tables() as tables, pytest.raises(InputError, match=expected):
        tables.bind("some", folder, layer=1, **{"gather_threads": 2, **options})


@every_form
def test_on_the_cpu(host_table, form):
    config, tables = host_table
    ids = some_ids(config, 5, 130)
    found = by_name(tables, form, "with_rows", ids)
    for actual, wanted in zip(found, twin(form, *formula_rows(config, ids)), strict=True):
        np.testing.assert_array_equal(Numpy().get(actual), wanted)


def test_workspace_is_for_host_tables():
    args = _native.LookupArgs(
        ids_stride=24, num_rows=9, num_tokens=8192, num_columns=24, head_dim=256
    )
    assert _native.lookup_workspace(args) == 0
    args.values_in_host = 1
    assert _native.lookup_workspace(args) > 0
