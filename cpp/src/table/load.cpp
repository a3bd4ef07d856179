// SPDX-License-Identifier: Apache-2.0
#include "table/load.h"

#include <algorithm>
#include <atomic>

#include "engram/error.h"
#include "engram/row.h"
#include "parallel.h"
#include "table/points.h"

namespace engram {
namespace {

constexpr int64_t kPieceBytes = StoreFile::kPieceBytes;

//! What one thread loads in one go: a block where it is verified, else a piece of one.
struct Unit {
  const SourceReader* reader;
  const LoadTarget* target;
  int64_t begin;
  int64_t end;
  bool verify;
};

int64_t num_blocks(int64_t num_bytes) { return ceil_div(num_bytes, kBlockBytes); }

//! Returns early once `stop` is true; sets it when the caller cancels.
void load_unit(const Unit& unit, const LoadOptions& options, std::atomic<bool>& stop) {
  if (unit.begin % kBlockBytes == 0) ENGRAM_POINT("load.block");
  BlockSum sum;
  for (int64_t begin = unit.begin; begin < unit.end; begin += kPieceBytes) {
    if (options.cancelled && options.cancelled()) stop = true;
    if (stop) return;
    uint8_t* const to = unit.target->data + begin;
    const int64_t num_bytes = std::min(kPieceBytes, unit.end - begin);
    if (unit.target->prefault) unit.target->prefault(begin, begin + num_bytes);
    unit.reader->read(to, begin, num_bytes);
    if (unit.verify) sum.add(to, num_bytes);  // while a cache still has it
    if (options.add_bytes) options.add_bytes(num_bytes);
  }
  if (!unit.verify) return;
  ENGRAM_POINT("load.verify");
  check_block(unit.reader->source(), unit.begin / kBlockBytes, sum.hex());
}

}  // namespace

SourceReader::SourceReader(const Source& source) : source_(source) {
  if (source.formula) return;
  const FileRange& range = source_.file;
  file_ = std::make_unique<const StoreFile>(range.file, range.offset, range.num_bytes);
}

const FileStamp* SourceReader::stamp() const {
  return file_ == nullptr ? nullptr : &file_->stamp();
}

void SourceReader::read(uint8_t* to, int64_t begin, int64_t num_bytes) const {
  if (source_.formula) {
    fill_formula(*source_.formula, begin, num_bytes, to);
  } else {
    file_->read(to, num_bytes, source_.file.offset + begin);
  }
}

void check_sums(const Source& source) {
  const int64_t expected = num_blocks(source.file.num_bytes);
  ENGRAM_CHECK(static_cast<int64_t>(source.file.block_sums.size()) == expected, source.file.file,
               ": ", source.name, ": expected ", expected, " block sums to verify, found ",
               source.file.block_sums.size());
}

void check_block(const Source& source, int64_t block_idx, const std::string& found_sum) {
  check_sums(source);
  const FileRange& range = source.file;
  const std::string& expected = range.block_sums.at(static_cast<size_t>(block_idx));
  const int64_t begin = block_idx * kBlockBytes;
  const int64_t end = std::min(begin + kBlockBytes, range.num_bytes);
  ENGRAM_CHECK(found_sum == expected, range.file, ": block ", block_idx, " of ", source.name,
               " (bytes ", range.offset + begin, " to ", range.offset + end, "): expected sum ",
               expected, ", found ", found_sum);
}

void throw_loading_cancelled() { throw Error(ENGRAM_INTERNAL_ERROR, "loading was cancelled"); }

int loader_threads(int shares) { return std::clamp(usable_threads() / std::max(shares, 1), 4, 16); }

int64_t share_bytes(int64_t num_bytes, int64_t first_block, int share, int shares) {
  int64_t total = 0;
  for (int64_t block = 0; block < num_blocks(num_bytes); ++block) {
    if ((first_block + block) % shares != share) continue;
    total += std::min(kBlockBytes, num_bytes - block * kBlockBytes);
  }
  return total;
}

Loader::Loader(const std::vector<const Source*>& sources) {
  for (const Source* source : sources) readers_.try_emplace(source, *source);
}

std::vector<FileStamp> Loader::stamps() const {
  std::map<std::string, FileStamp> by_file;
  for (const auto& [source, reader] : readers_) {
    if (reader.stamp() == nullptr) continue;
    const auto [found, added] = by_file.try_emplace(reader.stamp()->file, *reader.stamp());
    if (found->second == *reader.stamp()) continue;
    check_stamp(found->second);  // one of the two is not what the file is now
    check_stamp(*reader.stamp());
  }
  std::vector<FileStamp> stamps;
  for (const auto& [file, stamp] : by_file) stamps.push_back(stamp);
  return stamps;
}

void Loader::run(const std::vector<LoadTarget>& targets, const LoadOptions& options) const {
  ENGRAM_CHECK(options.share >= 0 && options.share < options.shares, "share: expected 0 to ",
               options.shares - 1, ", found ", options.share);
  std::vector<Unit> units;
  int64_t block = 0;
  for (const LoadTarget& target : targets) {
    const Source& source = *target.source;
    const SourceReader& reader = readers_.at(target.source);
    const int64_t num_bytes = source.file.num_bytes;
    ENGRAM_CHECK(num_bytes <= target.num_bytes, source.name, ": expected memory of at least ",
                 num_bytes, " bytes, found ", target.num_bytes);
    const bool verify = target.verify && !source.formula;
    if (verify) check_sums(source);
    for (int64_t begin = 0; begin < num_bytes; begin += kBlockBytes, ++block) {
      if (block % options.shares != options.share) continue;
      const int64_t block_end = std::min(begin + kBlockBytes, num_bytes);
      const int64_t step = verify ? kBlockBytes : kPieceBytes;
      for (int64_t at = begin; at < block_end; at += step) {
        units.push_back({&reader, &target, at, std::min(at + step, block_end), verify});
      }
    }
  }
  const int num_threads =
      options.num_threads > 0 ? options.num_threads : loader_threads(options.shares);
  std::atomic<bool> stop{false};
  parallel_for(static_cast<int64_t>(units.size()), 1, num_threads, [&](int64_t unit, int64_t) {
    try {
      load_unit(units[static_cast<size_t>(unit)], options, stop);
    } catch (...) {
      stop = true;  // the other threads leave at their next piece
      throw;
    }
  });
  if (stop) throw_loading_cancelled();
}

void Loader::check_unchanged() const {
  for (const FileStamp& stamp : stamps()) check_stamp(stamp);
}

}  // namespace engram
