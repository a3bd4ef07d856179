// SPDX-License-Identifier: Apache-2.0
//! \file lookup_disk.h
//! The lookup on the CPU in a table that stays on disk.
#pragma once

#include <cstdint>

#include "engram/engram.h"

namespace engram {

class DiskReader;

constexpr int64_t kRowsPerDiskRead = 12288;  //!< fills a disk's queue many times, and 3 MB

//! Threads for num_threads as in engram_exec: at least two, one reads while another converts.
int disk_threads(int num_threads);

//! As lookup_cpu, to the same bits, with rows of the reader in place of args.values and scales,
//! which are not looked at, nor are first_row and num_rows. Rows that cannot be read are NaN and
//! leave the reader a fault.
void lookup_disk(DiskReader& reader, const engram_lookup_args& args, int num_threads);

}  // namespace engram
