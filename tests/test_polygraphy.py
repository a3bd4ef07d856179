# SPDX-License-Identifier: Apache-2.0
"""polygraphy's form of compare: the same data, comparison and verdict."""

import importlib
import importlib.util
import re
import subprocess
import sys

import numpy as np
import pytest
from checkout import ROOT
from compare_cases import (
    FORMS,
    OUT,
    SIZES,
    in_each_form,
    spoilt,
    tables_toml,
    with_each_wrong_table,
)
from engine_cases import build_plan
from engines import WRONG, on_gpu, wrong_store

from trtllm_engram.builder.model import hidden_out_name, packed_names, rows_name
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime.compare import Reference, make_feeds
from trtllm_engram.runtime.compare.sizes import falling

pytest_plugins = "engine_fixtures"

# Of an engine that build() made: the first profile takes no more tokens than requests.
PREFILL = ["--optimization-profile", "1"]
OF_AN_ENGINE = {2: np.uint16, 1: np.int32}  # what BF16 and bytes come as, by their size

_POLYGRAPHY = """
import contextlib, importlib, sys
try:
    import tensorrt
except ImportError:  # bindings alone will do
    with contextlib.suppress(ImportError):
        sys.modules["tensorrt"] = importlib.import_module("tensorrt_bindings")
from polygraphy.tools import main
from trtllm_engram.runtime.compare.polygraphy_args import argument_groups
from polygraphy.tools.run import run
impl = run.Run.get_subscriptions_impl
def subscriptions(self):
    groups = impl(self)
    known = any(type(group).__name__ == "EngramReferenceArgs" for group in groups)
    return groups if known else [*groups, *argument_groups()]
run.Run.get_subscriptions_impl = subscriptions
sys.exit(main())
"""


