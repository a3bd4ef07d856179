// SPDX-License-Identifier: Apache-2.0
//! \file project_sm90_weights.cuh
//! From FP8 weights in a stage to the registers of a warpgroup product, in either layout: a warp
//! has 16 rows, which share their scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "dequantize.cuh"
#include "project_sm90.h"
#include "ptx_sm90.cuh"

namespace engram::sm90 {

//! A 16x16 operand: a lane has pairs of neighbours in row lane/4 and row lane/4 + 8, then the same
//! 8 inner values further on.
template <typename S>
using Operands = uint32_t[S::kGroup][4];

//! The scales of a warp's rows, 32 at a time: a lane holds one, and has one of the next 32 on its
//! way.
class RowScales {
 public:
  __device__ RowScales(const Args& args, int output, int lane)
      : args_(args), row_(output / kScaleBlock), lane_(lane) {
    next_ = load(0);
  }

  //! The next 32 scales, this lane's of which is returned.
  __device__ uint8_t take(int block) {
    const uint8_t scale = next_;
    next_ = load(block + 32);
    return scale;
  }

 private:
  //! Past the last inner value both operands are zero, and any scale but NaN will do.
  __device__ uint8_t load(int block) const {
    const int num_scales = args_.in_features / kScaleBlock;
    if (block + lane_ >= num_scales) return 0;
    return __ldg(args_.scale + row_offset(row_, num_scales) + block + lane_);
  }

  const Args& args_;
  const int row_;
  const int lane_;
  uint8_t next_;
};

//! A warp's first row in the tile. Warps past the tile's last row take the last ones again and
//! store nothing.
__device__ __forceinline__ int first_row_of(int num_rows, int warp) {
  return min(warp * 16, num_rows - 16);
}

//! ENGRAM_WEIGHT_ROW_MAJOR: boxes of rows, swizzled as the copy engine does.
template <typename S>
class RowMajorWeights {
 public:
  using Raw = uint16_t[S::kGroup][4];  //!< pairs of FP8 values

  __device__ static void load_stage(const CUtensorMap& weight, int num_rows, int num_inner,
                                    uint32_t to, int inner, int first_output, uint32_t barrier) {
    for (int k = 0; k < num_inner; k += S::kWeightColumns) {
      load_box(to + k * num_rows, weight, inner + k, first_output, barrier);
    }
  }

  __device__ RowMajorWeights(const Args& args, int num_rows, int first_output, int warp, int lane)
      : scales_(args, min(first_output + first_row_of(num_rows, warp), args.out_features - 1),
                lane) {
    const int row = first_row_of(num_rows, warp) + lane / 4;
    const int swizzle = S::kWeightColumns == 128 ? row % 8 : row / 2 % 4;
    offset_ = row * S::kWeightColumns + swizzle * 16 + lane % 4 * 2;
    box_bytes_ = num_rows * S::kWeightColumns;
  }

  //! Of the group of steps of the stage whose first is `step`.
  __device__ void load(uint32_t stage_weights, int step, Raw& raw) const {
#pragma unroll
    for (int j = 0; j < S::kGroup; ++j) {
      const int k = (step + j) * 16;
      const uint32_t from =
          (stage_weights + k / S::kWeightColumns * box_bytes_ + offset_) ^ k % S::kWeightColumns;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        raw[j][i] = load_shared_u16(from + i % 2 * 8 * S::kWeightColumns + i / 2 * 8);
      }
    }
  }

  //! Before the first block of a stage.
  __device__ void prepare_scales(int block) {
    if (block % 32 == 0) scale_ = bf16x2_from_e8m0(scales_.take(block));
  }

  //! A group of scale block `block` of the row; blocks come in order.
  template <bool kBranches = true>
  __device__ void dequantize(const Raw& raw, int block, Operands<S>& weights) const {
    const uint32_t scale = __shfl_sync(0xFFFFFFFFu, scale_, block % 32);
#pragma unroll
    for (int i = 0; i < 4 * S::kGroup; ++i) {
      weights[i / 4][i % 4] = scaled_pair(raw[i / 4][i % 4], scale);
    }
  }

 private:
  //! 2^(scale-127) as BF16 in both halves; NaN for scale 255.
  static __device__ uint32_t bf16x2_from_e8m0(uint8_t scale) {
    constexpr uint32_t kTwoToMinus127 = 0x0040;  // a BF16 subnormal
    const uint32_t bits = scale == kE8m0Nan ? kBf16Nan
                          : scale == 0      ? kTwoToMinus127
                                            : static_cast<uint32_t>(scale) << 7;
    return bits << 16 | bits;
  }

