# SPDX-License-Identifier: Apache-2.0
"""Counters of lookups and their text for Prometheus; on a server: test_triton_memory.py."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from checkpoints import small_checkpoint

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.plugins.errors import EngramError
from trtllm_engram.runtime import Tables, open_store
from trtllm_engram.runtime.metrics import FAILED, FAMILIES, REFUSED, Metrics
from trtllm_engram.runtime.pieces import Executor, Piece
from trtllm_engram.runtime.session import EngramSession
from trtllm_engram.runtime.triton import published
from trtllm_engram.runtime.triton.published import Published


def values(metrics):
    """Name and labels, as in the text, to value."""
    lines = metrics.prometheus_text().splitlines()
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in samples}


def test_a_lookup_is_counted():
    metrics = Metrics()
    metrics.count_lookup("t", np.array([[4, 4], [4, -1]], np.int32), 0.5)
    metrics.count_lookup("t", np.array([[4, 7]], np.int32))
    assert values(metrics) == {
        'engram_lookups_total{table="t"}': 2,
        'engram_rows_total{table="t"}': 5,
        'engram_rows_examined_total{table="t"}': 5,
        'engram_rows_unique_total{table="t"}': 3,
        'engram_lookup_seconds_total{table="t"}': 0.5,
    }


def test_large_calls_are_not_examined():
    metrics = Metrics()
    metrics.count_lookup("t", np.zeros((100_000, 1), np.int32))
    found = values(metrics)
    assert found['engram_rows_total{table="t"}'] == 100_000
    assert 'engram_rows_examined_total{table="t"}' not in found


@pytest.mark.parametrize(
    ("placement", "scales", "gpu"),
    [("host", "with_rows", 0), ("host", "device", 80), ("device", "with_rows", 2640)],
)
def test_bytes_by_place(placement, scales, gpu):
    metrics = Metrics()
    table = {"num_bytes": 2640, "head_dim": 256, "placement": placement, "scales": scales}
    metrics.note_tables({"t": table})
    assert values(metrics) == {
        'engram_table_bytes{table="t",place="gpu"}': gpu,
        'engram_table_bytes{table="t",place="host"}': 2640 - gpu,
    }


def test_the_text_is_prometheus():
    metrics = Metrics()
    metrics.count_lookup('a "b"\\\n', np.zeros((1, 1), np.int32), 1e-9)
    metrics.count_error(REFUSED)
    metrics.count_error(FAILED)
    text = metrics.prometheus_text()
    assert text.endswith("\n")
    sample = r'[a-z_]+\{[a-z]+="(?:[^"\\\n]|\\["\\n])*"(,[a-z]+="[^"]*")*\} [-+.e0-9]+'
    for line in text.splitlines():
        assert re.fullmatch(rf"# (HELP|TYPE) [a-z_]+ .+|{sample}", line), line
    assert set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) < FAMILIES.keys()
    assert text.count("# TYPE engram_errors_total counter") == 1


def test_threads():
    metrics = Metrics()
    ids = np.zeros((1, 1), np.int32)
    count = [lambda: [metrics.count_lookup("t", ids) for _ in range(500)]] * 4
    threads = [threading.Thread(target=one) for one in count]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(metrics)['engram_lookups_total{table="t"}'] == 2000


def test_pieces_are_counted(tmp_path):
    prepare(small_checkpoint(tmp_path / "checkpoint"), tmp_path / "store")
    store = open_store(tmp_path / "store")
    metrics = Metrics()
    piece = Piece(np.array([5, 6, 5], np.int32), 0, np.full(2, -1, np.int32), {})
    with Tables.of_store(store) as tables:
        metrics.note_tables(tables.describe())
        executor = Executor(EngramSession(store, "cpu", tables), metrics=metrics)
        executor.run([piece])
        assert not any("lookups" in name for name in values(metrics))  # ids alone: none
        (made,) = executor.run([piece], with_rows=True)
    found = values(metrics)
    for index, table in enumerate(("engram_1", "engram_5")):
        unique = np.unique(made.hash_ids[:, index]).size
        assert found[f'engram_lookups_total{{table="{table}"}}'] == 1
        assert found[f'engram_rows_total{{table="{table}"}}'] == 3 * store.config.num_columns
        assert found[f'engram_rows_unique_total{{table="{table}"}}'] == unique
        assert found[f'engram_lookup_seconds_total{{table="{table}"}}'] > 0
        rows = store.config.num_embeddings[index]
        assert found[f'engram_table_bytes{{table="{table}",place="host"}}'] == rows * 66


class Family:
    """Of a server: values by name and labels."""

    COUNTER, GAUGE = "counter", "gauge"
    values: ClassVar[dict[str, float]] = {}

    def __init__(self, name, description, kind):
        self.name = name

    def Metric(self, labels):  # noqa: N802 (the server's)
        key = f"{self.name} {labels}"
        self.values.setdefault(key, 0)

        def add(value):
            self.values[key] += value

        def put(value):
            self.values[key] = value

        return SimpleNamespace(increment=add, set=put)


@pytest.fixture
def server_values(monkeypatch):
    values = {}
    monkeypatch.setattr(Family, "values", values)
    return values


def publish(metrics, describe=None):
    return Published(SimpleNamespace(MetricFamily=Family), metrics, {"model": "m"}, describe)


def test_tables_that_cannot_be_described_lose_no_answer(server_values, caplog, monkeypatch):
    monkeypatch.setattr(published, "_TABLES_SECONDS", 0)
    metrics, fails = Metrics(), [True]

    def describe():
        if fails:
            raise EngramError("engine gone")
        return {}

    on_server = publish(metrics, describe)
    metrics.count_error(FAILED)
    for _ in range(3):
        on_server.update()
    assert [record.getMessage() for record in caplog.records] == ["metrics: engine gone"]
    fails.clear()
    on_server.update()
    assert server_values == {"engram_errors_total {'model': 'm', 'kind': 'failed'}": 1}


def test_tables_are_not_described_for_every_batch(server_values, monkeypatch):
    times = iter([50.0, 50.5, 50.9, 51.0, 51.5, 70.0])
    monkeypatch.setattr(published.time, "monotonic", lambda: next(times))
    described = []
    on_server = publish(Metrics(), lambda: described.append(1) or {})
    for _ in range(6):
        on_server.update()
    assert len(described) == 3
