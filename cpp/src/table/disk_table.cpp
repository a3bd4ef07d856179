// SPDX-License-Identifier: Apache-2.0
#include "table/disk_table.h"

#include "engram/error.h"

namespace engram {

const uint8_t* DiskArray::on_device(int device) {
  throw Error(ENGRAM_INVALID_ARGUMENT,
              concat(label_, ": expected placement host, device or device_sharded for lookups on ",
                     "CUDA device ", device, ", found disk, which CPUs read"));
}

}  // namespace engram
