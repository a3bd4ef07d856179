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

_folder: Path | None = None
_num_plans: Counter[str] = Counter()


def keep_plans(folder: Path) -> None:
    global _folder
    folder.mkdir(parents=True, exist_ok=True)
    _folder = folder


def kept_plan(build: Callable[[], bytes]) -> bytes:
    """What build() returns. Where plans are kept, a test's n-th one is built only once: the same
    tests must run in the same order."""
    if _folder is None:
        return build()
    test = os.environ["PYTEST_CURRENT_TEST"]
    _num_plans[test] += 1
    name = hashlib.sha256(f"{test} {_num_plans[test]}".encode()).hexdigest()[:32]
    file = _folder / f"{name}.plan"
    if not file.exists():
        file.write_bytes(build())
    return file.read_bytes()
