// SPDX-License-Identifier: Apache-2.0
//! \file lookup_disk.h
//! The lookup on the CPU in a table that stays on disk.
#pragma once

#include "engram/engram.h"

namespace engram {

class DiskReader;

//! As lookup_cpu, to the same bits, with rows of the reader in place of args.values and scales,
//! which are not looked at, nor are first_row and num_rows. Rows that cannot be read are NaN and
//! leave the reader a fault.
void lookup_disk(DiskReader& reader, const engram_lookup_args& args, int num_threads);

}  // namespace engram
