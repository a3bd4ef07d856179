// SPDX-License-Identifier: Apache-2.0
// The TOML form of Bindings: format_version = 1, [tables.NAME] with the keys of TableOptions, and
// [group] with those of GroupSettings.
#include <algorithm>
#include <numeric>
#include <sstream>
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
constexpr int64_t kMaxRanks = 4096;
constexpr double kMaxGib = 1 << 16;
constexpr int64_t kMaxGatherThreads = 1024;

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

//! Names and what they mean; the first is the default.
template <typename Value>
using Choices = std::initializer_list<std::pair<const char*, Value>>;

//! The keys of one table.
class Keys {
 public:
  Keys(const toml::table& table, std::string where, const std::string& folder)
      : table_(table), where_(std::move(where)), folder_(folder) {}

  void check_known(const std::vector<std::string_view>& known) const {
    check_keys(table_, known, where_);
  }

  bool has(const char* key) const { return table_.contains(key); }

  std::string text(const char* key, const char* fallback = "") const {
    const toml::node* const node = table_.get(key);
    if (node == nullptr) return fallback;
    const auto value = node->value_exact<std::string>();
    ENGRAM_CHECK(value && value->find('\0') == std::string::npos, where_, ": ", key,
                 ": expected text");
    return *value;
  }

  std::string path(const char* key) const {
    const std::string name = text(key);
    return name.empty() ? name : resolve(folder_, name);
  }

  std::optional<int64_t> integer(const char* key, int64_t low, int64_t high,
                                 const char* expected) const {
    const toml::node* const node = table_.get(key);
    if (node == nullptr) return std::nullopt;
    const auto number = node->value_exact<int64_t>();
    ENGRAM_CHECK(number && *number >= low && *number <= high, where_, ": ", key, ": expected ",
                 expected, ", found ", number ? std::to_string(*number) : "another value");
    return number;
  }

  bool flag(const char* key) const {
    const toml::node* const node = table_.get(key);
    if (node == nullptr) return false;
    const auto value = node->value_exact<bool>();
    ENGRAM_CHECK(value, where_, ": ", key, ": expected true or false");
    return *value;
  }

  std::optional<double> number(const char* key, double low, double high,
                               const char* expected) const {
    const toml::node* const node = table_.get(key);
    if (node == nullptr) return std::nullopt;
    const auto value = node->is_number() ? node->value<double>() : std::nullopt;
    ENGRAM_CHECK(value && *value >= low && *value <= high, where_, ": ", key, ": expected ",
                 expected, ", found ", value ? concat(*value) : "no number");
    return value;
  }

  template <typename Value>
  Value choice(const char* key, Choices<Value> choices) const {
    const std::string name = text(key, choices.begin()->first);
    std::string known;
    for (const auto& [word, value] : choices) {
      if (name == word) return value;
      const bool last = &word == &(choices.end() - 1)->first;
      known += concat(known.empty() ? "" : last ? " or " : ", ", word);
    }
    throw Error(ENGRAM_INVALID_ARGUMENT,
                concat(where_, ": ", key, ": expected ", known, ", found '", name, "'"));
  }

  const std::string& where() const { return where_; }

 private:
  const toml::table& table_;
  std::string where_;
  const std::string& folder_;
};

//! Rows that lie nearer than the others.
void read_hot(const Keys& keys, TableOptions* options) {
  options->hot_rows = keys.path("hot_rows");
  ENGRAM_CHECK(options->hot_rows.empty() || options->placement == Placement::kHost, keys.where(),
               ": hot_rows: expected with placement host, found ",
               placement_name(options->placement));
  const bool on_host = options->placement == Placement::kHost;
  ENGRAM_CHECK(!keys.has("hot_gib") || on_host || options->placement == Placement::kDisk,
               keys.where(), ": hot_gib: expected with placement host or disk, found ",
               placement_name(options->placement));
  options->hot_gib =
      keys.number("hot_gib", 0, kMaxGib, "GiB, 0 to 65536").value_or(options->hot_gib);
  ENGRAM_CHECK(!keys.has("hot_adaptive") || !options->hot_rows.empty(), keys.where(),
               ": hot_adaptive: expected with hot_rows, without which all is adaptive");
  if (!options->hot_rows.empty()) {
    options->hot_adaptive =
        keys.number("hot_adaptive", 0, 1, "a share, 0 to 1").value_or(options->hot_adaptive);
  } else if (on_host && keys.has("hot_gib")) {
    options->hot_adaptive = 1;
  }
}

//! What does not go with placement disk, or with no other.
void check_disk(const Keys& keys, const TableOptions& options) {
  if (options.placement != Placement::kDisk) {
    ENGRAM_CHECK(keys.text("scales") != "host", keys.where(),
                 ": scales: expected host with placement disk, found it with ",
                 placement_name(options.placement));
    return;
  }
  ENGRAM_CHECK(options.scales != Placement::kDevice, keys.where(),
               ": scales: expected with_rows or host with placement disk, found device");
  for (const char* const key : {"formula_seed", "verify"}) {
    ENGRAM_CHECK(!keys.has(key), keys.where(), ": ", key,
                 ": expected a placement that loads rows, found disk");
  }
}

