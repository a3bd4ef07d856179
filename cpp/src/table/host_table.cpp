// SPDX-License-Identifier: Apache-2.0
#include "table/host_table.h"

#include "cuda_support.h"
#include "engram/error.h"
#include "table/points.h"

namespace engram {

HostArray::HostArray(HostMemory memory)
    : memory_(std::make_unique<HostMemory>(std::move(memory))) {}

HostArray::~HostArray() {
  ENGRAM_POINT("unbind.unregister");
  registration_.reset();
  ENGRAM_POINT("unbind.unmap");
  memory_.reset();
  ENGRAM_POINT("unbind.end");
}

void HostArray::enroll(int device, const std::function<bool()>& cancelled) {
  require_cuda(device);
  const std::lock_guard lock(mutex_);
  if (registration_) return;
  // NOTE: most drivers pin pages for writing, which takes a mapping that may be written to.
  if (!can_register_read_only(device)) memory_->unprotect();
  try {
    registration_.emplace(*memory_, device, cancelled);
  } catch (...) {
    memory_->protect();
    throw;
  }
  memory_->protect();
}

void HostArray::protect() {
  const std::lock_guard lock(mutex_);
  memory_->protect();
}

const uint8_t* HostArray::on_device(int device) {
  enroll(device, {});
  const std::lock_guard lock(mutex_);
  return registration_->on_device(device);
}

std::optional<double> HostArray::registered_seconds() const {
  const std::lock_guard lock(mutex_);
  return registration_ ? std::optional(registration_->seconds()) : std::nullopt;
}

}  // namespace engram
