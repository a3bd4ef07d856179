# SPDX-License-Identifier: Apache-2.0
"""Models for trtllm-build, over small fakes of TensorRT-LLM's versions: what the networks compute,
what they are made of, and what is refused. The real front end was run by hand: docs/trtllm.md."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from checkpoints import refusal, small_checkpoint
from fake_trtllm_build import VERSIONS, State, build, forget_ours, install
from paged_feeds import paged_feeds
from paged_kv import Executor, Sizes
from safetensors.numpy import load_file, save_file
from trtllm_checkpoints import NUM_LAYERS, STORE, base_checkpoint, decode

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.trtllm import MODEL_FILE
from trtllm_engram.builder.trtllm.checkpoint import write_checkpoint
from trtllm_engram.builder.weight_layout import LAYOUTS
from trtllm_engram.runtime import open_store

GPT_FILE = Path(__file__).resolve().parents[1] / "examples/trtllm_build/gpt_model.py"
LLAMA = (MODEL_FILE, "EngramForCausalLM")
GPT = (GPT_FILE, "EngramGPTForCausalLM")
BASES = {LLAMA: "LlamaForCausalLM", GPT: "GPTForCausalLM"}
TOKENS = np.random.default_rng(3).integers(0, 43, 23).astype(np.int32)


@pytest.fixture(params=VERSIONS)
def version(request, monkeypatch):
    forget_ours()
    install(monkeypatch, request.param)
    yield request.param
    forget_ours()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    prepare(small_checkpoint(folder / "checkpoint", **STORE), folder / "store")
    return open_store(folder / "store")


@pytest.fixture
def checkpoint(store, tmp_path):
    """Makes a base and the checkpoint with the store's layers; returns both."""

    def make(history="explicit", family=LLAMA, projection=None, **changes):
        changes.setdefault("architecture", BASES[family])
        base = base_checkpoint(tmp_path / "base", store, **changes)
        options = {"history": history, "architecture": family[1], **(projection or {})}
        write_checkpoint(store, base, tmp_path / "output", **options)
        return base, tmp_path / "output"

    return make


def run(net, store, feeds):
    net.tables = {f"engram_{layer}": (store, layer) for layer in store.config.layer_ids}
    return net.run(feeds)


def packed_feeds(pieces, firsts, lookback=None):
    """One call with a piece of each of several requests."""
    bounds = np.cumsum([0, *(piece.size for piece in pieces)]).astype(np.int32)
    positions = [first + np.arange(piece.size) for first, piece in zip(firsts, pieces, strict=True)]
    feeds = {
        "input_ids": np.concatenate(pieces),
        "position_ids": np.concatenate(positions).astype(np.int32),
        "engram_cu_seqlens": bounds,
    }
    return feeds if lookback is None else {**feeds, "engram_lookback_ids": lookback}


@pytest.mark.parametrize("family", [LLAMA, GPT], ids=["llama", "gpt"])
def test_explicit_history_in_pieces_is_the_whole(version, store, checkpoint, family):
    """Two requests, one of them a token a call: the same bits as each in one piece."""
    base, output = checkpoint(family=family)
    net = build(version, output, *family)
    requests = (TOKENS[:15], TOKENS[7:])
    lookback = np.full((2, store.config.max_ngram_size - 1), -1, np.int32)
    done, parts = [0, 0], ([], [])
    for sizes in ((5, 1), (9, 1), (1, 1)):
        pieces = [
            tokens[at : at + size] for tokens, at, size in zip(requests, done, sizes, strict=True)
        ]
        out = run(net, store, packed_feeds(pieces, done, lookback))
        lookback = out["engram_next_lookback_ids"]
        for part, piece in zip(parts, np.split(out["hidden"], [sizes[0]]), strict=True):
            part.append(piece)
        done = [at + size for at, size in zip(done, sizes, strict=True)]
    for part, tokens, at in zip(parts, requests, done, strict=True):
        expected = decode(store, base, tokens[:at])
        np.testing.assert_array_equal(bits(np.concatenate(part)), bits(expected))


def test_whole_prompts(version, store, checkpoint):
    base, output = checkpoint("whole_prompt")
    net = build(version, output, *LLAMA, use_cache=False)
    pieces = [TOKENS[:9], TOKENS[9:]]
    out = run(net, store, packed_feeds(pieces, [0, 0]))["hidden"]
    expected = np.concatenate([decode(store, base, piece) for piece in pieces])
    np.testing.assert_array_equal(bits(out), bits(expected))


