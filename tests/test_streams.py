# SPDX-License-Identifier: Apache-2.0
"""The command under streams and signals as a shell may give them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import COMMAND, only_line

pytest_plugins = ["command_line_fixtures"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(files, tmp_path, closed):
    """Nothing that is meant for a closed stream gets into a file, and no bug shows."""
    script = f'"$@" {closed}'
    for argv, code in (
        (["prepare", files / "checkpoint", tmp_path / "store", "--copy"], 0),
        (["verify", tmp_path / "store"], 0),
        (["verify", tmp_path], 2),
    ):
        words = ["sh", "-c", script, "sh", *COMMAND, *map(str, argv)]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        assert result.returncode == code
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_names_that_the_encoding_does_not_hold(files, tmp_path, encoding):
    name = os.fsencode(tmp_path / "é 日本") + b"\xff"
    Path(os.fsdecode(name)).symlink_to(files / "store")
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    for argv in (["verify"], ["verify", "--json"], ["inspect", "--json"]):
        result = subprocess.run(
            [*map(os.fsencode, COMMAND), *map(os.fsencode, argv), name],
            env=environment,
            capture_output=True,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, b"")
        if "--json" in argv:
            document = json.loads(result.stdout.decode(encoding))
            assert document.get("store", document.get("path")) == os.fsdecode(name)


def test_ctrl_c_while_modules_are_imported():
    """There numpy makes an ImportError, and so a traceback, of a KeyboardInterrupt."""
    script = """if True:
        import importlib, os, signal, sys
        from trtllm_engram.runtime import cli
        assert "numpy" not in sys.modules
        def interrupted(name):
            os.kill(os.getpid(), signal.SIGINT)
            raise ImportError("as numpy does")
        importlib.import_module = interrupted
        cli.main(["cache"])
        """
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 130
    assert only_line(result.stderr) == "trtllm-engram: error: interrupted"
