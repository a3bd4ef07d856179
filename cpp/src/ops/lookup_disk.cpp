// SPDX-License-Identifier: Apache-2.0
#include "ops/lookup_disk.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "engram/ops.h"
#include "engram/row.h"
#include "ops/lookup_tokens.h"
#include "parallel.h"
#include "table/disk_reader.h"

namespace engram {
namespace {

//! Rows of tokens [begin, end): read side by side, then looked up in order.
void lookup_tokens(DiskReader& reader, const engram_lookup_args& args, int64_t begin, int64_t end) {
  const int64_t count = row_offset(end - begin, args.num_columns);
  const int num_scales = scales_per_row(args.head_dim);
  const auto size = [count](int row_bytes) {
    return static_cast<size_t>(row_offset(count, row_bytes));
  };
  const auto values = std::make_unique_for_overwrite<uint8_t[]>(size(args.head_dim));
  const auto scales = std::make_unique_for_overwrite<uint8_t[]>(size(num_scales));
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int64_t token = begin; token < end; ++token) {
    std::copy_n(args.ids + row_offset(token, args.ids_stride), args.num_columns,
                ids.data() + row_offset(token - begin, args.num_columns));
  }
  reader.read(ids.data(), count, values.get(), scales.get());
  std::iota(ids.begin(), ids.end(), 0);
  lookup_cpu(lookup_of_read(args, {values.get(), scales.get(), ids.data()}, begin, end), 1);
}

}  // namespace

engram_lookup_args lookup_of_read(const engram_lookup_args& args, const ReadRows& rows,
                                  int64_t begin, int64_t end) {
  engram_lookup_args part = lookup_of_tokens(args, begin, end);
  part.values = rows.values;
  part.scales = rows.scales;
  part.first_row = 0;
  part.num_rows = row_offset(end - begin, args.num_columns);
  part.ids = rows.places;
  part.ids_stride = args.num_columns;
  return part;
}

int disk_threads(int num_threads) {
  return num_threads > 0 ? num_threads : std::max(2, usable_threads());
}

void lookup_disk(DiskReader& reader, const engram_lookup_args& args, int num_threads) {
  // Whole tiles of scales in F8_128x4 order.
  const int64_t tiles = ceil_div(ceil_div(kRowsPerDiskRead, args.num_columns), kStageTileRows);
  const int threads = disk_threads(num_threads);
  parallel_for(args.num_tokens, tiles * kStageTileRows, threads,
               [&](int64_t begin, int64_t end) { lookup_tokens(reader, args, begin, end); });
}

}  // namespace engram
