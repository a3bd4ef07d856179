// SPDX-License-Identifier: Apache-2.0
// Hot rows out of GPU memory, and the others out of the table or, where another kernel does that,
// not at all. A block takes tokens of one column, so that it counts for one.
#include <algorithm>

#include "found_rows.cuh"
#include "hot_index.h"
#include "launch.cuh"
#include "row_runs.h"

namespace engram {
namespace {

constexpr int kWarps = 8;
constexpr int64_t kMaxBlocksPerColumn = 64;

//! Where the row of a token lies, and what there is to count.
__device__ __forceinline__ FoundRow find_row(const engram_lookup_args& args, int64_t token,
                                             int column, bool hot_alone, uint32_t* num_asked,
                                             uint32_t* num_found) {
  FoundRow found;
  found.token = token;
  found.column = column;
  found.is_written = !hot_alone;
  const int64_t row = find_table_row(args, token, column);
  found.is_lost = row == kLostId;
  if (row < 0) return found;
  const int64_t slot = find_hot_slot(args.hot, static_cast<int32_t>(row + args.first_row));
  ++*num_asked;
  const int num_scales = scales_per_row(args.head_dim);
  if (slot != kNoSlot) {
    ++*num_found;
    found.is_written = true;
    found.values = args.hot.values + row_offset(slot, args.head_dim);
    found.scales = args.hot.scales != nullptr ? args.hot.scales + row_offset(slot, num_scales)
                                              : args.scales + row_offset(row, num_scales);
  } else if (!hot_alone) {
    found.values = args.values + row_offset(row, args.head_dim);
    found.scales = args.scales + row_offset(row, num_scales);
  }
  return found;
}

//! num_tokens: those that are written, in F8_128x4 order past args.num_tokens.
template <engram_row_form kForm>
__global__ void __launch_bounds__(kWarps * 32, 2)
    lookup_hot_kernel(const __grid_constant__ engram_lookup_args args, int64_t num_tokens,
                      bool hot_alone, bool values_aligned) {
  __shared__ uint32_t counts[2];

  // Coordinates
  const int lane = static_cast<int>(threadIdx.x);
  const int column = static_cast<int>(blockIdx.x);
  const int64_t warp = row_offset(blockIdx.y, kWarps) + threadIdx.y;
  const int64_t step = row_offset(row_offset(gridDim.y, kWarps), kRowsInFlight);
  if (lane == 0 && threadIdx.y < 2) counts[threadIdx.y] = 0;
  __syncthreads();

  // Rows
  uint32_t num_asked = 0;
  uint32_t num_found = 0;
#pragma unroll 1
  for (int64_t first = row_offset(warp, kRowsInFlight); first < num_tokens; first += step) {
    FoundRow own;
    if (lane < kRowsInFlight && first + lane < num_tokens) {
      own = find_row(args, first + lane, column, hot_alone, &num_asked, &num_found);
    }
    write_found_rows<kForm>(args, own, values_aligned);
  }

  // Counts
  if (args.hot.counts == nullptr) return;
  num_asked = __reduce_add_sync(kWholeWarp, num_asked);
  num_found = __reduce_add_sync(kWholeWarp, num_found);
  if (lane == 0) {
    atomicAdd(&counts[0], num_asked);
    atomicAdd(&counts[1], num_found);
  }
  __syncthreads();
  if (lane == 0 && threadIdx.y < 2 && counts[threadIdx.y] > 0) {
    auto* const to = reinterpret_cast<unsigned long long*>(args.hot.counts);
    atomicAdd(to + 2 * column + threadIdx.y, counts[threadIdx.y]);
  }
}

template <engram_row_form kForm>
cudaError_t launch_lookup_hot(const engram_lookup_args& args, bool hot_alone, cudaStream_t stream) {
  const int64_t num_tokens = num_written_tokens(args);
  const int64_t blocks =
      std::min(kMaxBlocksPerColumn, ceil_div(num_tokens, int64_t{kWarps} * kRowsInFlight));
  const bool values_aligned = packed_row_bytes(args.head_dim) % 8 == 0 && is_aligned(8, args.out);
  return launch(lookup_hot_kernel<kForm>,
                dim3(static_cast<unsigned>(args.num_columns), static_cast<unsigned>(blocks)),
                dim3(32, kWarps), stream, args, num_tokens, hot_alone, values_aligned);
}

}  // namespace

cudaError_t lookup_hot(const engram_lookup_args& args, bool hot_alone, cudaStream_t stream) {
  if (args.num_tokens == 0) return cudaSuccess;
  switch (args.form) {
    case ENGRAM_ROWS_BF16:
      return launch_lookup_hot<ENGRAM_ROWS_BF16>(args, hot_alone, stream);
    case ENGRAM_ROWS_PACKED:
      return launch_lookup_hot<ENGRAM_ROWS_PACKED>(args, hot_alone, stream);
    case ENGRAM_ROWS_MXFP8_LINEAR:
      return launch_lookup_hot<ENGRAM_ROWS_MXFP8_LINEAR>(args, hot_alone, stream);
    case ENGRAM_ROWS_MXFP8_128X4:
      return launch_lookup_hot<ENGRAM_ROWS_MXFP8_128X4>(args, hot_alone, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace engram
