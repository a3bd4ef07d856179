# SPDX-License-Identifier: Apache-2.0
"""A text to a model of `trtllm-engram triton`, over gRPC: its rows, piece by piece.

    python examples/triton/client.py examples/multilingual.txt --url localhost:8001

With --sequences it is a model written with that option, and the server remembers the text so far;
without, each answer's next_lookback_ids go into the next request.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tokenizers import Tokenizer


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

    outputs = [triton.InferRequestedOutput("hash_ids")]
    if not args.sequences:
        outputs.append(triton.InferRequestedOutput("next_lookback_ids"))
    found, lookback = [], None
    for start in range(0, ids.size, args.piece):
        piece = ids[None, start : start + args.piece]  # a batch of one
        inputs = [tensor("token_ids", piece, "INT32")]
        options = {}
        if args.sequences:
            stop = start + piece.size
            options = {
                "sequence_id": 1,
                "sequence_start": start == 0,
                "sequence_end": stop == ids.size,
            }
        elif lookback is not None:
            inputs.append(tensor("lookback_ids", lookback, "INT32"))
            inputs.append(tensor("position", np.array([[start]], np.int64), "INT64"))
        answer = server.infer(args.model, inputs, outputs=outputs, **options)
        found.append(answer.as_numpy("hash_ids")[0])
        lookback = answer.as_numpy("next_lookback_ids")

    rows = np.concatenate(found)
    print(f"{ids.size} tokens, {rows.shape[1]} layers, {rows.shape[2]} rows each")
    print(f"last token, first layer: {rows[-1, 0].tolist()}")


if __name__ == "__main__":
    main()
