// SPDX-License-Identifier: Apache-2.0
#include "engram/ops.h"
#include "launch.cuh"
#include "rows.cuh"
#include "stage_tiles.cuh"

namespace engram {
namespace {

constexpr int kChunkBytes = 8;  //!< what packed rows of 264 bytes are aligned to
constexpr int kTokensInFlight = 4;

//! Packed rows at addresses that take 8-byte loads.
struct PackedRows {
  const uint8_t* packed;
  int64_t num_tokens;
  int num_columns;
  int head_dim;

  __device__ int64_t find(int64_t token, int column) const {
    return token < num_tokens ? row_offset(token, num_columns) + column : kNoRow;
  }
  __device__ uint4 values(int64_t row, int chunk) const {
    const auto* const from = reinterpret_cast<const uint2*>(bytes(row)) + 2 * chunk;
    const uint2 low = __ldg(from);
    const uint2 high = __ldg(from + 1);
    return {low.x, low.y, high.x, high.y};
  }
  __device__ uint32_t scales(int64_t row, int word) const {
    return __ldg(reinterpret_cast<const uint32_t*>(bytes(row) + head_dim) + word);
  }

 private:
  __device__ const uint8_t* bytes(int64_t row) const {
    return packed + row_offset(row, packed_row_bytes(head_dim));
  }
};

//! num_out_tokens: rows of the scales' tiles. The flags say which arrays take 8-byte accesses.
__global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm)
    stage_kernel(const __grid_constant__ engram_stage_args args, int64_t num_out_tokens,
                 bool packed_aligned, bool values_aligned) {
  // Coordinates
  const int column = blockIdx.y * blockDim.y + threadIdx.y;
  const int64_t first_token = row_offset(blockIdx.x, kTokensInFlight);
  if (column >= args.num_columns) return;
  const int row_scales = scales_per_row(args.head_dim);
  const int64_t num_scales = row_offset(args.num_columns, row_scales);

  const int chunks_per_row = args.head_dim / kChunkBytes;
#pragma unroll 1
  for (int chunk = threadIdx.x; chunk < chunks_per_row; chunk += blockDim.x) {
    const int scale_idx = chunk * kChunkBytes / kScaleBlock;
    const bool starts_block = chunk * kChunkBytes % kScaleBlock == 0;

    // Load all rows before the first store; tokens past the last have zero scales
    uint2 values[kTokensInFlight];
    uint8_t scales[kTokensInFlight];
#pragma unroll
    for (int i = 0; i < kTokensInFlight; ++i) {
      scales[i] = 0;
      const int64_t token = first_token + i;
      if (token >= args.num_tokens) continue;
      const int64_t row = row_offset(token, args.num_columns) + column;
      const uint8_t* const packed = args.packed + row_offset(row, packed_row_bytes(args.head_dim));
      values[i] = load_bytes(packed + chunk * kChunkBytes, packed_aligned);
      if (starts_block) scales[i] = __ldg(packed + args.head_dim + scale_idx);
    }

    // Store
#pragma unroll
    for (int i = 0; i < kTokensInFlight; ++i) {
      const int64_t token = first_token + i;
      if (token < args.num_tokens) {
        const int64_t row = row_offset(token, args.num_columns) + column;
        uint8_t* const to = args.values + row_offset(row, args.head_dim);
        store_bytes(to + chunk * kChunkBytes, values[i], values_aligned);
      }
      if (starts_block && token < num_out_tokens) {
        store_staged_scale(args.scales, token, row_offset(column, row_scales) + scale_idx,
                           num_scales, scales[i]);
      }
    }
  }
}

}  // namespace

cudaError_t stage_cuda(const engram_stage_args& args, cudaStream_t stream) {
  if (args.num_tokens == 0) return cudaSuccess;
  const int64_t num_out_tokens =
      row_offset(ceil_div(args.num_tokens, kStageTileRows), kStageTileRows);
  const RowGrid rows =
      row_grid(num_out_tokens, args.num_columns, args.head_dim / kChunkBytes, kTokensInFlight);
  const bool packed_aligned =
      packed_row_bytes(args.head_dim) % kChunkBytes == 0 && is_aligned(kChunkBytes, args.packed);
  if (packed_aligned && has_whole_tiles(args.head_dim, args.values, args.scales)) {
    const PackedRows source = {args.packed, args.num_tokens, args.num_columns, args.head_dim};
    return launch_stage_tiles(source, args.num_tokens, args.num_columns, args.head_dim, args.values,
                              args.scales, stream);
  }
  return launch(stage_kernel, rows.grid, rows.block, stream, args, num_out_tokens, packed_aligned,
                is_aligned(kChunkBytes, args.values));
}

}  // namespace engram
