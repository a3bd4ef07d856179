// SPDX-License-Identifier: Apache-2.0
#include "ops/lookup_thresholds.h"

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "engram/error.h"
#include "table/files.h"
#include "table/log.h"

namespace engram {
namespace {

constexpr int64_t kMaxFileBytes = 1 << 20;
constexpr int kFormatVersion = 1;

//! null: never.
int64_t tokens_of(const nlohmann::json& document, const char* key, const std::string& path) {
  const auto found = document.find(key);
  const bool known = found != document.end() && (found->is_null() || found->is_number_unsigned());
  ENGRAM_CHECK(known, path, ": ", key, ": expected a number of tokens or null, found ",
               found == document.end() ? "none" : found->dump());
  return found->is_null() ? INT64_MAX : found->get<int64_t>();
}

LookupThresholds thresholds_of_environment() {
  const char* const path = std::getenv("TRTLLM_ENGRAM_CALIBRATION");
  if (path == nullptr || *path == '\0') return {};
  try {
    return read_lookup_thresholds(path);
  } catch (const Error& error) {
    log(LogLevel::kWarning, concat("TRTLLM_ENGRAM_CALIBRATION: ", error.what()));
    return {};
  }
}

}  // namespace

LookupThresholds read_lookup_thresholds(const std::string& path) {
  const nlohmann::json document =
      nlohmann::json::parse(read_trusted_text(path, kMaxFileBytes), nullptr, false);
  ENGRAM_CHECK(document.is_object(), path, ": expected an object in JSON, as `bench lookup ",
               "--calibrate` writes it, found something else");
  const auto version = document.find("format_version");
  ENGRAM_CHECK(version != document.end() && *version == kFormatVersion, path,
               ": format_version: expected ", kFormatVersion, ", found ",
               version == document.end() ? "none" : version->dump());
  return {.sorted_tokens = tokens_of(document, "sorted_tokens", path),
          .gathered_tokens = tokens_of(document, "gathered_tokens", path)};
}

const LookupThresholds& lookup_thresholds() {
  static const LookupThresholds thresholds = thresholds_of_environment();
  return thresholds;
}

}  // namespace engram
