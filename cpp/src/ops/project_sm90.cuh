// SPDX-License-Identifier: Apache-2.0
//! \file project_sm90.cuh
//! The projection by warpgroup products: W is the A operand, dequantised into registers, x^T the B
//! operand in shared memory. The two blocks of a cluster have neighbouring outputs and the same
//! tokens; each loads half of x for both. One warp feeds the copy engine, the others multiply.
//!
//! An output is one sum in FP32, 16 inner values at a time from the first on, rounded once: it
//! depends neither on the shape nor on the number of tokens.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "engram/ops.h"
#include "project_sm90.h"
#include "project_sm90_weights.cuh"
#include "ptx_sm90.cuh"

namespace engram::sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

//! Where a thread stands in the ring of stages.
struct Ring {
  int num_stages;
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage < num_stages) return;
    stage = 0;
    parity ^= 1;
  }
};

//! Shared memory: stages of weights, rows x kInner bytes in their layout, and inputs
//! [kInner/64][tokens][64], swizzled as the copy engine does; then each warp's buffer for what it
//! writes.
struct Shared {
  uint32_t stages;
  uint32_t full;  //!< barriers, 8 bytes each
  uint32_t empty;
  uint32_t stage_bytes;
  uint32_t weight_bytes;

  __device__ uint32_t weights(int stage) const { return stages + stage * stage_bytes; }
  __device__ uint32_t inputs(int stage) const { return weights(stage) + weight_bytes; }
};

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
  const int num_left = args.num_tokens - first_token;
  while (size > S::kTokens / S::kParts && num_left <= size / 2) size /= 2;
  return {static_cast<int>((in_group / width * kClusterBlocks + cluster_rank()) * args.rows),
          first_token, num_left > 0 ? size : 0};
}

//! One thread: keeps the ring of stages filled.
template <typename S, typename Weights>
__device__ void produce(const Args& args, const Shared& shared) {
  Ring ring{args.num_stages};
  const uint32_t rank = cluster_rank();
  for (int piece = blockIdx.x / kClusterBlocks; piece < args.num_pieces;
       piece += gridDim.x / kClusterBlocks) {
    const Tile tile = find_tile<S>(args, piece);
    if (tile.num_tokens == 0) continue;
    const int half = tile.num_tokens / kClusterBlocks;
    const uint32_t bytes = args.rows * S::kInner + tile.num_tokens * S::kInner * 2;
    for (int inner = 0; inner < args.in_features; inner += S::kInner) {
      const uint32_t full = shared.full + ring.stage * 8;
      wait_barrier(shared.empty + ring.stage * 8, ring.parity ^ 1);
      expect_bytes(full, bytes);
      Weights::load_stage(args, shared.weights(ring.stage), inner, tile.first_output, full);
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
}

//! Rounds and writes a warp's 16 outputs of all tokens, 16 tokens at a time through its buffer.
template <int kTokens>
__device__ void store(const Args& args, const float (&sums)[kTokens / 2], int output, int limit,
                      int first_token, uint32_t buffer, const uint8_t* buffer_bytes) {
  const int lane = threadIdx.x % 32;
  const uint32_t row = buffer + (lane / 16 * 8 + lane % 8) * kBufferPitch + lane / 8 % 2 * 16;
  const bool in_tile = output + lane % 2 * 8 < limit;
#pragma unroll
  for (int block = 0; block < kTokens; block += 16) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair =
          __floats2bfloat162_rn(sums[block / 2 + i * 2], sums[block / 2 + i * 2 + 1]);
      pairs[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    store_matrices_transposed(row, pairs);
    __syncwarp();
    const int token = first_token + block + lane / 2;
    const uint4 outputs =
        *reinterpret_cast<const uint4*>(buffer_bytes + lane / 2 * kBufferPitch + lane % 2 * 16);
    if (in_tile && token < args.num_tokens) {
      *reinterpret_cast<uint4*>(args.out + row_offset(token, args.out_features) + output +
                                lane % 2 * 8) = outputs;
    }
    __syncwarp();
  }
}

//! A warpgroup's sums of a tile of kTokens tokens.
template <typename S, typename Weights, int kTokens>
__device__ void consume(const Args& args, const Shared& shared, const Tile& tile, Ring& ring,
                        uint32_t buffer, const uint8_t* buffer_bytes) {
  constexpr int kGroups = S::kInner / kScaleBlock;
  static_assert(kGroups % 2 == 0, "operands take turns");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Weights rows(args, tile.first_output, warp, lane);
  float sums[kTokens / 2] = {};
  typename Weights::Raw raw;
  Operands weights[2];
  uint32_t last_empty = 0;
  wait_barrier(shared.full + ring.stage * 8, ring.parity);
  rows.load(shared.weights(ring.stage), 0, raw);
  for (int inner = 0; inner < args.in_features; inner += S::kInner) {
    rows.prepare_scales(inner / kScaleBlock);
    const uint32_t stage_weights = shared.weights(ring.stage);
    const uint64_t inputs = swizzled_matrix(shared.inputs(ring.stage));
    const uint32_t empty = shared.empty + ring.stage * 8;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      wait_products<1>();  // the last group may run on; the one before has read its operands
      if (group == 1 && last_empty != 0 && lane < kClusterBlocks) arrive_at(last_empty, lane);
      Operands& a = weights[group % 2];
      rows.dequantize(raw, inner / kScaleBlock + group, a);
      fence_products();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int k = group * kScaleBlock + j * 16;
        const int bytes = k / kInputColumns * kTokens * 128 + k % kInputColumns * 2;
        multiply_warpgroup(sums, a[j], inputs + bytes / 16);
      }
      commit_products();
      if (group + 1 < kGroups) {
        rows.load(stage_weights, group + 1, raw);
        continue;
      }
      ring.advance();
      if (inner + S::kInner < args.in_features) {
        wait_barrier(shared.full + ring.stage * 8, ring.parity);
        rows.load(shared.weights(ring.stage), 0, raw);
      }
    }
    last_empty = empty;
  }
  wait_products<0>();
  if (lane < kClusterBlocks) arrive_at(last_empty, lane);
  store<kTokens>(args, sums, tile.first_output + warp * 16,
                 min(args.out_features, tile.first_output + args.rows), tile.first_token, buffer,
                 buffer_bytes);
}

