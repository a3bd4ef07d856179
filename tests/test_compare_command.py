# SPDX-License-Identifier: Apache-2.0
"""`compare` on right and on wrong tables: by engines on a GPU, and by a stand-in anywhere."""

import json
import sys

import pytest
from compare_cases import FORMS, in_each_form, spoilt, tables_toml, with_each_wrong_table
from engine_cases import build_plan
from engines import TEXT, on_gpu
from fake_engine import FakeEngine, use_fake_tensorrt

from trtllm_engram.builder.model import ModelOptions
from trtllm_engram.runtime import gpus
from trtllm_engram.runtime.cli import compare as command
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.cli.version import package_version

pytest_plugins = "engine_fixtures"


@pytest.fixture
def command_line(store, tmp_path):
    """`compare` of an engine on text that has the small tokenizer's words."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    (tmp_path / "fake.plan").touch()

    def run(*options, plan=tmp_path / "fake.plan"):
        words = ["--engine", plan, "--text", text, "--sizes", "37x3", *options]
        return main(["compare", str(store.path), *map(str, words)])

    return run


def check_verdict(code, printed, spoil, form):
    """That of the rows, whose every byte counts, in the form that the engine gives out."""
    names, report = FORMS[form][1], json.loads(printed)
    passed = {one["name"]: one["passed"] for one in report["outputs"]}
    assert (code, report["passed"]) == ((0, True) if spoil is None else (1, False))
    assert report["rows_compared"]
    assert all(passed[name] for name in names) == (spoil is None)
    others = [ok for name, ok in passed.items() if not name.startswith("layers.1.")]
    assert all(others)
    assert len(passed) > len(names) + 1


@pytest.fixture
def fakes(monkeypatch, store):
    """engine(options, tables): what `compare` loads instead of a plan."""
    use_fake_tensorrt(monkeypatch)
    gpu = gpus.Gpu(0, "NVIDIA of a test", (9, 0), 132, 1 << 30, None, "0000:01:00.0")
    monkeypatch.setattr(command, "probe_driver", lambda: gpus.Driver("580.1", (13, 0), (gpu,)))

    def engine(options, tables=None):
        made = FakeEngine(store, options, tables)
        monkeypatch.setattr(command, "Engine", lambda _plan: made)

    return engine


@in_each_form
@with_each_wrong_table
def test_wrong_tables_fail(store, feed, tmp_path, fakes, command_line, capsys, spoil, form):
    fakes(FORMS[form][0], {1: spoilt(store, tmp_path, spoil, feed)})
    code = command_line("--json")
    check_verdict(code, capsys.readouterr().out, spoil, form)


def test_an_engine_without_rows_is_no_proof(store, feed, tmp_path, fakes, command_line, capsys):
    """Exit code 2 before anything is run; --hidden-only compares what there is, and says so."""
    fakes(ModelOptions())
    assert command_line() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "outputs: expected rows of every layer (build --check-outputs), found none" in line
    assert command_line("--hidden-only") == 0
    assert capsys.readouterr().out.endswith("rows: not compared (build --check-outputs)\n")


def test_a_report_says_what_it_was_measured_on(fakes, command_line, capsys, monkeypatch):
    fakes(FORMS["rows"][0])
    monkeypatch.setattr(sys, "argv", ["trtllm-engram", "compare", "a store"])
    assert command_line("--json") == 0
    report = json.loads(capsys.readouterr().out)
    expected = {"machine": "NVIDIA of a test", "driver": "580.1", "tensorrt": "10.6.0"}
    expected |= {"trtllm_engram": package_version(), "command": "trtllm-engram compare 'a store'"}
    assert {name: report[name] for name in expected} == expected


# Engines.


@pytest.fixture(scope="module")
def plans(store):
    """plan(form), built once."""
    made = {}

    def plan(form):
        if form not in made:
            made[form] = build_plan(store, f"{form}.plan", FORMS[form][0])
        return made[form]

    return plan


@on_gpu
@in_each_form
@with_each_wrong_table
def test_engines_on_wrong_tables_fail(
    store, plans, feed, tmp_path, command_line, capsys, spoil, form
):
    """Bound by a TOML file."""
    tables = {1: spoilt(store, tmp_path, spoil, feed), 14: store}
    toml = tables_toml(tmp_path, tables)
    code = command_line("--tables", toml, "--json", plan=plans(form))
    check_verdict(code, capsys.readouterr().out, spoil, form)
