# SPDX-License-Identifier: Apache-2.0
"""--keep-plans DIR: plans that one run of the tests builds are loaded by the next.

compute-sanitizer slows TensorRT's builder down a hundred times; what it is to judge is the engines
as they run. `make sanitize-gpu` lets the tests build without it first.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

from trtllm_engram.builder.engine import EngineBuilder


def keep_plans(folder: Path) -> None:
    """From here on a test's n-th plan is the one that it built in the run that filled the folder,
    so the same tests must run in the same order."""
    folder.mkdir(parents=True, exist_ok=True)
    build = EngineBuilder.serialize
    num_plans: Counter[str] = Counter()

    def serialize(self: EngineBuilder, progress: Any = None) -> Any:
        test = os.environ["PYTEST_CURRENT_TEST"]
        num_plans[test] += 1
        name = hashlib.sha256(f"{test} {num_plans[test]}".encode()).hexdigest()[:32]
        file = folder / f"{name}.plan"
        if file.exists():
            return file.read_bytes()
        plan = build(self, progress)
        file.write_bytes(plan)
        return plan

    EngineBuilder.serialize = serialize  # type: ignore[method-assign]
