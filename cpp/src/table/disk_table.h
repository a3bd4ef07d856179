// SPDX-License-Identifier: Apache-2.0
//! \file disk_table.h
//! An array that stays in its file.
#pragma once

#include "engram/table.h"
#include "table/store_file.h"

namespace engram {

//! Has no address: rows come through DiskReader, to GPUs by a DiskLane.
class DiskArray final : public TableArray {
 public:
  //! Throws Error for a file that cannot be read or ends before the range does.
  explicit DiskArray(const FileRange& range)
      : offset_(range.offset), file_(range.file, range.offset, range.num_bytes) {}

  const uint8_t* on_device(int) override { return nullptr; }
  const uint8_t* on_host() override { return nullptr; }

  const StoreFile& file() const { return file_; }
  int64_t offset() const { return offset_; }  //!< in the file, of the array's first byte

 private:
  int64_t offset_;
  StoreFile file_;
};

}  // namespace engram