def polygraphy(*arguments):
    """`polygraphy run`; the runner is added by hand where no entry point brings it."""
    pytest.importorskip("polygraphy", reason="the extra `polygraphy` is not installed")
    return subprocess.run(
        [sys.executable, "-c", _POLYGRAPHY, "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_polygraphy_finds_the_runner_by_itself():
    """The commands here add it where no entry point does, as in a tree that is not installed."""
    from trtllm_engram.runtime.compare.polygraphy_args import argument_groups

    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = declared.partition('[project.entry-points."polygraphy.run.plugins"]\n')[2]
    module, name = re.match(r'engram-ref = "(.+):(.+)"', group).groups()
    assert getattr(importlib.import_module(module), name) is argument_groups


def test_polygraphy_reference(store, tmp_path):
    """The reference against itself, data and comparison of its own choice."""
    model = tmp_path / "unread.onnx"
    model.touch()
    options = ["--engram-store", store.path, "--engram-hidden-dtype", "float32"]
    sizes = ["--engram-sizes", "5x2", "0x1", "1x1"]
    png = tmp_path / "ulps.png"
    picture = ["--engram-png", png] if importlib.util.find_spec("matplotlib") else []
    done = polygraphy(model, "--engram-ref", "--engram-ref", *options, *sizes, *picture)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed: 3/3 iterations" in done.stdout
    assert f"{OUT}: {5 * 4 * 160} values, 0 different" in done.stdout
    assert f"bound: 3 BF16 ulps: ok (same: {5 * 4 * 160})" in done.stdout
    assert "rows: not compared" not in done.stdout
    assert not picture or png.read_bytes().startswith(b"\x89PNG")


def test_polygraphy_needs_a_store(tmp_path):
    done = polygraphy(tmp_path / "unread.onnx", "--engram-ref")
    assert done.returncode != 0
    assert "--engram-ref: expected --engram-store STORE" in done.stdout + done.stderr


def test_polygraphy_wants_rows(store, outputs, tmp_path, capsys):
    """An engine without check outputs is refused, or what is missing said; and all iterations are
    in one picture."""
    pytest.importorskip("polygraphy", reason="the extra `polygraphy` is not installed")
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from polygraphy.exception import PolygraphyException

    from trtllm_engram.runtime.compare import polygraphy_runner as runner

    found = {name: outputs[name].view(np.uint16) for name in (OUT, hidden_out_name(14))}
    options = {"sizes": [(37, 3)], "placement": "none"}
    runner.configure(str(store.path), **options)
    told = r"^--engram-ref: outputs: expected rows of every layer .* --engram-hidden-only compares"
    with pytest.raises(PolygraphyException, match=told):
        runner.compare_outputs(found, outputs)
    png = tmp_path / "ulps.png"
    runner.configure(str(store.path), **options, hidden_only=True, png=str(png))
    for _ in range(2):
        assert all(runner.compare_outputs(found, outputs).values())
        assert "rows: not compared (build --check-outputs)" in capsys.readouterr().out
    assert [len(part) for part in runner.setup().parts] == [2, 2]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engram-ref", "--engram-store", "nowhere"], "nowhere: expected a store (with"),
        (["--engram-ref"], "BF16 in polygraphy: expected the package torch, found none"),
        ([], "--engram-ref: expected another runner, such as --trt, or --load-outputs"),
    ],
    ids=["store", "torch", "alone"],
)
def test_polygraphy_tells_in_one_line(store, tmp_path, words, said):
    """With no traceback; and no success where nothing was compared."""
    if "torch" in said and importlib.util.find_spec("torch"):
        pytest.skip("torch is installed")
    model = tmp_path / "unread.onnx"
    model.touch()
    done = polygraphy(model, "--engram-store", store.path, "--engram-ref", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("option", ["--engram-limit=-1", "--engram-limit=nan", "--engram-seed=-1"])
def test_polygraphy_refuses_numbers(tmp_path, option):
    done = polygraphy(tmp_path / "unread.onnx", "--engram-ref", option)
    assert done.returncode == 2
    assert f"{option.partition('=')[0]}: expected 0 to " in done.stderr


@pytest.mark.parametrize("size", ["5", "5x0", "x1", "-1x1"])
def test_polygraphy_refuses_sizes(tmp_path, size):
    done = polygraphy(tmp_path / "unread.onnx", "--engram-ref", f"--engram-sizes={size}")
    assert done.returncode == 2
    assert "expected TOKENSxREQUESTS, such as 37x3" in done.stderr


def test_polygraphy_refuses_sizes_that_grow(tmp_path):
    """With fewer tokens next_lookback_ids would grow, in a buffer that cannot."""
    sizes = ["--engram-store", tmp_path, "--engram-sizes", "5x8", "37x3"]
    done = polygraphy(tmp_path / "unread.onnx", "--engram-ref", *sizes)
    assert done.returncode != 0
    told = "--engram-sizes: expected no more requests in a call of fewer tokens"
    assert told in done.stdout + done.stderr
    assert "found 37x3 and 5x8: run them apart" in done.stdout + done.stderr


def test_sizes_fall():
    assert falling([(1, 1), (37, 2), (5, 2), (37, 3)]) == [(37, 3), (37, 2), (5, 2), (1, 1)]
    with pytest.raises(InputError, match=r"^sizes: expected no more requests .*2x2 and 1x3: run"):
        falling([(1, 3), (2, 2), (8, 4)])


def test_polygraphy_functions_tell_wrong_tables(store, feed, outputs, tmp_path):
    """compare_outputs takes either order, BF16 as bits and packed rows as words."""
    pytest.importorskip("polygraphy", reason="the extra `polygraphy` is not installed")
    from trtllm_engram.runtime.compare import polygraphy_runner as runner

    runner.configure(str(store.path), sizes=[(37, 3)], placement="none")
    row = int(outputs["hash_ids"][5, 0, 7])
    wrong = Reference(wrong_store(tmp_path, WRONG["one byte flipped"], 1, row, **SIZES))(feed)
    found = {
        name: array.view(OF_AN_ENGINE.get(array.dtype.itemsize, array.dtype))
        for name, array in wrong.items()
        if not name.endswith(".magnitude")
    }
    more = {f"own_{index}": outputs["hash_ids"] for index in range(8)}  # than the reference has
    cases = [(found, outputs), (outputs, found), (found | more, outputs), (outputs, found | more)]
    for one, other in cases:
        results = runner.compare_outputs(one, other)
        assert not any(results[name] for name in (rows_name(1), packed_names(1)[0]))
        assert all(results[name] for name in (rows_name(14), *packed_names(14), packed_names(1)[1]))
        assert not any(results[name] for name in more if name in results)


# Engines.


@on_gpu
@in_each_form
def test_polygraphy_with_an_engine(store, form):
    """The command of examples/polygraphy."""
    from trtllm_engram.plugins import library_path

    plan = build_plan(store, f"{form}.plan", FORMS[form][0])
    options = ["--engram-store", store.path, "--plugins", library_path()]
    done = polygraphy(plan, "--trt", *PREFILL, "--engram-ref", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed: 2/2 iterations" in done.stdout
    assert all(f"{name}: " in done.stdout for name in FORMS[form][1])


@on_gpu
@with_each_wrong_table
@pytest.mark.parametrize("form", ["rows", "128x4"])
def test_polygraphy_tells_wrong_tables(store, tmp_path, monkeypatch, spoil, form):
    """The same with tables that TRTLLM_ENGRAM_TABLES binds: exit code 1 where one is wrong."""
    plan = build_plan(store, f"{form}.plan", FORMS[form][0])
    feed = make_feeds(store, [(37, 3), (1, 1)])[0]
    toml = tables_toml(tmp_path, {1: spoilt(store, tmp_path, spoil, feed), 14: store})
    monkeypatch.setenv("TRTLLM_ENGRAM_TABLES", str(toml))
    options = ["--engram-store", store.path, "--engram-placement", "none"]
    done = polygraphy(plan, "--trt", *PREFILL, "--engram-ref", *options)
    assert done.returncode == (0 if spoil is None else 1), done.stdout + done.stderr
    assert ("BROKEN" in done.stdout) == (spoil is not None)
    assert all(f"{name}: " in done.stdout for name in FORMS[form][1])
