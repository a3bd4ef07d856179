// SPDX-License-Identifier: Apache-2.0
// A store's engram.json, as builder/manifest.py writes it: what a table needs of it.
#include <algorithm>
#include <array>

#include "engram/error.h"
#include "engram/row.h"
#include "engram/table.h"
#include "nlohmann/json.hpp"
#include "table/block_sums.h"
#include "table/files.h"

namespace engram {
namespace {

using nlohmann::json;

constexpr const char* kManifestFile = "engram.json";
constexpr const char* kFormat = "trtllm-engram store";
constexpr int64_t kFormatVersion = 1;
constexpr int64_t kMaxManifestBytes = int64_t{256} << 20;
constexpr size_t kMaxShownBytes = 60;

//! A value for an error's text. Never more than one level deep: dump() calls itself for each.
std::string shown(const json& value) {
  const bool nested =
      value.is_structured() && std::any_of(value.begin(), value.end(),
                                           [](const json& item) { return item.is_structured(); });
  if (nested) return concat("a nested ", value.type_name());
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= kMaxShownBytes ? text : text.substr(0, kMaxShownBytes) + "...";
}

//! A JSON object from outside, read key by key; errors name the place.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    ENGRAM_CHECK(object_.is_object(), where_, ": expected an object, found ", shown(object_));
  }

  const std::string& where() const { return where_; }

  const json& at(const char* key, bool (json::*is_right)() const noexcept,
                 const char* expected) const {
    const auto found = object_.find(key);
    ENGRAM_CHECK(found != object_.end() && ((*found).*is_right)(), where_, ": ", key, ": expected ",
                 expected, ", found ", found == object_.end() ? "none" : shown(*found));
    return *found;
  }

  std::string text(const char* key) const {
    return at(key, &json::is_string, "text").get<std::string>();
  }

  int64_t integer(const char* key, int64_t low = 0) const {
    const json& value = at(key, &json::is_number_integer, "an integer");
    // An unsigned number past 2^63 reads as negative.
    const int64_t number = value.get<int64_t>();
    const bool fits =
        !value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
    ENGRAM_CHECK(fits && number >= low, where_, ": ", key, ": expected at least ", low, ", found ",
                 shown(value));
    return number;
  }

  int32_t integer32(const char* key, int64_t low = 0) const {
    const int64_t number = integer(key, low);
    ENGRAM_CHECK(number <= INT32_MAX, where_, ": ", key, ": expected below 2^31, found ", number);
    return static_cast<int32_t>(number);
  }

  Fields inner(const char* key) const {
    return {at(key, &json::is_object, "an object"), concat(where_, ": ", key)};
  }

  bool is_null(const char* key) const { return object_.value(key, json()).is_null(); }

 private:
  const json& object_;
  std::string where_;
};

//! root/name, where name comes from outside: relative and without "..".
std::string resolve_member(const std::string& root, const std::string& name,
                           const std::string& where) {
  const std::string parts = "/" + name + "/";
  ENGRAM_CHECK(!name.empty() && name.front() != '/' && parts.find("/../") == std::string::npos &&
                   name.find('\0') == std::string::npos,
               where, ": file: expected a relative name without '..', found '", name, "'");
  return resolve(root, name);
}

//! The sums of a part's blocks.
std::vector<std::string> read_block_sums(const Fields& part, int64_t num_bytes) {
  const json& sums = part.at("block_sums", &json::is_array, "a list");
  const auto is_sum = [](const json& sum) {
    if (!sum.is_string()) return false;
    const auto& text = sum.get_ref<const std::string&>();
    return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
  };
  const int64_t num_blocks = ceil_div(num_bytes, kBlockBytes);
  ENGRAM_CHECK(static_cast<int64_t>(sums.size()) == num_blocks &&
                   std::all_of(sums.begin(), sums.end(), is_sum),
               part.where(), ": block_sums: expected ", num_blocks,
               " sums of 32 hex digits, found ", shown(sums));
  return sums.get<std::vector<std::string>>();
}

//! Refuses a file that is not the one that was prepared.
void check_file(const Fields& part, const std::string& file, const std::string& store) {
  const struct stat status = stat_regular(file);
  ENGRAM_CHECK(status.st_size == part.integer("file_size"), file,
               ": changed since prepare: expected ", part.integer("file_size"), " bytes, found ",
               status.st_size);
  const int64_t mtime_ns = nanoseconds(status.st_mtim);
  const int64_t prepared_ns = part.integer("mtime_ns", INT64_MIN);
  // A store's own files may be copied about, which changes their time stamps.
  ENGRAM_CHECK(part.text("root") == "store" || mtime_ns == prepared_ns, file,
               ": changed since prepare: expected mtime_ns ", prepared_ns, ", found ", mtime_ns,
               "; if only the time stamp changed: trtllm-engram verify ", store, " --restamp");
}

//! Where a part's bytes are.
FileRange read_part(const Fields& part, const char* dtype, int64_t num_rows, int64_t row_bytes,
                    const std::string& store, const std::string& checkpoint, bool needs_files) {
  const json shape = json::array({num_rows, row_bytes});
  ENGRAM_CHECK(part.at("shape", &json::is_array, "a list") == shape, part.where(),
               ": shape: expected ", shape.dump(), ", found ",
               shown(part.at("shape", &json::is_array, "a list")));
  ENGRAM_CHECK(part.text("dtype") == dtype, part.where(), ": dtype: expected ", dtype, ", found ",
               part.text("dtype"));
  const std::string root = part.text("root");
  ENGRAM_CHECK(root == "store" || (root == "checkpoint" && !checkpoint.empty()), part.where(),
               ": root: expected store, or checkpoint where the manifest has one, found ", root);
  const std::string file =
      resolve_member(root == "store" ? store : checkpoint, part.text("file"), part.where());
  FileRange range{file, part.integer("offset")};
  int64_t end = 0;
  ENGRAM_CHECK(!__builtin_mul_overflow(num_rows, row_bytes, &range.num_bytes) &&
                   !__builtin_add_overflow(range.num_bytes, range.offset, &end) &&
                   end <= part.integer("file_size"),
               part.where(), ": offset: expected ", num_rows, " rows of ", row_bytes,
               " bytes inside ", part.integer("file_size"), " bytes, found offset ", range.offset);
  if (!needs_files) return range;
  check_file(part, file, store);
  range.block_sums = read_block_sums(part, range.num_bytes);
  return range;
}