def test_padded_inputs(version, store, checkpoint):
    """[B, S], as --remove_input_padding disable has them; what stands behind a prompt's end changes
    none of its tokens."""
    base, output = checkpoint("whole_prompt")
    net = build(version, output, *LLAMA, use_cache=False, packed=False)
    ids = np.stack([TOKENS[:9], np.append(TOKENS[9:15], [0, 0, 0])]).astype(np.int32)
    positions = np.tile(np.arange(9, dtype=np.int32), (2, 1))
    bounds = np.array([0, 9, 18], np.int32)
    feeds = {"input_ids": ids, "position_ids": positions, "engram_cu_seqlens": bounds}
    out = run(net, store, feeds)["hidden"]
    assert out.shape == (2, 9, store.config.hidden_size)
    np.testing.assert_array_equal(bits(out[0]), bits(decode(store, base, TOKENS[:9])))
    np.testing.assert_array_equal(bits(out[1, :6]), bits(decode(store, base, TOKENS[9:15])))


def test_copies_of_the_residual_stream(version, tmp_path):
    """A decoder with two copies, side by side in its residual stream, takes a store with two."""
    changes = {**STORE, "hc_mult": 2}
    prepare(small_checkpoint(tmp_path / "checkpoint", **changes), tmp_path / "store")
    store = open_store(tmp_path / "store")
    base = base_checkpoint(tmp_path / "base", store, hc_mult=2)
    write_checkpoint(store, base, tmp_path / "output", history="whole_prompt")
    net = build(version, tmp_path / "output", *LLAMA, use_cache=False)
    out = run(net, store, packed_feeds([TOKENS], [0]))["hidden"]
    np.testing.assert_array_equal(bits(out), bits(decode(store, base, TOKENS)))


def test_every_tensor_parallel_rank_has_the_layers(version, store, checkpoint):
    base, output = checkpoint("whole_prompt", mapping={"tp_size": 2, "world_size": 2})
    for rank in range(2):
        net = build(version, output, *LLAMA, use_cache=False, rank=rank)
        out = run(net, store, packed_feeds([TOKENS], [0]))["hidden"]
        np.testing.assert_array_equal(bits(out), bits(decode(store, base, TOKENS)))


@pytest.mark.parametrize("weight_layout", LAYOUTS)
def test_tensor_parallel_ranks_share_a_projection(version, store, checkpoint, weight_layout):
    """Each rank makes half of kv, and gathers the other's: the same bits as one that has all."""
    base, output = checkpoint(
        "whole_prompt",
        mapping={"tp_size": 2, "world_size": 2},
        projection={"split_projection": True, "weight_layout": weight_layout},
    )
    files = [load_file(output / f"rank{rank}.safetensors") for rank in range(2)]
    assert [file["engram.layer_1.words"].shape[0] for file in files] == [64, 64]
    nets = [build(version, output, *LLAMA, use_cache=False, rank=rank) for rank in range(2)]
    ranks = gathering(nets)
    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(lambda net: run(net, store, packed_feeds([TOKENS], [0])), ranks))
    for out in outs:
        np.testing.assert_array_equal(bits(out["hidden"]), bits(decode(store, base, TOKENS)))


def gathering(nets):
    """Networks whose ranks, each in a thread of its own, hand each other their parts."""
    parts, everyone = [None] * len(nets), threading.Barrier(len(nets), timeout=300)

    def gather(rank, part):
        parts[rank] = part
        everyone.wait()
        whole = list(parts)
        everyone.wait()
        return whole

    for rank, net in enumerate(nets):
        net.gather = functools.partial(gather, rank)
    return nets


