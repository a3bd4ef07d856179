# SPDX-License-Identifier: Apache-2.0
"""Reading and writing files of users."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trtllm_engram.builder.files import read_regular, refuse_to_replace, write_aside
from trtllm_engram.plugins.errors import InputError


def test_only_regular_files_are_read(tmp_path):
    """A pipe would keep the reader waiting for ever."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"content"
    with (tmp_path / "shard").open("wb") as shard:
        shard.truncate(1 << 40)  # a hole
    with pytest.raises(InputError, match=r"expected at most \d+ bytes, found 1099511627776$"):
        read_regular(tmp_path / "shard")
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


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (
        ("folder", "expected a file to write, found a folder or a device"),
        ("pipe", "expected a file to write, found a folder or a device"),
        ("nowhere/out", "cannot write: No such file or directory"),
        ("a\0b", "cannot write: embedded null byte"),
    ):
        begun = False
        with pytest.raises(InputError, match=reason), write_aside(tmp_path / name):
            begun = True
        assert not begun
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


def test_a_failure_of_the_work_leaves_what_was_there(tmp_path):
    """A bug stays what it is, a ValueError: it is not told as a file that cannot be written."""
    (tmp_path / "out").write_bytes(b"before")

    def work():
        with write_aside(tmp_path / "out") as scratch:
            scratch.write_bytes(b"half")
            raise ValueError("a bug")

    with pytest.raises(ValueError, match=r"^a bug$") as caught:
        work()
    assert not isinstance(caught.value, InputError)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"before"


def test_an_input_is_no_output_under_any_name(tmp_path):
    (tmp_path / "in").write_bytes(b"")
    (tmp_path / "soft").symlink_to("in")
    (tmp_path / "hard").hardlink_to(tmp_path / "in")
    inputs = [tmp_path / "gone", tmp_path / "in"]
    for name in ("in", "soft", "hard", "../" + tmp_path.name + "/in"):
        with pytest.raises(InputError, match="expected another file for the output"):
            refuse_to_replace(tmp_path / name, inputs)
    (tmp_path / "out").write_bytes(b"")
    for name in ("out", "new", "gone"):
        refuse_to_replace(tmp_path / name, inputs)
