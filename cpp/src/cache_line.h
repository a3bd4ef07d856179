// SPDX-License-Identifier: Apache-2.0
//! \file cache_line.h
//! What memory is asked for by.
#pragma once

#include <cstdint>

#include "engram/row.h"

namespace engram {

constexpr int kCacheLine = 64;

//! Bytes from the start of its line to an address. Rows as long as some lines all start so.
ENGRAM_HOST_DEVICE int bytes_into_line(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % kCacheLine);
}

}  // namespace engram
