# SPDX-License-Identifier: Apache-2.0
"""Files of tables, for tests of what binds them."""

from pathlib import Path

from checkpoints import small_checkpoint

from trtllm_engram.builder.prepare import prepare

HEAD = "format_version = 1\n"


def prepared_store(folder: Path) -> Path:
    path = folder / "store"
    prepare(small_checkpoint(folder / "checkpoint"), path)
    return path


def toml_file(folder: Path, text: str, name: str = "tables.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path
