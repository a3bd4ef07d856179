// SPDX-License-Identifier: Apache-2.0
//! \file table_row.cuh
//! What the kernels of a lookup share: ids to rows, and stores of a row's chunk in each form.
#pragma once

#include "dequantize.cuh"
#include "engram/engram.h"
#include "engram/layout.h"
#include "launch.cuh"
#include "rows.cuh"

namespace engram {

constexpr int kRowChunkBytes = 8;  //!< of a lane, where a warp has whole rows
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

//! Row of the table, kNoRow or kLostId: any id, also one of an uninitialised array, reads inside
//! the table.
__device__ __forceinline__ int64_t find_table_row(const engram_lookup_args& args, int64_t token,
                                                  int column) {
  if (token >= args.num_tokens) return kNoRow;
  const int64_t id = __ldg(args.ids + row_offset(token, args.ids_stride) + column);
  if (id == kLostId) return kLostId;
  const int64_t row = id - args.first_row;
  return row >= 0 && row < args.num_rows ? row : kNoRow;
}

//! What kNoRow and kLostId read as: zeros and NaN, in values and in scales.
template <typename Vector>
__device__ __forceinline__ Vector missing_values(int64_t row) {
  constexpr uint32_t kFourNans = kFp8NanMagnitude * 0x01010101u;
  const uint32_t word = row == kLostId ? kFourNans : 0;
  if constexpr (sizeof(Vector) == sizeof(uint2)) {
    return {word, word};
  } else {
    return {word, word, word, word};
  }
}

__device__ __forceinline__ uint8_t missing_scale(int64_t row) {
  return row == kLostId ? kE8m0Nan : uint8_t{0};
}

//! Whether packed rows take 8-byte stores.
inline bool takes_wide_stores(const engram_lookup_args& args) {
  return packed_row_bytes(args.head_dim) % 8 == 0 && is_aligned(8, args.out);
}

//! Writes one chunk of a row, as many values as a Vector has bytes, and its scale where the chunk
//! starts a scale block. A token past the last one has scales alone.
//! values_aligned: takes_wide_stores().
template <engram_row_form kForm, typename Vector>
__device__ __forceinline__ void store_row_chunk(const engram_lookup_args& args, int64_t token,
                                                int column, int chunk, Vector values, uint8_t scale,
                                                bool values_aligned) {
  const int64_t out_row = row_offset(token, args.num_columns) + column;
  const int first = chunk * static_cast<int>(sizeof(Vector));
  const int scale_idx = first / kScaleBlock;
  const bool starts_block = first % kScaleBlock == 0;
  auto* const bytes = static_cast<uint8_t*>(args.out);

  if constexpr (kForm == ENGRAM_ROWS_BF16) {
    auto* const to = static_cast<uint16_t*>(args.out) + row_offset(out_row, args.head_dim);
    *reinterpret_cast<uint4*>(to + first) = bf16x8_from_fp8(values, scale);
  } else if constexpr (kForm == ENGRAM_ROWS_PACKED) {
    uint8_t* const to = bytes + row_offset(out_row, packed_row_bytes(args.head_dim));
    store_bytes(to + first, values, values_aligned);
    if (starts_block) to[args.head_dim + scale_idx] = scale;
  } else {
    if (token < args.num_tokens) {
      *reinterpret_cast<Vector*>(bytes + row_offset(out_row, args.head_dim) + first) = values;
    }
    if (!starts_block) return;
    const int row_scales = scales_per_row(args.head_dim);
    if constexpr (kForm == ENGRAM_ROWS_MXFP8_LINEAR) {
      args.out_scales[row_offset(out_row, row_scales) + scale_idx] = scale;
    } else {
      store_staged_scale(args.out_scales, token, row_offset(column, row_scales) + scale_idx,
                         row_offset(args.num_columns, row_scales), scale);
    }
  }
}

}  // namespace engram
