// SPDX-License-Identifier: Apache-2.0
// The kernels of a sorted lookup, one place after the other.
#include <algorithm>
#include <vector>

#include "engram/layout.h"
#include "engram/ops.h"
#include "fake_gpus.h"
#include "ops/row_runs.h"

namespace engram {
namespace {

struct Place {
  int64_t order;
  int32_t row;
  uint16_t token;
};

Place place_of(const engram_lookup_args& args, int64_t token, int64_t column, int64_t first_token) {
  const int32_t id = args.ids[token * args.ids_stride + column];
  const int64_t row = int64_t{id} - args.first_row;
  const auto place = static_cast<uint16_t>(token - first_token);
  if (id == kLostId) return {INT64_MAX, kLostId, place};
  if (id < 0 || row < 0 || row >= args.num_rows) return {INT64_MAX - 1, kNoRow, place};
  return {row, static_cast<int32_t>(row), place};
}

void make_segment(const engram_lookup_args& args, const SegmentShape& shape,
                  const RunArrays& arrays, int64_t segment) {
  const int64_t column = segment / shape.num_chunks;
  const int64_t first = segment % shape.num_chunks * shape.chunk_tokens;
  std::vector<Place> places;
  for (int64_t token = first; token < std::min(first + shape.chunk_tokens, args.num_tokens);
       ++token) {
    places.push_back(place_of(args, token, column, first));
  }
  std::stable_sort(places.begin(), places.end(),
                   [](const Place& a, const Place& b) { return a.order < b.order; });
  RowRun* run = arrays.runs + segment * shape.runs_per_segment();
  int32_t count = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    arrays.tokens[segment * shape.chunk_tokens + static_cast<int64_t>(i)] = places[i].token;
    if (i > 0 && places[i].order == places[i - 1].order && i % kMaxRunTokens != 0) continue;
    run[count++] = {places[i].row, static_cast<int32_t>(i)};
  }
  run[count] = {kNoRow, static_cast<int32_t>(places.size())};
  arrays.num_runs[segment] = count;
}

//! One row of one column, which has its own place in every form but F8_128x4.
void write_row(engram_lookup_args one, int64_t index) {
  const int64_t scales = one.head_dim / kScaleBlock;
  const int64_t bytes = one.form == ENGRAM_ROWS_BF16     ? 2 * one.head_dim
                        : one.form == ENGRAM_ROWS_PACKED ? one.head_dim + scales
                                                         : one.head_dim;
  one.out = static_cast<uint8_t*>(one.out) + index * bytes;
  if (one.form == ENGRAM_ROWS_MXFP8_LINEAR) one.out_scales += index * scales;
  lookup_cpu(one, 1);
}

void read_segment(const engram_lookup_args& args, const SegmentShape& shape,
                  const RunArrays& arrays, const StagedRows& staged, int64_t segment) {
  const int64_t column = segment / shape.num_chunks;
  const int64_t first = segment % shape.num_chunks * shape.chunk_tokens;
  const RowRun* const runs = arrays.runs + segment * shape.runs_per_segment();
  const int64_t scales = args.head_dim / kScaleBlock;
  for (int64_t i = 0; i < arrays.num_runs[segment]; ++i) {
    const int64_t place = segment * shape.chunk_tokens + i;
    engram_lookup_args one = args;
    const int32_t id = runs[i].row < 0 ? runs[i].row : 0;
    one.values = staged.values + place * args.head_dim;
    one.scales = staged.scales != nullptr ? staged.scales + place * scales
                                          : args.scales + std::max(runs[i].row, 0) * scales;
    one.first_row = 0;
    one.num_rows = 1;
    one.ids = &id;
    one.ids_stride = one.num_columns = 1;
    one.num_tokens = 1;
    one.path = ENGRAM_LOOKUP_AUTO;
    for (int32_t j = runs[i].first; j < runs[i + 1].first; ++j) {
      const int64_t token = first + arrays.tokens[segment * shape.chunk_tokens + j];
      write_row(one, token * args.num_columns + column);
    }
  }
}

}  // namespace

cudaError_t lookup_hot(const engram_lookup_args&, const HotMarks&, cudaStream_t) {
  return cudaErrorNotSupported;
}

cudaError_t make_runs(const engram_lookup_args& args, const SegmentShape& shape,
                      const RunArrays& arrays, cudaStream_t stream) {
  return fake::enqueue(stream, [=] {
    for (int64_t i = 0; i < shape.num_segments; ++i) make_segment(args, shape, arrays, i);
  });
}

cudaError_t read_runs(const engram_lookup_args&, const SegmentShape&, const RunArrays&, int,
                      cudaStream_t) {
  return cudaErrorNotSupported;
}

cudaError_t read_staged_runs(const engram_lookup_args& args, const SegmentShape& shape,
                             const RunArrays& arrays, const StagedRows& staged, int,
                             cudaStream_t stream) {
  return fake::enqueue(stream, [=] {
    for (int64_t i = 0; i < staged.num_segments; ++i) {
      read_segment(args, shape, arrays, staged, staged.first_segment + i);
    }
  });
}

}  // namespace engram
