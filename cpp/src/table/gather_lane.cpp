// SPDX-License-Identifier: Apache-2.0
#include "table/gather_lane.h"

#if ENGRAM_CUDA
#include <algorithm>
#include <cstring>

#include "cuda_driver.h"
#include "engram/error.h"
#include "engram/ops.h"
#include "engram/row.h"
#include "ops/lookup_tokens.h"
#include "ops/stream_row.h"
#include "table/gpu_memory.h"

namespace engram {
namespace {

constexpr int64_t kRunsPerUnit = 128;
//! A piece's tokens at least: below, its own wait and launch cost more than they hide.
constexpr int64_t kPieceTokens = 256;
constexpr int kRowsAhead = 24;  // that memory is asked for
constexpr int kLineBytes = 64;

std::string what(const TableInfo& info, const char* kind) {
  return concat(info.store, " layer ", info.layer, ": ", kind, " for rows that CPUs gather");
}

//! The largest parts of `num_tokens` tokens at once.
SegmentShape largest_shape(const TableInfo& info, int64_t num_tokens) {
  engram_lookup_args args{};
  args.num_tokens = num_tokens;
  args.num_columns = info.num_columns;
  args.form = ENGRAM_ROWS_MXFP8_128X4;  // which writes whole tiles
  return segment_shape(args);
}

int64_t runs_bytes(const SegmentShape& shape) {
  return row_offset(shape.num_segments,
                    row_offset(shape.runs_per_segment(), sizeof(RowRun)) + int{sizeof(int32_t)});
}

cudaError_t wait_for(cudaStream_t stream, uint32_t* flag) {
  const CUresult code = cuda_driver().stream_wait_value32(
      stream, reinterpret_cast<CUdeviceptr>(flag), 1, CU_STREAM_WAIT_VALUE_EQ);
  return code == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

void ask_for(const uint8_t* row, int num_bytes) {
  for (int i = 0; i < num_bytes; i += kLineBytes) __builtin_prefetch(row + i, 0, 0);
}

}  // namespace

GatherLane::Part::Part(GatherLane* lane, const SegmentShape& shape, int64_t first_row)
    : lane_(lane),
      shape_(shape),
      first_row_(first_row),
      units_per_segment_(ceil_div(shape.chunk_tokens, kRunsPerUnit)),
      num_pieces_(static_cast<int>(
          std::clamp<int64_t>(shape.chunk_tokens / kPieceTokens, 1,
                              std::min<int64_t>(kMostPieces, shape.num_segments)))) {}

StagedRows GatherLane::Part::piece(int index) const {
  return {.values = lane_->values_,
          .scales = lane_->scales_,
          .first_segment = first_segment(index),
          .num_segments = first_segment(index + 1) - first_segment(index)};
}

void GatherLane::Part::begin() noexcept {
  wait();  // for its last time, where an error then kept the stream from waiting for it
  for (int i = 0; i < num_pieces_; ++i) {
    lane_->flags_[i] = 0;
    units_left_[static_cast<size_t>(i)] = row_offset(piece(i).num_segments, units_per_segment_);
  }
  lane_->pool_.start(this, row_offset(shape_.num_segments, units_per_segment_));
}

void GatherLane::Part::do_unit(int64_t unit) noexcept {
  const int64_t segment = unit / units_per_segment_;
  lane_->gather(shape_, first_row_, segment, unit % units_per_segment_ * kRunsPerUnit);
  int piece = static_cast<int>(segment * num_pieces_ / shape_.num_segments);
  while (segment >= first_segment(piece + 1)) ++piece;
  if (units_left_[static_cast<size_t>(piece)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    __atomic_store_n(lane_->flags_ + piece, 1u, __ATOMIC_RELEASE);
  }
}

GatherLane::GatherLane(const Table& table, int device, int64_t num_tokens)
    : Lane(table, device, what(table.info(), "event")),
      pool_(gather_pool(num_gather_threads(table.options(), table.history().size))),
      head_dim_(table.info().head_dim),
      table_values_(table.rows_on_host().values),
      table_scales_(table.rows_on_host().scales),
      first_row_(table.info().first_row),
      num_tokens_(std::min(num_tokens, kMostTokens)) {
  const OnGpu gpu(device);
  const SegmentShape shape = largest_shape(table.info(), num_tokens_);
  workspace_ = DeviceBytes(device, run_array_bytes(shape), what(table.info(), "GPU memory"));
  const int64_t num_places = row_offset(shape.num_segments, shape.chunk_tokens);
  const int64_t num_scales = table_scales_ != nullptr ? scales_per_row(head_dim_) : 0;
  const int64_t bytes = row_offset(num_places, head_dim_ + num_scales) + runs_bytes(shape) +
                        kMostPieces * int64_t{sizeof(uint32_t)};
  memory_ = make_pinned(bytes, what(table.info(), "pinned memory").c_str());
  values_ = memory_.get();
  runs_ = values_ + row_offset(num_places, head_dim_);
  flags_ = reinterpret_cast<uint32_t*>(runs_ + runs_bytes(shape));
  auto* const after = reinterpret_cast<uint8_t*>(flags_ + kMostPieces);
  scales_ = num_scales > 0 ? after : nullptr;
}

GatherLane::~GatherLane() {
  const OnGpu gpu(device(), std::nothrow);
  finish();
  parts_.clear();
  memory_.reset();
  workspace_ = {};
}

cudaError_t GatherLane::enqueue(const engram_lookup_args& args, cudaStream_t stream) {
  for (int64_t begin = 0; begin < args.num_tokens; begin += num_tokens_) {
    const int64_t end = std::min(begin + num_tokens_, args.num_tokens);
    const cudaError_t code = enqueue_part(lookup_of_tokens(args, begin, end), stream);
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}

cudaError_t GatherLane::enqueue_part(const engram_lookup_args& part, cudaStream_t stream) {
  check_lookup_on_gpu(part);
  const SegmentShape shape = segment_shape(part);
  const RunArrays arrays = run_arrays(shape, workspace_.get());
  Part* const told = part_of(shape, part.first_row - first_row_);
  cudaError_t code = cudaSuccess;
  if (has_hot_rows(part.hot)) code = lookup_hot(part, hot_marks(shape, arrays), stream);
  if (code == cudaSuccess) code = make_runs(part, shape, arrays, stream);
  if (code == cudaSuccess) {
    code = cudaMemcpyAsync(runs_, arrays.runs, static_cast<size_t>(runs_bytes(shape)),
                           cudaMemcpyDeviceToHost, stream);
  }
  if (code == cudaSuccess) {
    code = cudaLaunchHostFunc(stream, [](void* data) { static_cast<Part*>(data)->begin(); }, told);
  }
  const int num_blocks = part.num_read_blocks > 0 ? part.num_read_blocks : kStagedBlocks;
  for (int i = 0; i < told->num_pieces() && code == cudaSuccess; ++i) {
    code = wait_for(stream, flags_ + i);
    if (code != cudaSuccess) break;
    code = read_staged_runs(part, shape, arrays, told->piece(i), num_blocks, stream);
  }
  return code;
}

GatherLane::Part* GatherLane::part_of(const SegmentShape& shape, int64_t first_row) {
  const std::lock_guard lock(mutex_);
  const std::tuple key(shape.chunk_tokens, shape.num_segments, first_row);
  return &parts_.try_emplace(key, this, shape, first_row).first->second;
}

void GatherLane::gather(const SegmentShape& shape, int64_t first_row, int64_t segment,
                        int64_t first_run) noexcept {
  const RunArrays arrays = run_arrays(shape, runs_);
  const int64_t num_runs = std::min(arrays.num_runs[segment] - first_run, kRunsPerUnit);
  if (num_runs <= 0) return;
  const RowRun* const runs =
      arrays.runs + row_offset(segment, shape.runs_per_segment()) + first_run;
  const int num_scales = scales_per_row(head_dim_);
  const uint8_t* const all_values = table_values_ + row_offset(first_row, head_dim_);
  const uint8_t* const all_scales =
      table_scales_ != nullptr ? table_scales_ + row_offset(first_row, num_scales) : nullptr;
  int64_t asked = 0;
  for (int64_t i = 0; i < num_runs; ++i) {
    for (; asked < std::min(num_runs, i + kRowsAhead); ++asked) {
      if (runs[asked].row < 0) continue;
      ask_for(all_values + row_offset(runs[asked].row, head_dim_), head_dim_);
      if (all_scales == nullptr) continue;
      ask_for(all_scales + row_offset(runs[asked].row, num_scales), num_scales);
    }
    if (runs[i].row < 0) continue;
    const int64_t place = row_offset(segment, shape.chunk_tokens) + first_run + i;
    stream_row(all_values + row_offset(runs[i].row, head_dim_), head_dim_,
               values_ + row_offset(place, head_dim_));
    if (all_scales == nullptr) continue;
    std::memcpy(scales_ + row_offset(place, num_scales),
                all_scales + row_offset(runs[i].row, num_scales), static_cast<size_t>(num_scales));
  }
  finish_streamed_rows();
}

}  // namespace engram
#endif
