# SPDX-License-Identifier: Apache-2.0
"""What Triton's Python backend calls: one object per instance, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb  # Triton's, in its own processes alone

from trtllm_engram.builder.token_map import load_tokenizer
from trtllm_engram.plugins.errors import EngramError, InputError

from ..device_array import current_device
from ..devices import choose_device, parse_device
from ..engine import Engine
from ..engine_session import EngineSession
from ..metrics import FAILED, REFUSED, Metrics
from ..pieces import EngineExecutor, Executor
from ..session import EngramSession
from ..store import Store, open_store
from ..tables import Tables
from .published import Published
from .requests import Encode, Past, Reader, Request, outputs_of
from .settings import Instance, Settings, parameters_of
from .tensors import reads_text, to_tensor

_REFUSALS = (InputError, EngramError, OSError, MemoryError)
_logger = logging.getLogger("trtllm_engram")


class TritonPythonModel:
    """A store's Engram layers as a model."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._tables: Tables | None = None
        # Of sequences that go on. A text that was given up stays until others have come: no more
        # are kept than Triton keeps open at a time, and one that is open was used later than it.
        self._pasts: OrderedDict[int, Past] = OrderedDict()
        oldest = config.get("sequence_batching", {}).get("oldest")
        self._max_sequences = int(oldest["max_candidate_sequences"]) if oldest else 0
        try:
            _check_text(config)
            self._load(Settings.of_parameters(parameters_of(config)), Instance.of_args(args))
        except _REFUSALS as error:
            self.finalize()
            raise pb.TritonModelException(_one_line(error)) from None

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request; what is wrong with one is that one's error alone."""
        responses: list[Any] = [None] * len(requests)
        read: dict[int, Request] = {}
        for place, request in enumerate(requests):
            try:
                read[place] = self._read(request)
            except InputError as error:
                self._executor.metrics.count_error(REFUSED)
                responses[place] = _refused(error)
            except Exception as error:
                responses[place] = self._failed(error)
        for with_rows, with_hidden in ((False, False), (False, True), (True, False), (True, True)):
            places = [
                place
                for place, one in read.items()
                if (one.needs_rows, bool(one.pieces[0].hidden)) == (with_rows, with_hidden)
            ]
            made = self._answer([read[place] for place in places], with_rows)
            for place, response in zip(places, made, strict=True):
                responses[place] = response
                if not response.has_error():
                    self._keep(requests[place], read[place])
        self._published.update()
        return responses

    def finalize(self) -> None:
        if self._tables is not None:
            self._tables.close()

    def _load(self, settings: Settings, instance: Instance) -> None:
        device = choose_device(instance.device)
        ordinal = parse_device(device)
        store = open_store(settings.store, checkpoint=settings.checkpoint)
        group = instance.table_group(settings.keeper)
        with contextlib.nullcontext() if ordinal is None else current_device(ordinal):
            self._tables = Tables.of_store(store, group=group, **settings.table)
        metrics = Metrics()
        described = self._tables.describe()
        metrics.note_tables(described)
        has_hot_rows = any(one["disk"] or one["hot"] for one in described.values())
        describe = self._tables.describe if has_hot_rows else None  # found ones count on
        self._published = Published(pb, metrics, instance.labels, describe)
        session = EngramSession(store, device, self._tables)
        if settings.engine is None:
            self._executor = Executor(session, settings.max_tokens, metrics=metrics)
        elif ordinal is None:
            raise InputError("engine: expected instances on a GPU, found KIND_CPU")
        else:
            engine = EngineSession(Engine(settings.engine, ordinal), store)
            self._executor = EngineExecutor(session, engine, metrics)
        self._reader = Reader(
            store.config, store.token_map.size, _encoder(store), self._executor.check_size
        )

    def _read(self, request: Any) -> Request:
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        outputs = frozenset(request.requested_output_names())
        past = self._past(request) if self._max_sequences else None
        return self._reader.read(tensors, outputs, past)

    def _answer(self, requests: Sequence[Request], with_rows: bool) -> list[Any]:
        """A response for each; where they fail together, each has its own error, or none."""
        try:
            return self._run(requests, with_rows)
        except Exception as error:
            if len(requests) == 1:
                return [self._failed(error)]
        return [one for request in requests for one in self._answer([request], with_rows)]

    def _failed(self, error: Exception) -> Any:
        """A response with an error that is not the request's alone to mend, and its place in the
        log where it is none of ours."""
        self._executor.metrics.count_error(FAILED)
        if not isinstance(error, _REFUSALS):
            _logger.error("a request failed", exc_info=error)
        return _refused(error)

    def _run(self, requests: Sequence[Request], with_rows: bool) -> list[Any]:
        pieces = [piece for request in requests for piece in request.pieces]
        made = iter(self._executor.run(pieces, with_rows=with_rows))
        responses = []
        for request in requests:
            outputs = outputs_of(request, [next(made) for _ in request.pieces])
            tensors = [to_tensor(pb, name, array) for name, array in outputs.items()]
            responses.append(pb.InferenceResponse(tensors))
        return responses

    def _past(self, request: Any) -> Past:
        if request.flags() & pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            return self._reader.new_text()
        past = self._pasts.get(request.correlation_id())
        if past is None:
            raise InputError(
                f"sequence {request.correlation_id()}: expected one that has begun here, found "
                "none: its first request failed"
            )
        return past

    def _keep(self, request: Any, read: Request) -> None:
        """Notes where a sequence is, once its request has succeeded."""
        if not self._max_sequences:
            return
        sequence = request.correlation_id()
        self._pasts.pop(sequence, None)
        if not request.flags() & pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            (piece,) = read.pieces
            position = piece.position + piece.token_ids.size
            self._pasts[sequence] = Past(position, piece.next_lookback_ids)
        while len(self._pasts) > self._max_sequences:
            self._pasts.popitem(last=False)


def _encoder(store: Store) -> Encode:
    """Token ids of a text, as `run --text` gets them."""
    tokenizer = load_tokenizer(store.tokenizer_json)

    def encode(text: bytes) -> npt.NDArray[np.int32]:
        try:
            encoding = tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        except UnicodeDecodeError as error:
            raise InputError(
                f"text: expected UTF-8: {error.reason} at byte {error.start}"
            ) from None
        return np.array(encoding.ids, dtype=np.int32)

    return encode


def _check_text(config: dict[str, Any]) -> None:
    """Refuses inputs of text where one would end this process."""
    if any(one["name"] == "text" for one in config["input"]) and not reads_text(pb):
        raise InputError(
            "text: expected numpy below 2 in the Python of this server's Python backend, found "
            f"{np.__version__}: pip install 'numpy<2', or write the model with `triton --no-text`"
        )


def _refused(error: BaseException) -> Any:
    return pb.InferenceResponse(error=pb.TritonError(_one_line(error)))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
