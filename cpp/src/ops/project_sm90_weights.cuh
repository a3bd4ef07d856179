// SPDX-License-Identifier: Apache-2.0
//! \file project_sm90_weights.cuh
//! From FP8 weights in a stage to the registers of a warpgroup product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "dequantize.cuh"
#include "project_sm90.h"
#include "ptx_sm90.cuh"

namespace engram::sm90 {

//! 2^(scale-127) as BF16 in both halves; NaN for scale 255.
__device__ __forceinline__ uint32_t bf16x2_from_e8m0(uint8_t scale) {
  constexpr uint32_t kTwoToMinus127 = 0x0040;  // a BF16 subnormal
  const uint32_t bits = scale == kE8m0Nan ? kBf16Nan
                        : scale == 0      ? kTwoToMinus127
                                          : static_cast<uint32_t>(scale) << 7;
  return bits << 16 | bits;
}

//! Two FP8 values times bf16x2_from_e8m0(scale), as bf16_from_fp8 (row.h). Conversion is exact, so
//! the product alone rounds.
__device__ __forceinline__ uint32_t bf16x2_from_fp8(uint16_t values, uint32_t scale) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(values, __NV_E4M3);
  const float2 floats = __half22float2(__half2(halves));
  const __nv_bfloat162 pair = __floats2bfloat162_rn(floats.x, floats.y);
  return multiply_bf16x2(reinterpret_cast<const uint32_t&>(pair), scale);
}

//! A lane's part of two 16x16 operands, which share their scale: pairs of neighbours in row lane/4
//! and row lane/4 + 8, then the same 8 inner values further on.
using Pairs = uint16_t[2][4];
using Operands = uint32_t[2][4];

//! A warp's 16 rows of weights, which share their scales. Warps past the tile's last row take the
//! last ones again and store nothing.
template <typename S>
class WeightRows {
 public:
  __device__ WeightRows(const Args& args, int first_output, int warp, int lane)
      : lane_(lane), num_scales_(args.in_features / kScaleBlock) {
    const int first_row = min(warp * 16, args.rows - 16);
    const int row = first_row + lane / 4;
    const int swizzle = S::kWeightColumns == 128 ? row % 8 : row / 2 % 4;
    offset_ = row * S::kWeightColumns + swizzle * 16 + lane % 4 * 2;
    box_bytes_ = args.rows * S::kWeightColumns;
    const int output = min(first_output + first_row, args.out_features - 1);
    scales_ = args.scale + row_offset(output / kScaleBlock, num_scales_);
    next_ = load_scale(0);
  }

  //! Of scale block `group` of the stage.
  __device__ void load_pairs(uint32_t stage_weights, int group, Pairs& pairs) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int k = group * kScaleBlock + j * 16;
      const uint32_t from =
          (stage_weights + k / S::kWeightColumns * box_bytes_ + offset_) ^ k % S::kWeightColumns;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[j][i] = load_shared_u16(from + i % 2 * 8 * S::kWeightColumns + i / 2 * 8);
      }
    }
  }

  //! Of scale block `block` of the row; blocks come in order.
  __device__ void dequantize(const Pairs& pairs, int block, Operands& weights) const {
    const uint32_t scale = __shfl_sync(0xFFFFFFFFu, scale_, block % 32);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      weights[i / 4][i % 4] = bf16x2_from_fp8(pairs[i / 4][i % 4], scale);
    }
  }

  //! Before the first block of a stage: a lane holds one of 32 scales, and has one of the next 32
  //! on its way.
  __device__ void prepare_scales(int block) {
    if (block % 32 != 0) return;
    scale_ = bf16x2_from_e8m0(next_);
    next_ = load_scale(block + 32);
  }

 private:
  //! Past the last inner value both operands are zero, and any scale but NaN will do.
  __device__ uint8_t load_scale(int block) const {
    return block + lane_ < num_scales_ ? __ldg(scales_ + block + lane_) : uint8_t{0};
  }

  const int lane_;
  const int num_scales_;
  uint32_t offset_;     //!< in a box of weights
  uint32_t box_bytes_;  //!< a multiple of 1024
  const uint8_t* scales_;
  uint32_t scale_;
  uint8_t next_;
};

}  // namespace engram::sm90
