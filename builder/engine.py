# SPDX-License-Identifier: Apache-2.0
"""Builds TensorRT engines: one network, profiles for decode and prefill, plan written whole.

    build(open_store("store"), "engine.plan", max_tokens=8192, progress=report)

EngineBuilder is the same for networks of your own (builder.network). Building needs a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_engram.builder.block_sums import Progress
from trtllm_engram.builder.files import read_regular, write_aside
from trtllm_engram.builder.graph import NetworkGraph
from trtllm_engram.builder.layers import ModelStore, engram_layers
from trtllm_engram.builder.model import ModelOptions, add_model, input_shapes
from trtllm_engram.builder.tensorrt_log import tensorrt_logger, told
from trtllm_engram.plugins import env
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.plugins.registration import import_tensorrt, register
from trtllm_engram.runtime.devices import require_gpu

Shapes = Mapping[str, tuple[int, ...]]
AUTO = "auto"
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CUdevice_attribute

_log = logging.getLogger("trtllm_engram")


@dataclass(frozen=True)
class Profile:
    """The calls that one optimisation profile takes: up to so many tokens in so many requests, none
    included. TensorRT tunes for the largest."""

    name: str
    max_tokens: int
    max_requests: int

    def __post_init__(self) -> None:
        for key in ("max_tokens", "max_requests"):
            if not 1 <= getattr(self, key) < 2**31:
                raise InputError(
                    f"{self.name}: {key}: expected 1 to {2**31 - 1}, found {getattr(self, key)}"
                )


def default_profiles(max_batch: int, max_tokens: int) -> tuple[Profile, Profile]:
    """Decode takes a token each of up to max_batch requests, prefill up to max_tokens tokens."""
    return Profile("decode", max_batch, max_batch), Profile("prefill", max_tokens, max_batch)


def build(
    store: ModelStore,
    path: str | os.PathLike[str],
    *,
    max_batch: int = 64,
    max_tokens: int = 8192,
    options: ModelOptions | None = None,
    tables: Mapping[int, str] | None = None,
    projection: str = "plugin",
    rows_amax: float = 0.0,
    version_compatible: bool = False,
    timing_cache: str | os.PathLike[str] | None = AUTO,
    progress: Progress | None = None,
) -> None:
    """Writes an engine with all of a store's layers; model.py names its inputs and outputs.

    Args:
        max_batch: most requests of a call; a decode call has a token for each.
        max_tokens: most tokens of a prefill call.
        tables: names of the layers' tables, by layer, where not layers.table_name's.
        projection, rows_amax: see layers.EngramLayer.
        version_compatible: a plan for later TensorRT 10 too; without the lean runtime inside.
        timing_cache: file to keep TensorRT's timings in; "auto" is one in the cache folder.
        progress: called with steps done and steps in all.
    """
    options = options or ModelOptions()
    profiles = default_profiles(max_batch, max_tokens)
    engram_layers(store, tables, projection, rows_amax)  # refuses what is wrong without a GPU too
    with write_aside(Path(path)) as scratch:
        builder = EngineBuilder(version_compatible=version_compatible, timing_cache=timing_cache)
        layers = engram_layers(store, tables, projection, rows_amax, builder.capability)
        add_model(NetworkGraph(builder.network), store, layers, options)
        for profile in profiles:
            most = input_shapes(store, options, profile.max_tokens, profile.max_requests)
            builder.add_profile(input_shapes(store, options, 0, 0), most, most)
        scratch.write_bytes(builder.serialize(progress))


class EngineBuilder:
    """TensorRT's builder, config and a strongly typed `network` that knows our plugins, and the
    compute capability of the GPU that is built for."""

    def __init__(
        self,
        *,
        version_compatible: bool = False,
        timing_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        require_gpu("building")  # without one, TensorRT's builder would end the process
        name, self.capability = _find_gpu()
        self.trt = trt = import_tensorrt()
        with told("building") as failure:
            builder = failure.check(trt.Builder(tensorrt_logger()))
            register(trt)
            flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
            self.network = builder.create_network(0 if flag is None else 1 << int(flag))
            self.config = builder.create_builder_config()
        self._builder = builder
        if version_compatible:
            self.config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
            self.config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
        self._timing_cache = _timing_cache_file(trt.__version__, name, timing_cache)

    def allow_in_place(self) -> None:
        """For network.gate(in_place=True). InputError where this TensorRT does not have it."""
        feature = getattr(self.trt.PreviewFeature, "ALIASED_PLUGIN_IO_10_03", None)
        if feature is None:
            raise InputError(
                f"in_place: expected TensorRT 10.3 or later, found {self.trt.__version__}"
            )
        self.config.set_preview_feature(feature, True)

    def add_profile(self, least: Shapes, usual: Shapes, most: Shapes) -> None:
        """One optimisation profile: shapes of the inputs with dynamic dimensions."""
        profile = self._builder.create_optimization_profile()
        for name, shape in most.items():
            profile.set_shape(name, least[name], usual[name], shape)
        if self.config.add_optimization_profile(profile) < 0:
            raise InputError(
                f"profile: expected shapes of the network's inputs, found {dict(most)}"
            )

    def serialize(self, progress: Progress | None = None) -> Any:
        """The plan, as TensorRT's IHostMemory (a buffer)."""
        monitor = _monitor(self.trt, progress or (lambda _done, _total: None))
        self.config.progress_monitor = monitor
        with self._timings(), told("building") as failure:
            plan = self._builder.build_serialized_network(self.network, self.config)
            if monitor.stopped_by is not None:
                raise monitor.stopped_by
            return failure.check(plan)

    @contextlib.contextmanager
    def _timings(self) -> Iterator[None]:
        """Reads the timing cache, and writes it back once the engine is built.

        A cache that cannot be read or written costs time at most, never the engine.
        """
        file = self._timing_cache
        if file is None:
            yield
            return
        content = b""
        try:
            if file.exists():
                content = read_regular(file)
        except InputError as error:
            _log.warning("timing cache: built without it: %s", error)
        with told("timing cache"):  # one of another GPU or driver is refused: begin anew
            cache = self.config.create_timing_cache(content)
            if cache is None or not self.config.set_timing_cache(cache, False):
                cache = self.config.create_timing_cache(b"")
                self.config.set_timing_cache(cache, False)
        yield
        try:
            with write_aside(file) as scratch:
                scratch.write_bytes(self.config.get_timing_cache().serialize())
        except InputError as error:
            _log.warning("timing cache: not kept: %s", error)


