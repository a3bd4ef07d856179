# SPDX-License-Identifier: Apache-2.0
"""A paged KV cache and an executor over it, as TensorRT-LLM's behave: what test_history.py runs
engram_history in.

Blocks of finished requests stay for reuse by their prefix: whole ones are shared, the beginning of
one is copied into a new block. Blocks that nobody uses are moved to a secondary pool and back, or
evicted. Requests go in chunks and in steps side by side, with draft tokens that are taken back, or
with beams that swap histories through cache_indirection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

SECONDARY = -(2**31)
UNUSED_BLOCK = 2**30


class Sizes(NamedTuple):
    num_blocks: int = 24  # of each pool
    tokens_per_block: int = 4
    slot_bytes: int = 16
    layers_in_pool: int = 2
    layer: int = 1  # the reserved one, among those of its pool
    max_blocks: int = 8  # of a request


@dataclass
class Block:
    index: int
    secondary: bool = False
    users: int = 0
    prefix: tuple[int, ...] = ()  # all tokens up to its last valid one, once it is kept for reuse


@dataclass
class Request:
    """`histories`: of each beam all tokens; the last one has no slot yet in generation."""

    prompt: list[int]
    beams: int
    done: int = 0  # prompt tokens that have slots
    histories: list[list[int]] = field(default_factory=list)
    blocks: list[list[Block]] = field(default_factory=list)  # of each beam
    sources: np.ndarray | None = None  # [beams, positions]: which beam wrote a position


class Call(NamedTuple):
    """The arguments of one step, and what each of its requests has seen."""

    arguments: dict[str, Any]
    seen: list[list[int]]  # with the tokens of this call
    counts: list[int]


class Cache:
    """The pools and their blocks. fields K and V of each layer follow one another in a block."""

    def __init__(self, sizes: Sizes, rng: np.random.Generator) -> None:
        self.sizes, self.rng = sizes, rng
        fields = sizes.num_blocks * sizes.layers_in_pool * 2
        shape = (2, fields, sizes.tokens_per_block, sizes.slot_bytes)
        self.pools = rng.integers(0, 256, shape, np.uint8)  # what memory happens to hold
        self.blocks = [[Block(i, bool(s)) for i in range(sizes.num_blocks)] for s in range(2)]

    def views(self) -> tuple[np.ndarray, np.ndarray]:
        """Both pools from the reserved layer on, as the plugin computes their addresses."""
        return self.pools[0, 2 * self.sizes.layer :], self.pools[1, 2 * self.sizes.layer :]

    def offset(self, block: Block, field: int) -> int:
        index = block.index * self.sizes.layers_in_pool * 2 + field
        return index | SECONDARY if block.secondary else index

    def fields(self, block: Block) -> np.ndarray:
        width = self.sizes.layers_in_pool * 2
        return self.pools[int(block.secondary), block.index * width : (block.index + 1) * width]

    def allocate(self) -> Block | None:
        """A block of the primary pool that nobody uses; what it was kept for is gone."""
        free = [block for block in self.blocks[0] if block.users == 0]
        if not free:
            return None
        unkept = [block for block in free if not block.prefix] or free
        block = unkept[int(self.rng.integers(len(unkept)))]
        block.prefix, block.users = (), 1
        return block

    def move(self, secondary: bool) -> None:
        """Offloads, or brings back, a kept block: another block of the other pool takes over."""
        side = int(secondary)
        kept = [b for b in self.blocks[1 - side] if b.prefix and b.users == 0]
        room = [b for b in self.blocks[side] if b.users == 0 and not b.prefix]
        if not kept or not room:
            return
        source, target = (list_[int(self.rng.integers(len(list_)))] for list_ in (kept, room))
        self.fields(target)[:] = self.fields(source)
        self.fields(source)[:] = self.rng.integers(0, 256, self.fields(source).shape, np.uint8)
        target.prefix, source.prefix = source.prefix, ()

    def kept(self) -> list[Block]:
        return [block for side in self.blocks for block in side if block.prefix]

    def copy_partial(self, source: Block, target: Block, count: int) -> None:
        self.fields(target)[:, :count] = self.fields(source)[:, :count]


class Executor:
    """Random events; `step` gives out what the next call of the engine takes."""

    def __init__(self, sizes: Sizes, seed: int, beams: int = 1, vocabulary: int = 3) -> None:
        self.rng = np.random.default_rng(seed)
        self.cache = Cache(sizes, self.rng)
        self.sizes, self.beams, self.vocabulary = sizes, beams, vocabulary
        self.requests: list[Request] = []
        self.reused = self.copied = self.rewound = 0
        self.copy: Callable[[Block, Block, int], None] = self.cache.copy_partial

    def tokens(self, count: int) -> list[int]:
        """Few different ones: prefixes are shared, and ids repeat."""
        return self.rng.integers(0, self.vocabulary, count).tolist()

    @property
    def capacity(self) -> int:
        return self.sizes.max_blocks * self.sizes.tokens_per_block

    def add(self) -> None:
        """A request; it begins after what kept blocks hold of its prompt."""
        request = Request(self.tokens(int(self.rng.integers(1, self.capacity // 2))), self.beams)
        request.blocks = [[]]
        size, prompt = self.sizes.tokens_per_block, tuple(request.prompt)
        while True:
            begin = request.done
            whole = begin + size
            match = [b for b in self.cache.kept() if b.prefix == prompt[:whole]]
            if whole < len(prompt) and match:
                match[0].users += 1
                request.blocks[0].append(match[0])
                request.done, self.reused = whole, self.reused + 1
                continue
            self._reuse_part(request, begin)
            break
        self.requests.append(request)

    def _reuse_part(self, request: Request, begin: int) -> None:
        """Copies the beginning of a kept block that goes on like the prompt."""
        best, count = None, 0
        for block in self.cache.kept():
            same = _common(block.prefix, request.prompt[: len(request.prompt) - 1]) - begin
            reaches = begin < len(block.prefix) <= begin + self.sizes.tokens_per_block
            if reaches and same > count:
                best, count = block, same
        if best is None:
            return
        best.users += 1  # stays while a block for the copy is sought
        target = self.cache.allocate()
        best.users -= 1
        if target is None:
            return
        self.copy(best, target, count)
        request.blocks[0].append(target)
        request.done, self.copied = begin + count, self.copied + 1

    def finish(self, request: Request) -> None:
        """Frees a request's blocks; those of a single beam are kept for reuse."""
        written = request.histories[0][:-1] if request.histories else request.prompt[: request.done]
        size = self.sizes.tokens_per_block
        for beam in request.blocks:
            for index, block in enumerate(beam):
                block.users -= 1
                valid = written[: (index + 1) * size]
                if len(request.blocks) == 1 and len(valid) > index * size and not block.prefix:
                    block.prefix = tuple(valid)
        self.requests = [one for one in self.requests if one is not request]

    def step(self, max_drafts: int = 0) -> tuple[Call, Callable[[], None]] | None:
        """A call for some of the requests, and what happens after it."""
        order = self.rng.permutation(len(self.requests))
        chosen = [self.requests[i] for i in order if self.rng.random() < 0.8]
        drafts = int(self.rng.integers(0, max_drafts + 1))
        contexts, steps = [], []
        for request in chosen:
            if request.histories:
                if self._grow(request, len(request.histories[0]) + drafts):
                    steps.append(request)
            else:
                left = len(request.prompt) - request.done
                count = int(self.rng.integers(1, left + 1))
                if self._grow(request, request.done + count):
                    contexts.append((request, count))
        if not contexts and not steps:
            return None
        return self._call(contexts, steps, drafts)

    def _grow(self, request: Request, length: int) -> bool:
        """Blocks for so many tokens; a request that finds none ends."""
        if length < self.capacity:
            for beam in request.blocks:
                while len(beam) * self.sizes.tokens_per_block < length:
                    block = self.cache.allocate()
                    if block is None:
                        break
                    beam.append(block)
            if all(len(beam) * self.sizes.tokens_per_block >= length for beam in request.blocks):
                return True
        self.finish(request)
        return False

    def _call(self, contexts: Any, steps: list[Request], drafts: int) -> Any:
        rows, seen, counts, sequences, lengths = [], [], [], [], []
        for request, count in contexts:
            rows.append(request.blocks[0])
            seen.append(request.prompt[: request.done + count])
            counts.append(count)
            lengths.append(count)
        guesses = [self.tokens(drafts) for _ in steps]
        for request, guess in zip(steps, guesses, strict=True):
            for blocks, history in zip(request.blocks, request.histories, strict=True):
                rows.append(blocks)
                seen.append(history + guess)
                counts.append(1 + drafts)
                lengths.append(len(request.prompt) + drafts)
        sequences = [len(tokens) for tokens in seen]
        offsets = np.full((len(rows), 2, self.sizes.max_blocks), UNUSED_BLOCK, np.int32)
        for row, blocks in zip(offsets, rows, strict=True):
            for index, block in enumerate(blocks):
                row[:, index] = [self.cache.offset(block, field) for field in range(2)]
        ids = [tokens[len(tokens) - n :] for tokens, n in zip(seen, counts, strict=True)]
        beams = [request.sources for request in steps]
        primary, secondary = self.cache.views()
        arguments = {
            "pool": primary,
            "secondary_pool": secondary,
            "block_offsets": offsets,
            "sequence_lengths": np.array(sequences, np.int32),
            "context_lengths": np.array(lengths, np.int32),
            "token_ids": np.array([one for part in ids for one in part], np.int32),
            "num_contexts": len(contexts),
            "num_context_tokens": sum(count for _, count in contexts),
            "cache_indirection": self._indirection(beams),
        }
        return Call(arguments, seen, counts), lambda: self._after(contexts, steps, guesses)

    def _indirection(self, beams: list[Any]) -> np.ndarray | None:
        if self.beams == 1:
            return None
        stacked = np.zeros((len(beams), self.beams, self.capacity), np.int32)
        for row, sources in zip(stacked, beams, strict=True):
            row[:] = sources
        return stacked

    def _after(self, contexts: Any, steps: list[Request], guesses: list[list[int]]) -> None:
        for request, count in contexts:
            request.done += count
            if request.done == len(request.prompt):
                self._begin(request)
        for request, guess in zip(steps, guesses, strict=True):
            if self.beams > 1:
                self._choose_beams(request)
                continue
            accepted = int(self.rng.integers(0, len(guess) + 1))
            self.rewound += len(guess) - accepted
            request.histories[0] += guess[:accepted] + self.tokens(1)

    def _begin(self, request: Request) -> None:
        """From a prompt to beams: they share its whole blocks, and each has a last one of its
        own, whose part of the prompt only the first beam's holds."""
        request.histories = [request.prompt + self.tokens(1) for _ in range(self.beams)]
        request.sources = np.zeros((self.beams, self.capacity), np.int32)
        whole = len(request.prompt) // self.sizes.tokens_per_block
        shared = request.blocks[0][:whole]
        for _ in range(1, self.beams):
            for block in shared:
                block.users += 1
            request.blocks.append(list(shared))

    def _choose_beams(self, request: Request) -> None:
        """Each beam goes on from any of them."""
        written = len(request.histories[0]) - 1
        parents = self.rng.integers(0, self.beams, self.beams)
        request.sources = request.sources[parents].copy()
        request.sources[:, written] = parents
        request.histories = [request.histories[p] + self.tokens(1) for p in parents]


def _common(a: Any, b: Any) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count
