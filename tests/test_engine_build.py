# SPDX-License-Identifier: Apache-2.0
"""Building: for which GPU, progress, interruption, timing cache."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_cases import build_plan
from engines import on_gpu

pytest_plugins = "engine_fixtures"


@on_gpu
def test_progress_and_timing_cache(store, tmp_path):
    steps = []
    cache = tmp_path / "timings"
    options = {"timing_cache": cache, "projection": "tensorrt"}
    build_plan(store, "cached.plan", progress=lambda *step: steps.append(step), **options)
    assert steps
    assert all(0 < done <= total for done, total in steps)
    first = cache.read_bytes()
    assert first
    build_plan(store, "cached.plan", **options)
    cache.write_bytes(b"not a timing cache")
    build_plan(store, "cached.plan", **options)
    assert len(cache.read_bytes()) >= len(first) // 2
    build_plan(store, "uncached.plan", timing_cache=tmp_path / "nowhere/timings")


@pytest.mark.parametrize(("current", "expected"), [(None, 0), (0, 0), (1, 1)])
def test_the_current_gpu_is_built_for(monkeypatch, current, expected):
    """TensorRT builds for the thread's, whose weight layout and timings these are."""
    from trtllm_engram.builder import engine

    gpus = [(b"NVIDIA A100", (8, 0)), (b"NVIDIA H200", (9, 0))]

    def store(reference, value):
        reference._obj.value = value
        return 0

    def current_device(device):
        return store(device, current) if current is not None else 201  # CUDA_ERROR_INVALID_CONTEXT

    def device_name(name, _length, device):
        name.value = gpus[device.value][0]
        return 0

    driver = SimpleNamespace(
        cuInit=lambda _flags: 0,
        cuCtxGetDevice=current_device,
        cuDeviceGet=store,
        cuDeviceGetName=device_name,
        cuDeviceGetAttribute=lambda number, attribute, device: store(
            number, gpus[device.value][1][attribute - 75]
        ),
    )
    monkeypatch.setattr(engine.ctypes, "CDLL", lambda _name: driver)
    name, capability = gpus[expected]
    assert engine._find_gpu() == (name.decode(), capability)


def test_timings_are_kept_by_version_and_gpu(tmp_path, monkeypatch):
    from trtllm_engram.builder.engine import AUTO, _timing_cache_file

    monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", str(tmp_path))
    file = tmp_path / "timing-10-6-0-NVIDIA-H200.cache"
    assert _timing_cache_file("10.6.0", "NVIDIA H200", AUTO) == file
    assert _timing_cache_file("10.6.0", "NVIDIA A100/80GB", AUTO) != file
    assert _timing_cache_file("10.6.0", "NVIDIA H200", "own") == Path("own")
    assert _timing_cache_file("10.6.0", "NVIDIA H200", None) is None


def test_a_timing_cache_that_cannot_be_kept_is_a_warning(tmp_path, caplog):
    """An engine takes minutes: it is not lost for the sake of its timings."""
    from trtllm_engram.builder.engine import EngineBuilder

    class Config:
        def create_timing_cache(self, content):
            return content

        def set_timing_cache(self, cache, _ignore_mismatch):
            self.cache = cache
            return True

        def get_timing_cache(self):
            return self

        def serialize(self):
            return b"timings"

    builder = EngineBuilder.__new__(EngineBuilder)  # the constructor takes a GPU
    builder.config = Config()
    builder._timing_cache = tmp_path / "nowhere/timings"
    with builder._timings():
        assert builder.config.cache == b""
    assert "timing cache: not kept: " in caplog.text
    builder._timing_cache = tmp_path
    with builder._timings():
        assert builder.config.cache == b""
    assert "timing cache: built without it: " in caplog.text


@on_gpu
def test_interrupted_build_leaves_nothing(store):
    def stop(_done, _total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_plan(store, "stopped.plan", progress=stop)
    assert not [path for path in store.path.parent.iterdir() if "stopped" in path.name]