//! [tables.NAME]
TableOptions read_table(const toml::table& table, const std::string& where,
                        const std::string& folder) {
  const Keys keys(table, where, folder);
  keys.check_known({"store", "checkpoint", "layer", "placement", "scales", "hot_gib", "hot_rows",
                    "hot_adaptive", "gather_threads", "memory", "pages", "numa", "verify",
                    "formula_seed", "heads", "expect_content"});
  TableOptions options;
  options.store = keys.path("store");
  ENGRAM_CHECK(!options.store.empty(), where, ": store: expected a folder, found none");
  options.checkpoint = keys.path("checkpoint");
  options.expect_content = keys.text("expect_content");
  const auto layer = keys.integer("layer", 0, INT32_MAX, "the model's number of a layer");
  ENGRAM_CHECK(layer, where, ": layer: expected the model's number of a layer, found none");
  options.layer = static_cast<int32_t>(*layer);
  options.placement =
      keys.choice<Placement>("placement", {{"host", Placement::kHost},
                                           {"device", Placement::kDevice},
                                           {"device_sharded", Placement::kDeviceSharded},
                                           {"disk", Placement::kDisk}});
  using Scales = std::optional<Placement>;
  options.scales = keys.choice<Scales>("scales", {{"with_rows", std::nullopt},
                                                  {"device", Placement::kDevice},
                                                  {"host", Placement::kHost}})
                       .value_or(options.placement);
  read_hot(keys, &options);
  check_disk(keys, options);
  if (keys.has("memory")) {
    using Memory = std::optional<MemoryKind>;
    options.memory = keys.choice<Memory>("memory", {{"memfd", MemoryKind::kMemfd},
                                                    {"shm", MemoryKind::kShm},
                                                    {"cumem", MemoryKind::kCumem},
                                                    {"private", MemoryKind::kPrivate},
                                                    {"keeper", std::nullopt}});
    options.keeper = !options.memory;
  }
  if (const auto threads = keys.integer("gather_threads", 0, kMaxGatherThreads, "0 to 1024")) {
    ENGRAM_CHECK(options.placement == Placement::kHost, where,
                 ": gather_threads: expected with placement host, found ",
                 placement_name(options.placement));
    options.gather_threads = static_cast<int32_t>(*threads);
  }
  options.pages = keys.choice<PageKind>(
      "pages", {{"auto", PageKind::kAuto}, {"4k", PageKind::k4K}, {"2m", PageKind::k2M}});
  try {
    options.numa = parse_numa_policy(keys.text("numa", "default"));
  } catch (const Error& error) {
    throw Error(error.status(), concat(where, ": ", error.what()));
  }
  options.verify = keys.flag("verify");
  options.heads = keys.flag("heads");
  if (const auto seed = keys.integer("formula_seed", 0, INT64_MAX, "an integer of 63 bits")) {
    options.formula_seed = static_cast<uint64_t>(*seed);
  }
  ENGRAM_CHECK(!options.keeper || options.placement == Placement::kHost, where,
               ": placement: expected host, which is where a keeper's memory is, found ",
               placement_name(options.placement));
  for (const char* const key : {"pages", "numa"}) {
    ENGRAM_CHECK(!options.keeper || !keys.has(key), where, ": ", key,
                 ": expected of memory that is allocated here, found it with memory keeper");
  }
  const bool from_files =
      !options.formula_seed && (!options.keeper || options.scales == Placement::kDevice);
  ENGRAM_CHECK(!options.verify || from_files, where,
               ": verify: expected with bytes that are loaded from files, found it with ",
               options.formula_seed ? "formula_seed" : "memory keeper");
  return options;
}

//! The first thing that is wrong, while the rest is read on.
class FirstFailure {
 public:
  explicit FirstFailure(std::optional<Error>* failure) : failure_(failure) {}

  template <typename Read>
  void unless(const Read& read) const {
    try {
      read();
    } catch (const Error& error) {
      if (!*failure_) *failure_ = error;
    }
  }

 private:
  std::optional<Error>* const failure_;
};

