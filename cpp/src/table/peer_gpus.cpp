// SPDX-License-Identifier: Apache-2.0
// That every GPU of a group can read every other's memory is tried, not asked: a process may see
// no GPU but its own, and machines exist on which the driver promises what the bus does not do.
#include <algorithm>

#include "cuda_support.h"
#include "engram/error.h"
#include "table/group.h"
#include "table/sharded_table.h"

#if ENGRAM_CUDA
#include <memory>

#include "cuda_handles.h"
#include "table/formula_cuda.h"
#include "table/gpu_memory.h"
#endif

namespace engram {

#if ENGRAM_CUDA
namespace {

FormulaKey trial_key(size_t rank) {
  return {0, FormulaTensor::kValues, uint64_t{0x7472} + static_cast<uint64_t>(rank)};
}

//! A granule of this rank's GPU, filled with what nobody else's holds.
class Granule {
 public:
  Granule(int device, int rank)
      : memory_(GpuMemory::create(device, kGranuleBytes, "trial of peer access")),
        addresses_(kGranuleBytes, "trial of peer access") {
    addresses_.map(0, kGranuleBytes, memory_);
    addresses_.allow(device);
    const Stream stream = make_stream("trial of peer access");
    check_cuda(fill_formula_cuda(trial_key(static_cast<size_t>(rank)), 0, kGranuleBytes,
                                 addresses_.data(), stream.get()),
               "trial of peer access");
    check_cuda(cudaStreamSynchronize(stream.get()), "trial of peer access");
  }

  FileDescriptor descriptor() const { return memory_.export_descriptor("trial of peer access"); }

 private:
  GpuMemory memory_;
  GpuAddresses addresses_;
};

struct FreeDevice {
  void operator()(unsigned long long* count) const { forget_error(cudaFree(count)); }
};

//! Throws Error unless a kernel of `device` reads what the rank that exported the granule wrote.
void read_granule(const FileDescriptor& descriptor, size_t rank, int device) {
  const GpuMemory memory = GpuMemory::import(descriptor, "granule");
  GpuAddresses addresses(kGranuleBytes, "granule");
  addresses.map(0, kGranuleBytes, memory);
  addresses.allow(device);
  void* bytes = nullptr;
  check_cuda(cudaMalloc(&bytes, sizeof(unsigned long long)), "counter");
  const std::unique_ptr<unsigned long long, FreeDevice> wrong(
      static_cast<unsigned long long*>(bytes));
  const Stream stream = make_stream();
  check_cuda(cudaMemsetAsync(wrong.get(), 0, sizeof(*wrong), stream.get()), "counter");
  check_cuda(check_formula_cuda(trial_key(rank), 0, kGranuleBytes, addresses.data(), wrong.get(),
                                stream.get()),
             "read");
  check_cuda(cudaStreamSynchronize(stream.get()), "read");
  unsigned long long num_wrong = 0;
  check_cuda(cudaMemcpy(&num_wrong, wrong.get(), sizeof(num_wrong), cudaMemcpyDeviceToHost),
             "counter");
  if (num_wrong > 0) {
    throw Error(ENGRAM_CUDA_ERROR, concat(num_wrong, " wrong bytes of ", kGranuleBytes));
  }
}

//! The GPUs that cannot be read, in one line; empty where there are none.
std::string unreadable(const std::vector<Group::Part>& parts, size_t my_rank, int device) {
  std::string text;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (rank == my_rank) continue;
    try {
      read_granule(parts[rank].fds.at(0), rank, device);
    } catch (const Error& error) {
      text += concat(text.empty() ? "" : ", ", parts[rank].data.at("gpu").get<std::string>(),
                     " of rank ", rank, " (", error.what(), ")");
    }
  }
  return text;
}

}  // namespace

PeerGpus::PeerGpus(Group& group, int device) : device_(device) {
  const auto my_rank = static_cast<size_t>(group.rank());
  std::unique_ptr<Granule> granule;  // until everybody has read it
  const std::vector<Group::Part> granules = group.exchange("gpus", [&](Group::Work&) {
    require_cuda(std::max(device, 0));  // -1: what there is not is told
    check_can_share(device);
    const OnGpu gpu(device);
    granule = std::make_unique<Granule>(device, group.rank());
    Group::Part part;
    part.data = {{"gpu", pci_bus_id(device)}};
    part.fds.push_back(granule->descriptor());
    return part;
  });
  std::vector<std::string> bus_ids;  // by rank
  for (const Group::Part& part : granules) {
    bus_ids.push_back(part.data.at("gpu").get<std::string>());
  }
  group.exchange("peers", [&](Group::Work&) {
    const OnGpu gpu(device);
    const std::string text = unreadable(granules, my_rank, device);
    if (!text.empty()) {
      throw Error(ENGRAM_CUDA_ERROR,
                  concat("GPU ", bus_ids[my_rank], " cannot read the memory of ", text));
    }
    return Group::Part{};
  });
}

#else

PeerGpus::PeerGpus(Group&, int device) : device_(device) { require_cuda(0); }

#endif

}  // namespace engram
