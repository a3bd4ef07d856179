// SPDX-License-Identifier: Apache-2.0
//! \file memories.h
//! Host memory of every kind with bytes to tell it by.
#pragma once

#include <algorithm>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "ranks.h"
#include "table/host_memory.h"
#include "texts.h"

namespace engram {

constexpr int64_t kMebi = 1 << 20;

inline uint8_t byte_at(int64_t i) { return static_cast<uint8_t>(i * 31 + i / 4096 + 7); }

inline void fill(const HostMemory& memory) {
  for (int64_t i = 0; i < memory.num_bytes(); ++i) memory.data()[i] = byte_at(i);
}

inline bool is_filled(const HostMemory& memory) {
  for (int64_t i = 0; i < memory.num_bytes(); ++i) {
    if (memory.data()[i] != byte_at(i)) return false;
  }
  return true;
}

inline bool is_zero(const uint8_t* bytes, int64_t count) {
  return std::all_of(bytes, bytes + count, [](uint8_t byte) { return byte == 0; });
}

inline std::vector<FileDescriptor> duplicates(const HostMemory& memory) {
  std::vector<FileDescriptor> copies;
  for (const FileDescriptor& one : memory.descriptors()) copies.push_back(one.duplicate());
  return copies;
}

inline PageShare page_share(const void* begin, int64_t num_bytes) {
  return page_shares({{begin, num_bytes}}).front();
}

constexpr MemoryKind kKinds[] = {MemoryKind::kPrivate, MemoryKind::kMemfd, MemoryKind::kShm};
constexpr MemoryKind kShared[] = {MemoryKind::kMemfd, MemoryKind::kShm};

}  // namespace engram
