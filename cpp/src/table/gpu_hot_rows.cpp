// SPDX-License-Identifier: Apache-2.0
#include "table/gpu_hot_rows.h"

#if ENGRAM_CUDA
#include <algorithm>
#include <cstring>
#include <memory>

#include "cuda_handles.h"
#include "engram/row.h"
#include "parallel.h"
#include "table/gpu_memory.h"

namespace engram {
namespace {

constexpr int64_t kPieceRows = 1 << 16;
constexpr int64_t kRowsPerRange = 1 << 11;

struct FreePinned {
  void operator()(uint8_t* memory) const { forget_error(cudaFreeHost(memory)); }
};
using Pinned = std::unique_ptr<uint8_t, FreePinned>;

Pinned make_pinned(int64_t num_bytes) {
  void* memory = nullptr;
  check_cuda(cudaMallocHost(&memory, static_cast<size_t>(num_bytes)),
             "pinned memory for hot rows on their way to a GPU");
  return Pinned(static_cast<uint8_t*>(memory));
}

//! Copies row `row` of `rows` to place `place` of `to`.
void copy_row(const uint8_t* rows, int64_t row, int row_bytes, uint8_t* to, int64_t place) {
  memcpy(to + row_offset(place, row_bytes), rows + row_offset(row, row_bytes),
         static_cast<size_t>(row_bytes));
}

void copy_up(uint8_t* to, const void* from, int64_t num_bytes, cudaStream_t stream) {
  check_cuda(
      cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyHostToDevice, stream),
      "hot rows to a GPU");
}

}  // namespace

engram_hot_rows GpuHotRows::on_device(int device) {
  if (buckets_.empty()) return {};
  require_cuda(device);
  const std::lock_guard lock(mutex_);
  const OnGpu gpu(device);
  if (copies_.count(device) == 0) copies_.emplace(device, copy_to(device));
  const Copy& copy = copies_.at(device);
  return {.keys = reinterpret_cast<const int32_t*>(copy.keys.get()),
          .values = copy.values.get(),
          .scales = copy.scales.get(),
          .counts = reinterpret_cast<uint64_t*>(copy.counts.get()),
          .num_buckets = static_cast<int64_t>(buckets_.size())};
}

GpuHotRows::Copy GpuHotRows::copy_to(int device) const {
  const char* const what = "hot rows";
  const int64_t scale_bytes = row_offset(capacity(), scales_per_row(source_.head_dim));
  const auto num_buckets = static_cast<int64_t>(buckets_.size());
  Copy copy{.keys = {device, row_offset(num_buckets, sizeof(HotBucket)), what},
            .values = {device, row_offset(capacity(), source_.head_dim), what},
            .scales = {},
            .counts = {device, count_bytes(), what}};
  if (source_.scales != nullptr) copy.scales = {device, scale_bytes, what};
  fill(copy);
  return copy;
}

void GpuHotRows::fill(const Copy& copy) const {
  const Stream stream = make_stream();
  const int num_scales = source_.scales == nullptr ? 0 : scales_per_row(source_.head_dim);
  const int64_t values_bytes = row_offset(kPieceRows, source_.head_dim);
  const Pinned staged = make_pinned(values_bytes + row_offset(kPieceRows, num_scales));
  uint8_t* const values = staged.get();
  uint8_t* const scales = staged.get() + values_bytes;
  const auto* const keys = reinterpret_cast<const int32_t*>(buckets_.data());
  for (int64_t begin = 0; begin < capacity(); begin += kPieceRows) {
    const int64_t count = std::min(kPieceRows, capacity() - begin);
    parallel_for(count, kRowsPerRange, 0, [&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) {
        const int32_t row = keys[begin + i];
        if (row == kNoKey) continue;
        copy_row(source_.values, row, source_.head_dim, values, i);
        if (num_scales > 0) copy_row(source_.scales, row, num_scales, scales, i);
      }
    });
    copy_up(copy.values.get() + row_offset(begin, source_.head_dim), values,
            row_offset(count, source_.head_dim), stream.get());
    if (num_scales > 0) {
      copy_up(copy.scales.get() + row_offset(begin, num_scales), scales,
              row_offset(count, num_scales), stream.get());
    }
    check_cuda(cudaStreamSynchronize(stream.get()), "hot rows to a GPU");
  }
  copy_up(copy.keys.get(), keys, row_offset(capacity(), sizeof(int32_t)), stream.get());
  check_cuda(
      cudaMemsetAsync(copy.counts.get(), 0, static_cast<size_t>(count_bytes()), stream.get()),
      "hot rows' counts");
  check_cuda(cudaStreamSynchronize(stream.get()), "hot rows to a GPU");
}

int64_t GpuHotRows::count_bytes() const {
  return row_offset(source_.num_columns, sizeof(HotCounts));
}

int64_t GpuHotRows::num_bytes() const {
  const int num_scales = source_.scales == nullptr ? 0 : scales_per_row(source_.head_dim);
  const int64_t row_bytes = source_.head_dim + num_scales + int64_t{sizeof(int32_t)};
  const std::lock_guard lock(mutex_);
  return row_offset(static_cast<int64_t>(copies_.size()),
                    row_offset(capacity(), row_bytes) + count_bytes());
}

std::vector<HotCounts> GpuHotRows::counts() const {
  std::vector<HotCounts> sums(static_cast<size_t>(source_.num_columns));
  std::vector<HotCounts> found(sums.size());
  const std::lock_guard lock(mutex_);
  for (const auto& [device, copy] : copies_) {
    const OnGpu gpu(device);
    const Stream stream = make_stream();  // one that waits for no lookup
    check_cuda(cudaMemcpyAsync(found.data(), copy.counts.get(), static_cast<size_t>(count_bytes()),
                               cudaMemcpyDeviceToHost, stream.get()),
               "hot rows' counts");
    check_cuda(cudaStreamSynchronize(stream.get()), "hot rows' counts");
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i].num_asked += found[i].num_asked;
      sums[i].num_found += found[i].num_found;
    }
  }
  return sums;
}

}  // namespace engram
#else
#include "cuda_support.h"

namespace engram {

engram_hot_rows GpuHotRows::on_device(int device) {
  require_cuda(device);
  return {};
}

int64_t GpuHotRows::num_bytes() const { return 0; }

std::vector<HotCounts> GpuHotRows::counts() const {
  return std::vector<HotCounts>(static_cast<size_t>(source_.num_columns));
}

}  // namespace engram
#endif
