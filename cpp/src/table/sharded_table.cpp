// SPDX-License-Identifier: Apache-2.0
#include "table/sharded_table.h"

#include <algorithm>
#include <mutex>

#include "cuda_support.h"
#include "engram/error.h"
#include "table/group.h"
#include "table/load.h"
#include "table/upload.h"

#if ENGRAM_CUDA
#include "table/gpu_memory.h"
#endif

namespace engram {

#if ENGRAM_CUDA
namespace {

//! Of all ranks, in one exchange. Rank 0 passes them on, so it has each twice for a moment, which
//! must stay well below the usual limit of 1024.
constexpr size_t kMaxDescriptors = 240;

}  // namespace

class ShardedArray::Mapping {
 public:
  Mapping(Group& group, const PeerGpus& gpus, Parts cut, std::string label)
      : parts(std::move(cut)),
        rank(group.rank()),
        device(gpus.device()),
        label_(std::move(label)),
        runs_(static_cast<size_t>(group.size())) {
    ENGRAM_CHECK(parts.num_ranks() == group.size(), label_, ": expected parts for ", group.size(),
                 " ranks, found ", parts.num_ranks());
    for (const Parts::Run& run : parts.runs()) runs_[static_cast<size_t>(run.rank)].push_back(run);
    size_t most_runs = 0;
    for (const auto& runs : runs_) most_runs = std::max(most_runs, runs.size());
    const size_t batch = std::max<size_t>(1, kMaxDescriptors / runs_.size());
    for (size_t first = 0; first < most_runs; first += batch) share(group, first, first + batch);
    group.exchange("access", [&](Group::Work&) {
      const OnGpu gpu(device);
      allow(device);
      return Group::Part{};
    });
  }

  uint8_t* data() const { return addresses_->data(); }

  void allow(int reader) {
    const std::lock_guard lock(mutex_);
    addresses_->allow(reader);
  }

  const Parts parts;
  const int rank;
  const int device;

 private:
  //! Creates this rank's runs [first, last), as far as there are, and maps those of all ranks.
  void share(Group& group, size_t first, size_t last) {
    const std::vector<Group::Part> shared = group.exchange("allocate", [&](Group::Work&) {
      const OnGpu gpu(device);
      if (addresses_ == nullptr) {
        addresses_ = std::make_unique<GpuAddresses>(parts.mapped_bytes(), label_);
      }
      Group::Part part;
      const auto& runs = runs_[static_cast<size_t>(rank)];
      for (size_t i = first; i < std::min(last, runs.size()); ++i) {
        const int64_t num_bytes = runs[i].end - runs[i].begin;
        const GpuMemory memory = GpuMemory::create(device, num_bytes, label_);
        addresses_->map(runs[i].begin, num_bytes, memory);
        part.fds.push_back(memory.export_descriptor(label_));
      }
      return part;
    });
    group.exchange("map", [&](Group::Work&) {
      const OnGpu gpu(device);
      for (size_t other = 0; other < shared.size(); ++other) {
        if (static_cast<int>(other) != rank) map(shared[other].fds, other, first, last);
      }
      return Group::Part{};
    });
  }

  //! Maps another rank's runs [first, last), as far as there are.
  void map(const std::vector<FileDescriptor>& descriptors, size_t other, size_t first,
           size_t last) {
    const auto& runs = runs_[other];
    const size_t expected = std::min(last, runs.size()) - std::min(first, runs.size());
    ENGRAM_CHECK(descriptors.size() == expected, label_, ": expected ", expected,
                 " descriptors of rank ", other, ", found ", descriptors.size());
    for (size_t i = 0; i < expected; ++i) {
      const Parts::Run& run = runs[first + i];
      addresses_->map(run.begin, run.end - run.begin, GpuMemory::import(descriptors[i], label_));
    }
  }

  std::string label_;
  std::vector<std::vector<Parts::Run>> runs_;  // by rank
  std::unique_ptr<GpuAddresses> addresses_;
  std::mutex mutex_;
};

ShardedArray::ShardedArray(Group& group, const PeerGpus& gpus, Parts parts, std::string label)
    : mapping_(std::make_unique<Mapping>(group, gpus, std::move(parts), std::move(label))) {}

void ShardedArray::load(const SourceReader& reader, bool verify,
                        const std::function<bool()>& cancelled,
                        const std::function<void(int64_t)>& add_bytes) {
  const Source& source = reader.source();
  ENGRAM_CHECK(parts().num_bytes() == source.file.num_bytes, source.name, ": expected ",
               parts().num_bytes(), " bytes, found ", source.file.num_bytes);
  std::vector<UploadRange> ranges;
  for (const Parts::Run& run : parts().runs()) {
    if (run.rank != mapping_->rank) continue;
    const int64_t end = std::min(run.end, parts().num_bytes());
    ranges.push_back({run.begin, end, mapping_->data() + run.begin});
  }
  UploadOptions options;
  options.device = mapping_->device;
  options.num_threads = loader_threads(parts().num_ranks());
  options.verify = verify;
  options.cancelled = cancelled;
  options.add_bytes = add_bytes;
  upload(reader, ranges, options);
}

const uint8_t* ShardedArray::on_device(int device) {
  require_cuda(device);
  const OnGpu gpu(device);
  mapping_->allow(device);
  return mapping_->data();
}

const Parts& ShardedArray::parts() const { return mapping_->parts; }

#else

// NOTE: PeerGpus, without which no array is made, has thrown.
class ShardedArray::Mapping {
 public:
  Parts parts;
};

ShardedArray::ShardedArray(Group&, const PeerGpus& gpus, Parts parts, std::string)
    : mapping_(new Mapping{std::move(parts)}) {
  require_cuda(gpus.device());
}

void ShardedArray::load(const SourceReader&, bool, const std::function<bool()>&,
                        const std::function<void(int64_t)>&) {}

const uint8_t* ShardedArray::on_device(int) { return nullptr; }

const Parts& ShardedArray::parts() const { return mapping_->parts; }

#endif

ShardedArray::~ShardedArray() = default;

}  // namespace engram
