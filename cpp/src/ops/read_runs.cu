// SPDX-License-Identifier: Apache-2.0
// Reads rows over PCIe, where what counts is how near to each other in the table the rows are that
// are under way at one time: few blocks walk through the sorted runs together, many rows deep.
#include "adaptive_rows.cuh"
#include "launch.cuh"
#include "ptx.cuh"
#include "row_runs.h"
#include "table_row.cuh"

namespace engram {
namespace {

constexpr int kWarps = 8;
constexpr int kRunsInFlight = 8;  // of a warp

static_assert(kMaxRunTokens == 32, "each lane holds one token of a run");

//! Where the row of a run is to be kept: nowhere if it is there.
__device__ __forceinline__ Slot slot_to_write(const engram_lookup_args& args, int32_t row) {
  if (row < 0) return {};
  const AdaptivePlace place =
      find_adaptive(args.hot.adaptive, static_cast<int32_t>(row + args.first_row));
  return place.is_found ? Slot{} : place.slot;
}

template <engram_row_form kForm, bool kStaged, bool kAdaptive>
__global__ void __launch_bounds__(kWarps * 32, 2)
    read_runs_kernel(const __grid_constant__ engram_lookup_args args, SegmentShape shape,
                     RunArrays arrays, StagedRows staged, bool values_aligned) {
  // Coordinates
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t num_warps = row_offset(gridDim.x, kWarps);
  const int64_t batches_per_segment = ceil_div(shape.chunk_tokens, kRunsInFlight);
  const int64_t num_batches = row_offset(staged.num_segments, batches_per_segment);
  const int chunks_per_row = args.head_dim / kRowChunkBytes;

  KeptRow kept;
#pragma unroll 1
  for (int64_t batch = row_offset(blockIdx.x, kWarps) + threadIdx.y; batch < num_batches;
       batch += num_warps) {
    const int64_t segment = staged.first_segment + batch / batches_per_segment;
    const int first_run = static_cast<int>(batch % batches_per_segment) * kRunsInFlight;
    const int num_runs = min(__ldg(arrays.num_runs + segment) - first_run, kRunsInFlight);
    if (num_runs <= 0) continue;
    const int column = static_cast<int>(segment / shape.num_chunks);
    const int64_t first_token = row_offset(segment % shape.num_chunks, shape.chunk_tokens);
    const RowRun* const runs =
        arrays.runs + row_offset(segment, shape.runs_per_segment()) + first_run;
    const uint16_t* const sorted = arrays.tokens + row_offset(segment, shape.chunk_tokens);

    // Runs: lane i holds run i, and the one after the last its end
    int2 own = {-1, 0};
    if (lane <= num_runs) own = __ldg(reinterpret_cast<const int2*>(runs) + lane);
    int64_t rows[kRunsInFlight];
    int num_tokens[kRunsInFlight];
    int32_t tokens[kRunsInFlight];
#pragma unroll
    for (int i = 0; i < kRunsInFlight; ++i) {
      rows[i] = __shfl_sync(kWholeWarp, own.x, i);
      const int first = __shfl_sync(kWholeWarp, own.y, i);
      const int end = __shfl_sync(kWholeWarp, own.y, i + 1);
      num_tokens[i] = i < num_runs ? end - first : 0;
      tokens[i] = lane < num_tokens[i] ? __ldg(sorted + first + lane) : 0;
    }

#pragma unroll 1
    for (int begin = 0; begin < chunks_per_row; begin += 32) {
      const int chunk = begin + lane;
      const bool has_chunk = chunk < chunks_per_row;

      // Load all rows before the first store
      uint2 values[kRunsInFlight];
      uint8_t scales[kRunsInFlight];
#pragma unroll
      for (int i = 0; i < kRunsInFlight; ++i) {
        values[i] = missing_values<uint2>(rows[i]);
        scales[i] = missing_scale(rows[i]);
        if (!has_chunk || num_tokens[i] == 0 || rows[i] < 0) continue;
        const int64_t place = row_offset(segment, shape.chunk_tokens) + first_run + i;
        const bool has_scales = kStaged && staged.scales != nullptr;
        const uint8_t* const row = kStaged ? staged.values + row_offset(place, args.head_dim)
                                           : args.values + row_offset(rows[i], args.head_dim);
        const uint8_t* const row_scales =
            (has_scales ? staged.scales : args.scales) +
            row_offset(has_scales ? place : rows[i], scales_per_row(args.head_dim));
        values[i] = load_once(reinterpret_cast<const uint2*>(row) + chunk);
        scales[i] = load_once(row_scales + chunk * kRowChunkBytes / kScaleBlock);
      }

      // A place for each, found while they are on their way
      if constexpr (kAdaptive) {
        if (begin == 0) {
          kept.turn_to(args.hot.adaptive, slot_to_write(args, lane < num_runs ? own.x : kNoRow),
                       static_cast<int32_t>(own.x + args.first_row));
        }
      }

      // Convert and store
#pragma unroll
      for (int i = 0; i < kRunsInFlight; ++i) {
        const int64_t place = kAdaptive ? __shfl_sync(kWholeWarp, kept.place(), i) : kNoSlot;
        if (has_chunk && place != kNoSlot) {
          keep_row_chunk(args.hot.adaptive, args.head_dim, place, chunk, values[i], scales[i]);
        }
#pragma unroll 1
        for (int j = 0; j < num_tokens[i]; ++j) {
          const int64_t token = first_token + __shfl_sync(kWholeWarp, tokens[i], j);
          if (!has_chunk) continue;
          store_row_chunk<kForm>(args, token, column, chunk, values[i], scales[i], values_aligned);
        }
      }
    }
  }
  if constexpr (kAdaptive) kept.finish(args.hot.adaptive);
}

template <engram_row_form kForm>
cudaError_t launch_read_runs(const engram_lookup_args& args, const SegmentShape& shape,
                             const RunArrays& arrays, const StagedRows& staged, int num_blocks,
                             cudaStream_t stream) {
  const bool is_staged = staged.values != nullptr;
  const auto fixed =
      is_staged ? read_runs_kernel<kForm, true, false> : read_runs_kernel<kForm, false, false>;
  const auto adaptive =
      is_staged ? read_runs_kernel<kForm, true, true> : read_runs_kernel<kForm, false, true>;
  const auto kernel = args.hot.adaptive.num_buckets > 0 ? adaptive : fixed;
  return launch(kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(32, kWarps), stream, args,
                shape, arrays, staged, takes_wide_stores(args));
}

}  // namespace

cudaError_t read_runs(const engram_lookup_args& args, const SegmentShape& shape,
                      const RunArrays& arrays, int num_blocks, cudaStream_t stream) {
  return read_staged_runs(args, shape, arrays, {.num_segments = shape.num_segments}, num_blocks,
                          stream);
}

cudaError_t read_staged_runs(const engram_lookup_args& args, const SegmentShape& shape,
                             const RunArrays& arrays, const StagedRows& staged, int num_blocks,
                             cudaStream_t stream) {
  switch (args.form) {
    case ENGRAM_ROWS_BF16:
      return launch_read_runs<ENGRAM_ROWS_BF16>(args, shape, arrays, staged, num_blocks, stream);
    case ENGRAM_ROWS_PACKED:
      return launch_read_runs<ENGRAM_ROWS_PACKED>(args, shape, arrays, staged, num_blocks, stream);
    case ENGRAM_ROWS_MXFP8_LINEAR:
      return launch_read_runs<ENGRAM_ROWS_MXFP8_LINEAR>(args, shape, arrays, staged, num_blocks,
                                                        stream);
    case ENGRAM_ROWS_MXFP8_128X4:
      return launch_read_runs<ENGRAM_ROWS_MXFP8_128X4>(args, shape, arrays, staged, num_blocks,
                                                       stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace engram
