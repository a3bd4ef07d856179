# SPDX-License-Identifier: Apache-2.0
"""An engine of a store, and what tests do with it."""

import numpy as np
from engines import TEXT
from kept_plans import kept_plan

from trtllm_engram.builder.model import ModelOptions
from trtllm_engram.runtime.compare import Reference, compare, make_feeds
from trtllm_engram.runtime.compare.report import HIDDEN_LIMIT_BF16_ULPS

MAX_BATCH, MAX_TOKENS = 8, 131
CHECKED = ModelOptions(check_outputs=True)


def build_plan(store, name="engine.plan", options=CHECKED, **changes):
    from trtllm_engram.builder.engine import build

    path = store.path.parent / name
    defaults = {"max_batch": MAX_BATCH, "max_tokens": MAX_TOKENS, "timing_cache": None}

    def plan():
        build(store, path, options=options, **{**defaults, **changes})
        return path.read_bytes()

    path.write_bytes(kept_plan(plan, name))
    return path


def feed_of(store, num_tokens, num_requests, seed=0, options=CHECKED):
    return make_feeds(store, [(num_tokens, num_requests)], text=TEXT, options=options, seed=seed)[0]


def run(engine, feed):
    profile = engine.find_profile({name: array.shape for name, array in feed.items()})
    return engine.execution(profile).run(feed)


def check(store, feed, found, limit=HIDDEN_LIMIT_BF16_ULPS):
    broken = [one for one in compare(found, Reference(store)(feed), limit) if not one.passed]
    assert not broken, broken


def on_torch(feed):
    """The feed as torch tensors on the GPU."""
    import torch

    def tensor(array):
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
        return torch.from_numpy(array).cuda()

    return {name: tensor(array) for name, array in feed.items()}


def host(tensor):
    """A torch tensor as numpy bits."""
    import torch

    torch.cuda.synchronize()
    return tensor.cpu().contiguous().view(torch.uint8).numpy()


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(host(array), host(expected[name]), err_msg=name)
