// SPDX-License-Identifier: Apache-2.0
#include "table/disk_reader.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <tuple>

#include "engram/error.h"
#include "engram/layout.h"
#include "engram/row.h"
#include "table/log.h"

namespace engram {
namespace {

constexpr int64_t kPage = DiskQueue::kPageBytes;

int64_t page_begin(int64_t place) { return place / kPage * kPage; }
int64_t page_end(int64_t place) { return page_begin(place + kPage - 1); }

}  // namespace

//! One call's rows on their way, sorted.
struct DiskReader::Batch {
  std::vector<Wanted> wanted;
  std::vector<DiskRead> reads;
  struct Span {
    size_t column;
    size_t begin;  //!< of wanted
    size_t end;
  };
  std::vector<Span> spans;       //!< what each read is for
  std::vector<uint8_t> missing;  //!< for each wanted row, bit c: column c did not come
  uint8_t* outs[2];              //!< values, scales

  uint8_t* out(size_t column, const Wanted& row, int row_bytes) const {
    return outs[column] + row_offset(row.place, row_bytes);
  }
};

DiskReader::DiskReader(const TableInfo& info, const DiskArray& values, const DiskArray* scales,
                       const uint8_t* host_scales, int64_t hot_bytes)
    : first_row_(info.first_row),
      num_rows_(info.num_rows),
      host_scales_(host_scales),
      value_bytes_(info.head_dim),
      scale_bytes_(scales_per_row(info.head_dim)),
      columns_{{&values.file(), values.offset(), value_bytes_}},
      hot_rows_(hot_bytes, num_rows_, value_bytes_, host_scales == nullptr ? scale_bytes_ : 0) {
  ENGRAM_CHECK(value_bytes_ <= DiskQueue::kMostBytes - 2 * kPage, "head_dim: expected at most ",
               DiskQueue::kMostBytes - 2 * kPage, " for placement disk, found ", value_bytes_);
  if (scales != nullptr) columns_.push_back({&scales->file(), scales->offset(), scale_bytes_});
}

bool DiskReader::read(const int32_t* ids, int64_t count, uint8_t* values_out, uint8_t* scales_out) {
  Batch batch{.wanted = take_hot(ids, count, values_out, scales_out),
              .outs = {values_out, scales_out}};
  if (batch.wanted.empty()) return true;
  std::sort(batch.wanted.begin(), batch.wanted.end(), [](const Wanted& a, const Wanted& b) {
    return std::tie(a.row, a.place) < std::tie(b.row, b.place);
  });
  batch.missing.assign(batch.wanted.size(), 0);
  for (size_t column = 0; column < columns_.size(); ++column) plan(column, &batch);
  fetch(&batch);
  read_again(&batch);
  // NOTE: after the last read, or a row of another state of the file could slip through.
  const bool right = are_unchanged();
  bool complete = true;
  for (size_t i = 0; i < batch.wanted.size(); ++i) {
    const Wanted& row = batch.wanted[i];
    uint8_t* const values = batch.out(0, row, value_bytes_);
    uint8_t* const scales = batch.out(1, row, scale_bytes_);
    if (right && batch.missing[i] == 0) {
      const bool repeated = i > 0 && batch.wanted[i - 1].row == row.row;
      if (!repeated) hot_rows_.insert(row.row, values, scales);
    } else {
      write_nan(values, scales);
      complete = false;
    }
  }
  return complete;
}

void DiskReader::write_nan(uint8_t* values, uint8_t* scales) const {
  memset(values, kFp8NanMagnitude, static_cast<size_t>(value_bytes_));
  memset(scales, kE8m0Nan, static_cast<size_t>(scale_bytes_));
}

//! Writes missing rows, scales that are in RAM and rows that were read before; the rest is left.
std::vector<DiskReader::Wanted> DiskReader::take_hot(const int32_t* ids, int64_t count,
                                                     uint8_t* values_out, uint8_t* scales_out) {
  std::vector<Wanted> wanted;
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* const values = values_out + row_offset(i, value_bytes_);
    uint8_t* const scales = scales_out + row_offset(i, scale_bytes_);
    if (ids[i] == kLostId) {
      write_nan(values, scales);
      continue;
    }
    const int64_t row = ids[i] - first_row_;
    if (row < 0 || row >= num_rows_) {
      memset(values, 0, static_cast<size_t>(value_bytes_));
      memset(scales, 0, static_cast<size_t>(scale_bytes_));
      continue;
    }
    if (host_scales_ != nullptr) {
      memcpy(scales, host_scales_ + row_offset(ids[i], scale_bytes_),
             static_cast<size_t>(scale_bytes_));
    }
    if (hot_rows_.find(static_cast<int32_t>(row), values, scales)) continue;
    wanted.push_back({static_cast<int32_t>(row), static_cast<int32_t>(i)});
  }
  return wanted;
}

