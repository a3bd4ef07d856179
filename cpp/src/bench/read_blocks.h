// SPDX-License-Identifier: Apache-2.0
//! \file read_blocks.h
#pragma once

#include <cstdint>

namespace engram {

//! The arguments of engram_bench_read_blocks; returns its checksum.
uint64_t read_blocks_cpu(const uint8_t* base, const int64_t* block_ids, int64_t num_blocks,
                         int32_t block_bytes, uint8_t* out, int32_t out_bytes_per_block,
                         int32_t num_threads);

}  // namespace engram
