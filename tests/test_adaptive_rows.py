# SPDX-License-Identifier: Apache-2.0
"""Rows that a GPU keeps as lookups read them: whatever is there, or comes and goes meanwhile, the
result is the table's, bit for bit."""

import generators
import numpy as np
import pytest
import reference
from devices import Torch, capture
from lookup_cases import every_form, formula_rows, look_up, some_ids, twin

from trtllm_engram.runtime import Tables, _native

pytest_plugins = "lookup_fixtures"

PATHS = [_native.LookupPath.DIRECT, _native.LookupPath.SORTED]
every_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
WAYS = 4
LOCKED = -2  # key of a slot that is being written

_expected = {}  # of the same ids by all paths and parts


class AdaptiveTable:
    """A table in tensors, read as if it were in host memory, with an adaptive part alone."""

    def __init__(self, num_rows, num_buckets, head_dim=256, keeps_scales=True, first_row=0):
        import torch

        self.values, self.scales = generators.table(num_rows, head_dim)
        self.first_row = first_row
        self.table = [torch.tensor(array, device="cuda") for array in (self.values, self.scales)]
        num_slots = num_buckets * WAYS
        self.slots = torch.full((num_slots,), -1, dtype=torch.int64, device="cuda")
        self.kept = [
            torch.zeros((num_slots, array.shape[1]), dtype=torch.uint8, device="cuda")
            for array in self.table
        ]
        self.keeps_scales = keeps_scales
        self.counts = torch.zeros((64, 3), dtype=torch.int64, device="cuda")

    def view(self):
        values, scales = self.table
        args = _native.LookupArgs(
            values=values.data_ptr(),
            scales=scales.data_ptr(),
            first_row=self.first_row,
            num_rows=values.shape[0],
            head_dim=values.shape[1],
            values_in_host=1,
        )
        args.hot.counts = self.counts.data_ptr()
        args.hot.adaptive = _native.AdaptiveRows(
            slots=self.slots.data_ptr(),
            values=self.kept[0].data_ptr(),
            scales=self.kept[1].data_ptr() if self.keeps_scales else None,
            num_buckets=self.slots.shape[0] // WAYS,
        )
        return args

    def keys(self):
        """Row ids by slot; -1: none."""
        return self.slots.cpu().numpy().astype(np.int32)

    def check(self, form, ids, path):
        key = (form, ids.tobytes(), self.values.shape, self.first_row)
        if key not in _expected:
            _expected[key] = twin(form, self.values, self.scales, ids, self.first_row)
        device = Torch()
        found = look_up(form, self.view, device.put(ids), path)
        for actual, wanted in zip(found, _expected[key], strict=True):
            np.testing.assert_array_equal(device.get(actual), wanted)

    def check_kept(self):
        """What is there is the table's."""
        keys = self.keys()
        places = np.flatnonzero(keys != -1)
        assert (keys[places] >= self.first_row).all()
        rows = keys[places] - self.first_row
        for kept, table in zip(self.kept, (self.values, self.scales), strict=True):
            if table is self.scales and not self.keeps_scales:
                continue
            np.testing.assert_array_equal(kept.cpu().numpy()[places], table[rows])
        return places.size


