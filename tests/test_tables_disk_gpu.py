# SPDX-License-Identifier: Apache-2.0
"""placement = "disk" on GPUs: the bits of rows in memory, in whatever is enqueued or captured; what
cannot be read is NaN, and the next call's error."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from command_line import only_line
from devices import Torch, capture
from disk_tables import FORMS, LAYER, bind, last_row, random_ids, same
from engine_cases import MAX_BATCH, MAX_TOKENS, build_plan, check, feed_of, host, on_torch
from engines import V4_COLUMNS, on_gpu, small_store

from trtllm_engram.builder.model import ModelOptions
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import Tables, ops
from trtllm_engram.runtime.session import EngramSession

pytestmark = pytest.mark.gpu
CUDA = Torch()
LOST = -(2**31)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Of V4.1's columns: a lane holds 2560 tokens of them at once."""
    return small_store(tmp_path_factory.mktemp("disk"), **V4_COLUMNS)


@pytest.fixture
def own_store(tmp_path):
    """One whose files the test may harm."""
    return small_store(tmp_path)


def wanted(store, ids):
    table = store.table(LAYER)
    return ops.lookup(table.values, table.scales, ids)


def found(tables, ids, **options):
    return CUDA.get(tables.lookup("mine", CUDA.put(ids), **options))


def out_for(store, ids):
    import torch

    return torch.empty((len(ids), store.config.row_dim), dtype=torch.bfloat16, device="cuda")


