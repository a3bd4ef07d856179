// SPDX-License-Identifier: Apache-2.0
//! \file hot_file.h
//! The file that `tables count` writes: which rows texts read most.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace engram {

//! Row ids of a layer in a .npy file of records (layer, row: int32, count: int64), in the file's
//! order, which has the most read first. Throws Error for another file, one that others could
//! write, and ids outside [0, num_rows).
std::vector<int32_t> read_hot_file(const std::string& path, int32_t layer, int64_t num_rows);

}  // namespace engram