  //! As bf16_from_fp8 (row.h). Conversion is exact, so the product alone rounds.
  static __device__ uint32_t scaled_pair(uint16_t values, uint32_t scale) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(values, __NV_E4M3);
    const float2 floats = __half22float2(__half2(halves));
    const __nv_bfloat162 pair = __floats2bfloat162_rn(floats.x, floats.y);
    return multiply_bf16x2(reinterpret_cast<const uint32_t&>(pair), scale);
  }

  RowScales scales_;
  uint32_t offset_;     //!< in a box of weights
  uint32_t box_bytes_;  //!< a multiple of 1024
  uint32_t scale_;
};

//! ENGRAM_WEIGHT_SM90_V1: 16 rows x 32 inner values are 512 bytes, of which a lane has the 16 that
//! it multiplies, in four words. A 16-bit half of a word has a value of row lane/4 in the places
//! where BF16 has sign, exponent and mantissa, and in the other places one of row lane/4 + 8:
//!   bit    15   14-12      11   10-4   3-0
//!   of     s    low m 6-4  low s  m    low m 3-0      (m: the seven bits below the sign)
//! Read as BF16, a value so placed is 2^-120 times itself, subnormals too.
template <typename S>
class Sm90V1Weights {
 public:
  using Raw = uint32_t[2 * S::kGroup];

  __device__ static void load_stage(const CUtensorMap& weight, int num_rows, int num_inner,
                                    uint32_t to, int inner, int first_output, uint32_t barrier) {
    for (int k = 0; k < num_inner; k += S::kWeightColumns) {
      load_box(to + k * num_rows, weight, (inner + k) * kWordsPerColumn, first_output / 16,
               barrier);
    }
  }

  __device__ Sm90V1Weights(const Args& args, int num_rows, int first_output, int warp, int lane)
      : scales_(args, min(first_output + first_row_of(num_rows, warp), args.out_features - 1),
                lane),
        offset_(first_row_of(num_rows, warp) * S::kWeightColumns + lane * 16),
        box_bytes_(num_rows * S::kWeightColumns) {}

  __device__ void load(uint32_t stage_weights, int step, Raw& raw) const {
    const int k = step / 2 * kScaleBlock;
    load_shared(stage_weights + k / S::kWeightColumns * box_bytes_ + offset_ +
                    k % S::kWeightColumns * 16 + step % 2 * 8,
                raw);
  }

  __device__ void prepare_scales(int block) {
    if (block % 32 == 0) factor_ = factor_of(scales_.take(block));
  }

  //! Without branches, one more product each, steps can overlap.
  template <bool kBranches = true>
  __device__ void dequantize(const Raw& raw, int block, Operands<S>& weights) const {
    const uint32_t factor = __shfl_sync(0xFFFFFFFFu, factor_, block % 32);
#pragma unroll
    for (int i = 0; i < 2 * S::kGroup; ++i) {
      weights[i / 2][i % 2 * 2] = raw[i] & 0x87F087F0u;
      weights[i / 2][i % 2 * 2 + 1] = (raw[i] << 4 & 0x80F080F0u) | (raw[i] >> 4 & 0x07000700u);
    }
    if (!kBranches || factor & kTwoSteps) {
      const uint32_t first = factor & kTwoSteps ? kTwoTo120Pair : kOnePair;
#pragma unroll
      for (int i = 0; i < 4 * S::kGroup; ++i) {
        weights[i / 4][i % 4] =
            multiply_bf16x2(multiply_bf16x2(weights[i / 4][i % 4], first), factor & ~kTwoSteps);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * S::kGroup; ++i) {
        weights[i / 4][i % 4] = multiply_bf16x2(weights[i / 4][i % 4], factor);
      }
    }
  }

 private:
  static constexpr int kWordsPerColumn = 2;  //!< 16 rows' bytes, in 8-byte elements of the box
  //! The factor's sign, which none needs: 2^120 comes first, for the product of both overflows.
  static constexpr uint32_t kTwoSteps = 0x80000000u;
  static constexpr uint32_t kOnePair = 0x3F803F80u;

  //! 2^120 * 2^(scale-127) as BF16 in both halves, or 2^(scale-127) and kTwoSteps. Either way one
  //! product rounds.
  static __device__ uint32_t factor_of(uint8_t scale) {
    if (scale <= kMaxFoldedScale) return folded_factor_pair(scale);
    return kTwoSteps |
           (scale == kE8m0Nan ? kBf16Nan : static_cast<uint32_t>(scale) << 7) * 0x10001u;
  }

  RowScales scales_;
  uint32_t offset_;
  uint32_t box_bytes_;
  uint32_t factor_;
};

}  // namespace engram::sm90
