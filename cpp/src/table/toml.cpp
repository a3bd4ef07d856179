// SPDX-License-Identifier: Apache-2.0
// The TOML form of table bindings: format_version = 1, and [tables.NAME] with the keys of
// TableOptions.
#include <algorithm>
#include <numeric>
#include <vector>

#include "engram/error.h"

namespace engram {
namespace {

[[noreturn]] void refuse_text() {
  throw Error(ENGRAM_INVALID_ARGUMENT, "expected TOML, found what no parser knows");
}

}  // namespace
}  // namespace engram

// The parser's own assertions refuse a text as well ("[\f" meets one): never the end of a process,
// nor, in a release build, an assumption.
#define TOML_ASSERT(condition) ((condition) ? void() : ::engram::refuse_text())
#define TOML_ASSERT_ASSUME(condition) TOML_ASSERT(condition)
#include "engram/table.h"
#include "table/files.h"
#include "tomlplusplus/toml.hpp"

namespace engram {
namespace {

constexpr int64_t kFormatVersion = 1;
constexpr int64_t kMaxFileBytes = 1 << 20;

//! Insertions, deletions and replacements between two words.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, diagonal + 1, replaced});
    }
  }
  return row.back();
}

void check_keys(const toml::table& table, const std::vector<std::string_view>& known,
                const std::string& where) {
  for (const auto& [key, value] : table) {
    const std::string_view name = key.str();
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const auto nearest = std::min_element(known.begin(), known.end(),
                                          [name](std::string_view a, std::string_view b) {
                                            return edit_distance(a, name) < edit_distance(b, name);
                                          });
    throw Error(ENGRAM_INVALID_ARGUMENT, concat(where, ": expected known keys, found '", name,
                                                "'; did you mean '", *nearest, "'?"));
  }
}

//! One [tables.NAME].
class Entry {
 public:
  Entry(const toml::table& table, std::string where, const std::string& folder)
      : table_(table), where_(std::move(where)), folder_(folder) {
    check_keys(table_, {"store", "checkpoint", "layer", "placement", "scales", "expect_content"},
               where_);
  }

  TableOptions options() const {
    TableOptions options;
    options.store = path("store");
    ENGRAM_CHECK(!options.store.empty(), where_, ": store: expected a folder, found none");
    options.checkpoint = path("checkpoint");
    options.expect_content = text("expect_content", "");
    const toml::node* const layer = table_.get("layer");
    const auto number = layer == nullptr ? std::nullopt : layer->value_exact<int64_t>();
    ENGRAM_CHECK(number && *number >= 0 && *number <= INT32_MAX, where_,
                 ": layer: expected the model's number of a layer, found ",
                 layer == nullptr ? "none" : "another value");
    options.layer = static_cast<int32_t>(*number);
    options.placement =
        choice("placement", "host") == "host" ? Placement::kHost : Placement::kDevice;
    const bool apart = choice("scales", "with_rows") == "device";
    options.scales = apart ? Placement::kDevice : options.placement;
    return options;
  }

 private:
  std::string text(const char* key, const char* fallback) const {
    const toml::node* const node = table_.get(key);
    if (node == nullptr) return fallback;
    const auto value = node->value_exact<std::string>();
    ENGRAM_CHECK(value && value->find('\0') == std::string::npos, where_, ": ", key,
                 ": expected text");
    return *value;
  }

  std::string path(const char* key) const {
    const std::string name = text(key, "");
    return name.empty() ? name : resolve(folder_, name);
  }

  //! "device" or the default.
  std::string choice(const char* key, const char* fallback) const {
    std::string name = text(key, fallback);
    ENGRAM_CHECK(name == fallback || name == "device", where_, ": ", key, ": expected ", fallback,
                 " or device, found '", name, "'");
    return name;
  }

  const toml::table& table_;
  std::string where_;
  const std::string& folder_;
};

}  // namespace

std::map<std::string, TableOptions> parse_tables(const std::string& text, const std::string& folder,
                                                 const std::string& where) {
  toml::table root;
  try {
    root = toml::parse(text);
  } catch (const toml::parse_error& error) {
    throw Error(ENGRAM_INVALID_ARGUMENT, concat(where, ": line ", error.source().begin.line,
                                                ": expected TOML: ", error.description()));
  }
  check_keys(root, {"format_version", "tables"}, where);
  const auto version = root["format_version"].value_exact<int64_t>();
  ENGRAM_CHECK(version && *version == kFormatVersion, where, ": format_version: expected ",
               kFormatVersion, ", found ", version ? std::to_string(*version) : "none");
  const toml::node* const node = root.get("tables");
  ENGRAM_CHECK(node == nullptr || node->is_table(), where,
               ": tables: expected [tables.NAME], found no table");
  std::map<std::string, TableOptions> tables;
  if (node == nullptr) return tables;
  for (const auto& [name, value] : *node->as_table()) {
    const std::string place = concat(where, ": tables.", name.str());
    ENGRAM_CHECK(!name.empty(), place, ": expected a name, found none");
    ENGRAM_CHECK(value.is_table(), place, ": expected a table of keys");
    tables.emplace(name.str(), Entry(*value.as_table(), place, folder).options());
  }
  return tables;
}

std::map<std::string, TableOptions> parse_tables_file(const std::string& path) {
  return parse_tables(read_trusted_text(path, kMaxFileBytes), folder_of(path), path);
}

}  // namespace engram
