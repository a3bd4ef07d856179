# SPDX-License-Identifier: Apache-2.0
"""Run-time variables: the cache folder wherever one can be, the log level by name."""

import logging
from pathlib import Path

import pytest

from trtllm_engram.plugins import env
from trtllm_engram.plugins.errors import InputError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*env.VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


class TestCacheDir:
    def test_own_variable_comes_first(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", str(tmp_path / "own"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert env.cache_dir() == tmp_path / "own"
        assert (tmp_path / "own").is_dir()

    def test_xdg(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert env.cache_dir() == tmp_path / "xdg" / "trtllm-engram"

    @pytest.mark.parametrize("xdg", ["", "relative/path"])
    def test_home(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, xdg: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", "")
        assert env.cache_dir() == tmp_path / "home" / ".cache" / "trtllm-engram"

    @pytest.mark.parametrize("home", ["/proc/home", "/dev/null"], ids=["read-only", "no folder"])
    def test_none_where_it_cannot_be_made(self, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
        monkeypatch.setenv("HOME", home)
        assert env.cache_dir() is None

    def test_none_where_a_file_stands(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", str(tmp_path / "file"))
        assert env.cache_dir() is None

    def test_none_where_it_cannot_be_written(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", str(tmp_path))
        monkeypatch.setattr(env.os, "access", lambda *_: False)  # root may write anywhere
        assert env.cache_dir() is None

    def test_none_without_a_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("could not determine home directory")

        monkeypatch.setattr(env.Path, "home", no_home)
        assert env.cache_dir() is None


class TestLogLevel:
    @pytest.mark.parametrize(
        ("name", "level"),
        [("debug", logging.DEBUG), ("INFO", logging.INFO), ("", logging.WARNING)],
    )
    def test_names(self, monkeypatch: pytest.MonkeyPatch, name: str, level: int) -> None:
        monkeypatch.setenv("TRTLLM_ENGRAM_LOG", name)
        assert env.log_level() == level

    def test_default(self) -> None:
        assert env.log_level() == logging.WARNING

    def test_unknown_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRTLLM_ENGRAM_LOG", "loud")
        with pytest.raises(InputError, match=r"TRTLLM_ENGRAM_LOG: .*debug.*, found 'loud'"):
            env.log_level()
