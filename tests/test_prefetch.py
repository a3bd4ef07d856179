# SPDX-License-Identifier: Apache-2.0
"""EngramPrefetch and the EngramLookup that waits for it: nodes, and on a GPU engines with them."""

import ml_dtypes
import numpy as np
import pytest
from engine_cases import MAX_BATCH, MAX_TOKENS, build_plan, check, feed_of, on_torch, same
from engines import SmallEngine, bits, on_gpu

from trtllm_engram.builder import nodes
from trtllm_engram.builder.model import ModelOptions
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.plugins.registration import field_arrays, plugin_fields
from trtllm_engram.runtime import Tables

pytest_plugins = "engine_fixtures"

PREFETCHED = ModelOptions(check_outputs=True, prefetch=True)
NAMES = {"table": "t", "fingerprint": "0" * 64, "layer": 1, "layer_idx": 0, "head_dim": 64}
FORMS = ["bf16", "mxfp8_linear", "mxfp8_128x4"]


# Nodes, on any machine.


@pytest.mark.parametrize("output", FORMS)
def test_nodes_fit_together(output):
    started = nodes.prefetch_node("ids", **NAMES, output=output)
    waits = nodes.lookup_node("ids", **NAMES, output=output, prefetched=started.outputs)
    plain = nodes.lookup_node("ids", **NAMES, output=output)
    assert started.outputs == waits.outputs == plain.outputs
    assert list(waits.inputs) == ["hash_ids", *started.outputs]
    assert waits.fields == {**started.fields, "prefetched": 1}
    assert plain.fields == started.fields
    if plugin_fields():
        for node in (started, waits):
            assert field_arrays(node.op, dict(node.fields)).keys() == node.fields.keys()


@pytest.mark.parametrize("prefetched", [("values",), ("rows", "values", "scales")])
def test_another_number_of_tensors_is_refused(prefetched):
    with pytest.raises(InputError, match=r"^prefetched: expected 2 tensors \(values, scales\), f"):
        nodes.lookup_node("ids", **NAMES, output="mxfp8_linear", prefetched=prefetched)


# Engines.


def names_of(store, layer_id):
    return {
        "fingerprint": store.manifest.fingerprint,
        "layer": layer_id,
        "head_dim": store.config.head_dim,
        "layer_idx": store.config.layer_ids.index(layer_id),
    }


def some_ids(store, num_tokens, seed=0):
    shape = (num_tokens, store.config.num_layers, store.config.num_columns)
    most = min(store.config.num_embeddings)
    return np.random.default_rng(seed).integers(-1, most, shape).astype(np.int32)


@on_gpu
@pytest.mark.parametrize("placement", ["host", "device", "disk"])
@pytest.mark.parametrize("output", FORMS)
def test_same_rows_as_a_plain_lookup(store, output, placement):
    """The two in one network, of the same ids; no tokens, one and some."""
    from trtllm_engram.builder import network

    names = {"table": "engram_14", **names_of(store, 14)}
    order = {} if output == "bf16" else {"scale_order": output.removeprefix("mxfp8_")}
    lookup = network.lookup if output == "bf16" else network.lookup_mxfp8

    def make(net, ids):
        started = network.prefetch(net, ids, **names, output=output)
        plain = lookup(net, ids, **names, **order)
        waited = lookup(net, ids, **names, **order, prefetched=started)
        pairs = [(plain, waited)] if output == "bf16" else list(zip(plain, waited, strict=True))
        return {
            f"{kind}{index}": tensor
            for index, pair in enumerate(pairs)
            for kind, tensor in zip(("plain", "waited"), pair, strict=True)
        }

    with Tables.of_store(store, placement=placement):
        engine = SmallEngine(make, {"ids": some_ids(store, 131)})
        for num_tokens in (131, 0, 1, 37):
            found = engine.run({"ids": some_ids(store, num_tokens, seed=num_tokens)})
            for name in found:
                if name.startswith("plain"):
                    expected, other = found[name], found[name.replace("plain", "waited")]
                    np.testing.assert_array_equal(bits(expected), bits(other))


@pytest.fixture(scope="module")
def prefetched_plan(store):
    return build_plan(store, "prefetched.plan", PREFETCHED)


