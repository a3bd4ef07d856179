// SPDX-License-Identifier: Apache-2.0
#include "table/lane.h"

#if ENGRAM_CUDA
#include <algorithm>
#include <atomic>
#include <utility>

#include "check.h"
#include "engram/ops.h"
#include "table/disk_lane.h"
#include "table/gather_lane.h"
#include "table/gpu_memory.h"

namespace engram {
namespace {

//! A lane that a graph has kept. NOTE: CUDA calls leave() on a thread of its own that may neither
//! call CUDA nor wait, so it takes no lock and no memory.
struct LeftLane {
  std::shared_ptr<Lane> lane;
  LeftLane* next = nullptr;
};
std::atomic<LeftLane*> left_lanes{nullptr};

void CUDART_CB leave(void* kept) {
  auto* const left = static_cast<LeftLane*>(kept);
  left->next = left_lanes.load();
  while (!left_lanes.compare_exchange_weak(left->next, left)) {
  }
}

cudaError_t find_graph(cudaStream_t stream, cudaGraph_t* graph) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t code = cudaStreamGetCaptureInfo(stream, &status, nullptr, graph);
  if (status == cudaStreamCaptureStatusNone) *graph = nullptr;
  return code;
}

std::unique_ptr<Lane> new_lane(const Table& table, int device, int64_t num_tokens) {
  if (table.disk() != nullptr) return std::make_unique<DiskLane>(table, device, num_tokens);
  return std::make_unique<GatherLane>(table, device, num_tokens);
}

}  // namespace

Lane::Lane(const Table& table, int device, const std::string& label)
    : num_columns_(table.info().num_columns), device_(device) {
  const OnGpu gpu(device);
  done_ = make_event(label.c_str());
}

Lane::~Lane() {
  const OnGpu gpu(device_, std::nothrow);
  done_.reset();
}

void Lane::finish() { forget_error(cudaEventSynchronize(done_.get())); }

bool Lane::is_idle() const {
  const RelaxedCapture relaxed;
  const cudaError_t code = cudaEventQuery(done_.get());
  forget_error(code);
  return code == cudaSuccess;
}

cudaError_t Lane::lookup(const engram_lookup_args& args, cudaStream_t stream) {
  check_lookup_call(args);
  if (args.num_tokens == 0) return cudaSuccess;
  check_range(args.num_columns, "num_columns", 1, num_columns_);
  cudaGraph_t graph = nullptr;
  cudaError_t code = find_graph(stream, &graph);
  if (code == cudaSuccess && graph != nullptr) code = keep_for(graph);
  if (code != cudaSuccess) return code;
  code = enqueue(args, stream);
  // What came before a failure is begun all the same.
  const cudaError_t end = graph == nullptr ? cudaEventRecord(done_.get(), stream) : cudaSuccess;
  return code != cudaSuccess ? code : end;
}

cudaError_t Lane::keep_for(cudaGraph_t graph) {
  auto kept = std::make_unique<LeftLane>();
  kept->lane = shared_from_this();
  cudaUserObject_t object = nullptr;
  cudaError_t code =
      cudaUserObjectCreate(&object, kept.get(), leave, 1, cudaUserObjectNoDestructorSync);
  if (code != cudaSuccess) return code;
  kept.release();  // the object's
  code = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (code != cudaSuccess) forget_error(cudaUserObjectRelease(object, 1));
  return code;
}

std::shared_ptr<Lane> make_lane(std::shared_ptr<const Table> table, int device,
                                int64_t num_tokens) {
  free_left_lanes();
  std::unique_ptr<Lane> lane = new_lane(*table, device, num_tokens);
  return {lane.release(), [table = std::move(table)](Lane* ended) { delete ended; }};
}

void free_left_lanes() {
  for (LeftLane* left = left_lanes.exchange(nullptr); left != nullptr;) {
    const std::unique_ptr<LeftLane> freed(left);
    left = left->next;
  }
}

void Lanes::lookup(const engram_lookup_args& args, int device, cudaStream_t stream) {
  const std::shared_ptr<const Table> table = table_.lock();
  ENGRAM_CHECK(table != nullptr, "lookup: expected a table that is bound, found one that is gone");
  const DeviceGuard guard(device);
  cudaGraph_t graph = nullptr;
  check_cuda(find_graph(stream, &graph), "lookup");
  if (graph != nullptr) {
    const auto lane = make_lane(table, device, args.num_tokens);
    check_cuda(lane->lookup(args, stream), "lookup");
    return;
  }
  free_left_lanes();
  const std::lock_guard lock(mutex_);
  check_cuda(idle_lane(*table, device).lookup(args, stream), "lookup");
}

Lane& Lanes::idle_lane(const Table& table, int device) {
  const auto found = std::find_if(lanes_.begin(), lanes_.end(), [device](const auto& lane) {
    return lane->device() == device && lane->is_idle();
  });
  if (found != lanes_.end()) return **found;
  return *lanes_.emplace_back(new_lane(table, device, INT64_MAX));
}

}  // namespace engram
#endif
