// SPDX-License-Identifier: Apache-2.0
// Hot rows out of GPU memory, and the others out of the table or, where another kernel does that,
// not at all: then marks say which were written. A block takes tokens of one column, so that it
// counts for one.
#include <algorithm>

#include "adaptive_rows.cuh"
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
constexpr unsigned kAllRows = (1u << kRowsInFlight) - 1;

//! A row of the result, and its bytes.
struct FoundRow {
  int64_t token = 0;
  int64_t row = kNoRow;  //!< of the table
  int column = 0;
  bool is_written = false;          //!< false: left as it is
  bool is_lost = false;             //!< no bytes are there: NaN, not zeros
  const uint8_t* values = nullptr;  //!< 8-byte aligned; null: there are none
  const uint8_t* scales = nullptr;
  AdaptivePlace adaptive;  //!< where the row lies, or may be kept
};

//! What a lane counts: rows looked for, and found in the static and in the adaptive part.
constexpr int kNumCounts = 3;
struct Counts {
  uint32_t each[kNumCounts] = {};
};

__device__ __forceinline__ const uint8_t* shuffle(const uint8_t* address, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(address);
  return reinterpret_cast<const uint8_t*>(__shfl_sync(kWholeWarp, bits, lane));
}

__device__ __forceinline__ void take_from_table(const engram_lookup_args& args, FoundRow* own) {
  own->values = args.values + row_offset(own->row, args.head_dim);
  own->scales = args.scales + row_offset(own->row, scales_per_row(args.head_dim));
}

//! A chunk of each of the rows in the mask `wanted`. All lanes call it.
template <bool kAdaptive>
__device__ __forceinline__ void load_chunks(const engram_lookup_args& args, const FoundRow& own,
                                            unsigned wanted, int chunk, uint2* values,
                                            uint8_t* scales) {
  const bool has_chunk = chunk < args.head_dim / kRowChunkBytes;
  const unsigned lost = __ballot_sync(kWholeWarp, own.is_lost);
  const unsigned adaptive = kAdaptive ? __ballot_sync(kWholeWarp, own.adaptive.is_found) : 0;
#pragma unroll
  for (int i = 0; i < kRowsInFlight; ++i) {
    if ((wanted >> i & 1u) == 0) continue;
    const uint8_t* const from = shuffle(own.values, i);
    const uint8_t* const scales_from = shuffle(own.scales, i);
    const int64_t missing = (lost >> i & 1u) != 0 ? kLostId : kNoRow;
    values[i] = missing_values<uint2>(missing);
    scales[i] = missing_scale(missing);
    if (!has_chunk || from == nullptr) continue;
    const int scale = chunk * kRowChunkBytes / kScaleBlock;
    if ((adaptive >> i & 1u) != 0) {
      values[i] = load_kept_chunk(from, chunk);
      scales[i] = args.hot.adaptive.scales != nullptr ? load_relaxed(scales_from + scale)
                                                      : load_once(scales_from + scale);
      continue;
    }
    values[i] = load_once(reinterpret_cast<const uint2*>(from) + chunk);
    scales[i] = load_once(scales_from + scale);
  }
}

//! Of rows that were found in the adaptive part, but are there no more, what was read is nothing:
//! they are the table's or, with hot_alone, not written here. Returns which. All lanes call it.
__device__ __forceinline__ unsigned forget_changed(const engram_lookup_args& args, bool hot_alone,
                                                   FoundRow* own) {
  const bool changed =
      own->adaptive.is_found && !is_unchanged(args.hot.adaptive, own->adaptive.slot);
  if (changed) {
    own->adaptive = {};
    take_from_table(args, own);
    if (hot_alone) *own = {.token = own->token, .column = own->column};
  }
  return __ballot_sync(kWholeWarp, changed);
}