//! [group], as far as it can be read: who waits for this rank is to hear of the failure.
GroupSettings read_group(const toml::table& table, const std::string& where,
                         const std::string& folder, const FirstFailure& fails) {
  const Keys keys(table, where, folder);
  GroupSettings group;
  fails.unless([&] {
    keys.check_known({"name", "rank", "size", "socket", "timeout_s", "assume_ram", "keeper"});
  });
  fails.unless([&] { group.name = keys.text("name"); });
  fails.unless([&] { group.socket = keys.path("socket"); });
  fails.unless([&] { group.keeper = keys.text("keeper"); });
  fails.unless([&] {
    group.timeout_s =
        keys.number("timeout_s", 1e-9, 7 * 24 * 3600, "seconds, more than 0 and at most 604800");
  });
  fails.unless([&] { group.assume_ram = keys.integer("assume_ram", 1, INT64_MAX, "bytes"); });
  if (!keys.has("size") && !keys.has("rank")) return group;
  group.rank = 0;  // nobody's, unless both are right
  group.size = 1;
  fails.unless([&] {
    const auto size = keys.integer("size", 1, kMaxRanks, "1 to 4096 ranks");
    const auto rank = keys.integer("rank", 0, kMaxRanks - 1, "0 or more");
    ENGRAM_CHECK(size.has_value() == rank.has_value(), where,
                 ": expected rank and size, or neither, found ", size ? "size" : "rank", " alone");
    ENGRAM_CHECK(*rank < *size, where, ": rank: expected 0 to ", *size - 1, ", found ", *rank);
    group.size = static_cast<int32_t>(*size);
    group.rank = static_cast<int32_t>(*rank);
  });
  return group;
}

//! [tables]
std::map<std::string, TableOptions> read_all(const toml::table& tables, const std::string& where,
                                             const std::string& folder) {
  std::map<std::string, TableOptions> all;
  for (const auto& [name, value] : tables) {
    const std::string place = concat(where, "table '", name.str(), "'");
    ENGRAM_CHECK(!name.empty(), place, ": expected a name, found none");
    ENGRAM_CHECK(value.is_table(), place, ": expected a table of keys");
    all.emplace(name.str(), read_table(*value.as_table(), place, folder));
  }
  return all;
}

//! A table of the root; null where it is not there.
const toml::table* section(const toml::table& root, const char* key, const char* expected,
                           const std::string& where) {
  const toml::node* const node = root.get(key);
  ENGRAM_CHECK(node == nullptr || node->is_table(), where, key, ": expected ", expected,
               ", found no table");
  return node == nullptr ? nullptr : node->as_table();
}

toml::table parse(const std::string& text, const std::string& where) {
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& error) {
    throw Error(ENGRAM_INVALID_ARGUMENT, concat(where, "line ", error.source().begin.line,
                                                ": expected TOML: ", error.description()));
  } catch (const Error& error) {  // of refuse_text
    throw Error(error.status(), where + error.what());
  }
}

//! The lines of [group] that are TOML, in a text that is not.
toml::table readable_group(const std::string& text) {
  toml::table found;
  bool inside = false;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find_first_not_of(" \t");
    if (begin == line.npos) continue;
    if (line[begin] == '[') {
      inside = line.compare(begin, 7, "[group]") == 0;
    } else if (inside) {
      try {
        toml::table keys = parse(line, "");
        for (auto& [key, value] : keys) found.insert(key, std::move(value));
      } catch (const Error&) {
        // Perhaps the one that makes the text none.
      }
    }
  }
  return found;
}

}  // namespace

const char* placement_name(Placement placement) {
  switch (placement) {
    case Placement::kHost:
      return "host";
    case Placement::kDevice:
      return "device";
    case Placement::kDeviceSharded:
      return "device_sharded";
    case Placement::kDisk:
      return "disk";
  }
  return "";
}

Bindings parse_tables(const std::string& text, const std::string& folder,
                      const std::string& place) {
  const std::string where = place.empty() ? "" : place + ": ";
  Bindings bindings;
  const FirstFailure fails(&bindings.failure);
  toml::table root;
  fails.unless([&] { root = parse(text, where); });
  if (bindings.failure) {
    root.insert("format_version", kFormatVersion);
    root.insert("group", readable_group(text));
  }
  fails.unless([&] { check_keys(root, {"format_version", "group", "tables"}, place); });
  fails.unless([&] {
    const auto version = root["format_version"].value_exact<int64_t>();
    ENGRAM_CHECK(version && *version == kFormatVersion, where, "format_version: expected ",
                 kFormatVersion, ", found ", version ? std::to_string(*version) : "none");
  });
  fails.unless([&] {
    const toml::table* const group = section(root, "group", "[group]", where);
    if (group != nullptr) bindings.group = read_group(*group, where + "group", folder, fails);
  });
  fails.unless([&] {
    const toml::table* const tables = section(root, "tables", "[tables.NAME]", where);
    if (tables != nullptr) bindings.tables = read_all(*tables, where, folder);
  });
  if (bindings.failure) bindings.tables.clear();
  return bindings;
}

Bindings parse_tables_file(const std::string& path) {
  std::string text;
  try {
    text = read_trusted_text(path, kMaxFileBytes);
  } catch (const Error& error) {
    return {.tables = {}, .group = {}, .failure = error};
  }
  return parse_tables(text, folder_of(path), path);
}

}  // namespace engram
