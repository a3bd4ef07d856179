# SPDX-License-Identifier: Apache-2.0
"""Fixtures for `pytest_plugins = ["command_line_fixtures"]`."""

import secrets

import pytest
from checkpoints import small_checkpoint
from command_line import TEXT

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.runtime.cli import main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint, its store, a text and token ids."""
    folder = tmp_path_factory.mktemp("cli files ✓")
    checkpoint = small_checkpoint(folder / "checkpoint")
    prepare(checkpoint, folder / "store")
    (folder / "text").write_text(TEXT)
    (folder / "ids").write_text("1, 2, 3\n4")
    return folder


@pytest.fixture
def run(capsys, monkeypatch, files):
    """Runs a command in `files`; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(files)

    def run_command(*argv):
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@pytest.fixture
def keeper_name():
    return f"test-{secrets.token_hex(4)}"
