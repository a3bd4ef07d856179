// SPDX-License-Identifier: Apache-2.0
//! \file read_pages.h
#pragma once

#include <cstdint>
#include <string>

namespace engram {

//! The arguments of engram_bench_read_pages. Throws Error.
void read_pages(const std::string& path, const int64_t* page_ids, int64_t num_pages,
                int num_threads);

}  // namespace engram
