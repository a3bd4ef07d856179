// SPDX-License-Identifier: Apache-2.0
#include "lane.h"

#include <map>
#include <utility>

#include "engram/error.h"

namespace engram::plugins {

class SideStream {
 public:
  const Stream stream = make_stream();
};

namespace {

using LaneKey = std::pair<const void*, std::string>;

//! Weak: the plugins of a context hold its lanes, so that its address may be used again after it.
struct Lanes {
  std::mutex mutex;
  std::map<const void*, std::weak_ptr<SideStream>> streams;
  std::map<LaneKey, std::weak_ptr<PrefetchLane>> lanes;
};

Lanes& all_lanes() {
  static auto* const lanes =
      new Lanes();  // outlives engines that are torn down while the process exits
  return *lanes;
}

template <typename Map, typename Make>
auto find_or_make(Map* map, const typename Map::key_type& key, const Make& make) {
  std::erase_if(*map, [](const auto& entry) { return entry.second.expired(); });
  auto found = (*map)[key].lock();
  if (found == nullptr) (*map)[key] = found = make();
  return found;
}

}  // namespace

std::shared_ptr<PrefetchLane> PrefetchLane::of(const void* context, const std::string& table) {
  Lanes& lanes = all_lanes();
  const std::lock_guard lock(lanes.mutex);
  const RelaxedCapture relaxed;
  return find_or_make(&lanes.lanes, {context, table}, [&] {
    return std::make_shared<PrefetchLane>(
        find_or_make(&lanes.streams, context, [] { return std::make_shared<SideStream>(); }),
        table);
  });
}

PrefetchLane::PrefetchLane(std::shared_ptr<SideStream> side, std::string table)
    : side_(std::move(side)),
      table_(std::move(table)),
      forked_(make_event()),
      done_(make_event()) {}

void PrefetchLane::join(cudaStream_t main, const void* rows) {
  const std::lock_guard lock(mutex_);
  ENGRAM_CHECK(rows_ == rows && rows != nullptr, "rows: expected those that an EngramPrefetch of '",
               table_, "' in this execution context has started, found ",
               rows_ == nullptr ? "none started" : "others");
  wait(main);
}

cudaStream_t PrefetchLane::side_stream() const { return side_->stream.get(); }

void PrefetchLane::join_left(cudaStream_t main) {
  const bool is_left = std::exchange(rows_, nullptr) != nullptr;  // first: no error comes twice
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(main, &status), "capture of a prefetch");
  const bool left_by_capture = std::exchange(captured_, status != cudaStreamCaptureStatusNone);
  // What a failed capture left never runs, and no stream may wait for its event.
  if (!is_left || left_by_capture) return;
  if (!captured_) return wait(main);
  // No capture may wait for what is outside of it; its graph runs after this host's wait.
  const RelaxedCapture relaxed;
  check_cuda(cudaEventSynchronize(done_.get()), "end of the prefetch that a failed step left");
}

void PrefetchLane::wait(cudaStream_t main) {
  rows_ = nullptr;
  check_cuda(cudaStreamWaitEvent(main, done_.get(), 0), "join of the side stream");
}

void PrefetchLane::fork(cudaStream_t main) const {
  check_cuda(cudaEventRecord(forked_.get(), main), "fork of the side stream");
  check_cuda(cudaStreamWaitEvent(side_stream(), forked_.get(), 0), "fork of the side stream");
}

}  // namespace engram::plugins
