# SPDX-License-Identifier: Apache-2.0
"""How often texts read each row, and `tables count`."""

import json
from collections import Counter

import numpy as np
import pytest

from trtllm_engram.runtime import open_store, ops, row_counts
from trtllm_engram.runtime.row import packed_row_bytes

pytest_plugins = ["command_line_fixtures"]


def counted_one_by_one(store, texts):
    """A Counter of row ids for each layer."""
    counters = [Counter() for _ in store.layout.num_embeddings]
    for text in texts:
        positions = np.arange(text.size, dtype=np.int64)
        ends = np.array([0, text.size], np.int32)
        ids = ops.hash_ids(store.layout, store.token_map, text, positions, ends)
        for layer, counter in enumerate(counters):
            counter.update(int(row) for row in ids[:, layer].ravel() if row >= 0)
    return counters


@pytest.fixture
def store(files):
    return open_store(files / "store")


@pytest.fixture
def texts(store):
    rng = np.random.default_rng(1)
    few = min(20, store.token_map.size)
    return [rng.integers(0, few, size).astype(np.int32) for size in (1, 700, 0, 64, 333)]


@pytest.mark.parametrize("chunk", [1, 2, 63, 64, 65, 1 << 16])
def test_counts_are_those_of_whole_texts(store, texts, chunk, monkeypatch):
    monkeypatch.setattr(row_counts, "_CHUNK_TOKENS", chunk)
    counted = row_counts.count_rows(store.layout, store.token_map, texts)
    for layer, expected in zip(counted, counted_one_by_one(store, texts), strict=True):
        assert dict(zip(layer.rows.tolist(), layer.counts.tolist(), strict=True)) == expected
        assert (np.diff(layer.rows) > 0).all()


def test_counts_end_where_they_would_begin_again(store, texts):
    layout = store.layout
    text = texts[1]
    positions, ends = np.arange(text.size, dtype=np.int64), np.array([0, text.size], np.int32)
    ids = ops.hash_ids(layout, store.token_map, text, positions, ends)
    counts = [np.full(size, 2**32 - 3, np.uint32) for size in layout.num_embeddings]
    row_counts._add(layout, counts, [ids])
    for layer, counter in zip(counts, counted_one_by_one(store, [text]), strict=True):
        assert max(counter.values()) > 2
        for row, count in counter.items():
            assert layer[row] == min(2**32 - 3 + count, 2**32 - 1)


@pytest.mark.parametrize("num_rows", [0, 1, 50, 10**6])
def test_hot_rows_are_those_read_most(store, texts, num_rows):
    row_bytes = packed_row_bytes(store.config.head_dim)
    counted = row_counts.count_rows(store.layout, store.token_map, texts)
    budget = [num_rows * row_bytes + row_bytes - 1]
    found = row_counts.to_array(store.layout, counted, budget)
    layers = zip(store.config.layer_ids, counted_one_by_one(store, texts), strict=True)
    for layer_idx, (layer_id, counter) in enumerate(layers):
        expected = sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:num_rows]
        of_layer = found[found["layer"] == layer_id]
        assert list(zip(of_layer["row"], of_layer["count"], strict=True)) == expected
        orders = row_counts.shares(store.layout, layer_idx, counted[layer_idx], budget)
        assert sum(order.hot_reads for order in orders) == sum(count for _, count in expected)
        assert sum(order.hot_rows for order in orders) == len(expected)
        assert sum(order.reads for order in orders) == counter.total()
        assert [order.order for order in orders] == list(range(2, store.config.max_ngram_size + 1))


def test_shares_fall_by_order(store, texts):
    """Each token with enough before it reads n_heads rows of each order."""
    counted = row_counts.count_rows(store.layout, store.token_map, texts)
    for order in row_counts.shares(store.layout, 0, counted[0], [0]):
        assert order.reads % store.config.n_heads == 0
        assert 0 < order.rows <= order.reads
        assert (order.hot_reads, order.hot_rows) == (0, 0)


def test_a_budget_for_each_order(store, texts):
    counted = row_counts.count_rows(store.layout, store.token_map, texts)
    row_bytes = packed_row_bytes(store.config.head_dim)
    limits = [5, 0, 17][: store.config.max_ngram_size - 1]
    budgets = [limit * row_bytes for limit in limits]
    found = row_counts.to_array(store.layout, counted, budgets)
    everything = row_counts.to_array(store.layout, counted, [1 << 40])
    for layer_idx, layer_id in enumerate(store.config.layer_ids):
        offsets = store.layout.offsets[layer_idx][:: store.config.n_heads]
        of_layer, of_all = (each[each["layer"] == layer_id] for each in (found, everything))
        for order, limit in enumerate(limits):
            hot, every = (
                each[np.searchsorted(offsets, each["row"], side="right") - 1 == order]
                for each in (of_layer, of_all)
            )
            np.testing.assert_array_equal(hot, every[:limit])
        assert (np.diff(of_layer["count"]) <= 0).all()


def test_command(run, files, store, tmp_path):
    output = tmp_path / "hot.npy"
    words = ("tables", "count", "store", "--text", "text", "text", "--output", output)
    code, out, err = run(*words, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [layer["layer"] for layer in document["layers"]] == list(store.config.layer_ids)
    hot = np.load(output)
    assert hot.dtype == row_counts.COUNTS_DTYPE
    assert (hot["count"] % 2 == 0).all()  # the text was given twice
    reads = [order["reads"] for layer in document["layers"] for order in layer["orders"]]
    assert hot["count"].sum() == sum(reads)  # 1 GiB holds them all
    code, out, _ = run("tables", "count", "store", "--text", "text", "--gib", "0")
    assert code == 0
    assert "0 GiB" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--text", "text", "--gib", "-1"), "--gib: expected 0 to 1e+06, found"),
        (("--text", "text", "--gib", "1,x"), "--gib: expected 0 to 1e+06, found"),
        (("--text", "text", "--gib", "1,1,1,1,1"), "those of n-gram orders 2 to"),
        (("--text", "text", "--gib", "0", "--output", "o"), "--gib: expected room for a row with"),
        (("--text", "missing"), "missing"),
        (("--text", "text", "--output", "text"), "text"),
    ],
)
def test_what_the_command_refuses(run, words, message):
    code, out, err = run("tables", "count", "store", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
