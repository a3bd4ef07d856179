# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, exit codes, one line for bad input, JSON alone, pipes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import names_below, shard_of, small_checkpoint
from safetensors.numpy import load_file, save_file

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.plugins import library_path
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import cli, open_store, ops
from trtllm_engram.runtime.cli import COMMANDS, console, main
from trtllm_engram.runtime.cli import library_path as library_path_command
from trtllm_engram.runtime.hidden import SeededHidden
from trtllm_engram.runtime.session import EngramSession

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "trtllm_engram.runtime.cli"]
TEXT = "1 2 3 a A 7 7 7 pad 12 13 1 2 3 a A"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint, its store, a text and token ids."""
    folder = tmp_path_factory.mktemp("cli files ✓")
    checkpoint = small_checkpoint(folder / "checkpoint")
    prepare(checkpoint, folder / "store")
    (folder / "text").write_text(TEXT)
    (folder / "ids").write_text("1, 2, 3\n4")
    return folder


@pytest.fixture
def run(capsys, monkeypatch, files):
    """Runs a command in `files`; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(files)

    def run_command(*argv):
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def only_line(text):
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: trtllm-engram {command} ")
    example = out.partition("\nexample:\n")[2].strip()
    assert re.search(rf"trtllm-engram {command}\b", example)
    assert max(map(len, out.splitlines())) <= 100


def test_the_help_of_all(run):
    code, out, _ = run("--help")
    assert code == 0
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80


def test_every_example_is_understood(run):
    """Each example's words are options and arguments that its command has."""
    for name in COMMANDS:
        _, out, _ = run(name, "--help")
        words = out.partition("\nexample:\n")[2].split()
        if words[0] != cli.PROGRAM:
            continue  # an example of another program that takes the command's output
        args, unknown = cli.build_parser(words[1:]).parse_known_args(words[1:])
        assert args.command == name
        assert unknown == []