//! The rows that the first kRowsInFlight lanes have found, wherever they lie: all are loaded before
//! the first one is stored. All lanes call it.
template <engram_row_form kForm, bool kAdaptive>
__device__ __forceinline__ void write_found_rows(const engram_lookup_args& args, bool hot_alone,
                                                 bool values_aligned, FoundRow* own,
                                                 KeptRow* kept) {
  const int lane = static_cast<int>(threadIdx.x);
  if (!__any_sync(kWholeWarp, own->is_written)) return;
  // NOTE: what a lane acquired, the others have behind a barrier.
  const bool adapts = kAdaptive && __any_sync(kWholeWarp, own->adaptive.slot.place != kNoSlot ||
                                                              kept->place() != kNoSlot);
  __syncwarp();
  const int chunks_per_row = args.head_dim / kRowChunkBytes;
#pragma unroll 1
  for (int begin = 0; begin < chunks_per_row; begin += 32) {
    const int chunk = begin + lane;

    // Load all rows before the first store
    uint2 values[kRowsInFlight];
    uint8_t scales[kRowsInFlight];
    load_chunks<kAdaptive>(args, *own, kAllRows, chunk, values, scales);
    if (adapts) {
      if (begin == 0) {
        const Slot to_write = own->adaptive.is_found ? Slot{} : own->adaptive.slot;
        kept->turn_to(args.hot.adaptive, to_write, static_cast<int32_t>(own->row + args.first_row));
      } else {
        fence_warp();
      }
      const unsigned changed = forget_changed(args, hot_alone, own);
      if (changed != 0) load_chunks<false>(args, *own, changed, chunk, values, scales);
    }
    const unsigned written = __ballot_sync(kWholeWarp, own->is_written);

    // Convert and store
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int64_t token = __shfl_sync(kWholeWarp, own->token, i);
      const int column = __shfl_sync(kWholeWarp, own->column, i);
      const int64_t place = kAdaptive ? __shfl_sync(kWholeWarp, kept->place(), i) : kNoSlot;
      if (chunk >= chunks_per_row || (written >> i & 1u) == 0) continue;
      store_row_chunk<kForm>(args, token, column, chunk, values[i], scales[i], values_aligned);
      if (place == kNoSlot) continue;
      keep_row_chunk(args.hot.adaptive, args.head_dim, place, chunk, values[i], scales[i]);
    }
  }
}

//! Where the row of a token lies.
template <bool kAdaptive>
__device__ __forceinline__ FoundRow find_row(const engram_lookup_args& args, int64_t token,
                                             int column, bool hot_alone, Counts* counts) {
  FoundRow found;
  found.token = token;
  found.column = column;
  found.is_written = !hot_alone;
  found.row = find_table_row(args, token, column);
  found.is_lost = found.row == kLostId;
  if (found.row < 0) return found;
  ++counts->each[0];
  take_from_table(args, &found);
  const auto id = static_cast<int32_t>(found.row + args.first_row);
  const int num_scales = scales_per_row(args.head_dim);
  const int64_t slot = find_hot_slot(args.hot, id);
  if (slot != kNoSlot) {
    ++counts->each[1];
    found.is_written = true;
    found.values = args.hot.values + row_offset(slot, args.head_dim);
    if (args.hot.scales != nullptr) found.scales = args.hot.scales + row_offset(slot, num_scales);
  } else if constexpr (kAdaptive) {
    const engram_adaptive_rows& rows = args.hot.adaptive;
    found.adaptive = find_adaptive(rows, id);
    if (found.adaptive.is_found) {
      const int64_t place = found.adaptive.slot.place;
      found.is_written = true;
      found.values = rows.values + row_offset(place, args.head_dim);
      if (rows.scales != nullptr) found.scales = rows.scales + row_offset(place, num_scales);
    }
  }
  if (!found.is_written) {
    found.values = nullptr;
    found.adaptive = {};
  }
  return found;
}

