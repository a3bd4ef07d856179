// SPDX-License-Identifier: Apache-2.0
#include "ops/lookup_tokens.h"

#include "engram/layout.h"
#include "engram/row.h"

namespace engram {
namespace {

//! Bytes of a token in `out`.
int64_t out_bytes(const engram_lookup_args& args) {
  const int row_bytes = args.form == ENGRAM_ROWS_BF16     ? 2 * args.head_dim
                        : args.form == ENGRAM_ROWS_PACKED ? packed_row_bytes(args.head_dim)
                                                          : args.head_dim;
  return row_offset(args.num_columns, row_bytes);
}

}  // namespace

engram_lookup_args lookup_of_tokens(const engram_lookup_args& args, int64_t begin, int64_t end) {
  engram_lookup_args part = args;
  part.ids += row_offset(begin, args.ids_stride);
  part.num_tokens = end - begin;
  part.out = static_cast<uint8_t*>(args.out) + row_offset(begin, out_bytes(args));
  const int64_t token_scales = row_offset(args.num_columns, scales_per_row(args.head_dim));
  if (args.form == ENGRAM_ROWS_MXFP8_LINEAR) part.out_scales += row_offset(begin, token_scales);
  if (args.form == ENGRAM_ROWS_MXFP8_128X4) {
    part.out_scales += staged_scale_bytes(begin, token_scales);
  }
  return part;
}

}  // namespace engram
