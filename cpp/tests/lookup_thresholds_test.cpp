// SPDX-License-Identifier: Apache-2.0
#include "ops/lookup_thresholds.h"

#include <fstream>

#include "doctest/doctest.h"
#include "stores.h"
#include "texts.h"

namespace engram {
namespace {

std::string file_of(const Folder& folder, const std::string& text) {
  const std::string path = folder.path() + "/calibration.json";
  std::ofstream(path) << text;
  return path;
}

TEST_CASE("lookup thresholds: those of a file") {
  const Folder folder;
  const LookupThresholds found = read_lookup_thresholds(file_of(
      folder,
      R"({"format_version": 1, "sorted_tokens": null, "gathered_tokens": 64, "more": []})"));
  CHECK(found.sorted_tokens == INT64_MAX);
  CHECK(found.gathered_tokens == 64);
}

TEST_CASE("lookup thresholds: bad files are told in one line") {
  const Folder folder;
  for (const auto& [text, told] : {
           std::pair{"", "expected an object in JSON"},
           std::pair{"[1]", "expected an object in JSON"},
           std::pair{R"({"sorted_tokens": 1})", "format_version: expected 1, found none"},
           std::pair{R"({"format_version": 2})", "format_version: expected 1, found 2"},
           std::pair{R"({"format_version": 1, "gathered_tokens": 1})",
                     "sorted_tokens: expected a number of tokens or null, found none"},
           std::pair{R"({"format_version": 1, "sorted_tokens": -1})",
                     "sorted_tokens: expected a number of tokens or null, found -1"},
           std::pair{R"({"format_version": 1, "sorted_tokens": 1, "gathered_tokens": "2"})",
                     "gathered_tokens: expected a number of tokens or null, found \"2\""},
       }) {
    const std::string path = file_of(folder, text);
    const std::string said = message_of([&] { read_lookup_thresholds(path); });
    CAPTURE(said);
    CHECK(said.starts_with(path + ": "));
    CHECK(has(said, told));
  }
  CHECK(has(message_of([&] { read_lookup_thresholds(folder.path() + "/none"); }), "none"));
}

}  // namespace
}  // namespace engram
