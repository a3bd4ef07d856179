# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, exit codes, one line for bad input, JSON alone, pipes."""

from __future__ import annotations

import argparse
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
from command_line import COMMAND, only_line

from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import cli, open_store
from trtllm_engram.runtime.cli import COMMANDS, console
from trtllm_engram.runtime.cli import library_path as library_path_command

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ["command_line_fixtures"]


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


@pytest.mark.parametrize(
    "name",
    ["README.md", "CHANGELOG.md", "docs/performance.md", "docs/scaling.md", "docs/serving.md"],
)
def test_lines_fit_100_columns(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > 100] == []


def test_the_readmes_python_runs(files, monkeypatch):
    """Its first snippet, with the names that it takes as given."""
    monkeypatch.chdir(files)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    config = open_store("store").config
    names = {
        "token_ids": np.arange(5, dtype=np.int32),
        "positions": np.arange(5),
        "cu_seqlens": np.array([0, 5], np.int32),
        "hidden": np.ones((5, config.hc_mult, config.hidden_size), np.float32),
    }
    given = names["hidden"]
    exec(snippet, names)
    assert names["hidden"].shape == given.shape
    assert not np.array_equal(names["hidden"], given)


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


RUN = ("run", "store", "--ids", "ids", "--output")
ENGINE = ("--form", "tensorrt", "--engine", "text")
TRITON = ("triton", "store", "--model-repository", "new")
BAD = {
    "no command": ("",),
    "unknown command": ("frobnicate",),
    "unknown option": ("doctor", "--frobnicate"),
    "missing argument": ("verify",),
    "not a number": ("run", "store", "--text", "text", "--output", "o", "--chunk", "x"),
    "synthesize: folder in use": ("synthesize", "checkpoint"),
    "synthesize: layers": ("synthesize", "new", "--layers", "1,x"),
    "synthesize: a long number": ("synthesize", "new", "--layers", "9" * 5000),
    "synthesize: size": ("synthesize", "new", "--hidden-size", "-5"),
    "synthesize: overflow": ("synthesize", "new", "--engram-vocab-size", "999999999"),
    "synthesize: tokenizer": ("synthesize", "new", "--tokenizer", "text"),
    "synthesize: seed": ("synthesize", "new", "--seed", "-1"),
    "prepare: no checkpoint": ("prepare", "nowhere", "new"),
    "prepare: no folder": ("prepare", "text", "new"),
    "prepare: folder in use": ("prepare", "checkpoint", "."),
    "inspect: nothing there": ("inspect", "nowhere"),
    "inspect: some text": ("inspect", "text"),
    "inspect: a shard": ("inspect", "checkpoint/model-00001-of-00004.safetensors"),
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
    "hash: a long dead span": ("hash", "store", "--ids", "ids", "--dead", f"0:{'9' * 5000}"),
    "hash: checkpoint": ("hash", "store", "--ids", "ids", "--checkpoint", "nowhere"),
    "inspect: checkpoint": ("inspect", "store", "--checkpoint", "nowhere"),
    "verify: checkpoint": ("verify", "store", "--checkpoint", "nowhere"),
    "hash: output": ("hash", "store", "--ids", "ids", "--output", "nowhere/x.npy"),
    "run: no store": ("run", "checkpoint", "--text", "text", "--output", "new"),
    "run: no output": ("run", "store", "--text", "text"),
    "run: output folder": ("run", "store", "--text", "text", "--output", "nowhere/new"),
    "run: output of the store": (*RUN, "store/weights.safetensors"),
    "run: output of the checkpoint": (*RUN, "checkpoint/model-00001-of-00004.safetensors"),
    "run: output of the checkpoint by a link": (*RUN, "link"),
    "run: output is its input": (*RUN, "ids"),
    "run: output is a folder": (*RUN, "store"),
    "hash: output of the store": ("hash", "store", "--ids", "ids", "--output", "store/engram.json"),
    "hash: output of the checkpoint": (
        *("hash", "checkpoint", "--ids", "ids"),
        *("--output", "checkpoint/config.json"),
    ),
    "build: output of the store": ("build", "store", "--onnx", "--output", "store/token_map.npy"),
    "run: device": ("run", "store", "--text", "text", "--output", "new", "--device", "tpu"),
    "run: chunk": ("run", "store", "--text", "text", "--output", "new", "--chunk", "0"),
    "run: seed": (*RUN, "new", "--seed", "-1"),
    "build: batch": ("build", "store", "--output", "new", "--max-batch", "-1"),
    "compare: limit": ("compare", "store", "--engine", "text", "--limit", "-1"),
    "compare: sizes": ("compare", "store", "--engine", "text", "--sizes", "0x-1"),
    "run: hidden pipe": (*RUN, "new", "--hidden", "pipe"),
    "run: hidden missing": (*RUN, "new", "--hidden", "nowhere"),
    "run: hidden": ("run", "store", "--text", "text", "--output", "new", "--hidden", "text"),
    "bench: name": ("bench", "frobnicate"),
    "bench: size": ("bench", "ops", "--table-gb", "-1"),
    "bench: seconds": ("bench", "serving", "--seconds", "0.1"),
    "bench: seconds of ops": ("bench", "ops", "--seconds", "9"),
    "bench: folder": ("bench", "ops", "--table-gb", "0.001", "--dir", "nowhere"),
    "triton: no store": ("triton", "checkpoint", "--model-repository", "new"),
    "triton: no repository": ("triton", "store"),
    "triton: repository is a file": ("triton", "store", "--model-repository", "text"),
    "triton: name": (*TRITON, "--name", "a/b"),
    "triton: instances": (*TRITON, "--instances", "0"),
    "triton: device": (*TRITON, "--device", "tpu"),
    "triton: keeper": (*TRITON, "--keeper", "flash"),
    "triton: engine on the CPU": (*TRITON, "--engine", "text", "--device", "cpu"),
    "triton: no engine": (*TRITON, "--form", "tensorrt"),
    "triton: tensorrt on the CPU": (*TRITON, *ENGINE, "--device", "cpu"),
    "triton: tensorrt without text": (*TRITON, *ENGINE, "--no-text"),
    "triton: tensorrt of an engine that is none": (*TRITON, *ENGINE),
    "triton: engine missing": (*TRITON, "--form", "tensorrt", "--engine", "nowhere"),
    "size: no config": ("size", "text"),
    "size: nodes": ("size", "--nodes", "0"),
    "size: disk": ("size", "--disk", "0"),
    "size: number": ("size", "checkpoint", "--ram", "-2"),
    "demo: folder in use": ("demo", "--keep", "store"),
}


