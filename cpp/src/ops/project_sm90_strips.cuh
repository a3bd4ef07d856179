// SPDX-License-Identifier: Apache-2.0
//! \file project_sm90_strips.cuh
//! Outputs that whole rounds of tiles leave over, after them: each block of a cluster has 16
//! outputs of the same 32 tokens, by products of two warps. Sums have the order of a warpgroup's.
#pragma once

#include <cstdint>

#include "project_sm90.h"
#include "project_sm90_tile.cuh"
#include "project_sm90_weights.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"

namespace engram::sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Strip {
  int first_output;
  int first_token;
};

__device__ inline Strip find_strip(const Args& args, int strip) {
  const int row = args.num_row_tiles * args.rows * kClusterBlocks +
                  strip / args.num_token_strips * kStripRows * kClusterBlocks;
  return {row + static_cast<int>(cluster_rank()) * kStripRows,
          strip % args.num_token_strips * kStripTokens};
}

//! One thread: the stages of the strips, after those of the tiles.
template <typename S, typename Weights>
__device__ void produce_strips(const Args& args, const Shared<S>& shared, Ring<S>& ring) {
  constexpr int kBytes = S::kStripInner * (kStripRows + kStripTokens * 2);
  const int half = cluster_rank() * S::kInputRows;
  for (int i = blockIdx.x / kClusterBlocks; i < args.num_strips; i += gridDim.x / kClusterBlocks) {
    const Strip strip = find_strip(args, i);
    for (int inner = 0; inner < args.in_features; inner += S::kStripInner) {
      const uint32_t full = shared.full(ring.stage);
      wait_barrier(shared.empty(ring.stage), ring.parity ^ 1);
      expect_bytes(full, kBytes);
      Weights::load_stage(args.strip_weight, kStripRows, S::kStripInner, shared.weights(ring.stage),
                          inner, strip.first_output, full);
      for (int k = 0; k < S::kStripInner; k += kInputColumns) {
        load_box_to_both(
            shared.strip_inputs(ring.stage) + (k * kStripTokens + half * kInputColumns) * 2, args.x,
            inner + k, strip.first_token + half, full);
      }
      ring.advance();
    }
  }
}

//! Adds a stage to a warp's sums of 16 tokens; those of token t lie at inputs + t * 128.
template <typename S, typename Weights>
__device__ void add_strip_stage(Weights& rows, uint32_t weights, uint32_t inputs, int inner,
                                float (&sums)[8]) {
  constexpr int kSteps = 8;  // whose loads start together, while those before are multiplied
  const int lane = threadIdx.x % 32;
  // Lanes 8i..8i+7 pass the rows of matrix i: eight tokens' first or second 8 inner values.
  const uint32_t row = inputs + (lane / 16 * 8 + lane % 8) * 128;
  typename Weights::Raw raw[2][kSteps / S::kGroup];
  uint32_t columns[2][kSteps][4];
  const auto load = [&](int first) {
    const int buffer = first / kSteps % 2;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i % S::kGroup == 0) rows.load(weights, first + i, raw[buffer][i / S::kGroup]);
      const int k = (first + i) * 16;
      const int chunk = (k % kInputColumns / 8 + lane / 8 % 2) ^ lane % 8;
      load_matrices(columns[buffer][i], row + k / kInputColumns * kStripTokens * 128 + chunk * 16);
    }
  };
  rows.prepare_scales(inner / kScaleBlock);
  load(0);
#pragma unroll
  for (int first = 0; first < S::kStripInner / 16; first += kSteps) {
    if (first + kSteps < S::kStripInner / 16) load(first + kSteps);
#pragma unroll
    for (int i = 0; i < kSteps; i += S::kGroup) {
      Operands<S> operands;
      rows.template dequantize<false>(raw[first / kSteps % 2][i / S::kGroup],
                                      inner / kScaleBlock + (first + i) / 2, operands);
#pragma unroll
      for (int j = 0; j < S::kGroup; ++j) {
        const uint32_t (&b)[4] = columns[first / kSteps % 2][i + j];
        multiply_matrices(reinterpret_cast<float (&)[4]>(sums[0]), operands[j], b[0], b[1]);
        multiply_matrices(reinterpret_cast<float (&)[4]>(sums[4]), operands[j], b[2], b[3]);
      }
    }
  }
}

template <typename S, typename Weights>
__device__ void consume_strips(const Args& args, const Shared<S>& shared, Ring<S>& ring) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool has_tokens = warp < kStripTokens / 16;  // the others only give stages back
  for (int i = blockIdx.x / kClusterBlocks; i < args.num_strips; i += gridDim.x / kClusterBlocks) {
    const Strip strip = find_strip(args, i);
    Weights rows(args, kStripRows, strip.first_output, 0, lane);
    float sums[8] = {};
    for (int inner = 0; inner < args.in_features; inner += S::kStripInner) {
      wait_barrier(shared.full(ring.stage), ring.parity);
      if (has_tokens) {
        add_strip_stage<S>(rows, shared.weights(ring.stage),
                           shared.strip_inputs(ring.stage) + warp * 16 * 128, inner, sums);
      }
      __syncwarp();
      if (lane < kClusterBlocks) arrive_at(shared.empty(ring.stage), lane);
      ring.advance();
    }
    if (!has_tokens) continue;
    store<16>(args, sums, strip.first_output, args.out_features, strip.first_token + warp * 16,
              shared.buffer(warp));
  }
}

#endif

}  // namespace engram::sm90
