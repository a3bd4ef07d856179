// SPDX-License-Identifier: Apache-2.0
//! \file rows.cuh
//! What lookup and stage share: how threads lie on rows, and stores into the row forms.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "engram/row.h"

namespace engram {

constexpr int kRowThreads = 256;
constexpr int kRowBlocksPerSm = 3;  //!< at the fewest: 80 registers a thread

//! Threads on rows: x runs over a row's chunks (again and again where a row has more than the block
//! is wide), y over columns; each thread takes `tokens_per_thread` neighbouring tokens.
struct RowGrid {
  dim3 grid;
  dim3 block;
};

inline RowGrid row_grid(int64_t num_tokens, int num_columns, int chunks_per_row,
                        int tokens_per_thread) {
  const int width = std::min(chunks_per_row, kRowThreads);
  const int height = std::min(kRowThreads / width, num_columns);
  return {dim3(static_cast<unsigned>(ceil_div(num_tokens, tokens_per_thread)),
               static_cast<unsigned>(ceil_div(num_columns, height))),
          dim3(width, height)};
}

//! A load of kBytes (8 or 16) of read-only memory.
template <int kBytes>
struct Chunk;
template <>
struct Chunk<8> {
  using Vector = uint2;
};
template <>
struct Chunk<16> {
  using Vector = uint4;
};

//! Eight bytes from or to an address that may be odd: packed rows of small head_dim are.
__device__ __forceinline__ uint2 load_bytes(const uint8_t* from, bool is_aligned) {
  if (is_aligned) return __ldg(reinterpret_cast<const uint2*>(from));
  uint2 bytes = {0, 0};
  for (int i = 0; i < 4; ++i) {
    bytes.x |= static_cast<uint32_t>(__ldg(from + i)) << (8 * i);
    bytes.y |= static_cast<uint32_t>(__ldg(from + 4 + i)) << (8 * i);
  }
  return bytes;
}

__device__ __forceinline__ void store_bytes(uint8_t* to, uint2 bytes, bool is_aligned) {
  if (is_aligned) {
    *reinterpret_cast<uint2*>(to) = bytes;
    return;
  }
  for (int i = 0; i < 4; ++i) {
    to[i] = static_cast<uint8_t>(bytes.x >> (8 * i));
    to[4 + i] = static_cast<uint8_t>(bytes.y >> (8 * i));
  }
}

//! Scale s of token's row of num_scales, in F8_128x4 order. The last one also zeroes the padding
//! columns up to the tile's edge.
__device__ __forceinline__ void store_staged_scale(uint8_t* scales, int64_t token, int64_t s,
                                                   int64_t num_scales, uint8_t scale) {
  scales[staged_scale_offset(token, s, num_scales)] = scale;
  if (s + 1 < num_scales) return;
#pragma unroll 1
  for (int64_t pad = num_scales; pad % kStageTileScales != 0; ++pad) {
    scales[staged_scale_offset(token, pad, num_scales)] = 0;
  }
}

}  // namespace engram
