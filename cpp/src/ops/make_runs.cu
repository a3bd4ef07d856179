// SPDX-License-Identifier: Apache-2.0
// A block sorts the ids of one column: those of a column lie in one part of the table, so that the
// columns one after the other are the whole table's order, and equal ids are never in two columns.
#include <algorithm>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "launch.cuh"
#include "row_runs.h"
#include "table_row.cuh"

namespace engram {
namespace {

// What is no row, in the order that it gets behind all rows.
constexpr uint32_t kNothing = 0xFFFFFFFDu;
constexpr uint32_t kLost = kNothing + 1;
constexpr uint32_t kElsewhere = kLost + 1;  // written already, or no token: in no run

//! Smallest and largest row that a segment's tokens want; smallest > largest where they want none.
struct RowSpan {
  uint32_t smallest;
  uint32_t largest;
};

template <int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads)
    make_runs_kernel(const __grid_constant__ engram_lookup_args args, SegmentShape shape,
                     RunArrays arrays, int64_t num_tokens, bool has_marks) {
  using Sort = cub::BlockRadixSort<uint32_t, kThreads, kItems, uint16_t>;
  using Scan = cub::BlockScan<int32_t, kThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Scan::TempStorage scan;
  } scratch;
  __shared__ RowSpan span;
  __shared__ int num_elsewhere;
  __shared__ uint32_t last_keys[kThreads];

  // Coordinates
  const int64_t segment = blockIdx.x;
  const int column = static_cast<int>(segment / shape.num_chunks);
  const int64_t first_token = row_offset(segment % shape.num_chunks, shape.chunk_tokens);
  uint16_t* const sorted = arrays.tokens + row_offset(segment, shape.chunk_tokens);
  const int num_places =
      static_cast<int>(max(int64_t{0}, min(shape.chunk_tokens, num_tokens - first_token)));
  if (threadIdx.x == 0) {
    span = {kNothing, 0};
    num_elsewhere = 0;
  }
  __syncthreads();

  // Load rows
  uint32_t keys[kItems];
  uint16_t tokens[kItems];
  uint32_t smallest = kNothing;
  uint32_t largest = 0;
  uint32_t num_hot = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int place = i * kThreads + static_cast<int>(threadIdx.x);
    tokens[i] = static_cast<uint16_t>(place);
    keys[i] = kElsewhere;
    if (place >= num_places) continue;
    const int64_t row = find_table_row(args, first_token + place, column);
    keys[i] = row == kNoRow ? kNothing : row == kLostId ? kLost : static_cast<uint32_t>(row);
    if (row < 0) continue;
    if (has_marks && sorted[place] != 0) {
      keys[i] = kElsewhere;
      ++num_hot;
      continue;
    }
    smallest = min(smallest, keys[i]);
    largest = max(largest, keys[i]);
  }
  smallest = __reduce_min_sync(0xFFFFFFFFu, smallest);
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  num_hot = __reduce_add_sync(0xFFFFFFFFu, num_hot);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&span.smallest, smallest);
    atomicMax(&span.largest, largest);
    atomicAdd(&num_elsewhere, static_cast<int>(num_hot));
  }
  __syncthreads();
  const int count = num_places - num_elsewhere;

  // Keys of as few bits as the rows need
  const uint32_t base = span.smallest;
  const uint32_t no_row = span.largest >= base ? span.largest - base + 1 : 0;
  const uint32_t lost = no_row + (kLost - kNothing);
  const uint32_t elsewhere = no_row + (kElsewhere - kNothing);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    keys[i] = keys[i] < kNothing ? keys[i] - base : no_row + (keys[i] - kNothing);
  }

  // Sort: each thread then has kItems places side by side
  Sort(scratch.sort).Sort(keys, tokens, 0, 32 - __clz(static_cast<int>(elsewhere)));
  last_keys[threadIdx.x] = keys[kItems - 1];
  __syncthreads();

  // A run begins where the row changes
  const int first_place = static_cast<int>(threadIdx.x) * kItems;
  uint32_t before = threadIdx.x == 0 ? kNothing : last_keys[threadIdx.x - 1];
  uint32_t begins = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int place = first_place + i;
    const bool is_first = keys[i] != before || place % kMaxRunTokens == 0;
    if (place < count && is_first) begins |= 1u << i;
    before = keys[i];
  }
  int32_t run = 0;
  int32_t num_runs = 0;
  Scan(scratch.scan).ExclusiveSum(__popc(begins), run, num_runs);

  // Store
  RowRun* const runs = arrays.runs + row_offset(segment, shape.runs_per_segment());
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int place = first_place + i;
    if (place < count) sorted[place] = tokens[i];
    if ((begins >> i & 1u) == 0) continue;
    const int32_t row = static_cast<int32_t>(base + keys[i]);
    runs[run++] = {keys[i] == no_row ? kNoRow : keys[i] == lost ? kLostId : row, place};
  }
  if (threadIdx.x == 0) {
    runs[num_runs] = {kNoRow, count};
    arrays.num_runs[segment] = num_runs;
  }
}

template <int kThreads, int kItems>
cudaError_t launch_make_runs(const engram_lookup_args& args, const SegmentShape& shape,
                             const RunArrays& arrays, cudaStream_t stream) {
  return launch(make_runs_kernel<kThreads, kItems>, dim3(static_cast<unsigned>(shape.num_segments)),
                dim3(kThreads), stream, args, shape, arrays, num_written_tokens(args),
                has_hot_rows(args.hot));
}

}  // namespace

cudaError_t make_runs(const engram_lookup_args& args, const SegmentShape& shape,
                      const RunArrays& arrays, cudaStream_t stream) {
  static_assert(kMaxSegmentTokens == 1024 * 8, "the widest block below");
  if (shape.chunk_tokens <= 256) return launch_make_runs<256, 1>(args, shape, arrays, stream);
  if (shape.chunk_tokens <= 1024) return launch_make_runs<512, 2>(args, shape, arrays, stream);
  return launch_make_runs<1024, 8>(args, shape, arrays, stream);
}

}  // namespace engram
