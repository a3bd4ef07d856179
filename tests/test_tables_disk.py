# SPDX-License-Identifier: Apache-2.0
"""placement = "disk": the same bits as rows in memory, whichever are asked for, by whatever reads;
what cannot be read is NaN and an error that says where."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from command_line import COMMAND, TEXT, only_line
from disk_tables import FORMS, LAYER, bind, last_row, random_ids, same
from engines import small_store

from trtllm_engram.builder.layers import table_name
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import Tables, open_store, ops
from trtllm_engram.runtime.metrics import Metrics
from trtllm_engram.runtime.session import EngramSession
from trtllm_engram.runtime.tables import describe_tables

# Runs a command for which the kernel refuses io_uring_setup, as container runtimes' filters do.
WITHOUT_IO_URING = """
import ctypes, os, struct, sys
IO_URING_SETUP, EPERM = 425, 1
code = [(0x20, 0, 0, 0), (0x15, 0, 1, IO_URING_SETUP), (0x06, 0, 0, 0x00050000 | EPERM),
        (0x06, 0, 0, 0x7FFF0000)]  # load the call's number; equal: refuse it; else let it be
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, filter, 0, 0):
    sys.exit(77)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def own_store(tmp_path):
    """One whose files the test may harm."""
    return small_store(tmp_path)


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 129, 5000])
@pytest.mark.parametrize("options", [{}, {"scales": "host"}, {"hot_gib": 0}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_as_in_memory(store, form, options, num_tokens):
    on_disk, in_memory, order = FORMS[form]
    table = store.table(LAYER)
    ids = random_ids(store, num_tokens)
    with bind(store, **options) as tables:
        for _ in range(2):  # from the disk, then from RAM
            found = on_disk(tables, "mine", ids, **order)
            same(found, in_memory(table.values, table.scales, ids, **order))


def test_equal_ids_and_ids_apart(store):
    """All equal, none at all, descending; and a layer's part of the ids of all layers."""
    table = store.table(LAYER)
    columns = store.config.num_columns
    every = np.arange(last_row(store), -1, -1, np.int32)
    descending = every[: every.size // columns * columns].reshape(-1, columns)
    apart = np.stack([random_ids(store, 300, seed) for seed in (1, 2)], axis=1)
    with bind(store) as tables:
        for ids in (
            np.full((400, columns), last_row(store), np.int32),
            np.full((3, columns), -1, np.int32),
            descending,
            apart[:, 1],
        ):
            same(tables.lookup("mine", ids), ops.lookup(table.values, table.scales, ids))


def test_what_was_read_is_kept(store):
    ids = random_ids(store, 200)
    metrics = Metrics()
    with bind(store) as tables:
        tables.lookup("mine", ids)
        before = tables.describe()["mine"]["disk"]
        tables.lookup("mine", ids)
        after = tables.describe()["mine"]["disk"]
        metrics.note_tables(tables.describe())
    assert before["hot_rows"] == 0
    assert before["disk_rows"] > before["num_reads"] > 0
    asked = before["disk_rows"]
    assert after == before | {"hot_rows": asked}
    assert f'engram_hot_rows_total{{table="mine"}} {asked}' in metrics.prometheus_text()
    assert f'engram_disk_rows_total{{table="mine"}} {asked}' in metrics.prometheus_text()


def test_described(store):
    rows = last_row(store) + 1
    with bind(store, hot_gib=0.0001) as tables, bind_other(store) as others:
        about = tables.describe()["mine"]
        assert (about["placement"], about["scales"], about["memory"]) == ("disk", "disk", None)
        assert about["num_bytes"] == about["disk"]["hot_bytes"] <= 0.0001 * 2**30
        about = others.describe()["other"]
        assert (about["placement"], about["scales"], about["memory"]) == ("disk", "host", "memfd")
        assert about["disk"]["hot_capacity"] >= rows  # and no more than there are, but for ends
        assert about["num_bytes"] == about["disk"]["hot_bytes"] + rows * 2


def bind_other(store):
    tables = Tables()
    tables.bind("other", store, layer=LAYER, placement="disk", scales="host")
    return tables


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hot_gib": -1}, "hot_gib: expected GiB, 0 to 65536"),
        ({"hot_gib": "1"}, "hot_gib: expected GiB"),
        (
            {"placement": "device", "hot_gib": 1},
            "hot_gib: expected with placement host or disk, found",
        ),
        ({"placement": "host", "scales": "host"}, "scales: expected host with placement disk"),
        ({"scales": "device"}, "scales: expected with_rows or host with placement disk"),
        ({"formula_seed": 1}, "formula_seed: expected a placement that loads rows, found disk"),
        ({"verify": True}, "verify: expected a placement that loads rows, found disk"),
        ({"memory": "keeper"}, "placement: expected host, which is where a keeper's memory is"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused(store, options, expected):
    with Tables() as tables, pytest.raises(InputError, match=expected):
        tables.bind("mine", store, layer=LAYER, **{"placement": "disk"} | options)
    assert describe_tables() == {}


def test_a_part_of_the_columns(store):
    """heads: one rank's are all, so that row ids are its own."""
    ids = random_ids(store, 50)
    table = store.table(LAYER)
    with bind(store, heads=True) as tables:
        same(tables.lookup("mine", ids), ops.lookup(table.values, table.scales, ids))


def test_a_store_that_changed_is_refused(own_store):
    file = own_store.manifest.span(own_store.path, own_store.manifest.layers[LAYER]["embed.weight"])
    os.utime(file.file, ns=(1, 1))
    with pytest.raises(InputError, match="changed since prepare: expected mtime_ns"):
        bind(own_store)


def test_a_file_cut_short(own_store):
    """That step's rows are NaN, and every call from then on is an error."""
    span = own_store.manifest.span(own_store.path, own_store.manifest.layers[LAYER]["embed.weight"])
    row = 3
    ids = np.array([[row, -1] + [0] * (own_store.config.num_columns - 2)], np.int32)
    with bind(own_store) as tables:
        os.truncate(span.file, span.offset + row * 64 + 1)
        found = tables.lookup("mine", ids).view(np.uint16).reshape(-1, 64)
        assert (found[0] == 0x7FFF).all()
        assert (found[1] == 0).all()
        where = f"{re.escape(str(span.file))}: .* at offset {span.offset + row * 64}"
        for _ in range(2):
            with pytest.raises(EngramError, match=where):
                tables.lookup("mine", ids)
        with pytest.raises(EngramError, match=where):
            tables.raise_fault("mine")


def test_sessions_hand_out_no_such_rows(own_store):
    part = own_store.manifest.layers[LAYER]["embed.weight"]
    with Tables.of_store(own_store, placement="disk") as tables:
        session = EngramSession(own_store, "cpu", tables)
        step = session.step([1, 2, 3])
        same(session.rows(LAYER, step), EngramSession(own_store).rows(LAYER, step))
        other = session.step([4, 5])
        os.truncate(own_store.manifest.span(own_store.path, part).file, 4096)
        with pytest.raises(EngramError, match="rows of an earlier lookup could not be read"):
            session.rows(LAYER, other)


def test_many_threads(store):
    """More rows than may be kept, so that they are evicted under each other."""
    table = store.table(LAYER)
    wrong = []

    def look(seed, tables):
        for turn in range(15):
            ids = random_ids(store, 40, seed=turn + seed % 2)
            if not np.array_equal(
                tables.lookup("mine", ids).view(np.uint16),
                ops.lookup(table.values, table.scales, ids).view(np.uint16),
            ):
                wrong.append(turn)

    with bind(store, hot_gib=0.0001) as tables:
        threads = [threading.Thread(target=look, args=(seed, tables)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tables.describe()["mine"]["disk"]["hot_rows"] > 0
    assert not wrong


def test_forked_processes_read_on(store):
    table = store.table(LAYER)
    ids = random_ids(store, 100)
    expected = ops.lookup(table.values, table.scales, ids)
    with bind(store, hot_gib=0) as tables:
        same(tables.lookup("mine", ids), expected)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                same(tables.lookup("mine", ids), expected)
                code = 0
            finally:
                os._exit(code)
        same(tables.lookup("mine", ids), expected)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_stays_open(store):
    ids = random_ids(store, 3)
    bind(store).close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(200):
        with bind(store) as tables:
            tables.lookup("mine", ids)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def run_command(store, output, *options, prefix=()):
    """`run` on the CPU; the bytes that it wrote, and its errors' lines."""
    text = store.path.parent / "text"
    text.write_text(TEXT)
    command = ["run", str(store.path), "--text", str(text), "--output", str(output)]
    done = subprocess.run(
        [sys.executable, *prefix, *COMMAND[1:], *command, "--device", "cpu", "--rows", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this kernel lets nobody refuse calls")
    assert done.returncode == 0, done.stderr
    return output.read_bytes(), done.stderr.splitlines()


def test_run_by_either_way(store, tmp_path):
    """The command's results are the same bytes; threads in place of io_uring are worth a line."""
    with bind(store) as tables:
        has_io_uring = tables.describe()["mine"]["disk"]["reads_by"] == "io_uring"
    disk = ["--placement", "disk", "--hot-gib", "0"]
    expected, _ = run_command(store, tmp_path / "mapped")
    found, errors = run_command(store, tmp_path / "disk", *disk)
    assert found == expected
    assert (errors == []) == has_io_uring
    wrapper = ["-c", WITHOUT_IO_URING]
    found, errors = run_command(store, tmp_path / "threads", *disk, prefix=wrapper)
    assert found == expected
    assert "io_uring cannot be had: Operation not permitted" in only_line("\n".join(errors))
    found, _ = run_command(store, tmp_path / "host", "--placement", "disk", "--scales", "host")
    assert found == expected


def test_run_says_what_goes_with_what(store, tmp_path):
    command = [*COMMAND, "run", str(store.path), "--text", __file__, "--output", tmp_path / "o"]
    done = subprocess.run([*command, "--hot-gib", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--hot-gib: expected with --placement" in only_line(done.stderr)


@pytest.fixture
def failing_disk(tmp_path):
    """A folder on a disk of its own; calling it takes the disk's second half away."""
    image, folder = tmp_path / "disk", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    device = None
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        setup = ["losetup", "-f", "--show", "--direct-io=on", image]
        device = subprocess.run(setup, check=True, capture_output=True, text=True).stdout.strip()
        subprocess.run(["mount", device, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if device:
            subprocess.run(["losetup", "-d", device], check=True)
        pytest.skip(f"this user may mount no disk: {error}")
    yield folder, lambda: os.truncate(image, 8 << 20)
    subprocess.run(["umount", folder], check=True)
    subprocess.run(["losetup", "-d", device], check=True)


def test_a_disk_that_fails(failing_disk):
    """EIO, as disks say it: rows that it still has are right, the others NaN and an error once."""
    folder, fail = failing_disk
    store = small_store(folder)
    table = store.table(LAYER)
    ids = random_ids(store, 50)
    expected = ops.lookup(table.values, table.scales, ids).view(np.uint16)
    # Files of this size may lie anywhere: what lies last is behind a larger one.
    checkpoint = Path(store.manifest.checkpoint)
    copies = folder / "behind"
    (folder / "large").write_bytes(os.urandom(30 << 20))
    shutil.copytree(checkpoint, copies)
    for file in checkpoint.iterdir():
        shutil.copystat(file, copies / file.name)
    os.sync()
    with Tables() as tables:
        tables.bind(
            table_name(LAYER), store, layer=LAYER, placement="disk", hot_gib=0, checkpoint=copies
        )
        same(tables.lookup(table_name(LAYER), ids).view(np.uint16), expected)
        fail()
        for path in copies.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = tables.lookup(table_name(LAYER), ids).view(np.uint16)
        lost = found.reshape(-1, 64)[(found != expected).reshape(-1, 64).any(axis=1)]
        assert lost.size
        assert (lost == 0x7FFF).all()
        with pytest.raises(EngramError, match=r"Input/output error \(row \d+ at offset \d+\)"):
            tables.raise_fault(table_name(LAYER))
        tables.raise_fault(table_name(LAYER))


def test_bound_by_a_file(store):
    """The TOML's keys, by a program that knows nothing else."""
    path = store.path.parent / "tables.toml"
    path.write_text(
        "format_version = 1\n[tables.mine]\nstore = 'store'\nlayer = 5\nplacement = 'disk'\n"
        "scales = 'host'\nhot_gib = 0.5\n"
    )
    path.chmod(0o600)
    program = (
        "import json\nfrom trtllm_engram.runtime import _native\n"
        "_native.table_host_view('mine')\nprint(json.dumps(_native.describe_tables()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRTLLM_ENGRAM_TABLES": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    about = json.loads(done.stdout)["mine"]
    assert (about["placement"], about["scales"]) == ("disk", "host")
    assert open_store(store.path).config.num_columns == about["num_columns"]
