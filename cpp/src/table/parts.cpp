// SPDX-License-Identifier: Apache-2.0
#include "table/parts.h"

#include <algorithm>

#include "engram/error.h"
#include "engram/row.h"

namespace engram {

Parts::Parts(const std::vector<int64_t>& column_rows, int64_t row_bytes, int num_ranks,
             int64_t granule_bytes)
    : num_ranks_(num_ranks) {
  ENGRAM_CHECK(num_ranks >= 1, "parts: expected at least 1 rank, found ", num_ranks);
  ENGRAM_CHECK(row_bytes >= 1, "parts: expected at least 1 byte a row, found ", row_bytes);
  ENGRAM_CHECK(granule_bytes >= 2 && granule_bytes % 2 == 0,
               "parts: expected an even granule, found ", granule_bytes, " bytes");
  ENGRAM_CHECK(!column_rows.empty(), "parts: expected at least 1 column, found none");
  int64_t num_rows = 0;
  for (const int64_t rows : column_rows) {
    ENGRAM_CHECK(rows >= 1, "parts: expected at least 1 row in each column, found ", rows);
    num_rows += rows;
  }
  num_bytes_ = row_offset(num_rows, row_bytes);

  // The first granule whose middle does not lie before a byte.
  const auto granule_at = [granule_bytes](int64_t byte) {
    return (byte + granule_bytes / 2 - 1) / granule_bytes * granule_bytes;
  };
  int64_t begin = 0;
  int64_t column_row = 0;
  for (const int64_t rows : column_rows) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int64_t cut = column_row + rows * (rank + 1) / num_ranks;
      const int64_t end = granule_at(row_offset(cut, row_bytes));
      add_run({rank, begin, end});
      begin = std::max(begin, end);
    }
    column_row += rows;
  }
  const int64_t mapped = row_offset(ceil_div(num_bytes(), granule_bytes), granule_bytes);
  add_run({num_ranks - 1, begin, mapped});  // a last granule with less than half of its bytes
}

void Parts::add_run(const Run& run) {
  if (run.end <= run.begin) return;
  if (!runs_.empty() && runs_.back().rank == run.rank) {
    runs_.back().end = run.end;
  } else {
    runs_.push_back(run);
  }
}

int64_t Parts::part_bytes(int rank) const {
  int64_t bytes = 0;
  for (const Run& run : runs_) bytes += run.rank == rank ? run.end - run.begin : 0;
  return bytes;
}

HeadSplit split_heads(const std::vector<int64_t>& column_rows, int rank, int num_ranks) {
  ENGRAM_CHECK(rank >= 0 && rank < num_ranks, "heads: expected a rank of 0 to ", num_ranks - 1,
               ", found ", rank);
  const auto num_columns = static_cast<int64_t>(column_rows.size());
  const int64_t columns_per_rank = ceil_div(num_columns, num_ranks);
  ENGRAM_CHECK(row_offset(num_ranks - 1, columns_per_rank) < num_columns, "heads: expected ",
               num_columns, " columns to leave each of ", num_ranks,
               " ranks at least one, found that ", columns_per_rank,
               " a rank leave the last ranks none");
  HeadSplit split;
  split.first_column = static_cast<int32_t>(rank * columns_per_rank);
  split.num_columns =
      static_cast<int32_t>(std::min(columns_per_rank, num_columns - split.first_column));
  for (int32_t column = 0; column < split.first_column + split.num_columns; ++column) {
    int64_t& rows = column < split.first_column ? split.first_row : split.num_rows;
    rows += column_rows[static_cast<size_t>(column)];
  }
  return split;
}

}  // namespace engram