def numeric_options():
    """Of every command and of the actions of those that have some: (command, option, its type)."""
    for command in COMMANDS:
        waiting = [
            (command, cli.build_parser([command])._subparsers._group_actions[0].choices[command])
        ]
        while waiting:
            name, parser = waiting.pop()
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    waiting += [(f"{name} {key}", inner) for key, inner in action.choices.items()]
                elif getattr(action.type, "__module__", "") in RANGES or action.type in (
                    int,
                    float,
                ):
                    yield name, action.option_strings[-1], action.type


RANGES = ("trtllm_engram.runtime.cli.shared_options",)


def test_every_number_has_a_range():
    """One kind of type for all of them: what is no number, or none of the range, is told alike."""
    found = list(numeric_options())
    assert {command for command, _, _ in found} >= {"bench", "compare", "size", "tables load"}
    for command, option, kind in found:
        assert kind not in (int, float), f"{command} {option}"
        for text in ("-1", "x", "nan", "inf", "9" * 5000, ""):
            with pytest.raises(
                argparse.ArgumentTypeError, match=r"^expected [\d.e+]+ to [\d.e+]+, found "
            ):
                kind(text)


def test_a_text_without_a_name(run):
    """As a shell gives it for a variable that is not set."""
    code, out, err = run("hash", "store", "--text", "")
    assert (code, out) == (2, "")
    assert "cannot read" in only_line(err)


@pytest.mark.parametrize("argv", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_leaves_nothing(run, files, argv):
    (files / "big_ids").write_text("1 2 99999")
    (files / "text.npy").write_text("no array")
    (files / "latin1").write_bytes(b"na\xefve")
    np.save(files / "square.npy", np.zeros((2, 2), np.int64))
    if not (files / "link").exists():
        os.mkfifo(files / "pipe")
        (files / "link").symlink_to("checkpoint/config.json")
    before = contents_below(files)
    code, out, err = run(*filter(None, argv))
    assert (code, out) == (2, "")
    line = only_line(err)
    known = argv[0] if argv[0] in COMMANDS else ""
    assert line.startswith(f"{' '.join(filter(None, (cli.PROGRAM, known)))}: error: ")
    assert contents_below(files) == before


def contents_below(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


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


@pytest.mark.parametrize(("unit", "shown"), [("bytes", "1.0/2.0 kB"), ("steps", "1000 of 2000 st")])
def test_a_bar_counts_in_its_own_unit(monkeypatch, capsys, unit, shown):
    args = cli.build_parser(["doctor"]).parse_args(["doctor"])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "PROGRESS_DELAY_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with console.progress(args, "working", unit) as report:
        report(1000, 2000)
    assert shown in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)


def test_json_has_no_infinity(capsys):
    """RFC 8259 has none; other languages' parsers refuse Python's."""
    console.print_json({"worst": float("inf"), "all": [1.5, float("nan")]})
    assert json.loads(capsys.readouterr().out) == {"worst": None, "all": [1.5, None]}


def test_quiet_shows_no_bar(monkeypatch, capsys):
    args = cli.build_parser(["doctor", "-q"]).parse_args(["doctor", "-q"])
    monkeypatch.setattr(console, "PROGRESS_DELAY_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with console.progress(args, "working") as report:
        report(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5e-6, "1.5 us"), (9.996e-4, "1 ms"), (0.9996, "1 s"), (59.94, "59.9 s"), (1e4, "10000 s")],
)
def test_seconds_that_people_read(seconds, text):
    assert console.human_seconds(seconds) == text


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
