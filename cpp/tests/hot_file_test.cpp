// SPDX-License-Identifier: Apache-2.0
// Files of counted rows, and others.
#include "table/hot_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "doctest/doctest.h"
#include "engram/error.h"

namespace engram {
namespace {

const std::string kDtype = "[('layer', '<i4'), ('row', '<i4'), ('count', '<i8')]";

//! As numpy writes records, but for what the arguments change.
class HotFile {
 public:
  explicit HotFile(const std::vector<std::pair<int32_t, int32_t>>& rows,
                   const std::string& dtype = kDtype, size_t cut = 0) {
    std::string header = "{'descr': " + dtype + ", 'fortran_order': False, 'shape': (" +
                         std::to_string(rows.size()) + ",), }";
    header.resize(118, ' ');
    std::string bytes("\x93NUMPY\x01\x00\x76\x00", 10);
    bytes += header;
    for (const auto& [layer, row] : rows) {
      const int32_t fields[4] = {layer, row, 1, 0};
      bytes.append(reinterpret_cast<const char*>(fields), sizeof(fields));
    }
    bytes.resize(bytes.size() - cut);
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  ~HotFile() { std::remove(path_.c_str()); }
  HotFile(const HotFile&) = delete;
  HotFile& operator=(const HotFile&) = delete;

  const std::string& path() const { return path_; }
  std::string refusal(int32_t layer = 1) const {
    try {
      read_hot_file(path_, layer, 100);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

 private:
  std::string path_ = "/tmp/engram-hot-" + std::to_string(getpid()) + ".npy";
};

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("hot file: a layer's rows, in the file's order") {
  const HotFile file({{1, 99}, {1, 0}, {14, 7}, {1, 50}, {14, 98}});
  CHECK(read_hot_file(file.path(), 1, 100) == std::vector<int32_t>{99, 0, 50});
  CHECK(read_hot_file(file.path(), 14, 100) == std::vector<int32_t>{7, 98});
}

TEST_CASE("hot file: what is refused, and how") {
  CHECK(holds(HotFile({{1, 100}}).refusal(), "layer 1: expected rows from 0 to 99, found 100"));
  CHECK(holds(HotFile({{1, -1}}).refusal(), "found -1"));
  CHECK(holds(HotFile({{2, 3}}).refusal(), "expected rows of layer 1, found none"));
  CHECK(holds(HotFile({}).refusal(), "expected rows of layer 1, found none"));
  const std::string other = "as tables count --output writes them, found another file";
  CHECK(holds(HotFile({{1, 3}}, "'<i4'").refusal(), other));
  for (const size_t cut : {1, 15, 16, 17, 140}) {
    CHECK(holds(HotFile({{1, 3}, {1, 4}}, kDtype, cut).refusal(), other));
  }
  const HotFile shared({{1, 3}});
  REQUIRE(chmod(shared.path().c_str(), 0666) == 0);
  CHECK(holds(shared.refusal(), shared.path()));
}

}  // namespace
}  // namespace engram
