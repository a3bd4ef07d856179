// SPDX-License-Identifier: Apache-2.0
//! \file project_sm90_tile.cuh
//! What tiles and strips of project_sm90.cuh share: the ring of stages, and writing outputs.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "engram/row.h"
#include "project_sm90.h"
#include "ptx_sm90.cuh"

namespace engram::sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

//! Shared memory: stages of weights, rows x kInner bytes in their layout, and inputs
//! [kInner/64][tokens][64], swizzled as the copy engine does; then each warp's buffer for what it
//! writes.
template <typename S>
class Shared {
 public:
  __device__ Shared(const Args& args, const void* dynamic_shared, const uint64_t* barriers)
      : stages_((shared_address(dynamic_shared) + 1023) & ~1023u),
        barriers_(shared_address(barriers)),
        rows_(args.rows),
        num_stages_(S::num_stages(rows_)) {}

  __device__ uint32_t weights(int stage) const { return stages_ + stage * S::stage_bytes(rows()); }
  __device__ uint32_t inputs(int stage) const { return weights(stage) + rows() * S::kInner; }
  __device__ uint32_t strip_inputs(int stage) const {
    return weights(stage) + kStripRows * S::kStripInner;
  }
  __device__ uint32_t buffer(int warp) const {
    return weights(num_stages()) + warp * 16 * kBufferPitch;
  }
  __device__ uint32_t full(int stage) const { return barriers_ + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(stage) + kMaxStages * 8; }
  __device__ int num_stages() const {
    return S::kIsFixed ? S::num_stages(S::kMaxRows) : num_stages_;
  }

 private:
  __device__ int rows() const { return S::kIsFixed ? S::kMaxRows : rows_; }

  uint32_t stages_;
  uint32_t barriers_;
  int rows_;
  int num_stages_;
};

//! Where a thread stands in the ring of stages.
template <typename S>
struct Ring {
  const Shared<S>& shared;
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage < shared.num_stages()) return;
    stage = 0;
    parity ^= 1;
  }
};

//! Rounds and writes a warp's 16 outputs of all tokens, 16 tokens at a time through its buffer.
template <int kTokens>
__device__ void store(const Args& args, const float (&sums)[kTokens / 2], int output, int limit,
                      int first_token, uint32_t buffer) {
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
    const uint4 outputs = load_shared_u128(buffer + lane / 2 * kBufferPitch + lane % 2 * 16);
    if (in_tile && token < args.num_tokens) {
      *reinterpret_cast<uint4*>(args.out + row_offset(token, args.out_features) + output +
                                lane % 2 * 8) = outputs;
    }
    __syncwarp();
  }
}

#endif

}  // namespace engram::sm90
