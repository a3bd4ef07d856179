# SPDX-License-Identifier: Apache-2.0
"""--keep-plans DIR: plans that one run of the tests builds are loaded by the next.

compute-sanitizer slows TensorRT's builder down a hundred times; what it is to judge is engines as
they run. `make sanitize-gpu` lets the tests build without it first.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from trtllm_engram.builder.files import write_aside

_folder: Path | None = None
_num_plans: Counter[str] = Counter()


def keep_plans(folder: Path) -> None:
    global _folder
    folder.mkdir(parents=True, exist_ok=True)
    _folder = folder


def kept_plan(build: Callable[[], bytes], name: str = "") -> bytes:
    """What build() returns. Where plans are kept it is called once for each plan of a test, by
    their order, and for each name that fixtures of a module give."""
    if _folder is None:
        return build()
    test, phase = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)
    if phase == "(setup)":
        owner = f"{test.split('::')[0]} {name}"
    else:
        _num_plans[test] += 1
        owner = f"{test} {_num_plans[test]}"
    file = _folder / f"{hashlib.sha256(owner.encode()).hexdigest()[:32]}.plan"
    if not file.exists():
        with write_aside(file) as scratch:
            scratch.write_bytes(build())
    return file.read_bytes()
