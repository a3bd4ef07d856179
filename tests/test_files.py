# SPDX-License-Identifier: Apache-2.0
"""Reading and writing files of users."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trtllm_engram.builder.files import read_regular, write_aside
from trtllm_engram.plugins.errors import InputError


def test_only_regular_files_are_read(tmp_path):
    """A pipe would keep the reader waiting for ever."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"content"
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(InputError, match="expected a regular file"):
            read_regular(tmp_path / name)


def test_a_disk_that_can_only_be_read(tmp_path, monkeypatch):
    """There the removal of the scratch file fails too; the error names the file that was wanted."""

    def refused(path, *_args, **_options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_bytes", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    with (
        pytest.raises(InputError, match=r"/out: cannot write: Read-only file system$"),
        write_aside(tmp_path / "out") as scratch,
    ):
        scratch.write_bytes(b"x")