def test_the_first_pipeline_stage_has_them(version, store, checkpoint):
    base, output = checkpoint("whole_prompt", mapping={"pp_size": 2, "world_size": 2})
    first, second = (
        build(version, output, *LLAMA, use_cache=False, rank=rank) for rank in range(2)
    )
    out = run(first, store, packed_feeds([TOKENS], [0]))["hidden"]
    np.testing.assert_array_equal(bits(out), bits(decode(store, base, TOKENS, NUM_LAYERS // 2)))
    assert not [layer for layer in second.layers if layer.plugin]
    assert list(second.inputs) == ["hidden_states_input"]
    names = [set(load_file(output / f"rank{rank}.safetensors")) for rank in range(2)]
    assert [any("engram" in name for name in rank) for rank in names] == [True, False]


def test_one_hash_node_and_named_layers(version, checkpoint):
    net = build(version, checkpoint()[1], *LLAMA)
    assert [layer.name for layer in net.layers if layer.plugin] == [
        "engram/hash",
        *(f"engram/layer_{i}/{op}" for i in (1, 2) for op in ("lookup", "project", "gate")),
    ]
    assert list(net.inputs)[-2:] == ["engram_cu_seqlens", "engram_lookback_ids"]
    assert list(net.outputs) == ["engram_next_lookback_ids", "hidden"]


def test_new_inputs_have_a_profile_for_each_of_input_ids(version, checkpoint):
    build(version, checkpoint()[1], *LLAMA)
    dims = State.net.dims
    assert dims["engram_cu_seqlens_requests"] == [[2, 5, 9], [2, 65, 65]]
    assert dims["engram_lookback_ids_requests"] == [[1, 4, 8], [1, 64, 64]]


def test_the_config_comes_back(version, checkpoint):
    """Everything of the base's config.json stays, and the class is what trtllm-build looks up."""
    from tensorrt_llm.models import MODEL_MAP

    build(version, checkpoint()[1], *LLAMA)
    model = MODEL_MAP["EngramForCausalLM"]
    assert model.__module__ == "trtllm_engram.builder.trtllm.llama"  # which workers can import
    assert issubclass(model.config_class, MODEL_MAP["LlamaForCausalLM"].config_class)


@pytest.mark.parametrize("quantised", ["fc", "gate", "proj", "qkv", "dense"])
def test_no_name_that_quantised_checkpoints_change(checkpoint, quantised):
    names = [name for name in load_file(checkpoint()[1] / "rank0.safetensors") if "engram" in name]
    assert len(names) == 9
    assert not [name for name in names if quantised in name or name.endswith("weight")]


def test_the_base_stays_as_it_was(checkpoint):
    base, output = checkpoint()
    before, after = (load_file(folder / "rank0.safetensors") for folder in (base, output))
    for name, value in before.items():
        np.testing.assert_array_equal(bits(after.pop(name)), bits(value))
    assert all(name.startswith("engram.") for name in after)


def phantom_feeds(call, executor):
    token_ids = call.arguments["token_ids"]
    positions = np.full(token_ids.size, -7, np.int32)  # nobody's to read
    cache = paged_feeds(call, executor, NUM_LAYERS)
    return {"input_ids": token_ids, "position_ids": positions, **cache}


CACHE_REFUSED = {
    "0.14": "kv_phantom: prepare_inputs: expected to take num_hidden_layers, found that it",
    "0.15": "host_kv_cache_pool_mapping: expected [layers, 2], found [7]",
}


@pytest.mark.parametrize(("beams", "drafts"), [(1, 2), (3, 0)], ids=["drafts", "beams"])
def test_history_in_the_kv_cache(version, store, checkpoint, beams, drafts):
    """Under a simulated executor every step has the bits of the whole histories."""
    base, output = checkpoint("kv_phantom")
    if version in CACHE_REFUSED:
        with refusal(CACHE_REFUSED[version]):
            build(version, output, *LLAMA, paged=4)
        return
    net = build(version, output, *LLAMA, paged=4)
    slot_bytes = 2 * store.config.hidden_size // 4
    sizes = Sizes(tokens_per_block=4, slot_bytes=slot_bytes)
    executor = Executor(sizes, 2, beams, vocabulary=store.token_map.size)
    steps = 0
    for event in ["add", "step", "step", "step", "finish", "add"] * 12:
        if event == "add":
            executor.add()
        elif event == "finish":
            executor.finish(executor.requests[0]) if executor.requests else None
        elif made := executor.step(drafts):
            call, after = made
            found = run(net, store, phantom_feeds(call, executor))["hidden"]
            expected = [
                decode(store, base, np.array(tokens, np.int32))[-count:]
                for tokens, count in zip(call.seen, call.counts, strict=True)
            ]
            np.testing.assert_array_equal(bits(found), bits(np.concatenate(expected)))
            after()
            steps += 1
    assert steps > 20


@pytest.mark.parametrize("version", VERSIONS[2:], indirect=True)
def test_one_more_layer_in_the_cache(version, checkpoint):
    """The first: the decoder's own come after it, and the executor makes it with one head."""
    net = build(version, checkpoint("kv_phantom")[1], *LLAMA, paged=32)
    (node,) = [layer.plugin for layer in net.layers if layer.name == "engram/hash"]
    assert (node.fields["tokens_per_block"], node.fields["slot_bytes"]) == (32, 32)
    assert net.inputs["host_kv_cache_pool_mapping"].shape == (NUM_LAYERS + 1, 2)
    assert not [name for name in net.inputs if name.startswith("engram")]
    layers = State.model.transformer.layers
    assert [layer.attention.local_layer_idx for layer in layers] == [1, 2, 3, 4, 5, 6]
    config = State.model.config.to_dict()
    assert config["num_hidden_layers"] == NUM_LAYERS + 1
    assert config["num_kv_heads_per_layer"] == [1, 4, 4, 4, 4, 4, 4]


PHANTOM_REFUSED = {
    "NVFP4": ({"kv_dtype": "fp4"}, {}, "kv_phantom: kv_dtype: expected one of"),
    "stages": ({"mapping": {"pp_size": 2}}, {}, "kv_phantom: mapping.pp_size: expected 1, found 2"),
    "trees": ({}, {"max_draft_len": 3}, "found one whose drafts are trees"),
    "no pages": ({}, {"paged": None}, "kv_phantom: gpt_attention_plugin: expected to be on"),
    "padding": ({}, {"packed": False}, "kv_phantom: remove_input_padding: expected to be on"),
    "sinks": ({}, {"streamingllm": True}, "kv_phantom: --streamingllm: expected disable"),
    "a window": (
        {"runtime_defaults": {"max_attention_window": [128, 64], "sink_token_length": None}},
        {"max_seq_len": 128},
        "kv_phantom: runtime_defaults.max_attention_window: expected no attention window below "
        "max_seq_len, 128, found 64: a cache of that length",
    ),
    "sliding": (
        {"sliding_window": 64},
        {"max_seq_len": 65},
        "kv_phantom: sliding_window: expected",
    ),
    "no cache": ({}, {"use_cache": False}, "kv_phantom: use_cache: expected to be on, found False"),
}


@pytest.mark.parametrize("case", PHANTOM_REFUSED)
def test_what_the_kv_cache_cannot_hold(version, checkpoint, case):
    changes, settings, text = PHANTOM_REFUSED[case]
    _, output = checkpoint("kv_phantom", **changes)
    with refusal(text):
        build(version, output, *LLAMA, **{"paged": 32, **settings})


REFUSED = {
    "drafts": ({}, {"max_draft_len": 3}, "--max_draft_len: expected 0 with history explicit"),
    "prompt tuning": (
        {},
        {"prompt_embedding_table_size": 8},
        "--max_prompt_embedding_table_size: expected 0, found 8",
    ),
    "fusion": ({}, {"fusion": True}, "--reduce_fusion: expected disable, found enable"),
    "a cache without a past": (
        {"history": "whole_prompt"},
        {"use_cache": True},
        "--kv_cache_type: expected disabled with history whole_prompt",
    ),
    "a late layer": (
        {"mapping": {"pp_size": 3, "world_size": 3}},
        {},
        "expected layers of the first of 3 pipeline stages, found layer 2: only a rank that gets",
    ),
    "a late layer's own stage": (
        {"mapping": {"pp_size": 3, "world_size": 3}},
        {"rank": 1},
        "expected layers of the first of 3 pipeline stages, found layer 2",
    ),
    "a projection split for others": (
        {"mapping": {"tp_size": 2, "world_size": 2}, "projection": {"split_projection": True}},
        {"tp_size": 1},
        "mapping.tp_size: expected 2, as many ranks as trtllm-checkpoint split the projection",
    ),
    "context parallelism": (
        {"mapping": {"cp_size": 2, "world_size": 2}},
        {},
        "mapping.cp_size: expected 1, found 2: context parallelism hands each rank a part",
    ),
    "another family": (
        {"architecture": "GPTForCausalLM"},
        {},
        "engram.base_architecture: expected one that EngramForCausalLM extends, found 'GPT",
    ),
    "an unknown family": (
        {"architecture": "NewForCausalLM"},
        {},
        "engram.base_architecture: expected one that EngramForCausalLM extends, found 'New",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_build_refuses(version, checkpoint, case):
    changes, settings, text = REFUSED[case]
    _, output = checkpoint(**changes)
    with refusal(text):
        build(version, output, *LLAMA, **settings)


def test_another_token_map_is_refused(version, checkpoint):
    _, output = checkpoint()
    file = output / "rank0.safetensors"
    tensors = load_file(file)
    tensors["engram.token_map"][3] += 1
    save_file(tensors, file)
    with refusal("engram.token_map: expected the token map of engram.fingerprint"):
        build(version, output, *LLAMA)


def test_a_config_alone_is_refused(version, checkpoint):
    """trtllm-build would make weights up, as it does for --model_config."""
    _, output = checkpoint()
    with refusal("expected --checkpoint_dir, of trtllm-engram trtllm-checkpoint"):
        build(version, output, *LLAMA, weights=False)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint16)
