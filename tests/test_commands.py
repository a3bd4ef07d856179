# SPDX-License-Identifier: Apache-2.0
"""What each command does with good input. The demo, doctor and bench have files of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from checkpoints import names_below, shard_of, small_checkpoint
from command_line import COMMAND, TEXT, only_line
from safetensors.numpy import load_file, save_file

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.plugins import library_path
from trtllm_engram.runtime import gpus, open_store, ops, sizing
from trtllm_engram.runtime.data_files import flash_layout
from trtllm_engram.runtime.hidden import SeededHidden
from trtllm_engram.runtime.session import EngramSession

pytest_plugins = ["command_line_fixtures"]
ROOT = Path(__file__).resolve().parents[1]


def test_library_path(run):
    assert run("library-path") == (0, f"{library_path()}\n", "")


def test_cache_lists_and_clears_only_its_own(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", str(tmp_path))
    (tmp_path / "token_map-1.bin").write_bytes(b"123")
    (tmp_path / "timing-10.6.0.cache").write_bytes(b"12")
    (tmp_path / "precious").write_bytes(b"4")
    (tmp_path / ".token_map-1.bin.0123abcd.part").write_bytes(b"5")
    _, out, _ = run("cache", "--json")
    assert json.loads(out)["entries"] == [
        {"name": ".token_map-1.bin.0123abcd.part", "bytes": 1},
        {"name": "timing-10.6.0.cache", "bytes": 2},
        {"name": "token_map-1.bin", "bytes": 3},
    ]
    assert run("cache", "--clear")[0] == 0
    assert names_below(tmp_path) == ["precious"]


def test_a_cache_that_cannot_be_is_told(run, monkeypatch):
    monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", "/proc/no/such")
    code, _, err = run("cache")
    assert code == 2
    assert "uncached" in only_line(err)


def hash_of(store, ids, dead=None):
    positions, bounds = np.arange(ids.size), np.array([0, ids.size], np.int32)
    return ops.hash_ids(store.layout, store.token_map, ids, positions, bounds, dead_mask=dead)


def test_hash_in_every_form(run, files):
    store = open_store("store")
    ids = np.array([1, 2, 3, 4], np.int32)
    np.save(files / "ids.npy", ids)
    expected = hash_of(store, ids)
    for model in ("store", "checkpoint"):
        for source in ("ids", "ids.npy"):
            _, out, _ = run("hash", model, "--ids", source, "--json")
            assert json.loads(out)["hash_ids"] == expected.tolist()
    config = ("checkpoint/config.json", "--tokenizer", "checkpoint/tokenizer.json")
    assert run("hash", *config, "--ids", "ids", "--output", "out.npy")[0] == 0
    assert np.array_equal(np.load(files / "out.npy"), expected)
    _, out, _ = run("hash", "store", "--ids", "ids")
    lines = [line.split() for line in out.splitlines()[1:]]
    heads = store.config.n_heads
    assert np.array([line[4:] for line in lines], int).reshape(expected.shape).tolist() == (
        expected.tolist()
    )
    assert lines[0][:4] == ["0", "1", "1", "2"]
    assert len(lines[0]) == 4 + heads


def test_dead_spans(run):
    dead = np.array([False, True, True, False])
    _, out, _ = run("hash", "store", "--ids", "ids", "--dead", "1:3", "--json")
    expected = hash_of(open_store("store"), np.array([1, 2, 3, 4], np.int32), dead)
    assert json.loads(out)["hash_ids"] == expected.tolist()


def test_text_from_standard_input(files):
    done = subprocess.run(
        [*COMMAND, "hash", "store", "--text", "-", "--json"],
        cwd=files,
        input=TEXT.encode(),
        capture_output=True,
        check=True,
    )
    vocabulary = json.loads((files / "checkpoint/tokenizer.json").read_text())["model"]["vocab"]
    assert json.loads(done.stdout)["token_ids"] == [vocabulary[word] for word in TEXT.split()]


def test_run_is_the_session_in_any_chunking(run, files):
    store = open_store("store")
    options = ("run", "store", "--text", "text", "--device", "cpu", "--seed", "5", "--rows")
    assert run(*options, "--output", "one.safetensors")[0] == 0
    assert run(*options, "--output", "many.safetensors", "--chunk", "3")[0] == 0
    one = load_file(files / "one.safetensors")
    assert (files / "one.safetensors").read_bytes() == (files / "many.safetensors").read_bytes()
    _, out, _ = run("hash", "store", "--text", "text", "--json")
    ids = np.array(json.loads(out)["token_ids"])
    (chunk,) = EngramSession(store).run(ids, SeededHidden(store.config, 5))
    assert len(one) == 3 * store.config.num_layers
    for index, layer_id in enumerate(store.config.layer_ids):
        assert np.array_equal(one[f"layers.{layer_id}.hash_ids"], chunk.hash_ids[:, index])
        assert np.array_equal(one[f"layers.{layer_id}.rows"], chunk.rows[layer_id])
        assert np.array_equal(one[f"layers.{layer_id}.hidden"], chunk.hidden[layer_id])


def test_run_takes_hidden_states_and_hands_on_their_dtype(run, files):
    config = open_store("store").config
    hidden = np.ones((4, config.hc_mult, config.hidden_size), np.float32)
    save_file({"hidden": hidden}, files / "hidden.safetensors")
    options = ("run", "store", "--ids", "ids", "--hidden", "hidden.safetensors")
    assert run(*options, "--output", "f32.safetensors", "--dead", "0:2")[0] == 0
    out = load_file(files / "f32.safetensors")[f"layers.{config.layer_ids[0]}.hidden"]
    assert out.dtype == np.float32
    assert np.array_equal(out[:2], hidden[:2])
    assert not np.array_equal(out[2:], hidden[2:])
    code, _, err = run(*options, "--output", "hidden.safetensors")
    assert code == 2
    assert "expected another file for the output" in only_line(err)
    assert np.array_equal(load_file(files / "hidden.safetensors")["hidden"], hidden)


def test_a_store_runs_without_its_checkpoints_index(run, files, tmp_path):
    checkpoint = small_checkpoint(tmp_path / "checkpoint")
    prepare(checkpoint, tmp_path / "store")
    (checkpoint / "model.safetensors.index.json").write_text("torn")
    options = ("run", tmp_path / "store", "--ids", files / "ids", "--output")
    assert run(*options, tmp_path / "out")[0] == 0
    shard = next(checkpoint.glob("*.safetensors"))
    assert run(*options, shard)[0] == 2  # a store names those that it reads


def test_an_empty_text_runs(run, files):
    (files / "empty").write_text("")
    assert run("run", "store", "--text", "empty", "--output", "empty.safetensors")[0] == 0
    assert load_file(files / "empty.safetensors")["layers.1.hash_ids"].shape[0] == 0
    assert run("hash", "store", "--text", "empty")[0] == 0


def test_a_run_that_is_interrupted_leaves_nothing(run, files, monkeypatch):
    before = names_below(files)

    def interrupted(*_args, **_options):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(EngramSession, "run", interrupted)
    code, _, err = run("run", "store", "--text", "text", "--output", "never.safetensors")
    assert code == 130
    assert "interrupted" in only_line(err)
    assert names_below(files) == before


def test_verify_names_file_and_block_and_restamps(run, files, tmp_path):
    checkpoint = small_checkpoint(tmp_path / "checkpoint")
    store = tmp_path / "store"
    prepare(checkpoint, store)
    shard = shard_of(checkpoint, "layers.5.engram.embed.weight")
    os.utime(shard, ns=(1, 1))
    assert run("hash", store, "--ids", files / "ids")[0] == 2
    assert run("verify", store)[0] == 1
    assert run("verify", store, "--restamp")[0] == 0
    assert run("hash", store, "--ids", files / "ids")[0] == 0
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    code, out, err = run("verify", store, "--restamp")
    assert (code, err) == (1, "")
    line = only_line(out)
    assert str(shard) in line
    assert "block 0 of layers.5.engram.embed.weight" in line


def test_inspect_tells_what_it_is(run, files):
    shutil.copy(files / "checkpoint/tokenizer.json", files / "words of some name")
    for path, kind in (
        ("checkpoint", "checkpoint"),
        ("store", "store"),
        ("checkpoint/config.json", "config"),
        ("checkpoint/tokenizer.json", "tokenizer"),
        ("words of some name", "tokenizer"),
    ):
        _, out, _ = run("inspect", path)
        assert out.splitlines()[0].split() == ["kind", kind]


def test_size_of_many_nodes(run):
    """The example of docs/scaling.md, word for word; without a model it is V4.1-Flash."""
    text = (ROOT / "docs/scaling.md").read_text()
    (words,) = re.findall(r"^    trtllm-engram (size .*)$", text, re.MULTILINE)
    _, out, _ = run(*words.split())
    printed = out[out.index("2 nodes") :].splitlines()
    block = text[text.index("    2 nodes") : text.index("*load* is")]
    assert [line.removeprefix("    ") for line in block.rstrip().splitlines()] == printed


def result(name):
    return json.loads((ROOT / "docs" / name).read_text())


def rows_per_s(name, row, path=None):
    """Of a result with 8192 tokens x 24 rows, by the path that is chosen or by another, which
    stands beside it as a rival does."""
    ones = [one for one in result(name) if (one["row"], one["T"]) == (row, 8192)]
    if path is None:
        return 8192 * 24 / (ones[0]["ours_us"] * 1e-6)
    (us,) = [one["rival_us"] for one in ones if one["rival"] == path]
    return 8192 * 24 / (us * 1e-6)


def test_size_stands_on_rates_that_were_measured():
    ranks = result("tables.json")["sharded tables"]["result"]["ranks"]
    speeds = [rank["gb_per_s"] for rank in ranks]
    peer = min(speed for rank in speeds for part, speed in rank.items() if part.startswith("rank"))
    rates = [sizing.DEVICE_ROWS_PER_S, sizing.PEER_ROWS_PER_S, sizing.HOST_ROWS_PER_S]
    assert rates == pytest.approx(
        [
            rows_per_s("performance.json", "lookup to BF16"),
            peer * 1e9 / 264,
            rows_per_s("host_table.json", "host lookup to BF16", "sorted, 8"),
        ],
        rel=0.01,
    )
    text = (ROOT / "docs/scaling.md").read_text()
    found = re.findall(r"\| ([0-9.]+e[0-9]+) \|$", text, re.MULTILINE)
    assert [float(one) for one in found] == rates
    both = min(rank["all"] for rank in speeds) * 1e9 / 264
    assert sizing.sharded_rows_per_s(2) < both < 1.5 * sizing.sharded_rows_per_s(2)


def test_size_counts_the_bytes_that_runs_had():
    measured = result("tables.json")
    (shared,) = [
        one["share"] for one in measured["bench tables"]["figures"] if "memory" in one["name"]
    ]
    assert shared == pytest.approx(1, rel=0.01)  # of one table, as "host" has it, for 4 ranks
    nodes = sizing.Nodes(1, 0, 2, 0, 1, 1.0)
    counted = {one.name: one.gpu_bytes for one in sizing.placements(flash_layout().config, nodes)}
    for rank in measured["sharded tables"]["result"]["ranks"]:
        assert sum(rank["bytes"].values()) == pytest.approx(counted["device_sharded"], rel=0.01)


def test_size_asks_for_memory_that_it_cannot_see(run, monkeypatch):
    none = gpus.Driver("", (0, 0), ())
    monkeypatch.setattr("trtllm_engram.runtime.cli.size.probe_driver", lambda: none)
    code, _, err = run("size", "--gpus", "8", "--ram", "2000")
    assert (code, err.count("\n")) == (2, 1)
    assert "--gpu-memory: expected GB of a GPU where this machine has none" in err
    assert run("size", "--gpus", "0", "--ram", "2000")[0] == 0


def test_size_of_the_true_model(run, files):
    golden = json.loads((ROOT / "runtime/data/golden_hash.json").read_text())
    (files / "true.json").write_text(json.dumps(golden["config"]))
    machine = ("--gpus", "8", "--gpu-memory", "141", "--ram", "200", "--numa-nodes", "2")
    _, out, _ = run("size", "true.json", *machine, "--disk", "2", "--json")
    placements = {one["name"]: one for one in json.loads(out)["placements"]}
    total = (384006168 + 384016682) * 264
    assert placements["host"]["ram_bytes"] == total
    assert placements["host, numa gpu"]["ram_bytes"] == 2 * total
    assert placements["host, memory private"]["ram_bytes"] == 8 * total
    assert placements["device_sharded"]["gpu_bytes"] == -(-total // 8)
    assert placements["host"]["load_seconds"] == total / 2e9
    assert placements["disk"]["load_seconds"] == 0
    assert placements["disk"]["ram_bytes"] == 2 << 30  # hot_gib of each layer
    scales = total * 8 // 264
    assert placements["disk, scales in RAM"]["ram_bytes"] == (2 << 30) + scales
    assert placements["disk, scales in RAM"]["load_seconds"] == scales / 2e9
    assert placements["device"]["tokens_per_s"] == sizing.DEVICE_ROWS_PER_S / 48
    assert placements["device_sharded"]["tokens_per_s"] == sizing.sharded_rows_per_s(8) / 48
    assert placements["host"]["tokens_per_s"] is None
    assert {name: one["fits"] for name, one in placements.items()} == {
        "host": False,
        "host, scales on GPU": True,
        "host, numa gpu": False,
        "host, memory private": False,
        "device": False,
        "device_sharded": True,
        "disk": True,
        "disk, scales in RAM": True,
    }