def test_the_readme_lists_every_command():
    rows = re.findall(
        r"^\| `([a-z-]+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert rows == list(COMMANDS)


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    names = [line.partition(":")[0] for line in out.splitlines()[1:]]
    assert names == [
        "version",
        "abi",
        "git",
        "compiler",
        "cuda",
        "architectures",
        "tensorrt headers",
        "minimum driver",
    ]


def test_version_without_a_library(run, monkeypatch):
    def missing():
        raise EngramError("/x/libtrtllm_engram.so: expected the library, found no file")

    monkeypatch.setattr("trtllm_engram.runtime._native.build_info", missing)
    code, out, _ = run("--version")
    assert code == 0
    assert "found no file" in out


BAD = {
    "no command": ("",),
    "unknown command": ("frobnicate",),
    "unknown option": ("doctor", "--frobnicate"),
    "missing argument": ("verify",),
    "not a number": ("run", "store", "--text", "text", "--output", "o", "--chunk", "x"),
    "synthesize: folder in use": ("synthesize", "checkpoint"),
    "synthesize: layers": ("synthesize", "new", "--layers", "1,x"),
    "synthesize: size": ("synthesize", "new", "--hidden-size", "-5"),
    "synthesize: overflow": ("synthesize", "new", "--engram-vocab-size", "999999999"),
    "synthesize: tokenizer": ("synthesize", "new", "--tokenizer", "text"),
    "synthesize: seed": ("synthesize", "new", "--seed", "-1"),
    "prepare: no checkpoint": ("prepare", "nowhere", "new"),
    "prepare: no folder": ("prepare", "text", "new"),
    "prepare: folder in use": ("prepare", "checkpoint", "."),
    "inspect: nothing there": ("inspect", "nowhere"),
    "inspect: some text": ("inspect", "text"),
    "inspect: some folder": ("inspect", "."),
    "verify: no store": ("verify", "checkpoint"),
    "hash: no model": ("hash", "nowhere", "--text", "text"),
    "hash: no text": ("hash", "store"),
    "hash: text and ids": ("hash", "store", "--text", "text", "--ids", "ids"),
    "hash: text missing": ("hash", "store", "--text", "nowhere"),
    "hash: not UTF-8": ("hash", "store", "--text", "latin1"),
    "hash: ids are text": ("hash", "store", "--ids", "text"),
    "hash: ids of the vocabulary": ("hash", "store", "--ids", "big_ids"),
    "hash: ids shape": ("hash", "store", "--ids", "square.npy"),
    "hash: no npy": ("hash", "store", "--ids", "text.npy"),
    "hash: no tokenizer": ("hash", "checkpoint/config.json", "--text", "text"),
    "hash: dead span": ("hash", "store", "--ids", "ids", "--dead", "2:9"),
    "hash: output": ("hash", "store", "--ids", "ids", "--output", "nowhere/x.npy"),
    "run: no store": ("run", "checkpoint", "--text", "text", "--output", "new"),
    "run: no output": ("run", "store", "--text", "text"),
    "run: output folder": ("run", "store", "--text", "text", "--output", "nowhere/new"),
    "run: device": ("run", "store", "--text", "text", "--output", "new", "--device", "tpu"),
    "run: chunk": ("run", "store", "--text", "text", "--output", "new", "--chunk", "0"),
    "run: hidden": ("run", "store", "--text", "text", "--output", "new", "--hidden", "text"),
    "bench: name": ("bench", "frobnicate"),
    "bench: size": ("bench", "ops", "--table-gb", "-1"),
    "bench: folder": ("bench", "ops", "--table-gb", "0.001", "--dir", "nowhere"),
    "size: no config": ("size", "text"),
    "size: number": ("size", "checkpoint", "--ram", "-2"),
    "demo: folder in use": ("demo", "--keep", "store"),
}


@pytest.mark.parametrize("argv", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_leaves_nothing(run, files, argv):
    (files / "big_ids").write_text("1 2 99999")
    (files / "text.npy").write_text("no array")
    (files / "latin1").write_bytes(b"na\xefve")
    np.save(files / "square.npy", np.zeros((2, 2), np.int64))
    before = names_below(files)
    code, out, err = run(*filter(None, argv))
    assert (code, out) == (2, "")
    line = only_line(err)
    known = argv[0] if argv[0] in COMMANDS else ""
    assert line.startswith(f"{' '.join(filter(None, (cli.PROGRAM, known)))}: error: ")
    assert names_below(files) == before


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InputError("a\nb"), 2, "a b"),
        (FileNotFoundError(2, "No such file or directory", "x"), 2, "x: No such file or directory"),
        (OSError("odd"), 2, "odd"),
        (EngramError("broken"), 1, "broken"),
        (MemoryError("of 9 GB"), 1, "out of memory of 9 GB"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(run, monkeypatch, error, code, text):
    def fail(_args):
        raise error

    monkeypatch.setattr(library_path_command, "run", fail)
    assert run("library-path") == (code, "", f"trtllm-engram library-path: error: {text}\n")


def test_a_bug_shows_its_traceback(run, monkeypatch):
    monkeypatch.setattr(library_path_command, "run", lambda _args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("library-path")


def test_json_is_all_there_is_on_stdout(run):
    for argv in (
        ("inspect", "checkpoint"),
        ("inspect", "store"),
        ("inspect", "checkpoint/config.json"),
        ("inspect", "checkpoint/tokenizer.json"),
        ("verify", "store"),
        ("hash", "store", "--text", "text"),
        ("run", "store", "--text", "text", "--output", "json.safetensors"),
        ("size", "checkpoint"),
        ("cache",),
        ("synthesize", "json", "--engram-vocab-size", "60", "--hidden-size", "32"),
        ("prepare", "json", "json store"),
    ):
        code, out, err = run(*argv, "--json")
        assert (code, err) == (0, "")
        assert isinstance(json.loads(out), dict)


def test_plain_text_in_pipes(run, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for argv in ("doctor", "inspect store", "size checkpoint", "hash store --ids ids"):
        _, out, _ = run(*argv.split())
        assert "\x1b" not in out
        assert [line for line in out.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours_on_a_terminal_only_if_wanted(monkeypatch, no_color):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    assert (console.stdout().no_color) is bool(no_color)


def test_a_bar_shows_on_a_terminal_after_a_while(monkeypatch, capsys):
    args = cli.build_parser(["doctor"]).parse_args(["doctor"])
    monkeypatch.setenv("TERM", "xterm")
    for is_terminal, delay, shown in ((True, 0.0, True), (True, 60.0, False), (False, 0.0, False)):
        monkeypatch.setattr(console, "PROGRESS_DELAY_S", delay)
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        with console.progress(args, "working") as report:
            report(1, 2)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert ("working" in captured.err) is shown


def test_quiet_shows_no_bar(monkeypatch, capsys):
    args = cli.build_parser(["doctor", "-q"]).parse_args(["doctor", "-q"])
    monkeypatch.setattr(console, "PROGRESS_DELAY_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with console.progress(args, "working") as report:
        report(1, 2)
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_error(files):
    command = [*COMMAND, "hash", "store", "--text", "text"]
    with subprocess.Popen(
        command, cwd=files, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize("command", ["prepare", "synthesize"])
def test_ctrl_c_leaves_nothing_in_the_way(files, tmp_path, command):
    """Whenever the signal comes: no store or checkpoint, or a whole one, and a second try works."""
    target = tmp_path / "made"
    words = {
        "prepare": ["prepare", files / "checkpoint", target, "--copy"],
        "synthesize": ["synthesize", target, "--engram-vocab-size", "20000", "--hidden-size", "64"],
    }[command]
    argv = [*COMMAND, *map(str, words)]
    last_file = target / ("engram.json" if command == "prepare" else "config.json")
    with subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not target.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode in (0, 130, -signal.SIGINT)  # the last: it was on its way out
    if not last_file.exists():
        assert only_line(err) == f"trtllm-engram {command}: error: interrupted"
        subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
    assert last_file.exists()


def test_library_path(run):
    assert run("library-path") == (0, f"{library_path()}\n", "")


def test_cache_lists_and_clears_only_its_own(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", str(tmp_path))
    (tmp_path / "token_map-1.bin").write_bytes(b"123")
    (tmp_path / "precious").write_bytes(b"4")
    _, out, _ = run("cache", "--json")
    assert json.loads(out)["entries"] == [{"name": "token_map-1.bin", "bytes": 3}]
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
    os.utime(shard)
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


def test_inspect_tells_what_it_is(run):
    for path, kind in (
        ("checkpoint", "checkpoint"),
        ("store", "store"),
        ("checkpoint/config.json", "config"),
        ("checkpoint/tokenizer.json", "tokenizer"),
    ):
        _, out, _ = run("inspect", path)
        assert out.splitlines()[0].split() == ["kind", kind]


def test_size_of_the_true_model(run, files):
    golden = json.loads((ROOT / "runtime/data/golden_hash.json").read_text())
    (files / "true.json").write_text(json.dumps(golden["config"]))
    machine = ("--gpus", "8", "--gpu-memory", "141", "--ram", "200")
    _, out, _ = run("size", "true.json", *machine, "--json")
    placements = {one["name"]: one for one in json.loads(out)["placements"]}
    total = (384006168 + 384016682) * 264
    assert placements["host"]["ram_bytes"] == total
    assert placements["device_sharded"]["gpu_bytes"] == -(-total // 8)
    assert {name: one["fits"] for name, one in placements.items()} == {
        "host": False,
        "host, scales on GPU": True,
        "device": False,
        "device_sharded": True,
        "disk": True,
    }
