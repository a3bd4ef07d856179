// SPDX-License-Identifier: Apache-2.0
#include "table/gpu_hot_rows.h"

#if ENGRAM_CUDA
#include <algorithm>
#include <cstring>

#include "cuda_handles.h"
#include "engram/error.h"
#include "engram/row.h"
#include "parallel.h"
#include "table/gpu_memory.h"

namespace engram {
namespace {

constexpr int64_t kPieceRows = 1 << 16;
constexpr int64_t kRowsPerRange = 1 << 11;

//! Copies row `row` of `rows` to place `place` of `to`.
void copy_row(const uint8_t* rows, int64_t row, int row_bytes, uint8_t* to, int64_t place) {
  memcpy(to + row_offset(place, row_bytes), rows + row_offset(row, row_bytes),
         static_cast<size_t>(row_bytes));
}

void copy_up(uint8_t* to, const void* from, int64_t num_bytes, cudaStream_t stream,
             const std::string& what) {
  check_cuda(
      cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyHostToDevice, stream),
      what.c_str());
}

//! What a GPU has counted; where it cannot be asked, `counts` stay as they are.
void ask(int device, const DeviceBytes& from, std::vector<HotCounts>* counts) {
  if (!from.is_owned()) return;
  try {
    const OnGpu gpu(device);
    const Stream stream = make_stream();  // one that waits for no lookup
    std::vector<HotCounts> found(counts->size());
    const size_t num_bytes = found.size() * sizeof(HotCounts);
    check_cuda(
        cudaMemcpyAsync(found.data(), from.get(), num_bytes, cudaMemcpyDeviceToHost, stream.get()),
        "counts of hot rows");
    check_cuda(cudaStreamSynchronize(stream.get()), "counts of hot rows");
    *counts = std::move(found);
  } catch (const Error&) {
    return;  // lookups on that GPU tell of it
  }
}

}  // namespace

engram_hot_rows GpuHotRows::on_device(int device) {
  if (buckets_.empty()) return {};
  require_cuda(device);
  const Copy* copy = find(device);
  if (copy == nullptr) {
    const std::lock_guard making(making_);
    if (find(device) == nullptr) {
      const OnGpu gpu(device);
      Copy made = copy_to(device);
      const std::lock_guard lock(mutex_);
      copies_.emplace(device, std::move(made));
    }
    copy = find(device);
  }
  return {.keys = reinterpret_cast<const int32_t*>(copy->keys.get()),
          .values = copy->values.get(),
          .scales = copy->scales.get(),
          .counts = reinterpret_cast<uint64_t*>(copy->counts.get()),
          .num_buckets = static_cast<int64_t>(buckets_.size())};
}

const GpuHotRows::Copy* GpuHotRows::find(int device) const {
  const std::lock_guard lock(mutex_);
  const auto found = copies_.find(device);
  return found == copies_.end() ? nullptr : &found->second;
}

GpuHotRows::Copy GpuHotRows::copy_to(int device) const {
  const std::string what = source_.label + ": hot rows";
  const int64_t scale_bytes = row_offset(capacity(), scales_per_row(source_.head_dim));
  const auto num_buckets = static_cast<int64_t>(buckets_.size());
  Copy copy{.keys = {device, row_offset(num_buckets, sizeof(HotBucket)), what},
            .values = {device, row_offset(capacity(), source_.head_dim), what},
            .scales = {},
            .counts = {device, count_bytes(), what}};
  if (source_.scales != nullptr) copy.scales = {device, scale_bytes, what};
  fill(copy, concat(what, ": their way to GPU ", pci_bus_id(device)));
  return copy;
}

void GpuHotRows::fill(const Copy& copy, const std::string& what) const {
  const Stream stream = make_stream(what.c_str());
  const int num_scales = source_.scales == nullptr ? 0 : scales_per_row(source_.head_dim);
  const int64_t values_bytes = row_offset(kPieceRows, source_.head_dim);
  const PinnedBytes staged =
      make_pinned(values_bytes + row_offset(kPieceRows, num_scales), what.c_str());
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
            row_offset(count, source_.head_dim), stream.get(), what);
    if (num_scales > 0) {
      copy_up(copy.scales.get() + row_offset(begin, num_scales), scales,
              row_offset(count, num_scales), stream.get(), what);
    }
    check_cuda(cudaStreamSynchronize(stream.get()), what.c_str());
  }
  copy_up(copy.keys.get(), keys, row_offset(capacity(), sizeof(int32_t)), stream.get(), what);
  check_cuda(
      cudaMemsetAsync(copy.counts.get(), 0, static_cast<size_t>(count_bytes()), stream.get()),
      what.c_str());
  check_cuda(cudaStreamSynchronize(stream.get()), what.c_str());
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
  std::map<int, const DeviceBytes*> counted;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [device, copy] : copies_) counted[device] = &copy.counts;
  }
  std::vector<HotCounts> sums(static_cast<size_t>(source_.num_columns));
  const std::lock_guard counting(counting_);
  for (const auto& [device, counts] : counted) {
    std::vector<HotCounts>& last = last_counts_[device];
    last.resize(sums.size());
    ask(device, *counts, &last);
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i].num_asked += last[i].num_asked;
      sums[i].num_found += last[i].num_found;
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
