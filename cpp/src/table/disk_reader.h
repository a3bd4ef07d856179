// SPDX-License-Identifier: Apache-2.0
//! \file disk_reader.h
//! Rows of a table that stays in its store's files.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engram/table.h"
#include "table/disk_queue.h"
#include "table/disk_table.h"
#include "table/hot_rows.h"

namespace engram {

//! Since the table was bound.
struct DiskCounts {
  int64_t hot_rows = 0;   //!< found in RAM
  int64_t disk_rows = 0;  //!< read, each repetition within a call counted
  int64_t num_reads = 0;  //!< that it took, of values and of scales
};

class DiskReader {
 public:
  //! Values lie in `values`; scales in `scales`, or all in RAM at `host_scales` (row 0's). `info`
  //! says which rows there are. All are the table's, as long as this object. hot_bytes: how much
  //! RAM rows may take that were read before.
  DiskReader(const TableInfo& info, const DiskArray& values, const DiskArray* scales,
             const uint8_t* host_scales, int64_t hot_bytes);

  //! Row ids[i] to values_out [count, D] and scales_out [count, D/32], in any host memory. Ids
  //! outside the table's rows give zeros, lost ones NaN, values and scales. So are rows that cannot
  //! be read, which leave a fault, and all of a call in which a file turns out to have changed; it
  //! then returns false. Thread-safe; sleeps while the disk works, and waits for no log.
  bool read(const int32_t* ids, int64_t count, uint8_t* values_out, uint8_t* scales_out);

  //! The first fault since the last call, naming file and offset. Files that have changed stay a
  //! fault.
  std::optional<std::string> take_fault();

  DiskCounts counts() const;
  const HotRows& hot_rows() const { return hot_rows_; }
  const char* queue_kind() const { return queues_.kind(); }

 private:
  //! An array that rows are read of.
  struct Column {
    const StoreFile* file;
    int64_t offset;  //!< in the file, of row 0
    int row_bytes;
  };
  //! A row that the disk is asked for, and where it goes.
  struct Wanted {
    int32_t row;
    int32_t place;
  };
  struct Batch;

  std::vector<Wanted> take_hot(const int32_t* ids, int64_t count, uint8_t* values_out,
                               uint8_t* scales_out);
  void plan(size_t column, Batch* batch) const;
  void fetch(Batch* batch);
  void read_again(Batch* batch);
  bool are_unchanged();
  void write_nan(uint8_t* values, uint8_t* scales) const;
  void note_fault(const std::string& text, bool lasts);

  const int64_t first_row_;
  const int64_t num_rows_;
  const uint8_t* const host_scales_;
  const int value_bytes_;
  const int scale_bytes_;
  std::vector<Column> columns_;  // values, then scales unless they are in RAM
  HotRows hot_rows_;
  DiskQueues queues_;
  std::atomic<int64_t> disk_rows_{0};
  std::atomic<int64_t> num_reads_{0};
  std::mutex fault_mutex_;
  std::optional<std::string> fault_;
  bool fault_lasts_ = false;
};

}  // namespace engram
