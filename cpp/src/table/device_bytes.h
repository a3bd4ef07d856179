// SPDX-License-Identifier: Apache-2.0
//! \file device_bytes.h
//! Memory of one GPU that frees itself.
#pragma once

#if ENGRAM_CUDA
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>

namespace engram {

//! A forked child's copy frees nothing: CUDA is its parent's.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  //! Throws Error, which begins with `label`. NOTE: `device` must be the current one.
  DeviceBytes(int device, int64_t num_bytes, const std::string& label);
  DeviceBytes(DeviceBytes&& other) noexcept { *this = std::move(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept;
  ~DeviceBytes();

  uint8_t* get() const { return bytes_; }
  //! False in a forked child, which has no CUDA.
  bool is_owned() const;

 private:
  uint8_t* bytes_ = nullptr;
  int device_ = 0;
  pid_t owner_ = 0;
};

}  // namespace engram
#endif
