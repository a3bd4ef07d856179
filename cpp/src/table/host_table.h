// SPDX-License-Identifier: Apache-2.0
//! \file host_table.h
//! An array in host memory, most often one that other processes map too.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "engram/table.h"
#include "table/registration.h"

namespace engram {

class HostArray final : public TableArray {
 public:
  //! Takes over memory that is filled, or is about to be.
  explicit HostArray(HostMemory memory);
  //! Unregisters, then unmaps.
  ~HostArray() override;

  HostMemory& memory() { return *memory_; }
  //! Makes it readable for all GPUs of the process, through the context of `device`, and from then
  //! on read-only for the CPU. Once; thread-safe. Throws Error.
  void enroll(int device, const std::function<bool()>& cancelled);

  //! Read-only for this process, from here on: for memory that is filled, and that no GPU is about
  //! to register. Throws Error.
  void protect() override;

  const uint8_t* on_device(int device) override;
  const uint8_t* on_host() override { return memory_->data(); }
  const HostMemory* host_memory() const override { return memory_.get(); }
  std::optional<double> registered_seconds() const override;

 private:
  std::unique_ptr<HostMemory> memory_;
  mutable std::mutex mutex_;
  std::optional<Registration> registration_;
};

}  // namespace engram