//! num_tokens: those that are written, in F8_128x4 order past args.num_tokens. marks: see
//! lookup_hot().
template <engram_row_form kForm, bool kAdaptive>
__global__ void __launch_bounds__(kWarps * 32, 2)
    lookup_hot_kernel(const __grid_constant__ engram_lookup_args args, int64_t num_tokens,
                      HotMarks marks, bool values_aligned) {
  __shared__ uint32_t sums[kNumCounts];

  // Coordinates
  const int lane = static_cast<int>(threadIdx.x);
  const int column = static_cast<int>(blockIdx.x);
  const int64_t warp = row_offset(blockIdx.y, kWarps) + threadIdx.y;
  const int64_t step = row_offset(row_offset(gridDim.y, kWarps), kRowsInFlight);
  const bool hot_alone = marks.tokens != nullptr;
  if (lane == 0 && threadIdx.y < kNumCounts) sums[threadIdx.y] = 0;
  __syncthreads();

  // Rows
  Counts counts;
  KeptRow kept;
#pragma unroll 1
  for (int64_t first = row_offset(warp, kRowsInFlight); first < num_tokens; first += step) {
    FoundRow own;
    const int64_t token = first + lane;
    const bool has_token = lane < kRowsInFlight && token < num_tokens;
    if (has_token) own = find_row<kAdaptive>(args, token, column, hot_alone, &counts);
    write_found_rows<kForm, kAdaptive>(args, hot_alone, values_aligned, &own, &kept);
    if (own.adaptive.is_found) ++counts.each[2];
    if (has_token && hot_alone) {
      marks.tokens[row_offset(column, marks.column_tokens) + token] = own.is_written ? 1 : 0;
    }
  }
  if constexpr (kAdaptive) kept.finish(args.hot.adaptive);

  // Counts
  if (args.hot.counts == nullptr) return;
#pragma unroll
  for (int i = 0; i < kNumCounts; ++i) {
    const uint32_t count = __reduce_add_sync(kWholeWarp, counts.each[i]);
    if (lane == 0) atomicAdd(&sums[i], count);
  }
  __syncthreads();
  if (lane == 0 && threadIdx.y < kNumCounts && sums[threadIdx.y] > 0) {
    auto* const to = reinterpret_cast<unsigned long long*>(args.hot.counts);
    atomicAdd(to + kNumCounts * column + threadIdx.y, sums[threadIdx.y]);
  }
}

template <engram_row_form kForm>
cudaError_t launch_lookup_hot(const engram_lookup_args& args, const HotMarks& marks,
                              cudaStream_t stream) {
  const int64_t num_tokens = num_written_tokens(args);
  const int64_t blocks =
      std::min(kMaxBlocksPerColumn, ceil_div(num_tokens, int64_t{kWarps} * kRowsInFlight));
  const bool values_aligned = takes_wide_stores(args);
  const auto kernel = args.hot.adaptive.num_buckets > 0 ? lookup_hot_kernel<kForm, true>
                                                        : lookup_hot_kernel<kForm, false>;
  return launch(kernel,
                dim3(static_cast<unsigned>(args.num_columns), static_cast<unsigned>(blocks)),
                dim3(32, kWarps), stream, args, num_tokens, marks, values_aligned);
}

}  // namespace

cudaError_t lookup_hot(const engram_lookup_args& args, const HotMarks& marks, cudaStream_t stream) {
  if (args.num_tokens == 0) return cudaSuccess;
  switch (args.form) {
    case ENGRAM_ROWS_BF16:
      return launch_lookup_hot<ENGRAM_ROWS_BF16>(args, marks, stream);
    case ENGRAM_ROWS_PACKED:
      return launch_lookup_hot<ENGRAM_ROWS_PACKED>(args, marks, stream);
    case ENGRAM_ROWS_MXFP8_LINEAR:
      return launch_lookup_hot<ENGRAM_ROWS_MXFP8_LINEAR>(args, marks, stream);
    case ENGRAM_ROWS_MXFP8_128X4:
      return launch_lookup_hot<ENGRAM_ROWS_MXFP8_128X4>(args, marks, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace engram
