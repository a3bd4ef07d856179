# SPDX-License-Identifier: Apache-2.0
"""EngramSession: the same bits in any chunking, requests that do not mix, bad input in one line."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import reference
from checkpoints import small_checkpoint, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import open_store
from trtllm_engram.runtime.compare.report import HIDDEN_LIMIT_BF16_ULPS
from trtllm_engram.runtime.hidden import FileHidden, SeededHidden
from trtllm_engram.runtime.session import EngramSession

NUM_TOKENS = 61
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    prepare(small_checkpoint(folder / "checkpoint"), folder / "store")
    return open_store(folder / "store")


@pytest.fixture(scope="module", params=DEVICES)
def session(request, store):
    return EngramSession(store, request.param)


@pytest.fixture(scope="module")
def token_ids(store):
    return np.random.default_rng(0).integers(0, store.token_map.size, NUM_TOKENS, dtype=np.int32)


@pytest.fixture(scope="module")
def dead(token_ids):
    mask = np.zeros(token_ids.size, np.bool_)
    mask[[9, 10, 30]] = True
    return mask


def in_pieces(session, token_ids, dead, bounds):
    """(ids, rows of each layer) of a text cut at `bounds`."""
    session.forget()
    ids, rows = [], {layer_id: [] for layer_id in session.config.layer_ids}
    for begin, end in zip([0, *bounds], [*bounds, token_ids.size], strict=True):
        step = session.step(token_ids[begin:end], dead[begin:end])
        ids.append(session.to_host(step.hash_ids))
        for layer_id, parts in rows.items():
            parts.append(session.to_host(session.rows(layer_id, step)).view(np.uint16))
    return np.concatenate(ids), {layer: np.concatenate(parts) for layer, parts in rows.items()}


def expected_ids(store, token_ids, dead):
    tokens = reference.Tokens(
        token_ids, np.arange(token_ids.size), np.array([0, token_ids.size]), dead_mask=dead
    )
    return reference.hash_ids(store.layout, store.token_map, tokens)


def test_ids_are_the_references(session, store, token_ids, dead):
    ids, _ = in_pieces(session, token_ids, dead, [])
    assert np.array_equal(ids, expected_ids(store, token_ids, dead))


@settings(max_examples=15)
@given(bounds=st.lists(st.integers(0, NUM_TOKENS), max_size=8).map(sorted))
def test_any_chunking_gives_the_same_bits(session, token_ids, dead, bounds):
    ids, rows = in_pieces(session, token_ids, dead, bounds)
    whole_ids, whole_rows = in_pieces(session, token_ids, dead, [])
    assert np.array_equal(ids, whole_ids)
    for layer_id, found in rows.items():
        assert np.array_equal(found, whole_rows[layer_id])


def test_token_by_token(session, token_ids, dead):
    ids, _ = in_pieces(session, token_ids, dead, list(range(1, token_ids.size)))
    assert np.array_equal(ids, in_pieces(session, token_ids, dead, [])[0])


def test_requests_in_one_step_do_not_mix(session, store, token_ids):
    texts = {"a": token_ids, "b": token_ids[::-1].copy(), "c": token_ids[:20]}
    alone = {
        name: expected_ids(store, ids, np.zeros(ids.size, bool)) for name, ids in texts.items()
    }
    found = {name: [] for name in texts}
    for begin in range(0, NUM_TOKENS, 13):
        step = session.step({name: ids[begin : begin + 13] for name, ids in texts.items()})
        ids = session.to_host(step.hash_ids)
        for index, parts in enumerate(found.values()):
            parts.append(ids[step.cu_seqlens[index] : step.cu_seqlens[index + 1]])
    for name, parts in found.items():
        assert np.array_equal(np.concatenate(parts), alone[name])
        session.forget(name)


def test_a_forgotten_request_begins_anew(session, token_ids):
    first = session.to_host(session.step({"x": token_ids}).hash_ids)
    session.forget("x")
    assert np.array_equal(session.to_host(session.step({"x": token_ids}).hash_ids), first)
    session.forget("x")


def test_run_is_the_reference_layer(session, store, token_ids, dead):
    hidden = SeededHidden(store.config, seed=3)
    for chunk in session.run(token_ids, hidden, chunk=25, dead=dead):
        for layer_id in store.config.layer_ids:
            weights = store.weights(layer_id)
            entering = hidden(layer_id, chunk.start, chunk.stop)
            rows = chunk.rows[layer_id].view(np.uint16)
            kv, _ = reference.project(rows, weights.wkv_weight, weights.wkv_scale)
            expected, magnitude = reference.gate(
                entering.astype(np.float64),
                kv.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16),
                weights.q_weight.view(np.uint16),
                weights.k_weight.view(np.uint16),
                store.config.rms_norm_eps,
                ~dead[chunk.start : chunk.stop],
            )
            # FP32 sums may round values to BF16 the other way: compare/report.py has the bound.
            error = np.abs(chunk.hidden[layer_id].astype(np.float64) - expected)
            assert (error <= HIDDEN_LIMIT_BF16_ULPS * reference.bf16_ulp(magnitude)).all()
            masked = dead[chunk.start : chunk.stop]
            assert np.array_equal(chunk.hidden[layer_id][masked], entering[masked])


def test_a_refused_step_changes_nothing(session, store, token_ids):
    session.forget()
    session.step(token_ids[:10])
    with pytest.raises(InputError, match=r"token ids: expected 0 to \d+, found"):
        session.step(np.array([1, store.token_map.size], np.int32))
    step = session.step(token_ids[10:20])
    assert step.positions.tolist() == list(range(10, 20))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.step([-1]), "token ids: expected 0 to"),
        (lambda s: s.step([0.5]), "token ids: expected integers"),
        (lambda s: s.step([[1]]), "token ids: expected integers of shape"),
        (lambda s: s.step({}), "expected at least one request"),
        (lambda s: s.step([1, 2], [True]), r"dead: expected bool \[2\]"),
        (lambda s: s.step({"a": [1]}, {"b": [True]}), "dead: expected requests of this step"),
        (lambda s: s.rows(99, s.step([1])), "layer: expected one of 1, 5, found 99"),
        (lambda s: list(s.run([1], SeededHidden(s.config), chunk=0)), "chunk: expected at least"),
    ],
)
def test_bad_input_is_named(session, call, message):
    session.forget()
    with pytest.raises(InputError, match=message):
        call(session)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1", ""])
def test_unknown_devices_are_refused(store, device):
    with pytest.raises(InputError, match="device: expected cpu or cuda:N"):
        EngramSession(store, device)


def test_an_empty_text_runs(session, store):
    assert list(session.run([], SeededHidden(store.config))) == []


def test_the_example_runs(store):
    script = Path(__file__).parents[1] / "examples/session.py"
    command = [sys.executable, str(script), str(store.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "rows of one n-gram are one: True"


@pytest.mark.gpu
def test_a_table_that_does_not_fit_is_read_on_the_cpu(store, token_ids, dead):
    session = EngramSession(store, "cuda:0")
    _, on_gpu = in_pieces(session, token_ids, dead, [])
    session.tables_on_device = False
    _, on_cpu = in_pieces(session, token_ids, dead, [])
    for layer_id, rows in on_gpu.items():
        assert np.array_equal(rows, on_cpu[layer_id])


def splitmix(x):
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_seeded_hidden_is_its_formula(store):
    config = store.config
    whole = SeededHidden(config, seed=7)(5, 0, 12)
    assert whole.shape == (12, config.hc_mult, config.hidden_size)
    for token, copy, dim in [
        (0, 0, 0),
        (3, 1, 17),
        (11, config.hc_mult - 1, config.hidden_size - 1),
    ]:
        element = copy * config.hidden_size + dim
        key = splitmix((splitmix((splitmix(7) + 5) % 2**64) + token) % 2**64)
        byte = splitmix((key + element // 8) % 2**64) >> element % 8 * 8 & 0xFF
        assert float(whole[token, copy, dim]) == (byte - 256 * (byte >> 7)) / 64
    assert np.array_equal(SeededHidden(config, seed=7)(5, 4, 9), whole[4:9])
    assert not np.array_equal(SeededHidden(config, seed=8)(5, 0, 12), whole)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_hidden_of_a_file(store, tmp_path, dtype):
    from safetensors.numpy import save_file

    config = store.config
    arrays = {i: SeededHidden(config, i)(i, 0, 5).astype(dtype) for i in config.layer_ids}
    first, last = config.layer_ids
    save_file({f"layers.{first}.hidden": arrays[first], "hidden": arrays[last]}, tmp_path / "h")
    hidden = FileHidden(tmp_path / "h", config, 5)
    assert np.array_equal(hidden(first, 1, 4), arrays[first][1:4])
    assert np.array_equal(hidden(last, 0, 5), arrays[last])
    assert hidden(last, 0, 5).dtype == dtype


def test_hidden_files_that_do_not_fit_are_refused(store, tmp_path):
    from safetensors.numpy import save_file

    config = store.config
    shape = (5, config.hc_mult, config.hidden_size)
    (tmp_path / "text").write_text("no safetensors")
    save_file({"other": np.zeros(shape, np.float32)}, tmp_path / "names")
    save_file({"hidden": np.zeros(shape, np.float32)}, tmp_path / "good")
    save_file({"hidden": np.zeros(shape, np.int32)}, tmp_path / "dtype")
    for name, num_tokens, message in [
        ("text", 5, "expected a safetensors file"),
        ("names", 5, "expected a tensor layers.1.hidden or hidden"),
        ("good", 6, r"hidden: expected shape \[6, "),
    ]:
        with pytest.raises(InputError, match=message):
            FileHidden(tmp_path / name, config, num_tokens)
    with pytest.raises(InputError, match="expected one of BF16, F16, F32, found I32"):
        FileHidden(tmp_path / "dtype", config, 5)
    eight_bits = {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [0, math.prod(shape)]}
    write_safetensors(tmp_path / "fp8", {"hidden": eight_bits}, bytes(math.prod(shape)))
    with pytest.raises(InputError, match="expected one of BF16, F16, F32, found F8_E4M3"):
        FileHidden(tmp_path / "fp8", config, 5)


def test_hidden_states_of_no_tokens(store, tmp_path):
    from safetensors.numpy import save_file

    shape = (0, store.config.hc_mult, store.config.hidden_size)
    save_file({"hidden": np.zeros(shape, np.float16)}, tmp_path / "none")
    empty = FileHidden(tmp_path / "none", store.config, 0)(1, 0, 0)
    assert (empty.shape, empty.dtype) == (shape, np.float16)
