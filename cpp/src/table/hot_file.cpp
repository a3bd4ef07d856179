// SPDX-License-Identifier: Apache-2.0
#include "table/hot_file.h"

#include <charconv>
#include <cstring>
#include <string_view>

#include "engram/error.h"
#include "table/files.h"

namespace engram {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{1} << 34;
// The form's version 1.0, the header's length in two bytes, then the header.
constexpr std::string_view kBegin{"\x93NUMPY\x01\x00", 8};
constexpr size_t kLengthBytes = 2;
constexpr std::string_view kHeader =
    "{'descr': [('layer', '<i4'), ('row', '<i4'), ('count', '<i8')], 'fortran_order': False, "
    "'shape': (";

struct Record {
  int32_t layer;
  int32_t row;
  int64_t count;
};
static_assert(sizeof(Record) == 16, "as numpy packs it");

//! Where the records begin; 0: nowhere.
size_t find_records(std::string_view bytes) {
  if (bytes.substr(0, kBegin.size()) != kBegin) return 0;
  if (bytes.size() < kBegin.size() + kLengthBytes) return 0;
  const auto byte = [&](size_t at) { return static_cast<size_t>(static_cast<uint8_t>(bytes[at])); };
  const size_t begin = kBegin.size() + kLengthBytes;
  const size_t end = begin + byte(kBegin.size()) + (byte(kBegin.size() + 1) << 8);
  if (bytes.size() < end) return 0;
  std::string_view header = bytes.substr(begin, end - begin);
  if (header.substr(0, kHeader.size()) != kHeader) return 0;
  header.remove_prefix(kHeader.size());
  size_t count = 0;
  const auto [rest, error] = std::from_chars(header.data(), header.data() + header.size(), count);
  header.remove_prefix(static_cast<size_t>(rest - header.data()));
  const bool is_list = error == std::errc() && header.substr(0, 2) == ",)";
  const size_t num_bytes = bytes.size() - end;
  return is_list && num_bytes % sizeof(Record) == 0 && num_bytes / sizeof(Record) == count ? end
                                                                                           : 0;
}

}  // namespace

std::vector<int32_t> read_hot_file(const std::string& path, int32_t layer, int64_t num_rows) {
  const std::string bytes = read_trusted_text(path, kMaxFileBytes);
  const size_t begin = find_records(bytes);
  ENGRAM_CHECK(begin > 0, path, ": expected records of layer, row and count, as tables count ",
               "--output writes them, found another file");
  std::vector<int32_t> rows;
  for (size_t at = begin; at < bytes.size(); at += sizeof(Record)) {
    Record record;
    memcpy(&record, bytes.data() + at, sizeof(record));
    if (record.layer != layer) continue;
    ENGRAM_CHECK(record.row >= 0 && record.row < num_rows, path, ": layer ", layer,
                 ": expected rows from 0 to ", num_rows - 1, ", found ", record.row);
    rows.push_back(record.row);
  }
  ENGRAM_CHECK(!rows.empty(), path, ": expected rows of layer ", layer, ", found none");
  return rows;
}

}  // namespace engram
