// SPDX-License-Identifier: Apache-2.0
//! \file disk_table.h
//! An array that stays in its file.
#pragma once

#include <string>

#include "engram/table.h"
#include "table/store_file.h"

namespace engram {

//! Has no address: rows come through DiskReader.
class DiskArray final : public TableArray {
 public:
  //! Throws Error for a file that cannot be read or ends before the range does.
  DiskArray(std::string label, const FileRange& range)
      : label_(std::move(label)),
        offset_(range.offset),
        file_(range.file, range.offset, range.num_bytes) {}

  //! Throws Error.
  const uint8_t* on_device(int device) override;
  const uint8_t* on_host() override { return nullptr; }

  const StoreFile& file() const { return file_; }
  int64_t offset() const { return offset_; }  //!< in the file, of the array's first byte

 private:
  std::string label_;
  int64_t offset_;
  StoreFile file_;
};

}  // namespace engram
