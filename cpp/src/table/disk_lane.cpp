// SPDX-License-Identifier: Apache-2.0
#include "table/disk_lane.h"

#if ENGRAM_CUDA
#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "check.h"
#include "engram/error.h"
#include "engram/ops.h"
#include "engram/row.h"
#include "fault.h"
#include "ops/lookup_disk.h"
#include "parallel.h"
#include "table/disk_reader.h"
#include "table/gpu_memory.h"

namespace engram {
namespace {

int64_t row_bytes(const TableInfo& info) {
  return packed_row_bytes(info.head_dim) + 2 * int64_t{sizeof(int32_t)};
}

//! Tokens of a part: whole tiles of scales in F8_128x4 order where there is more than one part.
int64_t part_tokens(const TableInfo& info, int64_t num_tokens) {
  const int64_t token_bytes = row_offset(info.num_columns, row_bytes(info));
  const int64_t tiles = DiskLane::kMostBytes / row_offset(kStageTileRows, token_bytes);
  return std::min(num_tokens, row_offset(std::max<int64_t>(tiles, 1), kStageTileRows));
}

std::string what(const TableInfo& info) {
  return concat(info.store, " layer ", info.layer, ": pinned memory for rows on disk");
}

}  // namespace

DiskLane::DiskLane(const Table& table, int device, int64_t num_tokens)
    : Lane(table, device, what(table.info())),
      reader_(*table.disk()),
      layer_(table.info().layer),
      head_dim_(table.info().head_dim),
      num_tokens_(part_tokens(table.info(), num_tokens)),
      fault_(fault_word_on_host(device)) {
  const OnGpu gpu(device);
  const int64_t num_rows = row_offset(num_tokens_, table.info().num_columns);
  memory_ = make_pinned(row_offset(num_rows, row_bytes(table.info())), what(table.info()).c_str());
  values_ = memory_.get();
  ids_ = reinterpret_cast<int32_t*>(values_ + row_offset(num_rows, head_dim_));
  places_ = ids_ + num_rows;
  scales_ = reinterpret_cast<uint8_t*>(places_ + num_rows);
  std::iota(places_, places_ + num_rows, 0);
}

DiskLane::~DiskLane() {
  const OnGpu gpu(device(), std::nothrow);
  finish();
  memory_.reset();
}

cudaError_t DiskLane::enqueue(const engram_lookup_args& args, cudaStream_t stream) {
  for (int64_t begin = 0; begin < args.num_tokens; begin += num_tokens_) {
    const int64_t end = std::min(begin + num_tokens_, args.num_tokens);
    const cudaError_t code = enqueue_part(args, begin, end, stream);
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}

cudaError_t DiskLane::enqueue_part(const engram_lookup_args& args, int64_t begin, int64_t end,
                                   cudaStream_t stream) {
  engram_lookup_args part =
      lookup_of_read(args, {.values = values_, .scales = scales_, .places = places_}, begin, end);
  part.path = ENGRAM_LOOKUP_DIRECT;
  check_lookup_on_gpu(part);
  constexpr auto kIdBytes = static_cast<int64_t>(sizeof(int32_t));
  const auto width = static_cast<size_t>(row_offset(args.num_columns, kIdBytes));
  cudaError_t code =
      cudaMemcpy2DAsync(ids_, width, args.ids + row_offset(begin, args.ids_stride),
                        static_cast<size_t>(row_offset(args.ids_stride, kIdBytes)), width,
                        static_cast<size_t>(end - begin), cudaMemcpyDefault, stream);
  if (code != cudaSuccess) return code;
  code = cudaLaunchHostFunc(
      stream,
      [](void* data) {
        const Part& told = *static_cast<const Part*>(data);
        told.lane->read(told.num_rows);
      },
      part_of(part.num_rows));
  return code == cudaSuccess ? lookup_cuda(part, stream) : code;
}

DiskLane::Part* DiskLane::part_of(int64_t num_rows) {
  const std::lock_guard lock(mutex_);
  return &parts_.try_emplace(num_rows, Part{this, num_rows}).first->second;
}

void DiskLane::read(int64_t num_rows) noexcept {
  std::atomic<bool> complete{true};
  try {
    parallel_for(num_rows, kRowsPerDiskRead, disk_threads(0), [&](int64_t begin, int64_t end) {
      const bool all =
          reader_.read(ids_ + begin, end - begin, values_ + row_offset(begin, head_dim_),
                       scales_ + row_offset(begin, scales_per_row(head_dim_)));
      if (!all) complete = false;
    });
  } catch (const std::exception&) {  // no memory to read with
    memset(values_, kFp8NanMagnitude, static_cast<size_t>(row_offset(num_rows, head_dim_)));
    memset(scales_, kE8m0Nan, static_cast<size_t>(row_offset(num_rows, scales_per_row(head_dim_))));
    complete = false;
  }
  if (!complete) store_fault(fault_, FaultCode::kUnreadRows, layer_, 0);
}

}  // namespace engram
#endif
