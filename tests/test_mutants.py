# SPDX-License-Identifier: Apache-2.0
"""The mutants still fit the code and name tests that exist; `make test-mutants` runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = sorted((ROOT / "tests/mutants").glob("*.patch"))


def test_there_are_enough():
    assert len(MUTANTS) >= 15
    for op in ("hash", "lookup", "stage", "project", "gate"):
        assert any(patch.stem.startswith(f"{op}_") for patch in MUTANTS)


@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_fits(patch):
    head, old, new, hunk, *lines = patch.read_text(encoding="utf-8").splitlines()
    file = old.removeprefix("--- a/")
    assert new == f"+++ b/{file}"
    assert hunk.startswith("@@ ")
    assert sum(line.startswith("-") for line in lines) == 1
    assert sum(line.startswith("+") for line in lines) <= 1
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    assert (ROOT / file).read_text(encoding="utf-8").count(before) == 1
    assert_test_exists(head.removeprefix("Test: "))


def assert_test_exists(test):
    kind, _, name = test.partition(":")
    if kind in ("cpp", "plugins"):
        assert "," not in name  # there doctest splits filters, and parts match nothing
        folder = ROOT / "cpp/tests" / ("plugins" if kind == "plugins" else "")
        found = re.compile(rf'TEST_CASE\(\s*"{re.escape(name.strip("*"))}')
        assert any(found.search(file.read_text(encoding="utf-8")) for file in folder.glob("*.cpp"))
        return
    file, *names = test.partition("[")[0].split("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    for name in names:
        assert f"def {name}(" in text or f"class {name}:" in text