def value_file(store):
    return store.manifest.span(store.path, store.manifest.layers[LAYER]["embed.weight"])


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 127, 129, 2561, 5300])
@pytest.mark.parametrize("options", [{}, {"scales": "host"}, {"hot_gib": 0}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_as_in_memory(store, form, options, num_tokens):
    on_disk, in_memory, order = FORMS[form]
    table = store.table(LAYER)
    ids = random_ids(store, num_tokens)
    expected = in_memory(table.values, table.scales, ids, **order)
    with bind(store, **options) as tables:
        for _ in range(2):  # from the disk, then from RAM
            results = on_disk(tables, "mine", CUDA.put(ids), **order)
            results = results if isinstance(results, tuple) else (results,)
            same(tuple(CUDA.get(result) for result in results), expected)


def test_arrays_that_are_not_torch(store):
    from trtllm_engram.runtime.device_array import DeviceArray

    ids = random_ids(store, 300)
    with bind(store) as tables:
        result = tables.lookup("mine", DeviceArray.from_host(ids))
        same(result.copy_to_host(), wanted(store, ids))


def test_a_layer_of_all_layers_ids(store):
    apart = np.stack([random_ids(store, 3000, seed) for seed in (1, 2)], axis=1)
    with bind(store) as tables:
        result = tables.lookup("mine", CUDA.put(apart)[:, 1])
        same(CUDA.get(result), wanted(store, apart[:, 1]))


def test_a_part_of_the_columns(store):
    ids = random_ids(store, 70)
    with bind(store, heads=True) as tables:
        same(found(tables, ids), wanted(store, ids))


def test_more_columns_than_it_has(store):
    ids = np.zeros((2, store.config.num_columns + 1), np.int32)
    with bind(store) as tables, pytest.raises(InputError, match="num_columns: expected 1 to 24"):
        found(tables, ids)


def test_sessions(store):
    with Tables.of_store(store, placement="disk") as tables:
        session, plain = EngramSession(store, "cuda:0", tables), EngramSession(store)
        for ids in ([1, 2, 3], [4, 5]):
            rows = session.rows(LAYER, session.step(ids))
            same(session.to_host(rows), plain.rows(LAYER, plain.step(ids)))


@pytest.mark.parametrize("num_tokens", [5, 3000])
def test_a_thousand_replays(store, num_tokens):
    """Each reads the rows of the ids of the moment; calls beside them change nothing of it."""
    import torch

    few = [random_ids(store, num_tokens, seed) for seed in range(10)]
    given = [CUDA.put(ids) for ids in few]
    expected = [CUDA.put(wanted(store, ids).view(np.uint16)).view(torch.int16) for ids in few]
    ids, out = given[0].clone(), out_for(store, few[0])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with bind(store, hot_gib=0.0001) as tables:
        graph = capture(lambda: tables.lookup("mine", ids, out=out))
        for turn in range(1000 if num_tokens < 100 else 50):
            ids.copy_(given[turn % len(few)])
            graph.replay()
            wrong += (out.view(torch.int16) != expected[turn % len(few)]).sum()
            if turn % 10 == 0:
                same(found(tables, few[3]), wanted(store, few[3]))
    assert wrong.item() == 0


def test_graphs_keep_their_table(own_store):
    """Replays go on when the name is free, and bound to another table; the last end frees it."""
    import torch

    ids, other = random_ids(own_store, 20), random_ids(own_store, 20, seed=1)
    given, out = CUDA.put(ids), out_for(own_store, ids)
    expected = wanted(own_store, other)
    before = num_open(own_store)  # with the one of the store's own mapping
    with bind(own_store) as tables:
        graph = capture(lambda: tables.lookup("mine", given, out=out))
    assert num_open(own_store) > before
    with Tables() as others:
        others.bind("mine", own_store, layer=1, placement="disk")
        given.copy_(CUDA.put(other))
        graph.replay()
        same(CUDA.get(out), expected)
    del graph
    for _ in range(1000):  # CUDA ends what a graph keeps when it likes; names that end free it
        torch.cuda.synchronize()
        bind(own_store).close()
        if num_open(own_store) == before:
            break
    assert num_open(own_store) == before


def num_open(store):
    """Descriptors of the file of values."""
    path = os.path.realpath(value_file(store).file)
    return sum(os.path.realpath(link) == path for link in Path("/proc/self/fd").iterdir())


def test_streams_and_threads_at_once(store):
    """Each lookup that runs has memory of its own."""
    import torch

    given = [random_ids(store, 200, seed) for seed in range(8)]
    expected = [wanted(store, ids) for ids in given]
    wrong = []
    with bind(store, hot_gib=0.0001) as tables:

        def look(first):
            streams = [torch.cuda.Stream() for _ in range(2)]
            for turn in range(20):
                results = []
                for index, stream in enumerate(streams):
                    which = (first + turn + index) % len(given)
                    with torch.cuda.stream(stream):
                        ids = CUDA.put(given[which])
                        results.append((which, tables.lookup("mine", ids)))
                torch.cuda.synchronize()
                for which, result in results:
                    bits = CUDA.get(result).view(np.uint16)
                    if not np.array_equal(bits, expected[which].view(np.uint16)):
                        wrong.append((first, turn))

        threads = [threading.Thread(target=look, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tables.describe()["mine"]["disk"]["disk_rows"] > 0
    assert not wrong


def test_a_lookup_while_another_thread_captures(store):
    """The first one, which takes memory: the other's graph is whole."""
    import torch

    ids = random_ids(store, 30)
    given, out = CUDA.put(ids), out_for(store, ids)
    begun, done = threading.Event(), threading.Event()
    failures = []

    def look(tables):
        begun.wait()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                tables.lookup("mine", given, out=out)
        except EngramError as error:
            failures.append(error)
        done.set()

    with bind(store) as tables:
        thread = threading.Thread(target=look, args=(tables,))
        number = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        thread.start()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            number += 1
            begun.set()
            done.wait()
        thread.join()
        graph.replay()
        torch.cuda.synchronize()
        assert not failures
        assert number.item() == 1
        same(CUDA.get(out), wanted(store, ids))


def test_a_file_cut_short(own_store):
    """That step's rows are NaN, and every call from then on is an error, of the device once."""
    import torch

    row, span = 3, value_file(own_store)
    ids = CUDA.put(np.array([[row, -1] + [0] * (own_store.config.num_columns - 2)], np.int32))
    packed = torch.zeros((1, 66), dtype=torch.uint8, device="cuda")
    with bind(own_store) as tables:
        os.truncate(span.file, span.offset + row * 64 + 1)
        rows = CUDA.get(tables.lookup("mine", ids)).view(np.uint16).reshape(-1, 64)
        assert (rows[0] == 0x7FFF).all()
        assert (rows[1] == 0).all()
        with pytest.raises(EngramError) as told:
            ops.stage_mxfp8(packed, 64)
        expected = f"layer {LAYER}: rows of its table on disk could not be read"
        assert expected in only_line(str(told.value))
        ops.stage_mxfp8(packed, 64)
        where = f"{re.escape(str(span.file))}: .* at offset {span.offset + row * 64}"
        for _ in range(2):
            with pytest.raises(EngramError, match=where):
                tables.lookup("mine", ids)


def test_one_fault_is_told_once(own_store):
    """By the table, which knows the file; nothing is then left of it for the device's next call."""
    import torch

    ids = CUDA.put(np.zeros((1, own_store.config.num_columns), np.int32))
    with bind(own_store) as tables:
        os.truncate(value_file(own_store).file, 4096)
        tables.lookup("mine", ids)
        torch.cuda.synchronize()
        with pytest.raises(EngramError, match="rows of an earlier lookup could not be read"):
            tables.raise_fault("mine")
    ops.stage_mxfp8(torch.zeros((1, 66), dtype=torch.uint8, device="cuda"), 64)


def test_replays_of_a_file_cut_short(own_store):
    import torch

    ids = random_ids(own_store, 40)
    ids[0] = 0
    given = CUDA.put(ids)
    with bind(own_store, hot_gib=0) as tables:
        out = out_for(own_store, ids)
        graph = capture(lambda: tables.lookup("mine", given, out=out))
        graph.replay()
        same(CUDA.get(out), wanted(own_store, ids))
        expected = wanted(own_store, ids).view(np.uint16)
        os.truncate(value_file(own_store).file, value_file(own_store).offset)
        graph.replay()
        torch.cuda.synchronize()
        rows = CUDA.get(out).view(np.uint16).reshape(*ids.shape, 64)
        missing = (ids != LOST) & ((ids < 0) | (ids > last_row(own_store)))
        assert (rows[~missing] == 0x7FFF).all()
        np.testing.assert_array_equal(rows[missing], expected.reshape(*ids.shape, 64)[missing])
        with pytest.raises(EngramError, match="rows of an earlier lookup could not be read"):
            tables.raise_fault("mine")


# Engines.


@pytest.fixture(scope="module")
def model_store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("engine"), **V4_COLUMNS, layers=(1, 14))


@pytest.fixture(scope="module", params=["plain", "prefetched"])
def plan(model_store, request):
    options = (
        {"options": ModelOptions(check_outputs=True, prefetch=True)}
        if request.param == "prefetched"
        else {}
    )
    return build_plan(model_store, f"{request.param}.plan", **options)


@on_gpu
def test_engines(model_store, plan):
    """Of any number of tokens; graphs follow their inputs, and two contexts run at once."""
    import torch

    from trtllm_engram.runtime.engine import Engine

    with Tables.of_store(model_store, placement="disk"):
        execution = Engine(plan).execution(1)
    for size in ((0, 1), (1, 1), (37, 3), (MAX_TOKENS, MAX_BATCH)):
        feed = feed_of(model_store, *size)
        check(model_store, feed, execution.run(feed))
    feeds = [on_torch(feed_of(model_store, 37, 3, seed=seed)) for seed in range(3)]
    expected = [execution.run(feed) for feed in feeds]
    with Tables.of_store(model_store, placement="disk", hot_gib=0):
        others = [Engine(plan).execution(1) for _ in range(2)]
    graph = others[0].capture({name: tensor.clone() for name, tensor in feeds[0].items()})
    streams = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(30):
        for name, tensor in feeds[turn % 3].items():
            graph.inputs[name].copy_(tensor)
        torch.cuda.synchronize()
        by_graph = graph.replay(stream=streams[0])
        by_call = others[1].run(feeds[(turn + 1) % 3], stream=streams[1])
        torch.cuda.synchronize()
        for name, tensor in by_graph.items():
            np.testing.assert_array_equal(host(tensor), host(expected[turn % 3][name]))
        for name, tensor in by_call.items():
            np.testing.assert_array_equal(host(tensor), host(expected[(turn + 1) % 3][name]))


@on_gpu
def test_an_engines_fault(tmp_path, plan, model_store):
    """The step runs to its end; the next one tells whose rows were NaN."""
    import torch

    from trtllm_engram.runtime.engine import Engine

    store = small_store(tmp_path, **V4_COLUMNS, layers=(1, 14))
    assert store.manifest.fingerprint == model_store.manifest.fingerprint
    with Tables.of_store(store, placement="disk", hot_gib=0):
        execution = Engine(plan).execution(1)
        feed = on_torch(feed_of(store, 37, 3))
        execution.run(feed)
        torch.cuda.synchronize()
        span = store.manifest.span(store.path, store.manifest.layers[14]["embed.weight"])
        os.truncate(span.file, span.offset)
        for _ in range(2):
            execution.run(feed)
            torch.cuda.synchronize()
            told = r"EngramHash\.enqueue: .*layer 14: rows of its table on disk could not be read"
            with pytest.raises(EngramError, match=told):
                execution.run(feed)
            torch.cuda.synchronize()
