// SPDX-License-Identifier: Apache-2.0
//! \file lookup_disk.h
//! The lookup on the CPU in a table that stays on disk.
#pragma once

#include <cstdint>

#include "engram/engram.h"

namespace engram {

class DiskReader;

constexpr int64_t kRowsPerDiskRead = 12288;  //!< fills a disk's queue many times, and 3 MB

//! Rows in the order in which a call's ids ask for them; `places` are 0, 1, ...
struct ReadRows {
  const uint8_t* values;
  const uint8_t* scales;
  const int32_t* places;
};

//! The lookup of args' tokens [begin, end), whose rows have been read. In F8_128x4 order begin is a
//! multiple of kStageTileRows.
engram_lookup_args lookup_of_read(const engram_lookup_args& args, const ReadRows& rows,
                                  int64_t begin, int64_t end);

//! Threads for num_threads as in engram_exec: at least two, one reads while another converts.
int disk_threads(int num_threads);

//! As lookup_cpu, to the same bits, with rows of the reader in place of args.values and scales,
//! which are not looked at, nor are first_row and num_rows. Rows that cannot be read are NaN and
//! leave the reader a fault.
void lookup_disk(DiskReader& reader, const engram_lookup_args& args, int num_threads);

}  // namespace engram
