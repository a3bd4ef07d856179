# SPDX-License-Identifier: Apache-2.0
"""A mixed load on a running Triton server, and what its processes take of memory meanwhile.

Every answer is held against the eager ops: a wrong bit counts as an error like a failed request,
and so does an answer to a request that must be refused.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.model import hidden_name, hidden_out_name, rows_name
from trtllm_engram.plugins.errors import EngramError, InputError

from ..hidden import SeededHidden
from ..machine import ROOT, read_text
from ..pieces import Executor, Made, Piece
from ..session import EngramSession
from ..store import Store, open_store
from ..triton.settings import Settings

SETTLED = 0.2  # of the time; from then on memory should not grow
_WINDOW = 0.1  # of the time, over which memory is told: requests under way come and go
_CALLS = 16  # of each kind, in turns
_SAMPLES = 600  # of memory
_SERVER, _STUB = "tritonserver", "triton_python_b"
_DATATYPES = {"int32": "INT32", "int64": "INT64", "bfloat16": "BF16", "object": "BYTES"}

Host = npt.NDArray[Any]


@dataclass(frozen=True)
class Call:
    """One request and what it must get: outputs by name, or the text of a refusal."""

    inputs: Mapping[str, Host]
    outputs: Mapping[str, Host] = field(default_factory=dict)
    refusal: str = ""
    sequence: tuple[bool, bool] | None = None  # whether it is a sequence's first and last


@dataclass
class Kind:
    """Requests of one kind, sent one after the other over one connection."""

    name: str
    protocol: str  # "http" or "grpc"
    model: str
    calls: list[Call]
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Memory:
    seconds: float  # since the load began
    pss: int  # bytes of the server and its stubs, shared pages shared out


def tritonclient(protocol: str) -> Any:
    try:
        return importlib.import_module(f"tritonclient.{protocol}")
    except ImportError:
        raise EngramError(
            "bench serving: expected the package tritonclient, found none: "
            "pip install 'tritonclient[grpc,http]'"
        ) from None


def find_server() -> int:
    """The process of the only tritonserver of this machine."""
    pids = [pid for pid, name, _ in _processes() if name == _SERVER]
    if len(pids) != 1:
        raise InputError(f"--pid: expected one of {_SERVER}, found {pids or 'none running'}")
    return pids[0]


def server_pss(pid: int) -> int:
    """Bytes of a server and of its Python models' processes."""
    stubs = [one for one, name, parent in _processes() if parent == pid and name == _STUB]
    rollups = [read_text(ROOT / f"proc/{one}/smaps_rollup") for one in (pid, *stubs)]
    found = [re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE) for text in rollups]
    if found[0] is None:
        raise EngramError(f"pid {pid}: expected a process whose memory may be read, found none")
    return sum(int(one[1]) * 1024 for one in found if one is not None)


def store_of(url: str, model: str) -> Store:
    """The store that a model of the server was written for."""
    with contextlib.closing(tritonclient("grpc").InferenceServerClient(url)) as server:
        config = server.get_model_config(model, as_json=True)["config"]
    parameters = config.get("parameters", {})
    settings = {name: one.get("string_value", "") for name, one in parameters.items()}
    known = Settings.of_parameters(settings)
    return open_store(known.store, checkpoint=known.checkpoint)


def mixed_load(store: Store, model: str, sequences: str | None) -> list[Kind]:
    """Decode steps, prefills, batches and refusals, and texts in pieces where there is a model that
    keeps sequences."""
    maker = _Maker(store)
    kinds = [
        Kind("decode, 1 token", "grpc", model, [maker.piece(1) for _ in range(_CALLS)]),
        Kind("prefill, 128 tokens", "grpc", model, [maker.piece(128) for _ in range(_CALLS)]),
        Kind("4 texts of 16 tokens", "http", model, [maker.batch(4, 16) for _ in range(_CALLS)]),
        Kind("refused", "http", model, [maker.refused()]),
    ]
    if sequences is not None:
        calls = [call for _ in range(_CALLS) for call in maker.sequence(3, 8)]
        kinds.append(Kind("sequences, 8 tokens", "grpc", sequences, calls))
    return kinds