//! Of a tile of at most kTokens tokens.
template <typename S, typename Weights, int kTokens = S::kTokens>
__device__ void consume_tile(const Args& args, const Shared& shared, const Tile& tile, Ring& ring,
                             uint32_t buffer, const uint8_t* buffer_bytes) {
  if (tile.num_tokens == kTokens) {
    consume<S, Weights, kTokens>(args, shared, tile, ring, buffer, buffer_bytes);
  } else if constexpr (kTokens > S::kTokens / S::kParts) {
    consume_tile<S, Weights, kTokens / 2>(args, shared, tile, ring, buffer, buffer_bytes);
  }
}

#endif

template <typename S, typename Weights>
__global__ void __launch_bounds__(S::kThreads, 1)
    project_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t barriers[2][kMaxStages];
  const uint32_t stages = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const Shared shared{stages, shared_address(barriers[0]), shared_address(barriers[1]),
                      static_cast<uint32_t>(args.stage_bytes<S>()),
                      static_cast<uint32_t>(args.rows * S::kInner)};
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < args.num_stages; ++i) {
      init_barrier(shared.full + i * 8, 1);
      init_barrier(shared.empty + i * 8, S::kConsumerWarps * kClusterBlocks);
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
    const uint32_t buffer =
        stages + args.num_stages * shared.stage_bytes + warp * kBufferPitch * 16;
    const uint8_t* const buffer_bytes = dynamic_shared + (buffer - shared_address(dynamic_shared));
    Ring ring{args.num_stages};
    for (int piece = blockIdx.x / kClusterBlocks; piece < args.num_pieces;
         piece += gridDim.x / kClusterBlocks) {
      const Tile tile = find_tile<S>(args, piece);
      consume_tile<S, Weights>(args, shared, tile, ring, buffer, buffer_bytes);
    }
  }
  cluster_sync();  // no block may go while the other still writes to it
#endif
}

}  // namespace engram::sm90
