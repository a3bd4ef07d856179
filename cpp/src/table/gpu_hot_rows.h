// SPDX-License-Identifier: Apache-2.0
//! \file gpu_hot_rows.h
//! Hot rows of a table in host memory: copies of some of its rows in the memory of each GPU that
//! looks up in it, a static part, filled here, and an adaptive one, which lookups fill.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engram/engram.h"
#include "ops/adaptive_index.h"
#include "table/device_bytes.h"
#include "table/hot_buckets.h"

#if ENGRAM_CUDA
#include <cuda_runtime_api.h>
#endif

namespace engram {

//! What hot rows are copied of.
struct HotSource {
  std::string label;                //!< of the table, for errors
  const uint8_t* values = nullptr;  //!< FP8, from row id 0 on, in host memory
  const uint8_t* scales = nullptr;  //!< E8M0, or null: GPUs have all scales
  int32_t head_dim = 0;
  int32_t num_columns = 0;  //!< of the lookups, which are counted by them
};

//! Of a column, over all GPUs, since they have the rows.
struct HotCounts {
  uint64_t num_asked = 0;
  uint64_t num_found = 0;     //!< in the static part
  uint64_t num_adaptive = 0;  //!< found in the adaptive one
};

class GpuHotRows {
 public:
  //! Takes no memory of a GPU yet. The source lives as long as this object.
  GpuHotRows(HotSource source, std::vector<HotBucket> buckets, int64_t num_adaptive_buckets)
      : source_(std::move(source)),
        buckets_(std::move(buckets)),
        num_rows_(count_hot_rows(buckets_)),
        num_adaptive_buckets_(num_adaptive_buckets) {}

  //! What lookups on a device are told, which the first call copies to it. Thread-safe, and allowed
  //! while any thread captures. Throws Error.
  engram_hot_rows on_device(int device);

  //! Of the static part.
  int64_t num_rows() const { return num_rows_; }
  int64_t capacity() const { return row_offset(static_cast<int64_t>(buckets_.size()), kHotWays); }
  int64_t adaptive_capacity() const { return row_offset(num_adaptive_buckets_, kAdaptiveWays); }
  //! On all GPUs that have them, the index included.
  int64_t num_bytes() const;
  //! [num_columns]; kernels that run may be counted later. Of a GPU that cannot be asked, as in a
  //! forked child, what it last said.
  std::vector<HotCounts> counts() const;

 private:
  HotSource source_;
  std::vector<HotBucket> buckets_;
  int64_t num_rows_;
  int64_t num_adaptive_buckets_;
#if ENGRAM_CUDA
  //! A part: what finds its rows, and these.
  struct Part {
    DeviceBytes index, values, scales;
  };
  struct Copy {
    Part fixed, adaptive;
    DeviceBytes counts;
  };
  Part part_on(int device, int64_t num_rows, int64_t index_bytes) const;
  int64_t count_bytes() const;
  const Copy* find(int device) const;
  Copy copy_to(int device) const;  // the current one
  void fill(const Copy& copy, const std::string& what) const;
  void fill_fixed(const Part& part, cudaStream_t stream, const std::string& what) const;

  std::mutex making_;         //!< of copies, each of which takes a while
  mutable std::mutex mutex_;  //!< of the map; what is in it stays
  std::map<int, Copy> copies_;
  mutable std::mutex counting_;
  mutable std::map<int, std::vector<HotCounts>> last_counts_;
#endif
};

}  // namespace engram
