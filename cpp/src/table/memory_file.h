// SPDX-License-Identifier: Apache-2.0
//! \file memory_file.h
//! The nameless files that host_memory.h shares: of memory alone, gone with their last holder.
#pragma once

#include <cstdint>
#include <string>

#include "table/descriptor.h"
#include "table/host_memory.h"

namespace engram {

//! A file of num_bytes (whole pages) without a page in it, for kMemfd or kShm; this user's alone,
//! and a memfd sealed against another size. Throws Error.
FileDescriptor make_memory_file(const HostMemoryOptions& options, int64_t num_bytes,
                                const std::string& label);

//! From now on nobody maps a memfd for writing, nor writes through a descriptor of it; mappings
//! that are there stay what they are. Where the kernel has no such seal, nothing changes.
void forbid_writers(const FileDescriptor& file);

//! Refuses a descriptor of anything but what make_memory_file makes. Throws Error.
void check_memory_file(const HostMemoryOptions& options, const FileDescriptor& file,
                       int64_t num_bytes, const std::string& label);

}  // namespace engram