def mixed_ids(seed, num_tokens, num_columns, num_rows):
    """Half of few rows, some of none, few lost."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, num_rows, (num_tokens, num_columns))
    kind = rng.random(ids.shape)
    few = np.where(kind < 0.5, ids % 50, ids)
    none = np.where(kind > 0.96, reference.LOST, -1)
    return np.where(kind < 0.9, few, none).astype(np.int32)


@pytest.mark.gpu
@every_form
@every_path
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 129, 1025, 9000])
@pytest.mark.parametrize("num_buckets", [1, 40, 5000])
def test_the_same_bits(form, path, num_tokens, num_buckets):
    """At first, when most is there, and when other rows come."""
    table = AdaptiveTable(3000, num_buckets)
    for seed in (1, 1, 2, 1):
        table.check(form, mixed_ids(seed, num_tokens, 3, 3000), path)
        assert table.check_kept() > 0


@pytest.mark.gpu
@every_form
@every_path
@pytest.mark.parametrize("head_dim", [32, 96, 512], ids="D{}".format)
@pytest.mark.parametrize("keeps_scales", [True, False], ids=["scales", "no_scales"])
def test_row_sizes(form, path, head_dim, keeps_scales):
    table = AdaptiveTable(1013, 100, head_dim, keeps_scales, first_row=7)
    for seed in (1, 1, 2):
        table.check(form, mixed_ids(seed, 300, 5, 1013), path)
        assert table.check_kept() > 0


IDS = {
    "none": np.full((700, 2), -1),
    "all_equal": np.full((700, 2), 70),
    "one_row_once": np.where(np.arange(1400).reshape(700, 2) == 801, 70, -1),
    "ends_of_the_table": np.tile([[0, 100], [100, 0]], (350, 1)),
    "ends_of_int32": np.tile([[2**31 - 1, -(2**31)], [101, -2]], (350, 1)),
    "rising": np.arange(1400).reshape(700, 2) % 101,
    "no_tokens": np.zeros((0, 2)),
}


@pytest.mark.gpu
@every_path
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_ids(path, ids):
    table = AdaptiveTable(101, 3)
    for _ in range(3):
        table.check("bf16", ids.astype(np.int32), path)
        table.check_kept()


@pytest.mark.gpu
@every_path
def test_what_was_read_is_found(path):
    """Each row once, and none twice, where there is room for all."""
    table = AdaptiveTable(1000, 20000)
    ids = np.random.default_rng(3).permutation(1000).astype(np.int32)[:960].reshape(320, 3)
    for turn in range(2):
        table.check("packed", ids, path)
        asked, fixed, adaptive = table.counts.sum(0).tolist()
        assert (asked, fixed) == (960 * (turn + 1), 0)
        keys = table.keys()
        kept = keys[keys != -1]
        assert kept.size == np.unique(kept).size
        if turn == 0:
            assert adaptive == 0
            assert np.isin(kept, ids).all()
            num_kept = kept.size
    assert adaptive == num_kept > 900  # who found another at work in its bucket kept nothing


@pytest.mark.gpu
@every_path
def test_they_come_out_of_gpu_memory(path):
    """Other bytes in the place of those that are kept are in the result."""
    table = AdaptiveTable(1000, 2000)
    ids = np.arange(900, dtype=np.int32).reshape(300, 3)
    table.check("packed", ids, path)
    table.kept[0].fill_(0x11)
    device = Torch()
    (found,) = look_up("packed", table.view, device.put(ids), path)
    rows = device.get(found).reshape(300, 3, 264)
    is_kept = np.isin(ids, table.keys())
    assert (rows[is_kept][:, :256] == 0x11).all()
    np.testing.assert_array_equal(rows[~is_kept][:, :256], table.values[ids[~is_kept]])
    np.testing.assert_array_equal(rows[..., 256:], table.scales[ids])


@pytest.mark.gpu
@every_path
def test_the_oldest_goes(path):
    """A bucket has the last rows that were read."""
    table = AdaptiveTable(100, 1)
    for row in range(20):
        table.check("bf16", np.array([[row]], np.int32), path)
    assert sorted(table.keys()) == [16, 17, 18, 19]


@pytest.mark.gpu
@every_path
def test_a_slot_that_nobody_unlocks(path):
    """As of a lookup that ended in the midst: no row is found there, and all are the table's."""
    table = AdaptiveTable(100, 2)
    ids = mixed_ids(1, 200, 2, 100)
    table.slots[0] = LOCKED & 0xFFFFFFFF
    for _ in range(2):
        table.check("bf16", ids, path)
    keys = table.keys()
    assert keys[:WAYS].tolist() == [LOCKED, -1, -1, -1]
    assert (keys[WAYS:] >= 0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_buckets", [1, 4, 64])
@pytest.mark.parametrize("paths", [PATHS, PATHS[::-1], PATHS[:1] * 2, PATHS[1:] * 2], ids=str)
def test_a_thousand_replays_of_two_streams(num_buckets, paths):
    """Both read and evict what the other one does, all the while."""
    import torch

    table = AdaptiveTable(2000, num_buckets)
    rows = torch.cat([*table.table], dim=1)
    rows = torch.cat([rows, torch.zeros_like(rows[:1])])  # of id -1
    rng = np.random.default_rng(num_buckets)
    batches = []
    for _ in range(16):
        few = np.minimum(rng.zipf(1.3, (600, 4)) - 1, 1999)
        batches.append(
            torch.tensor(np.where(rng.random(few.shape) < 0.05, -1, few).astype(np.int32))
        )
    batches = [ids.cuda() for ids in batches]
    lanes = []
    for path in paths:
        ids = batches[0].clone()
        out = torch.empty((600, 4 * 264), dtype=torch.uint8, device="cuda")
        graph = capture(
            lambda ids=ids, out=out, path=path: look_up("packed", table.view, ids, path, out=out)
        )
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        lanes.append((torch.cuda.Stream(), graph, ids, out, wrong))
    torch.cuda.synchronize()
    for turn in range(1000):
        for number, (stream, graph, ids, out, wrong) in enumerate(lanes):
            with torch.cuda.stream(stream):
                ids.copy_(batches[(turn * (number + 1) + number) % 16])
                graph.replay()
                wrong += (out.view(600, 4, 264) != rows[ids.long()]).sum()
    torch.cuda.synchronize()
    assert [wrong.item() for *_, wrong in lanes] == [0, 0]
    table.check_kept()
    asked, _, found = table.counts.sum(0).tolist()
    assert 0 < found < asked


@pytest.mark.gpu
@pytest.mark.parametrize("path", list(_native.LookupPath), ids=lambda path: path.name)
@pytest.mark.parametrize("scales", ["with_rows", "device"])
def test_bound_tables(made_up_store, path, scales):
    """Of a table in host memory, bound again with nothing of what was kept before."""
    config, folder = made_up_store
    device = Torch()
    for seed in (1, 2):
        with Tables() as tables:
            gib = 2000 * 272 / 2**30
            options = {"hot_gib": gib, "gather_threads": 2}
            tables.bind("hot", folder, layer=1, scales=scales, formula_seed=3, **options)
            ids = some_ids(config, seed, 700)
            for _ in range(3):
                (found,) = look_up(
                    "bf16", lambda: _native.table_view("hot", 0), device.put(ids), path
                )
                expected = reference.lookup(*formula_rows(config, ids))
                np.testing.assert_array_equal(device.get(found), expected)
            counted = tables.describe()["hot"]["hot"]
            assert sum(counted["adaptive_found"].values()) > 0
            assert sum(counted["found"].values()) == 0


def test_all_is_adaptive_without_counts(made_up_store):
    _, folder = made_up_store
    with Tables() as tables:
        tables.bind("hot", folder, layer=1, formula_seed=3, hot_gib=800 * 272 / 2**30)
        hot = tables.describe()["hot"]["hot"]
        assert (hot["num_rows"], hot["capacity"], hot["adaptive_capacity"]) == (0, 0, 800)
        assert hot["adaptive_found"] == {"2": 0, "3": 0, "4": 0}
    with Tables() as tables:
        tables.bind("hot", folder, layer=1, formula_seed=3)
        assert tables.describe()["hot"]["hot"] is None
