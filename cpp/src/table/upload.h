// SPDX-License-Identifier: Apache-2.0
//! \file upload.h
//! Ranges of an array into GPU memory: read through pinned buffers or, by a formula, made there.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "table/load.h"

namespace engram {

//! Bytes [begin, end) of a source, and where on a GPU they go (aligned to 16 bytes).
struct UploadRange {
  int64_t begin;
  int64_t end;
  uint8_t* to;
};

struct UploadOptions {
  int device = 0;
  int num_threads = 0;  //!< that read; 0: loader_threads(1)
  //! Compare each block that a range touches with its sum, which reads such blocks as a whole. A
  //! source by formula has no sums and passes; a file without is an Error.
  bool verify = false;
  //! Both may be empty, and are called on any of the threads. Once `cancelled` is true, what runs
  //! ends within a piece of 4 MiB for each thread; that is an Error ("loading was cancelled").
  std::function<bool()> cancelled;
  std::function<void(int64_t)> add_bytes;  //!< bytes of the ranges that are there since last called
};

//! Fills the ranges, which rise and do not overlap; everything is there when it returns. Throws
//! Error.
void upload(const SourceReader& reader, const std::vector<UploadRange>& ranges,
            const UploadOptions& options);

//! What one thread of upload() reads in one go: all or a part of one block.
struct UploadUnit {
  int64_t begin;
  int64_t end;
  size_t first_range;  //!< the first that ends after `begin`
};

//! verify: whole blocks of a source of num_bytes; else no more than the ranges, in parts of blocks.
std::vector<UploadUnit> upload_units(const std::vector<UploadRange>& ranges, int64_t num_bytes,
                                     bool verify);

}  // namespace engram
