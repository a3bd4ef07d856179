// SPDX-License-Identifier: Apache-2.0
//! \file row_runs.h
//! Runs: which tokens want one row, found on the device so that captured work adapts to its ids.
//! A sorted lookup makes them (make_runs), then reads each row once, in the order of rows, and
//! writes it to its run's tokens (read_runs). Hot rows are in no run: lookup_hot comes first, and
//! marks those that it wrote. Nobody else asks which are hot: it may change.
#pragma once

#include <cstdint>

#include "engram/engram.h"
#include "engram/layout.h"
#include "engram/row.h"

#if ENGRAM_CUDA
#include <cuda_runtime_api.h>
#endif

namespace engram {

//! Tokens of one column that are sorted together: what one block holds.
constexpr int64_t kMaxSegmentTokens = 8192;
//! Blocks that read rows where nothing else is asked for: more spread the rows under way too far.
constexpr int kReadBlocks = 8;
//! The same of staged rows, which lie in order: as many as keep up with the link.
constexpr int kStagedBlocks = 32;
//! A row that more tokens want is read once for each so many places of the sorted order, so that
//! their writing is spread over warps.
constexpr int kMaxRunTokens = 32;

struct alignas(8) RowRun {
  int32_t row;    //!< of the table, kNoRow or kLostId
  int32_t first;  //!< of its places in the segment's sorted tokens; the next run's is their end
};

//! How a lookup's tokens fall into segments, one column of one chunk of tokens each; a column's
//! segments lie side by side.
struct SegmentShape {
  int64_t num_chunks = 0;
  int64_t chunk_tokens = 0;
  int64_t num_segments = 0;

  ENGRAM_HOST_DEVICE int64_t runs_per_segment() const { return chunk_tokens + 1; }
};

//! Tokens that a lookup writes: in F8_128x4 order the scales' tiles have rows past the last one.
inline int64_t num_written_tokens(const engram_lookup_args& args) {
  if (args.form != ENGRAM_ROWS_MXFP8_128X4) return args.num_tokens;
  return row_offset(ceil_div(args.num_tokens, kStageTileRows), kStageTileRows);
}

inline SegmentShape segment_shape(const engram_lookup_args& args) {
  const int64_t num_tokens = num_written_tokens(args);
  SegmentShape shape;
  shape.num_chunks = ceil_div(num_tokens, kMaxSegmentTokens);
  if (shape.num_chunks > 0) shape.chunk_tokens = ceil_div(num_tokens, shape.num_chunks);
  shape.num_segments = row_offset(shape.num_chunks, args.num_columns);
  return shape;
}

//! The arrays of a sorted lookup in its workspace.
struct RunArrays {
  RowRun* runs;       //!< [segments, runs_per_segment], the one after the last run ends it
  int32_t* num_runs;  //!< [segments]
  uint16_t* tokens;   //!< [segments, chunk_tokens], in the order of rows, counted from the chunk's;
                      //!< until make_runs, the marks of lookup_hot
};

//! Bytes that RunArrays take.
inline int64_t run_array_bytes(const SegmentShape& shape) {
  const auto per_segment = static_cast<int64_t>(sizeof(RowRun)) * shape.runs_per_segment() +
                           static_cast<int64_t>(sizeof(int32_t)) +
                           static_cast<int64_t>(sizeof(uint16_t)) * shape.chunk_tokens;
  return row_offset(shape.num_segments, per_segment);
}

//! `workspace` is aligned to alignof(RowRun).
inline RunArrays run_arrays(const SegmentShape& shape, void* workspace) {
  auto* const runs = static_cast<RowRun*>(workspace);
  auto* const num_runs =
      reinterpret_cast<int32_t*>(runs + row_offset(shape.num_segments, shape.runs_per_segment()));
  return {runs, num_runs, reinterpret_cast<uint16_t*>(num_runs + shape.num_segments)};
}

//! Rows that CPUs have put into memory that the GPU reads in order, for some of the segments: run i
//! of segment s lies at place s * chunk_tokens + i.
struct StagedRows {
  const uint8_t* values = nullptr;  //!< FP8 [places, D]
  const uint8_t* scales = nullptr;  //!< E8M0 [places, D/32]; null: the table's are in GPU memory
  int64_t first_segment = 0;
  int64_t num_segments = 0;
};

//! Which tokens' rows lookup_hot wrote.
struct HotMarks {
  uint16_t* tokens = nullptr;  //!< [columns, column_tokens], 1 or 0
  int64_t column_tokens = 0;
};

inline HotMarks hot_marks(const SegmentShape& shape, const RunArrays& arrays) {
  return {arrays.tokens, row_offset(shape.num_chunks, shape.chunk_tokens)};
}

inline bool has_hot_rows(const engram_hot_rows& hot) {
  return hot.num_buckets > 0 || hot.adaptive.num_buckets > 0;
}

#if ENGRAM_CUDA
//! Writes the hot rows of all columns and, unless they are to be marked, whatever else there is to
//! write, out of the table; rows that come from there are kept in the adaptive part.
cudaError_t lookup_hot(const engram_lookup_args& args, const HotMarks& marks, cudaStream_t stream);

//! Sorts the ids of each segment and writes its runs, in which rows are left out that are marked.
cudaError_t make_runs(const engram_lookup_args& args, const SegmentShape& shape,
                      const RunArrays& arrays, cudaStream_t stream);

//! Reads the rows of all runs, num_blocks blocks walking through them together, writes them in
//! args.form and keeps them in the adaptive part.
cudaError_t read_runs(const engram_lookup_args& args, const SegmentShape& shape,
                      const RunArrays& arrays, int num_blocks, cudaStream_t stream);

//! The same for the runs of staged segments, whose rows are taken from there.
cudaError_t read_staged_runs(const engram_lookup_args& args, const SegmentShape& shape,
                             const RunArrays& arrays, const StagedRows& staged, int num_blocks,
                             cudaStream_t stream);
#endif

}  // namespace engram
