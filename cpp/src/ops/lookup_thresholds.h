// SPDX-License-Identifier: Apache-2.0
//! \file lookup_thresholds.h
//! From how many tokens on lookups of tables in host memory take another way. What is best depends
//! on the machine's GPU, link, memory and CPUs: `bench lookup --calibrate` measures it.
#pragma once

#include <cstdint>
#include <string>

namespace engram {

struct LookupThresholds {
  //! Below, too few rows are neighbours for sorting to pay.
  int64_t sorted_tokens = 512;
  //! Below, a GPU has read the rows before the CPU's threads are awake.
  int64_t gathered_tokens = 256;
};

//! Of a file that `bench lookup --calibrate` wrote. Throws Error, one line "PATH: ...".
LookupThresholds read_lookup_thresholds(const std::string& path);

//! Of the file that TRTLLM_ENGRAM_CALIBRATION names at the first call; those above where it names
//! none or, with a warning, one that cannot be read.
const LookupThresholds& lookup_thresholds();

}  // namespace engram