def _find_gpu() -> tuple[str, tuple[int, int]]:
    """Name and compute capability of the GPU that is built for: the thread's current one, which is
    the first where it has no context."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda = ctypes.CDLL("libcuda.so.1")
    failed = cuda.cuInit(0)
    if not failed and cuda.cuCtxGetDevice(ctypes.byref(device)):
        failed = cuda.cuDeviceGet(ctypes.byref(device), 0)
    failed = failed or cuda.cuDeviceGetName(name, len(name), device)
    for number, attribute in ((major, _COMPUTE_MAJOR), (minor, _COMPUTE_MINOR)):
        failed = failed or cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    if failed:
        raise EngramError(f"building: expected a GPU that tells what it is, found error {failed}")
    return name.value.decode("utf-8", "replace"), (major.value, minor.value)


def _timing_cache_file(
    version: str, gpu: str, chosen: str | os.PathLike[str] | None
) -> Path | None:
    """Timings hold for one TensorRT and one kind of GPU; machines may share a home folder."""
    if chosen != AUTO:
        return None if chosen is None else Path(chosen)
    folder = env.cache_dir()
    words = re.sub(r"\W+", "-", f"{version}-{gpu}")
    return None if folder is None else folder / f"timing-{words}.cache"


def _monitor(trt: Any, report: Progress) -> Any:
    """An IProgressMonitor that reports the outermost phase. What a callback raises (^C too) must
    not pass through TensorRT: it stops the build, and serialize raises it then."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped_by: BaseException | None = None
            self._outer = ""
            self._num_steps = 0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._outer, self._num_steps = phase_name, num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name == self._outer and self.stopped_by is None:
                try:
                    report(step + 1, self._num_steps)
                except BaseException as error:
                    self.stopped_by = error
            return self.stopped_by is None

        def phase_finish(self, _phase_name: str) -> None:
            return

    return Monitor()
