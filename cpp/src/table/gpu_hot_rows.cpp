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
  if (buckets_.empty() && num_adaptive_buckets_ == 0) return {};
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
  const auto& [fixed, adaptive, counts] = *copy;
  return {.keys = reinterpret_cast<const int32_t*>(fixed.index.get()),
          .values = fixed.values.get(),
          .scales = fixed.scales.get(),
          .counts = reinterpret_cast<uint64_t*>(counts.get()),
          .num_buckets = static_cast<int64_t>(buckets_.size()),
          .adaptive = {.slots = reinterpret_cast<uint64_t*>(adaptive.index.get()),
                       .values = adaptive.values.get(),
                       .scales = adaptive.scales.get(),
                       .num_buckets = num_adaptive_buckets_}};
}

const GpuHotRows::Copy* GpuHotRows::find(int device) const {
  const std::lock_guard lock(mutex_);
  const auto found = copies_.find(device);
  return found == copies_.end() ? nullptr : &found->second;
}

GpuHotRows::Part GpuHotRows::part_on(int device, int64_t num_rows, int64_t index_bytes) const {
  if (num_rows == 0) return {};
  const std::string what = source_.label + ": hot rows";
  Part part{.index = {device, index_bytes, what},
            .values = {device, row_offset(num_rows, source_.head_dim), what},
            .scales = {}};
  if (source_.scales != nullptr) {
    part.scales = {device, row_offset(num_rows, scales_per_row(source_.head_dim)), what};
  }
  return part;
}

GpuHotRows::Copy GpuHotRows::copy_to(int device) const {
  Copy copy{.fixed = part_on(device, capacity(), row_offset(capacity(), sizeof(int32_t))),
            .adaptive = part_on(device, adaptive_capacity(),
                                row_offset(adaptive_capacity(), sizeof(uint64_t))),
            .counts = {device, count_bytes(), source_.label + ": hot rows"}};
  fill(copy, concat(source_.label, ": hot rows: their way to GPU ", pci_bus_id(device)));
  return copy;
}

void GpuHotRows::fill(const Copy& copy, const std::string& what) const {
  const Stream stream = make_stream(what.c_str());
  const auto set = [&](const DeviceBytes& bytes, int value, int64_t num_bytes) {
    if (num_bytes == 0) return;
    check_cuda(cudaMemsetAsync(bytes.get(), value, static_cast<size_t>(num_bytes), stream.get()),
               what.c_str());
  };
  static_assert(kEmptySlot == ~uint64_t{0});
  set(copy.adaptive.index, 0xFF, row_offset(adaptive_capacity(), sizeof(uint64_t)));
  set(copy.counts, 0, count_bytes());
  if (capacity() > 0) fill_fixed(copy.fixed, stream.get(), what);
  check_cuda(cudaStreamSynchronize(stream.get()), what.c_str());
}

void GpuHotRows::fill_fixed(const Part& part, cudaStream_t stream, const std::string& what) const {
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
    copy_up(part.values.get() + row_offset(begin, source_.head_dim), values,
            row_offset(count, source_.head_dim), stream, what);
    if (num_scales > 0) {
      copy_up(part.scales.get() + row_offset(begin, num_scales), scales,
              row_offset(count, num_scales), stream, what);
    }
    check_cuda(cudaStreamSynchronize(stream), what.c_str());
  }
  copy_up(part.index.get(), keys, row_offset(capacity(), sizeof(int32_t)), stream, what);
}

int64_t GpuHotRows::count_bytes() const {
  return row_offset(source_.num_columns, sizeof(HotCounts));
}

int64_t GpuHotRows::num_bytes() const {
  const int num_scales = source_.scales == nullptr ? 0 : scales_per_row(source_.head_dim);
  const int row_bytes = source_.head_dim + num_scales;
  const int64_t gpu_bytes = row_offset(capacity(), row_bytes + int64_t{sizeof(int32_t)}) +
                            row_offset(adaptive_capacity(), row_bytes + int64_t{sizeof(uint64_t)}) +
                            count_bytes();
  const std::lock_guard lock(mutex_);
  return row_offset(static_cast<int64_t>(copies_.size()), gpu_bytes);
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
      sums[i].num_adaptive += last[i].num_adaptive;
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
