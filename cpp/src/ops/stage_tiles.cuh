// SPDX-License-Identifier: Apache-2.0
//! \file stage_tiles.cuh
//! Rows to MXFP8 operands whose scales lie in F8_128x4 order, for lookup and stage. A thread takes
//! the tokens of a scale tile that are 32 apart: their scales lie side by side, so that it writes
//! 16 bytes of them at once where it would write 16 single ones.
#pragma once

#include "engram/layout.h"
#include "launch.cuh"
#include "table_row.cuh"

namespace engram {

constexpr int kTileStep = 32;                                //!< tokens between a thread's own
constexpr int kTileTokens = kStageTileRows / kTileStep;      //!< of a thread
constexpr int kTileChunkBytes = 16;                          //!< values of a thread
constexpr int kWordValues = kStageTileScales * kScaleBlock;  //!< values of a word of four scales
constexpr int kWordChunks = kWordValues / kTileChunkBytes;

//! Rows of a Source: find(token, column) gives a row, kNoRow (also for tokens past the last) or
//! kLostId, values(row, chunk) and scales(row, word) read of a row.
template <typename Source>
__global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm)
    stage_tiles_kernel(const __grid_constant__ Source source, int64_t num_tokens, int num_columns,
                       int head_dim, uint8_t* out_values, uint8_t* out_scales) {
  // Coordinates
  const int column = blockIdx.y * blockDim.y + threadIdx.y;
  const int64_t first_token =
      row_offset(blockIdx.x / kTileStep, kStageTileRows) + blockIdx.x % kTileStep;
  if (column >= num_columns) return;
  const int row_scales = scales_per_row(head_dim);

  // Rows
  int64_t rows[kTileTokens];
#pragma unroll
  for (int i = 0; i < kTileTokens; ++i) rows[i] = source.find(first_token + i * kTileStep, column);

#pragma unroll 1
  for (int chunk = threadIdx.x; chunk < head_dim / kTileChunkBytes; chunk += blockDim.x) {
    const int word = chunk / kWordChunks;
    const bool starts_word = chunk % kWordChunks == 0;

    // Load all rows before the first store
    uint4 values[kTileTokens];
    uint32_t scales[kTileTokens];
#pragma unroll
    for (int i = 0; i < kTileTokens; ++i) {
      values[i] = missing_values<uint4>(rows[i]);
      scales[i] = missing_scale(rows[i]) * 0x01010101u;
      if (rows[i] < 0) continue;
      values[i] = source.values(rows[i], chunk);
      if (starts_word) scales[i] = source.scales(rows[i], word);
    }

    // Store
#pragma unroll
    for (int i = 0; i < kTileTokens; ++i) {
      const int64_t token = first_token + i * kTileStep;
      if (token >= num_tokens) break;
      uint8_t* const to =
          out_values + row_offset(row_offset(token, num_columns) + column, head_dim);
      reinterpret_cast<uint4*>(to)[chunk] = values[i];
    }
    if (!starts_word) continue;
    const int64_t s = row_offset(column, row_scales) + word * kStageTileScales;
    const int64_t offset = staged_scale_offset(first_token, s, row_offset(num_columns, row_scales));
    *reinterpret_cast<uint4*>(out_scales + offset) = {scales[0], scales[1], scales[2], scales[3]};
  }
}

//! Whether rows are whole words of scales, and the outputs take 16-byte stores.
inline bool has_whole_tiles(int head_dim, const void* out_values, const void* out_scales) {
  return head_dim % kWordValues == 0 && is_aligned(16, out_values, out_scales);
}

template <typename Source>
cudaError_t launch_stage_tiles(const Source& source, int64_t num_tokens, int num_columns,
                               int head_dim, uint8_t* out_values, uint8_t* out_scales,
                               cudaStream_t stream) {
  const int64_t num_out_tokens = row_offset(ceil_div(num_tokens, kStageTileRows), kStageTileRows);
  const RowGrid rows =
      row_grid(num_out_tokens, num_columns, head_dim / kTileChunkBytes, kTileTokens);
  return launch(stage_tiles_kernel<Source>, rows.grid, rows.block, stream, source, num_tokens,
                num_columns, head_dim, out_values, out_scales);
}

}  // namespace engram
