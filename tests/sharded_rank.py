# SPDX-License-Identifier: Apache-2.0
"""A rank of test_tables_sharded.py: python sharded_rank.py JSON, then a request a line.

JSON is {group, tables, device, seed}: tables are bind_all's, device is a CUDA ordinal, or null for
the CPU. It answers the bind and each request with a line, {"result": ...} or {"error": ...}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from trtllm_engram.builder.checkpoint import SCALES, VALUES
from trtllm_engram.builder.formula import Formula, row_bytes
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import Tables, _native
from trtllm_engram.runtime.group import Group

ROWS_AT_A_TIME = 1 << 18


class Rank:
    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.device: int | None = job["device"]
        self.tables = Tables(Group(**job["group"]))
        if self.device is not None:
            import torch

            torch.cuda.set_device(self.device)
            torch.empty(1, device="cuda")

    def bind(self) -> dict[str, Any]:
        self.tables.bind_all(self.job["tables"])
        return self.tables.describe()

    def check(self) -> int:
        """How many bytes were compared with the formula, as lookups read them; all were right."""
        return sum(self._check(name, table) for name, table in self.tables.describe().items())

    def lookup(self, name: str, ids: list[list[int]]) -> str:
        """Packed rows [T, C*(D+D/32)] of ids [T, C], in hex."""
        return self._packed(name, np.array(ids, np.int32)).tobytes().hex()

    def replay(self, name: str) -> bool:
        """Whether a lookup inside a CUDA graph gives what the formula says, at each replay."""
        import torch

        about = self.tables.describe()[name]
        args = self._view(name)
        ids = torch.zeros((64, args.num_columns), dtype=torch.int32, device="cuda")
        out = torch.zeros((ids.numel(), packed_bytes(args)), dtype=torch.uint8, device="cuda")
        self._run(args, ids, out, torch.cuda.current_stream().cuda_stream)  # loads the kernel
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(args, ids, out, torch.cuda.current_stream().cuda_stream)
        for seed in range(3):
            rows = np.random.default_rng(seed).integers(0, about["num_rows"], tuple(ids.shape))
            ids.copy_(torch.from_numpy(rows.astype(np.int32)))
            graph.replay()
            torch.cuda.synchronize()
            if not np.array_equal(out.cpu().numpy(), self._formula(about, rows.ravel())):
                return False
        return True

    def close(self) -> None:
        self.tables.close()

    def free(self) -> int:
        """Bytes of free memory of the GPU."""
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def _check(self, name: str, about: dict[str, Any]) -> int:
        args = self._view(name)
        checked = 0
        end = args.first_row + args.num_rows
        for first in range(args.first_row, end, ROWS_AT_A_TIME):
            ids = np.arange(first, min(first + ROWS_AT_A_TIME, end), dtype=np.int32)
            padding = np.full(-len(ids) % args.num_columns, -1, np.int32)
            shape = (-1, args.num_columns)
            found = self._packed(name, np.concatenate([ids, padding]).reshape(shape))
            found = found.reshape(-1, packed_bytes(args))
            expected = self._formula_between(about, first, first + len(ids))
            if not np.array_equal(found[: len(ids)], expected) or found[len(ids) :].any():
                wrong = np.flatnonzero((found[: len(ids)] != expected).any(axis=1))
                raise EngramError(f"{name}: {len(wrong)} wrong rows from row {first} on")
            checked += expected.size
        return checked

    def _formula(self, about: dict[str, Any], rows: np.ndarray) -> np.ndarray:
        config = read_manifest(about["store"]).config
        return np.concatenate(row_bytes(config, about["layer"], rows, self.job["seed"]), axis=-1)

    def _formula_between(self, about: dict[str, Any], first: int, end: int) -> np.ndarray:
        config = read_manifest(about["store"]).config
        parts = []
        for tensor, width in ((VALUES, config.head_dim), (SCALES, config.head_dim // 32)):
            formula = Formula(config, about["layer"], tensor, self.job["seed"])
            start = first * width // 8 * 8
            chunks = b"".join(bytes(chunk) for _, chunk in formula.chunks(start, end * width))
            parts.append(np.frombuffer(chunks, np.uint8)[first * width - start :])
        return np.concatenate([part.reshape(end - first, -1) for part in parts], axis=1)

    def _view(self, name: str) -> _native.LookupArgs:
        if self.device is None:
            return _native.table_host_view(name)
        return _native.table_view(name, self.device)

    def _packed(self, name: str, ids: np.ndarray) -> np.ndarray:
        args = self._view(name)
        width = args.num_columns * packed_bytes(args)
        if self.device is None:
            out = np.zeros((len(ids), width), np.uint8)
            args.ids, args.out = ids.ctypes.data, out.ctypes.data
            self._fill(args, ids.shape)
            _native.run("lookup", args, _native.Exec(device=-1, num_threads=1, stream=None))
            return out
        import torch

        given = torch.from_numpy(np.ascontiguousarray(ids)).cuda()
        found = torch.zeros((len(ids), width), dtype=torch.uint8, device="cuda")
        self._run(args, given, found, torch.cuda.current_stream().cuda_stream)
        return found.cpu().numpy()

    def _run(self, args: _native.LookupArgs, ids: Any, out: Any, stream: int) -> None:
        args.ids, args.out = ids.data_ptr(), out.data_ptr()
        self._fill(args, tuple(ids.shape))
        place = _native.Exec(device=self.device, num_threads=0, stream=stream or None)
        _native.run("lookup", args, place)

    @staticmethod
    def _fill(args: _native.LookupArgs, shape: tuple[int, ...]) -> None:
        args.num_tokens, args.ids_stride = shape
        args.form = _native.RowForm.PACKED


def packed_bytes(args: _native.LookupArgs) -> int:
    return int(args.head_dim + args.head_dim // 32)


def main() -> None:
    rank = Rank(json.loads(sys.argv[1]))
    for request in _requests():
        try:
            answer = {"result": getattr(rank, request.pop("do"))(**request)}
        except (EngramError, InputError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def _requests() -> Iterator[dict[str, Any]]:
    yield {"do": "bind"}
    yield from map(json.loads, sys.stdin)


if __name__ == "__main__":
    main()
