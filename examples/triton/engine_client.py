# SPDX-License-Identifier: Apache-2.0
"""A text to a model of `trtllm-engram triton --form tensorrt`, over gRPC: made-up residual streams
go through its Engram layers, piece by piece.

    python examples/triton/engine_client.py examples/multilingual.txt --url localhost:8001

With --sequences it is a model written with that option, and the server remembers the text so far;
without, each answer's next_lookback_ids go into the next request.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ml_dtypes
import numpy as np
import tritonclient.grpc as triton
from tokenizers import Tokenizer

DTYPES = {"BF16": ml_dtypes.bfloat16, "FP16": np.float16, "FP32": np.float32}


def tensor(name: str, array: np.ndarray, datatype: str) -> triton.InferInput:
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", default="store/tokenizer.json")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="engram")
    parser.add_argument("--sequences", action="store_true")
    parser.add_argument("--piece", type=int, default=64, help="tokens of a request")
    args = parser.parse_args()

    server = triton.InferenceServerClient(args.url)
    tokenizer = Tokenizer.from_file(args.tokenizer)
    text = args.text.read_text(encoding="utf-8")
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    rng = np.random.default_rng(0)
    streams, datatypes = {}, {}
    described = {one.name: one for one in server.get_model_metadata(args.model).inputs}
    for one in described.values():
        if one.name.endswith(".hidden"):
            size = [int(size) for size in one.shape[2:]]  # hc_mult, hidden
            stream = rng.standard_normal((1, ids.size, *size), np.float32)
            streams[one.name] = stream.astype(DTYPES[one.datatype])
            datatypes[one.name] = one.datatype

    added = {name: [] for name in streams}
    if not args.sequences:
        window = int(described["lookback_ids"].shape[1])
        lookback = np.full((1, window), -1, np.int32)  # no tokens before the text
    for start in range(0, ids.size, args.piece):
        piece = ids[None, start : start + args.piece]
        stop = start + piece.size
        positions = np.arange(start, stop, dtype=np.int64)[None]
        inputs = [tensor("token_ids", piece, "INT32"), tensor("positions", positions, "INT64")]
        for name, stream in streams.items():
            inputs.append(tensor(name, stream[:, start:stop], datatypes[name]))
        options = {}
        if args.sequences:
            options = {
                "sequence_id": 1,
                "sequence_start": start == 0,
                "sequence_end": stop == ids.size,
            }
        else:
            inputs.append(tensor("lookback_ids", lookback, "INT32"))
        answer = server.infer(args.model, inputs, **options)
        for name, stream in streams.items():
            out = answer.as_numpy(f"{name}_out").astype(np.float64)
            given = stream[:, start:stop].astype(np.float64)
            added[name].append(np.abs(out - given).mean((0, 2, 3)))
        if not args.sequences:
            lookback = answer.as_numpy("next_lookback_ids")

    print(f"{ids.size} tokens")
    for name, pieces in added.items():
        print(f"{name}: {np.concatenate(pieces).mean():.6f} added to a value, on average")


if __name__ == "__main__":
    main()
