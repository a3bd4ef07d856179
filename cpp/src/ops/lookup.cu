// SPDX-License-Identifier: Apache-2.0
#include "engram/ops.h"
#include "launch.cuh"
#include "ptx.cuh"
#include "row_runs.h"
#include "stage_tiles.cuh"
#include "table_row.cuh"

namespace engram {
namespace {

//! Up to here each thread takes one token, which spreads the few rows over the most SMs.
constexpr int64_t kFewTokens = 64;
//! Rows that a thread has in flight beyond that: enough reads to cover the memory's latency.
constexpr int kTokensInFlight = 4;

//! Value bytes of a thread. With 8, a warp's BF16 stores are 512 bytes side by side, and packed
//! rows (264 bytes for 256 values) keep their alignment.
template <engram_row_form kForm>
constexpr int kChunkBytes = kForm == ENGRAM_ROWS_BF16 || kForm == ENGRAM_ROWS_PACKED ? 8 : 16;

//! Blocks of an SM at the fewest: small chunks take fewer registers.
template <engram_row_form kForm>
constexpr int kMinBlocks = kChunkBytes<kForm> == 8 ? 6 : kRowBlocksPerSm;

//! num_out_tokens: args.num_tokens, or in F8_128x4 order the rows of the scales' tiles.
template <engram_row_form kForm, int kTokens>
__global__ void __launch_bounds__(kRowThreads, kMinBlocks<kForm>)
    lookup_kernel(const __grid_constant__ engram_lookup_args args, int64_t num_out_tokens,
                  bool values_aligned) {
  constexpr int kBytes = kChunkBytes<kForm>;
  using Vector = typename Chunk<kBytes>::Vector;

  // Coordinates
  const int column = blockIdx.y * blockDim.y + threadIdx.y;
  const int64_t first_token = row_offset(blockIdx.x, kTokens);
  if (column >= args.num_columns) return;

  // Ids
  int64_t rows[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) rows[i] = find_table_row(args, first_token + i, column);

  const int chunks_per_row = args.head_dim / kBytes;
#pragma unroll 1
  for (int chunk = threadIdx.x; chunk < chunks_per_row; chunk += blockDim.x) {
    // Load all rows before the first store
    Vector values[kTokens];
    uint8_t scales[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      values[i] = missing_values<Vector>(rows[i]);
      scales[i] = missing_scale(rows[i]);
      if (rows[i] < 0) continue;
      const uint8_t* const row = args.values + row_offset(rows[i], args.head_dim);
      values[i] = load_once(reinterpret_cast<const Vector*>(row + chunk * kBytes));
      scales[i] = load_once(args.scales + row_offset(rows[i], scales_per_row(args.head_dim)) +
                            chunk * kBytes / kScaleBlock);
    }

    // Convert and store
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int64_t token = first_token + i;
      if (token >= num_out_tokens) break;
      store_row_chunk<kForm>(args, token, column, chunk, values[i], scales[i], values_aligned);
    }
  }
}

template <engram_row_form kForm>
cudaError_t launch_lookup(const engram_lookup_args& args, cudaStream_t stream) {
  static_assert(kChunkBytes<kForm> == lookup_read_bytes(kForm), "check_lookup_on_gpu asks for it");
  const int64_t num_out_tokens = num_written_tokens(args);
  const bool few = args.num_tokens <= kFewTokens;
  const RowGrid rows = row_grid(num_out_tokens, args.num_columns,
                                args.head_dim / kChunkBytes<kForm>, few ? 1 : kTokensInFlight);
  const bool values_aligned = takes_wide_stores(args);
  const auto kernel = few ? lookup_kernel<kForm, 1> : lookup_kernel<kForm, kTokensInFlight>;
  return launch(kernel, rows.grid, rows.block, stream, args, num_out_tokens, values_aligned);
}

struct TableRows {
  engram_lookup_args args;

  __device__ int64_t find(int64_t token, int column) const {
    return find_table_row(args, token, column);
  }
  __device__ uint4 values(int64_t row, int chunk) const {
    const uint8_t* const from = args.values + row_offset(row, args.head_dim);
    return load_once(reinterpret_cast<const uint4*>(from) + chunk);
  }
  __device__ uint32_t scales(int64_t row, int word) const {
    const uint8_t* const from = args.scales + row_offset(row, scales_per_row(args.head_dim));
    return load_once(reinterpret_cast<const uint32_t*>(from) + word);
  }
};

cudaError_t launch_128x4(const engram_lookup_args& args, cudaStream_t stream) {
  if (args.num_tokens <= kFewTokens || !has_whole_tiles(args.head_dim, args.out, args.out_scales) ||
      !is_aligned(4, args.scales)) {
    return launch_lookup<ENGRAM_ROWS_MXFP8_128X4>(args, stream);
  }
  return launch_stage_tiles(TableRows{args}, args.num_tokens, args.num_columns, args.head_dim,
                            static_cast<uint8_t*>(args.out), args.out_scales, stream);
}

}  // namespace

cudaError_t lookup_cuda(const engram_lookup_args& args, cudaStream_t stream) {
  if (args.num_tokens == 0) return cudaSuccess;
  switch (args.form) {
    case ENGRAM_ROWS_BF16:
      return launch_lookup<ENGRAM_ROWS_BF16>(args, stream);
    case ENGRAM_ROWS_PACKED:
      return launch_lookup<ENGRAM_ROWS_PACKED>(args, stream);
    case ENGRAM_ROWS_MXFP8_LINEAR:
      return launch_lookup<ENGRAM_ROWS_MXFP8_LINEAR>(args, stream);
    case ENGRAM_ROWS_MXFP8_128X4:
      return launch_128x4(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace engram
