// SPDX-License-Identifier: Apache-2.0
//! \file device_table.h
//! An array, or a range of one, in the memory of GPUs: a copy on each that asks.
#pragma once

#include <functional>
#include <memory>

#include "engram/table.h"
#include "table/load.h"

namespace engram {

//! A TableArray that loads its bytes when a GPU first asks for them.
class DeviceArray : public TableArray {
 public:
  //! Loads them now; on_device(device) then finds them. Throws Error.
  virtual void load(int device, const std::function<bool()>& cancelled,
                    const std::function<void(int64_t)>& add_bytes) = 0;
};

//! Bytes [begin, end) of the source. `verify`: compare with the source's sums. Throws Error where
//! there is no GPU, or the file cannot be read.
std::unique_ptr<DeviceArray> make_device_array(const Source& source, int64_t begin, int64_t end,
                                               bool verify);

}  // namespace engram
