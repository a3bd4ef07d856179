// SPDX-License-Identifier: Apache-2.0
//! \file load.h
//! Fills memory with a table's arrays, by several threads of several processes.
//!
//! The blocks (block_sums.h) of all arrays form one sequence, in the arrays' order, and block i of
//! it is loaded by share i % shares, so that the shares are equal to one block.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engram/table.h"
#include "table/block_sums.h"
#include "table/formula.h"
#include "table/store_file.h"

namespace engram {

//! Where an array's bytes come from.
struct Source {
  std::string name;  //!< for errors: "engram.1.values"
  FileRange file;    //!< num_bytes is the array's size; block_sums may be empty
  //! Fill by this formula instead: the file is not opened and need not exist.
  std::optional<FormulaKey> formula;
};

//! Memory for one array.
struct LoadTarget {
  uint8_t* data = nullptr;
  int64_t num_bytes = 0;  //!< at least the source's
  const Source* source = nullptr;
  //! Compare each block with its sum. Sources by formula have none and pass; a file with none is
  //! an Error before anything is read.
  bool verify = false;
  //! Called on the thread that is about to write bytes [begin, end), which are whole pieces of 4
  //! MiB but for the array's last: pages that one thread first clears and then fills are still in
  //! its cache. May be empty; what it throws ends the load.
  std::function<void(int64_t begin, int64_t end)> prefault;
};

//! An open source: ranges of an array, wherever they come from. Thread-safe.
class SourceReader {
 public:
  //! Throws Error for a file that cannot be read or ends before the source's range does.
  explicit SourceReader(const Source& source);

  const Source& source() const { return source_; }
  //! Of the open file; none where a formula fills.
  const FileStamp* stamp() const;

  //! Writes bytes [begin, begin + num_bytes) of the array to `to` on the calling thread. Throws
  //! Error.
  void read(uint8_t* to, int64_t begin, int64_t num_bytes) const;

 private:
  Source source_;
  std::unique_ptr<const StoreFile> file_;
};

//! Throws Error unless the source's file has a sum for each of its blocks.
void check_sums(const Source& source);

//! Throws Error, "FILE: block 3 of NAME (bytes A to B): expected sum X, found Y" with A and B
//! places in the file, unless a whole block has the sum that the source says. Throws too where the
//! source has no sum for it.
void check_block(const Source& source, int64_t block_idx, const std::string& found_sum);

//! What whoever loads throws once its `cancelled` is true.
[[noreturn]] void throw_loading_cancelled();

//! Threads by which each of `shares` processes of this machine reads: 4 to 16, about one for each
//! CPU in all; with more, pages that they clear and fill leave the caches in between.
int loader_threads(int shares);

struct LoadOptions {
  int share = 0;  //!< 0 to shares - 1
  int shares = 1;
  int num_threads = 0;  //!< 0: loader_threads(shares)
  //! Both may be empty, and are called on any of the threads. Once `cancelled` is true, what runs
  //! ends within a piece of 4 MiB for each thread; that is an Error ("loading was cancelled").
  std::function<bool()> cancelled;
  std::function<void(int64_t)> add_bytes;  //!< bytes that have been loaded since the last call
};

//! Bytes of an array's blocks that one of `shares` loads, where the array's first block is the
//! `first_block`-th of the sequence.
int64_t share_bytes(int64_t num_bytes, int64_t first_block, int share, int shares);

class Loader {
 public:
  //! Opens the sources' files; Errors as SourceReader's. Sources and files are this object's as
  //! long as it lives.
  explicit Loader(const std::vector<const Source*>& sources);

  //! What the open files are, one entry for each file, by name. For ranks to compare.
  std::vector<FileStamp> stamps() const;

  //! Loads this share of the targets' blocks; each target's source is one of the constructor's.
  //! Blocks are dealt out by their places in the list, which is the same for all shares.
  //! Errors are those of the file system, a bad block's, or that it was cancelled; the targets then
  //! hold anything. Once the threads have ended, the first one is thrown.
  void run(const std::vector<LoadTarget>& targets, const LoadOptions& options) const;

  //! Throws Error where a file is not what it was when it was opened. To be called once every share
  //! has run: a share's bytes are those of one state of the store only then.
  void check_unchanged() const;

 private:
  std::map<const Source*, SourceReader> readers_;
};

}  // namespace engram
