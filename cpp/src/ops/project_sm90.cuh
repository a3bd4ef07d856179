// SPDX-License-Identifier: Apache-2.0
//! \file project_sm90.cuh
//! The projection by warpgroup products: W is the A operand, dequantised into registers, x^T the B
//! operand in shared memory. The two blocks of a cluster have neighbouring outputs and the same
//! tokens; each loads half of x for both. One warp feeds the copy engine, the others multiply.
//! Three warpgroups have 192 outputs, so that one round of 132 blocks has nearly all of 25,600;
//! what whole rounds leave over is done in strips after them.
//!
//! An output is one sum in FP32, 16 inner values at a time from the first on, rounded once: it
//! depends neither on the shape nor on the number of tokens.
#pragma once

#include <cstdint>

#include "engram/ops.h"
#include "project_sm90.h"
#include "project_sm90_strips.cuh"
#include "project_sm90_tile.cuh"
#include "project_sm90_weights.cuh"
#include "ptx_sm90.cuh"

namespace engram::sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

//! Outputs and tokens of a block's next sums; num_tokens 0: none.
struct Tile {
  int first_output;
  int first_token;
  int num_tokens;
};

//! Piece p of the work: the whole tiles come first, then parts of the others, so that the last
//! round of the grid is a short one. Tiles that run side by side share weights and tokens.
template <typename S>
__device__ Tile find_tile(const Args& args, int piece) {
  int tile = piece, offset = 0, size = S::kTokens;
  if (piece >= args.num_whole) {
    const int part = piece - args.num_whole;
    size = S::kTokens / args.num_parts;
    tile = args.num_whole + part / args.num_parts;
    offset = part % args.num_parts * size;
  }
  const int group = tile / (kTileGroup * args.num_row_tiles);
  const int width = min(kTileGroup, args.num_token_tiles - group * kTileGroup);
  const int in_group = tile - group * kTileGroup * args.num_row_tiles;
  const int token_tile = group * kTileGroup + in_group % width;
  const int first_token = token_tile * S::kTokens + offset;
  const int num_left = max(args.num_tokens - first_token, 0);
  size = min(size, static_cast<int>(ceil_div(num_left, S::kStepTokens)) * S::kStepTokens);
  return {static_cast<int>((in_group / width * kClusterBlocks + cluster_rank()) * args.rows),
          first_token, size};
}

//! One thread: keeps the ring of stages filled.
template <typename S, typename Weights>
__device__ void produce(const Args& args, const Shared<S>& shared) {
  Ring<S> ring{shared};
  const uint32_t rank = cluster_rank();
  for (int piece = blockIdx.x / kClusterBlocks; piece < args.num_pieces;
       piece += gridDim.x / kClusterBlocks) {
    const Tile tile = find_tile<S>(args, piece);
    if (tile.num_tokens == 0) continue;
    const int half = tile.num_tokens / kClusterBlocks;
    const uint32_t bytes = args.rows * S::kInner + tile.num_tokens * S::kInner * 2;
    for (int inner = 0; inner < args.in_features; inner += S::kInner) {
      const uint32_t full = shared.full(ring.stage);
      wait_barrier(shared.empty(ring.stage), ring.parity ^ 1);
      expect_bytes(full, bytes);
      Weights::load_stage(args.weight, args.rows, S::kInner, shared.weights(ring.stage), inner,
                          tile.first_output, full);
      for (int k = 0; k < S::kInner; k += kInputColumns) {
        const uint32_t to = shared.inputs(ring.stage) + k * tile.num_tokens * 2;
        for (int t = rank * half; t < (rank + 1) * half; t += S::kInputRows) {
          load_box_to_both(to + t * kInputColumns * 2, args.x, inner + k, tile.first_token + t,
                           full);
        }
      }
      ring.advance();
    }
  }
  if constexpr (S::kHasStrips) produce_strips<S, Weights>(args, shared, ring);
}

