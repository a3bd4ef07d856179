// SPDX-License-Identifier: Apache-2.0
//! \file bound.h
//! An array that ranks bind as device_sharded, from a file or by its formula.
#pragma once

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>

#include "fake_gpus.h"
#include "ranks.h"
#include "table/block_sums.h"
#include "table/group.h"
#include "table/load.h"
#include "table/sharded_table.h"

namespace engram {

using fake::machine;

inline const std::vector<std::string> kGpus{"0000:1B:00.0", "0000:3B:00.0", "0000:9C:00.0"};
constexpr int64_t kRowBytes = 256;
constexpr uint64_t kSeed = 5;
inline const std::vector<int64_t> kColumns{30000, 41000, 52003};  // 7 to 13 MB
inline const std::vector<int64_t> kShort{9000, 9001};             // 2 MB each

inline FormulaKey formula_key() { return {1, FormulaTensor::kValues, kSeed}; }

inline int64_t num_bytes_of(const std::vector<int64_t>& columns) {
  int64_t rows = 0;
  for (const int64_t count : columns) rows += count;
  return rows * kRowBytes;
}

//! An array's file, which begins at an odd place.
class ArrayFile {
 public:
  static constexpr int64_t kOffset = 1003;

  explicit ArrayFile(bool spoilt = false)
      : path_(std::filesystem::temp_directory_path() /
              ("engram-sharded-" + std::to_string(getpid()))) {
    const int64_t num_bytes = num_bytes_of(kColumns);
    std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
    fill_formula(formula_key(), 0, num_bytes, bytes.data());
    source_ = {"engram.1.values", {path_.string(), kOffset, num_bytes, {}}, std::nullopt};
    for (int64_t begin = 0; begin < num_bytes; begin += kBlockBytes) {
      const int64_t count = std::min(kBlockBytes, num_bytes - begin);
      source_.file.block_sums.push_back(block_sum(bytes.data() + begin, count));
    }
    if (spoilt) bytes.back() ^= 1;
    std::ofstream file(path_, std::ios::binary);
    file << std::string(kOffset, 'x');
    file.write(reinterpret_cast<const char*>(bytes.data()), num_bytes);
  }
  ~ArrayFile() { std::filesystem::remove(path_); }
  ArrayFile(const ArrayFile&) = delete;
  ArrayFile& operator=(const ArrayFile&) = delete;

  const Source& source() const { return source_; }

 private:
  std::filesystem::path path_;
  Source source_;
};

inline Source formula_source(const std::vector<int64_t>& columns = kColumns) {
  return {"engram.1.values", {"no file", 0, num_bytes_of(columns), {}}, formula_key()};
}

inline GroupOptions group_options(int rank, int size, const std::string& trial = "") {
  GroupOptions options;
  options.name = "sharded-test-" + std::to_string(size == 1 ? getpid() : getppid()) + trial;
  options.rank = rank;
  options.size = size;
  options.timeout_s = 60;
  return options;
}

//! Bytes that are not the formula's from `first_byte` on.
inline int64_t num_wrong(const uint8_t* bytes, int64_t num_bytes, int64_t first_byte = 0) {
  std::vector<uint8_t> right(static_cast<size_t>(num_bytes));
  fill_formula(formula_key(), first_byte, num_bytes, right.data());
  int64_t wrong = 0;
  for (int64_t i = 0; i < num_bytes; ++i) wrong += bytes[i] != right[static_cast<size_t>(i)];
  return wrong;
}

inline void load(Group& group, ShardedArray& array, const Source& source, bool verify) {
  group.exchange("load", [&](Group::Work& work) {
    const SourceReader reader(source);
    int64_t done = 0;
    std::mutex mutex;
    array.load(
        reader, verify, [&] { return work.cancelled(); },
        [&](int64_t count) {
          const std::lock_guard lock(mutex);
          done += count;
        });
    int64_t expected = 0;
    for (const Parts::Run& run : array.parts().runs()) {
      if (run.rank != group.rank()) continue;
      expected += std::min(run.end, array.parts().num_bytes()) - run.begin;
    }
    if (done != expected) throw Error(ENGRAM_INTERNAL_ERROR, concat("told of ", done, " bytes"));
    return Group::Part{};
  });
}

//! Binds an array on this rank; what is thrown is every rank's Error.
struct Bound {
  Bound(int rank, int size, const Source& source, bool verify = true, const std::string& trial = "",
        const std::vector<int64_t>& columns = kColumns)
      : parts(columns, kRowBytes, size), group(group_options(rank, size, trial), cancelled) {
    const PeerGpus gpus(group, 0);
    array = std::make_unique<ShardedArray>(group, gpus, parts, "engram.1.values");
    load(group, *array, source, verify);
  }
  std::string read() {
    return concat(num_wrong(array->on_device(0), array->parts().num_bytes()), " wrong");
  }

  std::atomic<bool> cancelled{false};
  Parts parts;
  Group group;
  std::unique_ptr<ShardedArray> array;
};

inline void see_only(const std::string& gpu) { machine().visible = {gpu}; }

}  // namespace engram
