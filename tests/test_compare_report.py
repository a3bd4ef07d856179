# SPDX-License-Identifier: Apache-2.0
"""What comparisons say: tables, lines, pictures."""

import argparse
import json
import sys

import ml_dtypes
import numpy as np
import pytest
from compare_cases import OUT, changed

from trtllm_engram.builder.model import hidden_out_name, packed_names, rows_name
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime.cli.compare import _print
from trtllm_engram.runtime.compare import compare
from trtllm_engram.runtime.compare.plot import write_histogram
from trtllm_engram.runtime.compare.report import ULP_BINS
from trtllm_engram.runtime.compare.text import line

pytest_plugins = "engine_fixtures"


def test_table_of_a_comparison(outputs, capsys):
    """Means in ulps, and the histogram without its empty bins."""
    wide = {name: outputs[name].astype(np.float32) for name in (OUT, f"{OUT}.magnitude")}
    ids = {"hash_ids": outputs["hash_ids"]}
    wide |= ids

    def change(array):
        _, exponent = np.frexp(wide[f"{OUT}.magnitude"][0, 0, :2])
        array[0, 0, :2] += [2, 20] * np.ldexp(1.0, exponent - 8)
        return array

    comparisons = compare(changed(wide, OUT, change), wide)
    _print(argparse.Namespace(json=False), comparisons, {})
    lines = capsys.readouterr().out.splitlines()
    count = outputs[OUT].size
    assert " ".join(lines[0].split()) == (
        "output values different max mean max ulps mean ulps bound"
    )
    assert f" {22 / count:.3g} " in next(row for row in lines if row.startswith(OUT))
    shown = f"same: {count - 2}, <= 2: 1, > 16: 1"
    assert lines[-3].split() == ["output", "values", "by", "BF16", "ulps"]
    assert lines[-2].split(maxsplit=1) == [OUT, shown]
    assert lines[-1] == "rows: not compared (build --check-outputs)"
    assert line(comparisons[0]).endswith(f"bound: 3 BF16 ulps: BROKEN ({shown})")
    assert f"mean {comparisons[0].mean_abs:.3g} ({22 / count:.3g} BF16 ulps)" in line(
        comparisons[0]
    )


@pytest.mark.parametrize("named", [rows_name, lambda layer: packed_names(layer)[0]])
def test_compared_rows_need_no_note(outputs, capsys, named):
    """Of every layer."""
    streams = {name: outputs[name] for name in (OUT, hidden_out_name(14))}
    scales = {packed_names(layer)[1]: outputs[packed_names(layer)[1]] for layer in (1, 14)}
    rows = {named(layer): outputs[named(layer)] for layer in (1, 14)}
    first = streams | scales | {named(1): rows[named(1)]}
    for part, is_compared in ((streams, False), (first, False), (first | rows, True)):
        comparisons = compare(part, outputs)
        _print(argparse.Namespace(json=False), comparisons, {})
        assert ("rows: not compared" in capsys.readouterr().out) != is_compared
        _print(argparse.Namespace(json=True), comparisons, {})
        assert json.loads(capsys.readouterr().out)["rows_compared"] == is_compared


def test_histogram_as_png(outputs, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    pictures = []
    for found in (outputs, outputs, changed(outputs, OUT, np.negative)):
        write_histogram(tmp_path / "ulps.png", compare(found, outputs))
        pictures.append((tmp_path / "ulps.png").read_bytes())
    assert pictures[0].startswith(b"\x89PNG")
    assert pictures[0] == pictures[1] != pictures[2]


def test_histograms_are_of_floats(outputs):
    lengths = {one.name: len(one.histogram) for one in compare(outputs, outputs)}
    floats = {name for name, array in outputs.items() if array.dtype == ml_dtypes.bfloat16}
    assert floats >= {OUT, rows_name(1)}
    assert lengths == {name: (len(ULP_BINS) + 1) * (name in floats) for name in lengths}


def test_png_without_matplotlib(outputs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EngramError, match=r"pip install matplotlib$"):
        write_histogram(tmp_path / "ulps.png", compare(outputs, outputs))
    with pytest.raises(InputError, match=r"^png: expected outputs of floating point"):
        write_histogram(tmp_path / "ulps.png", compare({"hash_ids": outputs["hash_ids"]}, outputs))
