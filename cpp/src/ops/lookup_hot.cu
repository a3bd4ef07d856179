// SPDX-License-Identifier: Apache-2.0
// Hot rows out of GPU memory, and the others out of the table or, where another kernel does that,
// not at all. A block takes tokens of one column, so that it counts for one.
#include <algorithm>

#include "hot_index.h"
#include "launch.cuh"
#include "ptx.cuh"
#include "row_runs.h"
#include "table_row.cuh"

namespace engram {
namespace {

constexpr int kWarps = 8;
constexpr int64_t kMaxBlocksPerColumn = 64;
constexpr int kRowsInFlight = 8;  // of a warp

//! A row of the result, and its bytes.
struct FoundRow {
  int64_t token = 0;
  int column = 0;
  bool is_written = false;          //!< false: left as it is
  bool is_lost = false;             //!< no bytes are there: NaN, not zeros
  const uint8_t* values = nullptr;  //!< 8-byte aligned; null: there are none
  const uint8_t* scales = nullptr;
};

__device__ __forceinline__ const uint8_t* shuffle(const uint8_t* address, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(address);
  return reinterpret_cast<const uint8_t*>(__shfl_sync(kWholeWarp, bits, lane));
}

//! The rows that the first kRowsInFlight lanes have found, wherever they lie: all are loaded before
//! the first one is stored. All lanes call it.
template <engram_row_form kForm>
__device__ __forceinline__ void write_found_rows(const engram_lookup_args& args,
                                                 const FoundRow& own, bool values_aligned) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned written = __ballot_sync(kWholeWarp, own.is_written);
  if (written == 0) return;
  const unsigned lost = __ballot_sync(kWholeWarp, own.is_lost);
  const int chunks_per_row = args.head_dim / kRowChunkBytes;
#pragma unroll 1
  for (int begin = 0; begin < chunks_per_row; begin += 32) {
    const int chunk = begin + lane;
    const bool has_chunk = chunk < chunks_per_row;

    // Load all rows before the first store
    uint2 values[kRowsInFlight];
    uint8_t scales[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const uint8_t* const from = shuffle(own.values, i);
      const uint8_t* const scales_from = shuffle(own.scales, i);
      const int64_t missing = (lost >> i & 1u) != 0 ? kLostId : kNoRow;
      values[i] = missing_values<uint2>(missing);
      scales[i] = missing_scale(missing);
      if (!has_chunk || from == nullptr) continue;
      values[i] = load_once(reinterpret_cast<const uint2*>(from) + chunk);
      scales[i] = load_once(scales_from + chunk * kRowChunkBytes / kScaleBlock);
    }

    // Convert and store
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int64_t token = __shfl_sync(kWholeWarp, own.token, i);
      const int column = __shfl_sync(kWholeWarp, own.column, i);
      if (!has_chunk || (written >> i & 1u) == 0) continue;
      store_row_chunk<kForm>(args, token, column, chunk, values[i], scales[i], values_aligned);
    }
  }
}

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
  const bool values_aligned = takes_wide_stores(args);
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