//! A warpgroup's sums of a tile of kTokens tokens.
template <typename S, typename Weights, int kTokens>
__device__ void consume(const Args& args, const Shared<S>& shared, const Tile& tile,
                        Ring<S>& ring) {
  constexpr int kSteps = S::kInner / 16;
  constexpr int kGroup = S::kGroup, kBuffers = S::kPending + 1;
  // Of a product: it must fit the registers that the block starts with.
  constexpr int kColumns = S::kIsTight ? kTokens / 2 : kTokens;
  static_assert(kSteps / kGroup % kBuffers == 0, "operands take turns");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Weights rows(args, args.rows, tile.first_output, warp, lane);
  float sums[kTokens / 2] = {};
  typename Weights::Raw raw;
  Operands<S> weights[kBuffers];
  uint32_t last_empty = 0;
  wait_barrier(shared.full(ring.stage), ring.parity);
  rows.load(shared.weights(ring.stage), 0, raw);
  for (int inner = 0; inner < args.in_features; inner += S::kInner) {
    rows.prepare_scales(inner / kScaleBlock);
    const uint32_t stage_weights = shared.weights(ring.stage);
    const uint64_t inputs = swizzled_matrix(shared.inputs(ring.stage));
    const uint32_t empty = shared.empty(ring.stage);
#pragma unroll
    for (int step = 0; step < kSteps; step += kGroup) {
      wait_products<S::kPending>();  // those before have read their operands
      if (step == kGroup * S::kPending && last_empty != 0 && lane < kClusterBlocks) {
        arrive_at(last_empty, lane);
      }
      Operands<S>& group = weights[step / kGroup % kBuffers];
      rows.dequantize(raw, inner / kScaleBlock + step / 2, group);
      fence_products();
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int k = (step + i) * 16;
        const int bytes = k / kInputColumns * kTokens * 128 + k % kInputColumns * 2;
#pragma unroll
        for (int token = 0; token < kTokens; token += kColumns) {
          multiply_warpgroup(reinterpret_cast<float (&)[kColumns / 2]>(sums[token / 2]), group[i],
                             inputs + (bytes + token * 128) / 16);
        }
      }
      commit_products();
      if (step + kGroup < kSteps) {
        rows.load(stage_weights, step + kGroup, raw);
        continue;
      }
      ring.advance();
      if (inner + S::kInner < args.in_features) {
        wait_barrier(shared.full(ring.stage), ring.parity);
        rows.load(shared.weights(ring.stage), 0, raw);
      }
    }
    last_empty = empty;
  }
  wait_products<0>();
  if (lane < kClusterBlocks) arrive_at(last_empty, lane);
  store<kTokens>(args, sums, tile.first_output + warp * 16,
                 min(args.out_features, tile.first_output + args.rows), tile.first_token,
                 shared.buffer(warp));
}

//! Of a tile of at most kTokens tokens.
template <typename S, typename Weights, int kTokens = S::kTokens>
__device__ void consume_tile(const Args& args, const Shared<S>& shared, const Tile& tile,
                             Ring<S>& ring) {
  if (tile.num_tokens == kTokens) {
    consume<S, Weights, kTokens>(args, shared, tile, ring);
  } else if constexpr (kTokens > S::kStepTokens) {
    consume_tile<S, Weights, kTokens - S::kStepTokens>(args, shared, tile, ring);
  }
}

#endif

template <typename S, typename Weights>
__global__ void __launch_bounds__(S::kThreads, 1)
    project_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t barriers[2 * kMaxStages];
  const Shared<S> shared(args, dynamic_shared, barriers);
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < shared.num_stages(); ++i) {
      init_barrier(shared.full(i), 1);
      init_barrier(shared.empty(i), S::kConsumerWarps * kClusterBlocks);
    }
    fence_barrier_init();
  }
  __syncthreads();
  cluster_sync();

  if (warp >= S::kConsumerWarps) {
    give_up_registers<S::kProducerRegisters>();
    if (threadIdx.x == S::kConsumerWarps * 32) produce<S, Weights>(args, shared);
    __syncwarp();
  } else {
    take_registers<S::kConsumerRegisters>();
    Ring<S> ring{shared};
    for (int piece = blockIdx.x / kClusterBlocks; piece < args.num_pieces;
         piece += gridDim.x / kClusterBlocks) {
      const Tile tile = find_tile<S>(args, piece);
      consume_tile<S, Weights>(args, shared, tile, ring);
    }
    if constexpr (S::kHasStrips) consume_strips<S, Weights>(args, shared, ring);
  }
  cluster_sync();  // no block may go while the other still writes to it
#endif
}

}  // namespace engram::sm90