def run_load(
    kinds: Sequence[Kind],
    urls: Mapping[str, str],
    pid: int,
    seconds: float,
    progress: Callable[[int, int], None],
) -> list[Memory]:
    """Sends all kinds at once for so long; fills in their times and errors."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=_send, args=(kind, urls[kind.protocol], number + 1, stop))
        for number, kind in enumerate(kinds)
    ]
    for thread in threads:
        thread.start()
    memory = []
    started = time.monotonic()
    try:
        while (now := time.monotonic() - started) < seconds:
            memory.append(Memory(now, server_pss(pid)))
            progress(int(now), int(seconds))
            time.sleep(seconds / _SAMPLES)
        memory.append(Memory(now, server_pss(pid)))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return memory


def growth(memory: Sequence[Memory]) -> float:
    """Of PSS from when the load had settled to its end, as a share; each the median of a while."""
    end = memory[-1].seconds

    def median(start: float) -> float:
        stop = start + _WINDOW
        found = [one.pss for one in memory if start * end <= one.seconds <= stop * end]
        # A busy machine may have been looked at seldom.
        nearest = min(memory, key=lambda one: abs(one.seconds - start * end))
        return statistics.median(found or [nearest.pss])

    return median(1 - _WINDOW) / median(SETTLED) - 1


class _Maker:
    """Calls with what they must get."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hidden = SeededHidden(store.config)
        self._random = np.random.default_rng(0)
        self._executor = Executor(EngramSession(store))

    def piece(self, num_tokens: int) -> Call:
        """Tokens amid a text, through all layers."""
        window = self._store.config.max_ngram_size - 1
        position = int(self._random.integers(window, 1000))
        piece = self._piece(self._ids(num_tokens), position, self._ids(window))
        (made,) = self._executor.run([piece], with_rows=True)
        inputs: dict[str, Host] = {
            "token_ids": piece.token_ids[None],
            "lookback_ids": piece.lookback_ids[None],
            "position": np.array([[position]], np.int64),
        }
        inputs |= {hidden_name(layer): one[None] for layer, one in piece.hidden.items()}
        outputs = {"next_lookback_ids": piece.next_lookback_ids[None], **_outputs([made])}
        return Call(inputs, outputs)

    def batch(self, num_rows: int, num_tokens: int) -> Call:
        """Texts' rows."""
        pieces = [self._new(self._ids(num_tokens)) for _ in range(num_rows)]
        made = self._executor.run(pieces, with_rows=True)
        return Call({"token_ids": np.stack([one.token_ids for one in pieces])}, _outputs(made))

    def refused(self) -> Call:
        """A token that is not in the vocabulary."""
        ids = np.array([[self._store.token_map.size]], np.int32)
        return Call({"token_ids": ids}, refusal="token ids: expected 0 to")

    def sequence(self, num_pieces: int, num_tokens: int) -> list[Call]:
        """A text in pieces whose past the server keeps."""
        calls = []
        past = self._new(np.zeros(0, np.int32))
        for number in range(num_pieces):
            past = Piece(
                self._ids(num_tokens),
                past.position + past.token_ids.size,
                past.next_lookback_ids,
                {},
            )
            (made,) = self._executor.run([past], with_rows=True)
            inputs = {"token_ids": past.token_ids[None]}
            place = (number == 0, number == num_pieces - 1)
            calls.append(Call(inputs, _outputs([made]), sequence=place))
        return calls

    def _ids(self, count: int) -> npt.NDArray[np.int32]:
        return self._random.integers(0, self._store.token_map.size, count, dtype=np.int32)

    def _new(self, ids: npt.NDArray[np.int32]) -> Piece:
        window = self._store.config.max_ngram_size - 1
        return Piece(ids, 0, np.full(window, -1, np.int32), {})

    def _piece(self, ids: Host, position: int, lookback: Host) -> Piece:
        layers = self._store.config.layer_ids
        hidden = {layer: self._hidden(layer, position, position + ids.size) for layer in layers}
        return Piece(ids, position, lookback, hidden)


def _outputs(made: Sequence[Made]) -> dict[str, Host]:
    outputs = {"hash_ids": np.stack([one.hash_ids for one in made])}
    for layer in made[0].rows:
        outputs[rows_name(layer)] = np.stack([one.rows[layer] for one in made])
    for layer in made[0].hidden:
        outputs[hidden_out_name(layer)] = np.stack([one.hidden[layer] for one in made])
    return outputs


def _send(kind: Kind, url: str, number: int, stop: threading.Event) -> None:
    """A thread of its own: sends a kind's calls in turns until told to stop, at a text's end; one
    at least, for on a busy machine the time may be over before it begins."""
    client = tritonclient(kind.protocol)
    with contextlib.closing(client.InferenceServerClient(url)) as server:
        turn = 0
        while True:
            call = kind.calls[turn % len(kind.calls)]
            if turn > 0 and stop.is_set() and (call.sequence is None or call.sequence[0]):
                return
            started = time.perf_counter()
            try:
                problem = _problem(client, server, kind.model, call, number)
            except Exception as error:  # whatever it is, it is the benchmark's finding
                problem = f"{type(error).__name__}: {error}"
            kind.seconds.append(time.perf_counter() - started)
            if problem:
                kind.errors.append(problem)
            turn += 1


def _problem(client: Any, server: Any, model: str, call: Call, sequence: int) -> str:
    """What was wrong with the answer; "" where nothing was."""
    tensors = []
    for name, array in call.inputs.items():
        tensor = client.InferInput(name, array.shape, _DATATYPES[array.dtype.name])
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    wanted = [client.InferRequestedOutput(name) for name in call.outputs or ["hash_ids"]]
    options: dict[str, Any] = {}
    if call.sequence is not None:
        first, last = call.sequence
        options = {"sequence_id": sequence, "sequence_start": first, "sequence_end": last}
    try:
        answer = server.infer(model, tensors, outputs=wanted, **options)
    except client.InferenceServerException as error:
        told = str(error)
        return "" if call.refusal and call.refusal in told else told
    if call.refusal:
        return f"expected a refusal, {call.refusal!r}, found an answer"
    for name, expected in call.outputs.items():
        found = answer.as_numpy(name)
        if found.dtype != expected.dtype:  # BF16 comes as float32 from older clients
            found = found.astype(expected.dtype)
        if found.tobytes() != expected.tobytes():
            return f"{name}: expected the reference's bits, found others"
    return ""


def _processes() -> list[tuple[int, str, int]]:
    """(pid, name, parent) of all."""
    found = []
    for folder in (ROOT / "proc").glob("[0-9]*"):
        status = re.match(r"(\d+) \((.*)\) \S (\d+)", read_text(Path(folder, "stat")))
        if status is not None:
            found.append((int(status[1]), status[2], int(status[3])))
    return found
