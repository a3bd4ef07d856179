// SPDX-License-Identifier: Apache-2.0
//! \file made_disk_table.h
//! A table in a made file, and its rows as they have to be.
#pragma once

#include <memory>
#include <vector>

#include "engram/layout.h"
#include "engram/row.h"
#include "made_file.h"
#include "table/disk_reader.h"

namespace engram {

constexpr int kDiskHeadDim = 256;
constexpr int kDiskScales = kDiskHeadDim / kScaleBlock;
constexpr int64_t kDiskRows = 20000;
constexpr int64_t kValuesAt = 8 * 1031;  // of no page, nor of a row
constexpr int64_t kScalesAt = kValuesAt + kDiskRows * kDiskHeadDim + 24;

//! Where the reader finds scales.
enum class ScalesIn { kFile, kRam };

class MadeDiskTable {
 public:
  explicit MadeDiskTable(ScalesIn scales_in, int64_t hot_bytes, int64_t first_row = 0,
                         int64_t num_rows = kDiskRows)
      : file_(kScalesAt + kDiskRows * kDiskScales),
        values_({file_.path(), kValuesAt, kDiskRows * kDiskHeadDim}),
        scales_({file_.path(), kScalesAt, kDiskRows * kDiskScales}),
        bytes_(MadeFile::made(0, kScalesAt + kDiskRows * kDiskScales)),
        first_row_(first_row),
        num_rows_(num_rows) {
    TableInfo info;
    info.head_dim = kDiskHeadDim;
    info.first_row = first_row;
    info.num_rows = num_rows;
    const bool in_ram = scales_in == ScalesIn::kRam;
    reader_ = std::make_unique<DiskReader>(info, values_, in_ram ? nullptr : &scales_,
                                           in_ram ? bytes_.data() + kScalesAt : nullptr, hot_bytes);
  }

  DiskReader& reader() { return *reader_; }
  const MadeFile& file() const { return file_; }
  const uint8_t* value_bytes() const { return bytes_.data() + kValuesAt; }
  const uint8_t* scale_bytes() const { return bytes_.data() + kScalesAt; }
  int page_handle() const { return values_.file().page_handle(); }

  //! How many rows of a read are neither right nor, where `lost` counts them, NaN. Right is NaN of
  //! lost ids.
  int64_t num_wrong(const std::vector<int32_t>& ids, int64_t* lost = nullptr) {
    std::vector<uint8_t> values(ids.size() * kDiskHeadDim, 0xAA);
    std::vector<uint8_t> scales(ids.size() * kDiskScales, 0xAA);
    reader_->read(ids.data(), static_cast<int64_t>(ids.size()), values.data(), scales.data());
    int64_t wrong = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool outside = ids[i] < first_row_ || ids[i] >= first_row_ + num_rows_;
      const auto is = [&](const std::vector<uint8_t>& found, int64_t at, int row_bytes, int nan) {
        const uint8_t* const row = &found[i * static_cast<size_t>(row_bytes)];
        for (int j = 0; j < row_bytes; ++j) {
          const uint8_t right =
              outside ? 0 : bytes_[static_cast<size_t>(at + row_offset(ids[i], row_bytes) + j)];
          if (row[j] != (nan < 0 ? right : nan)) return false;
        }
        return true;
      };
      const bool is_nan = is(values, kValuesAt, kDiskHeadDim, kFp8NanMagnitude) &&
                          is(scales, kScalesAt, kDiskScales, kE8m0Nan);
      const bool is_right = ids[i] == kLostId ? is_nan
                                              : is(values, kValuesAt, kDiskHeadDim, -1) &&
                                                    is(scales, kScalesAt, kDiskScales, -1);
      if (is_right) continue;
      if (lost != nullptr && is_nan) {
        ++*lost;
      } else {
        ++wrong;
      }
    }
    return wrong;
  }

 private:
  MadeFile file_;
  DiskArray values_;
  DiskArray scales_;
  std::vector<uint8_t> bytes_;
  int64_t first_row_;
  int64_t num_rows_;
  std::unique_ptr<DiskReader> reader_;
};

}  // namespace engram
