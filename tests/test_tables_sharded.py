# SPDX-License-Identifier: Apache-2.0
"""Tables over the memory of several GPUs, and tables whose ranks keep their own heads: ranks are
processes, and every byte that they read is the formula's."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkout import ROOT
from engines import small_store, tensor_bytes

from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.builder.made_up import config_of_size, write_made_up_store
from trtllm_engram.runtime import Store
from trtllm_engram.runtime.row_counts import COUNTS_DTYPE

SEED = 3
SHARDED = {"placement": "device_sharded"}
GRANULE = 2 << 20


class Rank:
    def __init__(self, job: dict[str, Any], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/sharded_rank.py"), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"a rank ended: {self.process.wait()}")
        return json.loads(line)

    def result(self) -> Any:
        answer = self.answer()
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def ask(self, do: str, **arguments: Any) -> None:
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(30) == -signal.SIGKILL

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def gpus_of(where: str, size: int) -> list[tuple[int, dict[str, str]]]:
    """(device, environment) of each rank. where: how ranks lie on GPUs, and what they see."""
    if where == "cpu":
        return [(None, {})] * size
    if where == "one":
        return [(0, {})] * size
    devices = [rank % 2 for rank in range(size)]
    if where == "two":
        return [(device, {}) for device in devices]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return [(0, {"CUDA_VISIBLE_DEVICES": visible[device]}) for device in devices]


@contextlib.contextmanager
def started(
    where: str, size: int, store: Store | Path, layers: tuple[int, ...] = (1,), **table: Any
) -> Iterator[list[Rank]]:
    """Ranks that bind the store's layers; their answers to that are still to come. What a list says
    of the tables is of one rank each."""
    path = str(store.path if isinstance(store, Store) else store)
    name = f"sharded-{secrets.token_hex(6)}"
    ranks = []
    for rank, (device, environment) in enumerate(gpus_of(where, size)):
        keys = {key: each[rank] if isinstance(each, list) else each for key, each in table.items()}
        job = {
            "group": {"name": name, "rank": rank, "size": size, "timeout_s": 60.0},
            "tables": {f"engram_{n}": {"store": path, "layer": n, **keys} for n in layers},
            "device": device,
            "seed": table.get("formula_seed", SEED),
        }
        ranks.append(Rank(job, environment))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def all_of(ranks: list[Rank], do: str, **arguments: Any) -> list[Any]:
    for rank in ranks:
        rank.ask(do, **arguments)
    return [rank.result() for rank in ranks]


def errors_of(ranks: list[Rank]) -> list[str]:
    answers = [rank.answer() for rank in ranks]
    assert all("error" in answer for answer in answers), answers
    return [answer["error"] for answer in answers]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """102 MB of values a layer, which is two blocks: some are on both sides of a cut."""
    folder = tmp_path_factory.mktemp("sharded")
    return small_store(folder, engram_vocab_size=400_000, seed=SEED)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("heads")
    return small_store(folder, engram_vocab_size=300, max_ngram_size=4, seed=SEED)


# One GPU serves several ranks; two: each has its own, and sees the other or not.
WHERE = [
    pytest.param("one", 2, id="one-2"),
    pytest.param("one", 3, id="one-3"),
    pytest.param("two", 2, id="two-2", marks=pytest.mark.gpus),
    pytest.param("hidden", 2, id="hidden-2", marks=pytest.mark.gpus),
    pytest.param("hidden", 4, id="hidden-4", marks=pytest.mark.gpus),
]

one_and_two = pytest.mark.parametrize("where", ["one", pytest.param("two", marks=pytest.mark.gpus)])


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.parametrize(("where", "size"), WHERE)
@pytest.mark.parametrize("source", ["files", "formula"])
def test_every_rank_reads_every_row(store: Store, where: str, size: int, source: str) -> None:
    options = {"verify": True} if source == "files" else {"formula_seed": 77}
    config = store.config
    with started(where, size, store, config.layer_ids, **SHARDED, **options) as ranks:
        described = [rank.result() for rank in ranks]
        rows = sum(config.num_embeddings)
        for checked in all_of(ranks, "check"):
            assert checked == rows * (config.head_dim + config.head_dim // 32)
        for layer, num_rows in zip(config.layer_ids, config.num_embeddings, strict=True):
            held = [tables[f"engram_{layer}"]["num_bytes"] for tables in described]
            needed = num_rows * config.head_dim
            # All of it once, and equal parts but for less than a granule a column and array.
            assert needed <= sum(held) <= needed * 33 // 32 + 2 * GRANULE
            assert max(held) - min(held) < 4 * config.num_columns * GRANULE
        assert all(all_of(ranks, "replay", name="engram_1"))


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.parametrize(("where", "size"), WHERE)
def test_survivors_of_a_kill_go_on_reading(store: Store, where: str, size: int) -> None:
    with started(where, size, store, **SHARDED, formula_seed=1) as ranks:
        for rank in ranks:
            rank.result()
        ranks.pop(size // 2).kill()
        for _ in range(2):
            assert min(all_of(ranks, "check")) > 0


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.xdist_group("table_limits_gpu")  # which takes all of a GPU
@one_and_two
def test_memory_is_given_back(tmp_path: Path, where: str) -> None:
    """Once no rank maps it; until then one rank's part stays for the others. Parts are so large
    that other tests on these GPUs do not hide them."""
    num_bytes = 16 << 30
    write_made_up_store(tmp_path, config_of_size(num_bytes, layers=(1,)))
    with started(where, 2, tmp_path, **SHARDED, formula_seed=1) as ranks:
        for rank in ranks:
            rank.result()
        before = all_of(ranks, "free")
        all_of(ranks, "close")
        after = all_of(ranks, "free")
    gained = [late - early for early, late in zip(before, after, strict=True)]
    assert min(gained) > (num_bytes if where == "one" else num_bytes // 2) * 3 // 4, gained


@pytest.mark.gpu
@pytest.mark.multiproc
@one_and_two
def test_scales_of_ones_own(store: Store, where: str) -> None:
    with started(where, 2, store, **SHARDED, scales="device") as ranks:
        for rank in ranks:
            rank.result()
        assert min(all_of(ranks, "check")) > 0


@pytest.mark.gpu
@pytest.mark.multiproc
def test_a_bad_block_is_every_ranks_error(tmp_path: Path) -> None:
    store = small_store(tmp_path, engram_vocab_size=400_000, seed=SEED)
    file = tensor_bytes(tmp_path / "checkpoint", "1.engram.embed.weight")
    status = Path(file.filename).stat()
    file[-1, -1] ^= 1
    file.flush()
    os.utime(file.filename, ns=(status.st_atime_ns, status.st_mtime_ns))
    with started("one", 2, store, **SHARDED, verify=True) as ranks:
        for error in errors_of(ranks):
            assert "block 1 of engram.1.values (bytes" in error
            assert error.startswith("tables: rank ")


@pytest.mark.gpu
@pytest.mark.multiproc
@one_and_two
def test_too_large_is_told_before_it_is_allocated(tmp_path: Path, where: str) -> None:
    write_made_up_store(tmp_path, config_of_size(10**12))
    with started(where, 2, tmp_path, (1, 14), **SHARDED, formula_seed=0) as ranks:
        for error in errors_of(ranks):
            assert "GPU 0000" in error
            assert "of free memory for the tables of rank" in error


@pytest.mark.gpu
@pytest.mark.multiproc
def test_the_example() -> None:
    words = ["--ranks", "2", "--gb", "0.5", "--kill", "1", "--json"]
    command = [sys.executable, str(ROOT / "examples/sharded_tables.py"), *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    loaded, killed = map(json.loads, run.stdout.splitlines())
    assert [rank["rank"] for rank in loaded["ranks"]] == [0, 1]
    assert [rank["rank"] for rank in killed["ranks"]] == [0]
    assert 5e8 < sum(sum(rank["bytes"].values()) for rank in loaded["ranks"]) < 6e8


@pytest.mark.gpu
@pytest.mark.multiproc
@one_and_two
def test_heads_in_gpu_memory(small: Store, where: str) -> None:
    check_heads(small, where, 3, placement="device")


@pytest.mark.multiproc
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("options", [{}, {"formula_seed": SEED}], ids=["files", "formula"])
def test_heads_in_host_memory(small: Store, size: int, options: dict[str, Any]) -> None:
    check_heads(small, "cpu", size, placement="host", **options)


def check_heads(store: Store, where: str, size: int, **options: Any) -> None:
    """Each rank has its own columns, and the ranks' lookups side by side are the table's."""
    config = store.config
    columns, num_rows = config.num_columns, config.num_embeddings[0]
    offsets = store.layout.offsets[0]
    ends = np.append(offsets[1:], num_rows)
    ids = np.random.default_rng(0).integers(offsets, ends, (40, columns)).astype(np.int32)
    ids[7] = -1
    rows = np.concatenate(row_bytes(config, 1, ids, SEED), axis=-1)
    rows[7] = 0
    with started(where, size, store, heads=True, **options) as ranks:
        first = 0
        for rank in ranks:
            table = rank.result()["engram_1"]
            assert table["first_column"] == first
            mine = slice(first, first + table["num_columns"])
            assert table["num_rows"] == (ends[mine] - offsets[mine]).sum()
            if options["placement"] == "device":
                row = config.head_dim + config.head_dim // 32
                assert table["num_bytes"] == table["num_rows"] * row
            rank.ask("lookup", name="engram_1", ids=ids[:, mine].tolist())
            assert rank.result() == rows[:, mine].tobytes().hex()
            # Rows of other ranks' columns read as zeros.
            others = np.roll(ids, table["num_columns"], axis=1)[:, mine]
            rank.ask("lookup", name="engram_1", ids=others.tolist())
            assert size == 1 or not any(bytes.fromhex(rank.result()))
            first = mine.stop
        assert first == columns


@pytest.mark.multiproc
@pytest.mark.parametrize("where", ["cpu", pytest.param("one", marks=pytest.mark.gpu)])
def test_heads_with_hot_rows(small: Store, tmp_path: Path, where: str) -> None:
    """Each rank keeps those of its own columns, and finds them by the table's row ids."""
    config = small.config
    half = config.num_columns // 2
    offsets = small.layout.offsets[0]
    rows = np.concatenate([offsets[:2], offsets[half] + np.arange(5)])
    hot = np.zeros(rows.size, COUNTS_DTYPE)
    hot["layer"], hot["row"], hot["count"] = 1, rows, 1
    np.save(tmp_path / "hot.npy", hot)
    options = {"placement": "host", "hot_rows": str(tmp_path / "hot.npy")}
    with started(where, 2, small, heads=True, **options) as ranks:
        described = [rank.result()["engram_1"] for rank in ranks]
        assert [one["first_column"] for one in described] == [0, half]
        assert [one["hot"]["num_rows"] for one in described] == [2, 5]
        for first, rank in zip((0, half), ranks, strict=True):
            ids = np.full((3, half), rows[-1 if first else 0], np.int32)
            ids[1] = offsets[first : first + half]
            wanted = np.concatenate(row_bytes(config, 1, ids, SEED), axis=-1)
            rank.ask("lookup", name="engram_1", ids=ids.tolist())
            assert rank.result() == wanted.tobytes().hex()


@pytest.mark.multiproc
def test_more_ranks_than_heads(small: Store) -> None:
    with started("cpu", 7, small, heads=True) as ranks:
        for error in errors_of(ranks):
            assert "expected 6 columns to leave each of 7 ranks at least one" in error


@pytest.mark.multiproc
def test_ranks_that_do_not_agree_on_heads(small: Store) -> None:
    with started("cpu", 2, small, heads=[True, False]) as ranks:
        for error in errors_of(ranks):
            assert "rank 1: table 'engram_1': heads: expected true as on rank 0" in error


@pytest.mark.multiproc
def test_sharded_without_a_gpu(small: Store) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    job = {
        "group": {"name": secrets.token_hex(6), "rank": 0, "size": 1},
        "tables": {"engram_1": {"store": str(small.path), "layer": 1, **SHARDED}},
        "device": None,
        "seed": SEED,
    }
    rank = Rank(job, environment)
    try:
        assert "CUDA" in rank.answer()["error"]
    finally:
        rank.close()