//! Rows of each column of a layer: the layout's primes [L, N-1, H] at `index`.
std::vector<int64_t> read_column_rows(const Fields& manifest, size_t index, const TableInfo& info) {
  const Fields layout = manifest.inner("layout");
  const json& layers = layout.at("primes", &json::is_array, "a list");
  std::vector<int64_t> rows;
  int64_t sum = 0;
  if (index < layers.size() && layers[index].is_array()) {
    for (const json& heads : layers[index]) {
      for (const json& prime : heads) {
        const bool fits = prime.is_number_integer() && prime.get<int64_t>() > 0 &&
                          prime.get<int64_t>() <= info.num_rows;
        rows.push_back(fits ? prime.get<int64_t>() : 0);
        sum += rows.back();
      }
    }
  }
  ENGRAM_CHECK(static_cast<int64_t>(rows.size()) == info.num_columns && sum == info.num_rows &&
                   std::find(rows.begin(), rows.end(), 0) == rows.end(),
               layout.where(), ": primes: expected ", info.num_columns, " for layer ", info.layer,
               " with the sum ", info.num_rows, ", found ", rows.size(), " with the sum ", sum);
  return rows;
}

void check_format(const Fields& manifest) {
  ENGRAM_CHECK(manifest.text("format") == kFormat, manifest.where(), ": format: expected '",
               kFormat, "', found '", manifest.text("format"), "'");
  const int64_t version = manifest.integer("format_version", 1);
  ENGRAM_CHECK(version <= kFormatVersion, manifest.where(), ": format_version: expected at most ",
               kFormatVersion, ", found ", version, ": use trtllm-engram ",
               manifest.text("requires"), " or newer");
}

}  // namespace

TableInfo read_table_info(const std::string& store, int32_t layer, const std::string& relocated,
                          bool needs_files) {
  const std::string path = resolve(store, kManifestFile);
  check_trusted_folder(store);
  json data;
  try {
    data = json::parse(read_trusted_text(path, kMaxManifestBytes));
  } catch (const json::exception& error) {
    throw Error(ENGRAM_INVALID_ARGUMENT, concat(path, ": expected JSON: ", error.what()));
  }
  const Fields manifest(data, path);
  check_format(manifest);
  const Fields config = manifest.inner("config");
  const json& layer_ids = config.at("engram_layer_ids", &json::is_array, "a list");
  const json& num_rows = config.at("engram_num_embeddings", &json::is_array, "a list");
  const json& layers = manifest.at("layers", &json::is_array, "a list");
  const auto found = std::find(layer_ids.begin(), layer_ids.end(), json(layer));
  ENGRAM_CHECK(found != layer_ids.end(), path, ": expected a table of layer ", layer,
               ", found those of layers ", shown(layer_ids));
  const auto index = static_cast<size_t>(found - layer_ids.begin());
  ENGRAM_CHECK(
      index < num_rows.size() && index < layers.size() && num_rows[index].is_number_integer(), path,
      ": expected one entry per layer (", layer_ids.size(),
      ") in engram_num_embeddings and layers, found ", num_rows.size(), " and ", layers.size());
  TableInfo info;
  info.store = store;
  info.fingerprint = manifest.text("fingerprint");
  info.content_id = manifest.text("content_id");
  info.layer = layer;
  info.layer_idx = static_cast<int32_t>(index);
  info.num_layers = static_cast<int32_t>(layer_ids.size());
  info.head_dim = config.integer32("engram_head_dim", 1);
  ENGRAM_CHECK(info.head_dim % kScaleBlock == 0, path, ": engram_head_dim: expected a multiple of ",
               kScaleBlock, ", found ", info.head_dim);
  info.num_heads = config.integer32("engram_n_heads", 1);
  const int64_t num_columns =
      (config.integer32("engram_max_ngram_size", 2) - int64_t{1}) * info.num_heads;
  ENGRAM_CHECK(num_columns <= INT32_MAX, path, ": expected fewer than 2^31 hash columns, found ",
               num_columns);
  info.num_columns = static_cast<int32_t>(num_columns);
  info.num_rows = num_rows[index].get<int64_t>();
  ENGRAM_CHECK(info.num_rows > 0 && info.num_rows <= INT32_MAX, path,
               ": engram_num_embeddings: expected 1 to 2^31-1 rows, found ", info.num_rows);
  info.column_rows = read_column_rows(manifest, index, info);
  const std::string checkpoint = !relocated.empty() || manifest.is_null("checkpoint")
                                     ? relocated
                                     : manifest.text("checkpoint");
  const Fields tensors = Fields(layers[index], concat(path, ": layers: ", layer)).inner("tensors");
  info.values = read_part(tensors.inner("embed.weight"), "F8_E4M3", info.num_rows, info.head_dim,
                          store, checkpoint, needs_files);
  info.scales = read_part(tensors.inner("embed.scale"), "F8_E8M0", info.num_rows,
                          scales_per_row(info.head_dim), store, checkpoint, needs_files);
  return info;
}

}  // namespace engram
