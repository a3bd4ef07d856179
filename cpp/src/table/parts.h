// SPDX-License-Identifier: Apache-2.0
//! \file parts.h
//! Which rank holds which bytes of a table. Arithmetic alone: no memory, no GPU.
#pragma once

#include <cstdint>
#include <vector>

namespace engram {

//! What a part is cut in: GPU memory that other processes can map comes in multiples of it.
constexpr int64_t kGranuleBytes = int64_t{2} << 20;

//! The device_sharded layout of one array of a table, values or scales. The rows of each column are
//! cut into `num_ranks` near equal contiguous ranges, the r-th for rank r: a token reads one row of
//! each column, at random, so every rank serves an equal share of every column's reads. Cuts lie at
//! multiples of the granule; a granule belongs to the rank whose range holds its middle, so each
//! rank's share of a column is off by less than one granule.
class Parts {
 public:
  //! Bytes [begin, end) of the array; granule-aligned, so the last run may end past the array.
  struct Run {
    int rank;
    int64_t begin;
    int64_t end;
  };

  //! column_rows: rows of each column, in the order of the table.
  Parts(const std::vector<int64_t>& column_rows, int64_t row_bytes, int num_ranks,
        int64_t granule_bytes = kGranuleBytes);

  int num_ranks() const { return num_ranks_; }
  //! The array's bytes, and those up to the end of its last granule.
  int64_t num_bytes() const { return num_bytes_; }
  int64_t mapped_bytes() const { return runs_.back().end; }
  //! They cover [0, mapped_bytes()) in order; neighbours are of different ranks.
  const std::vector<Run>& runs() const { return runs_; }
  //! GPU memory that a rank's runs take.
  int64_t part_bytes(int rank) const;

 private:
  //! Joins it to the run before it where that is the same rank's.
  void add_run(const Run& run);

  int num_ranks_;
  int64_t num_bytes_ = 0;
  std::vector<Run> runs_;
};

//! The "heads" layout: a rank keeps whole columns, as the checkpoint loaders of other engines do
//! (contiguous columns, ceil split), and no rank reads another's. The columns are neighbours in the
//! table, so are their rows, and nothing is re-based: a lookup of hash ids' columns
//! [first_column, first_column + num_columns) takes first_row and num_rows as in
//! engram_lookup_args, with values and scales that begin at first_row. It yields
//! [T, num_columns*D]; side by side in the order of ranks (the host framework's all-gather along
//! dimension 1) these are the rows of the whole table. Ranks are not equally busy: columns are
//! order-major, and short n-grams repeat more.
struct HeadSplit {
  int32_t first_column = 0;
  int32_t num_columns = 0;
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

//! Refuses more ranks than the split leaves columns for.
HeadSplit split_heads(const std::vector<int64_t>& column_rows, int rank, int num_ranks);

}  // namespace engram