//! The fewest reads of a column: whole pages, neighbours together, each once.
void DiskReader::plan(size_t column, Batch* batch) const {
  const Column& from = columns_[column];
  const size_t first = batch->reads.size();
  for (size_t i = 0; i < batch->wanted.size(); ++i) {
    const int64_t place =
        from.offset + row_offset(first_row_ + batch->wanted[i].row, from.row_bytes);
    const int64_t begin = page_begin(place);
    const int64_t end = page_end(place + from.row_bytes);
    if (batch->reads.size() > first) {
      DiskRead& last = batch->reads.back();
      if (begin <= last.offset + last.num_bytes && end - last.offset <= DiskQueue::kMostBytes) {
        last.num_bytes = std::max(last.num_bytes, static_cast<int32_t>(end - last.offset));
        batch->spans.back().end = i + 1;
        continue;
      }
    }
    batch->reads.push_back({from.file->page_handle(), begin, static_cast<int32_t>(end - begin)});
    batch->spans.push_back({column, i, i + 1});
  }
}

void DiskReader::fetch(Batch* batch) {
  // Reads of the two columns mix their marks of one row.
  std::vector<std::atomic<uint8_t>> missing(batch->wanted.size());
  queues_.run(batch->reads, [&](size_t read_idx, const uint8_t* bytes, int64_t count) {
    const Batch::Span& span = batch->spans[read_idx];
    const Column& from = columns_[span.column];
    for (size_t i = span.begin; i < span.end; ++i) {
      const Wanted& row = batch->wanted[i];
      const int64_t at = from.offset + row_offset(first_row_ + row.row, from.row_bytes) -
                         batch->reads[read_idx].offset;
      if (at + from.row_bytes <= count) {
        memcpy(batch->out(span.column, row, from.row_bytes), bytes + at,
               static_cast<size_t>(from.row_bytes));
      } else {
        missing[i] |= static_cast<uint8_t>(1 << span.column);
      }
    }
  });
  for (size_t i = 0; i < missing.size(); ++i) batch->missing[i] = missing[i];
  disk_rows_ += static_cast<int64_t>(batch->wanted.size());
  num_reads_ += static_cast<int64_t>(batch->reads.size());
}

//! What did not come is asked for once more, plainly: what a queue or direct reading has against it
//! is no fault. The first that fails so ends it, for disks take long to fail.
void DiskReader::read_again(Batch* batch) {
  for (size_t i = 0; i < batch->wanted.size(); ++i) {
    const Wanted& row = batch->wanted[i];
    for (size_t column = 0; column < columns_.size(); ++column) {
      const uint8_t bit = static_cast<uint8_t>(1 << column);
      if ((batch->missing[i] & bit) == 0) continue;
      const Column& from = columns_[column];
      const int64_t place = from.offset + row_offset(first_row_ + row.row, from.row_bytes);
      try {
        from.file->read_few(batch->out(column, row, from.row_bytes), from.row_bytes, place);
        batch->missing[i] &= static_cast<uint8_t>(~bit);
      } catch (const Error& error) {
        note_fault(concat(error.what(), " (row ", first_row_ + row.row, " at offset ", place, ")"),
                   false);
        return;
      }
    }
  }
}

bool DiskReader::are_unchanged() {
  try {
    for (const Column& column : columns_) check_contents(column.file->stamp());
    return true;
  } catch (const Error& error) {
    note_fault(error.what(), true);
    return false;
  }
}

void DiskReader::note_fault(const std::string& text, bool lasts) {
  const std::lock_guard lock(fault_mutex_);
  fault_lasts_ = fault_lasts_ || lasts;
  if (fault_) return;
  fault_ = text;
  // NOTE: who takes messages may wait for what waits for a GPU, which may wait for this read.
  try {
    std::thread([text] {
      log(LogLevel::kError, concat("rows of a table on disk are NaN: ", text));
    }).detach();
  } catch (const std::exception&) {  // the fault itself is there
  }
}

std::optional<std::string> DiskReader::take_fault() {
  const std::lock_guard lock(fault_mutex_);
  std::optional<std::string> fault = fault_;
  if (!fault_lasts_) fault_.reset();
  return fault;
}

DiskCounts DiskReader::counts() const {
  return {.hot_rows = hot_rows_.num_found(), .disk_rows = disk_rows_, .num_reads = num_reads_};
}

}  // namespace engram
