// SPDX-License-Identifier: Apache-2.0
// engram_stage on the CPU.
#include <cstring>

#include "check.h"
#include "engram/ops.h"
#include "ops/staged_scales.h"
#include "parallel.h"

namespace engram {

void check_stage(const engram_stage_args& args) {
  check_range(args.num_tokens, "num_tokens", 0, INT32_MAX);
  check_at_least(args.num_columns, "num_columns", 1);
  check_multiple(args.head_dim, "head_dim", kScaleBlock);
  check_product({args.num_columns, packed_row_bytes(args.head_dim)},
                "bytes of a token's packed rows", INT32_MAX);
  check_product(
      {args.num_tokens + kStageTileRows, args.num_columns, packed_row_bytes(args.head_dim)},
      "bytes of packed");
  if (args.num_tokens == 0) return;
  check_array(args.packed, "packed");
  check_array(args.values, "values");
  check_array(args.scales, "scales");
}

void stage_cpu(const engram_stage_args& args, int num_threads) {
  const int scales_each = scales_per_row(args.head_dim);
  const int row_bytes = packed_row_bytes(args.head_dim);
  const int64_t num_scales = row_offset(args.num_columns, scales_each);
  parallel_for(args.num_tokens, kStageTileRows, num_threads, [&](int64_t begin, int64_t end) {
    clear_staged_tiles(args.scales, begin, end, num_scales);
    for (int64_t token = begin; token < end; ++token) {
      for (int32_t column = 0; column < args.num_columns; ++column) {
        const int64_t row = row_offset(token, args.num_columns) + column;
        const uint8_t* const packed = args.packed + row_offset(row, row_bytes);
        memcpy(args.values + row_offset(row, args.head_dim), packed,
               static_cast<size_t>(args.head_dim));
        stage_scales(packed + args.head_dim, scales_each, token, row_offset(column, scales_each),
                     num_scales, args.scales);
      }
    }
  });
}

}  // namespace engram
