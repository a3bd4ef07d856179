# SPDX-License-Identifier: Apache-2.0
"""Two requests through a store's Engram layers, as a server would: prompts, then a token each.

trtllm-engram demo --keep engram-demo && python examples/session.py engram-demo/store
"""

import sys

from trtllm_engram.runtime import open_store
from trtllm_engram.runtime.hidden import SeededHidden
from trtllm_engram.runtime.session import EngramSession

session = EngramSession(open_store(sys.argv[1]), device="cpu")  # or "cuda:0"
model = SeededHidden(session.config)  # stands for the hidden states of a real model

prompt = session.step({"a": [11, 12, 13, 14], "b": [11, 12]})
decode = session.step({"a": [15], "b": [13]})  # the session knows each request's last tokens

for name, step in (("prompt", prompt), ("decode", decode)):
    for layer_id in session.config.layer_ids:
        hidden = session.to_device(model(layer_id, 0, step.num_tokens))
        out = session.layer(layer_id, step, hidden)
        print(f"{name}: layer {layer_id}: {list(out.shape)} from {step.cu_seqlens.tolist()}")

# Tokens 11, 12, 13 end at the prompt's third token and at b's next one: both read the same rows.
same = session.to_host(prompt.hash_ids)[2] == session.to_host(decode.hash_ids)[1]
print("rows of one n-gram are one:", bool(same.all()))
