// SPDX-License-Identifier: Apache-2.0
//! \file staged_scales.h
//! Scales in F8_128x4 order on the CPU. Threads own whole tile rows, so no two write one line and
//! each clears its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "engram/row.h"

namespace engram {

//! Zeroes the tiles of rows [begin, end), begin a multiple of kStageTileRows: what lies past the
//! last row stays zero.
inline void clear_staged_tiles(uint8_t* staged, int64_t begin, int64_t end, int64_t num_scales) {
  const int64_t first = staged_scale_bytes(begin, num_scales);
  memset(staged + first, 0, static_cast<size_t>(staged_scale_bytes(end, num_scales) - first));
}

//! Writes the `count` scales of row r from its scale s on.
ENGRAM_HOST_DEVICE void stage_scales(const uint8_t* scales, int count, int64_t r, int64_t s,
                                     int64_t num_scales, uint8_t* staged) {
  for (int i = 0; i < count; ++i) staged[staged_scale_offset(r, s + i, num_scales)] = scales[i];
}

}  // namespace engram
