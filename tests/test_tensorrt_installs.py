# SPDX-License-Identifier: Apache-2.0
"""Which TensorRT tests run in: the one that the user names, before any that is found."""

import pytest
import tensorrt_installs


def made(folder):
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/libnvinfer.so.10").touch()
    return folder / "lib/libnvinfer.so.10"


@pytest.fixture
def installs(monkeypatch, tmp_path):
    """Beside a folder of `make tensorrt`."""
    made(tmp_path / ".tensorrt/10.6.0")
    monkeypatch.setattr(tensorrt_installs, "ROOT", tmp_path)
    return tensorrt_installs.installs.__wrapped__


def test_the_named_one_alone(installs, monkeypatch, tmp_path):
    monkeypatch.delenv("TENSORRT_ROOT", raising=False)
    assert [one.version for one in installs()] == ["10.6.0"]
    library = made(tmp_path / "mine")
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path / "mine"))
    assert [(one.library, one.bindings) for one in installs()] == [(library, None)]


def test_a_named_place_without_a_library(monkeypatch, tmp_path):
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path))
    with pytest.raises(pytest.UsageError, match=r"^TENSORRT_ROOT: expected libnvinfer\.so\.N in "):
        tensorrt_installs.check_named()