@pytest.fixture
def prefetched(engine, prefetched_plan):
    from trtllm_engram.runtime.engine import Engine

    return Engine(prefetched_plan)


@on_gpu
@pytest.mark.parametrize("size", [(0, 1), (1, 1), (37, 3), (MAX_TOKENS, MAX_BATCH)])
def test_whole_model(store, engine, prefetched, size):
    """Bit for bit what the engine without prefetches gives, in every profile that takes it."""
    feed = feed_of(store, *size)
    assert (prefetched.inputs, prefetched.outputs) == (engine.inputs, engine.outputs)
    for profile in (0, 1) if size[0] <= MAX_BATCH else (1,):
        found = prefetched.execution(profile).run(feed)
        check(store, feed, found)
        for name, expected in engine.execution(profile).run(feed).items():
            np.testing.assert_array_equal(bits(found[name]), bits(expected), err_msg=name)


@on_gpu
def test_graph_replays_with_changed_inputs(store, engine, prefetched):
    """The side stream forks and joins inside the capture; eager calls go on beside it."""
    execution = prefetched.execution(1)
    graph = execution.capture(on_torch(feed_of(store, 37, 3)))
    plain = engine.execution(1)
    for seed in (1, 2, 3):
        inputs = on_torch(feed_of(store, 37, 3, seed=seed))
        for name, tensor in inputs.items():
            graph.inputs[name].copy_(tensor)
        same(graph.replay(), plain.run(inputs))
    other = on_torch(feed_of(store, 37, 3, seed=4))
    same(execution.run(other), plain.run(other))


@on_gpu
def test_two_contexts_on_two_streams(store, engine, prefetched):
    """Each has its own side stream and events."""
    import torch

    feeds = [on_torch(feed_of(store, 37, 3, seed)) for seed in (1, 2)]
    expected = [engine.execution(1).run(feed) for feed in feeds]
    torch.cuda.synchronize()
    executions = [prefetched.execution(1) for _ in feeds]
    streams = [torch.cuda.Stream() for _ in feeds]
    found = [
        execution.run(feed, stream=stream)
        for _ in range(20)
        for execution, feed, stream in zip(executions, feeds, streams, strict=True)
    ]
    for one, other in zip(found, expected * 20, strict=True):
        same(one, other)


@on_gpu
def test_a_bad_id_strands_no_prefetch(store, engine, prefetched):
    """Its own step runs to the end, however early the GPU meets it; the next call tells."""
    import torch

    feed = on_torch(feed_of(store, 37, 3))
    bad = {**feed, "token_ids": feed["token_ids"].clone()}
    bad["token_ids"][3] = 1_000_000_000
    expected = engine.execution(1).run(feed)
    execution = prefetched.execution(1)
    for _ in range(20):
        execution.run(bad)
        torch.cuda.synchronize()
        with pytest.raises(EngramError, match=r"EngramHash\.enqueue: .*token_ids\[3\]: expected"):
            execution.run(feed)
        same(execution.run(feed), expected)


@on_gpu
@pytest.mark.parametrize("partner", ["none", "of another table"])
def test_a_missing_partner_is_an_error(store, partner):
    """Rows that no prefetch of this table has started are never given out."""
    from trtllm_engram.builder import network

    def make(net, ids, rows):
        names = names_of(store, 14)
        if partner != "none":
            (rows,) = network.prefetch(net, ids, table="engram_14", **names)
        waits = {"table": "other", **names, "prefetched": (rows,)}
        return {"rows": network.lookup(net, ids, **waits)}

    rows = np.zeros((5, store.config.row_dim), ml_dtypes.bfloat16)
    if partner == "none":
        inputs = {"ids": some_ids(store, 5), "rows": rows}
        wanted = make
    else:
        inputs = {"ids": some_ids(store, 5)}

        def wanted(net, ids):
            return make(net, ids, None)

    with Tables.of_store(store):
        engine = SmallEngine(wanted, inputs)
        with pytest.raises(
            EngramError, match=r"an EngramPrefetch of 'other' .* found none started"
        ):
            engine.run(inputs)


@on_gpu
def test_unbound_table_is_told(prefetched_plan):
    from trtllm_engram.runtime.engine import Engine

    with pytest.raises(EngramError, match=r"table 'engram_\d+': expected a bound name, found no"):
        Engine(prefetched_plan).execution()
