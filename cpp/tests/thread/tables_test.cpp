// SPDX-License-Identifier: Apache-2.0
// The loader and the registry by many threads at once, for ThreadSanitizer: what is looked for are
// races; the results are checked too.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "engram/table.h"
#include "nlohmann/json.hpp"
#include "table/formula.h"
#include "table/load.h"

namespace engram {
namespace {

constexpr int64_t kRows = 1024;
constexpr int64_t kHeadDim = 64;
constexpr int64_t kRowScales = kHeadDim / 32;

//! A folder for one test.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "engram-thread-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::vector<uint8_t> formula_bytes(const FormulaKey& key, int64_t num_bytes) {
  std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
  fill_formula(key, 0, num_bytes, bytes.data());
  return bytes;
}

void write_file(const std::filesystem::path& path, const std::vector<uint8_t>& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  REQUIRE(file.good());
}

//! Writes a table's array to a file; its entry in the manifest.
nlohmann::json write_part(const Folder& folder, const FormulaKey& key, const char* dtype,
                          int64_t row_bytes) {
  const std::string file = concat("layer-", key.layer, ".", dtype);
  const std::vector<uint8_t> bytes = formula_bytes(key, kRows * row_bytes);
  write_file(folder / file, bytes);
  return {{"root", "store"}, {"file", file},
          {"offset", 0},     {"shape", {kRows, row_bytes}},
          {"dtype", dtype},  {"file_size", kRows * row_bytes},
          {"mtime_ns", 0},   {"block_sums", {block_sum(bytes.data(), kRows * row_bytes)}}};
}

//! A store of layers 1 and 2 by formula, seed 0.
void write_store(const Folder& folder) {
  nlohmann::json layers = nlohmann::json::array();
  for (const int32_t layer : {1, 2}) {
    const auto values = write_part(folder, {layer, FormulaTensor::kValues, 0}, "F8_E4M3", kHeadDim);
    const auto scales =
        write_part(folder, {layer, FormulaTensor::kScales, 0}, "F8_E8M0", kRowScales);
    layers.push_back(
        {{"layer", layer}, {"tensors", {{"embed.weight", values}, {"embed.scale", scales}}}});
  }
  // Of each layer, order and head.
  const nlohmann::json sizes = {{kRows / 4, kRows / 4}, {kRows / 4, kRows / 4}};
  const nlohmann::json manifest = {{"format", "trtllm-engram store"},
                                   {"format_version", 1},
                                   {"requires", "0.1.0"},
                                   {"checkpoint", nullptr},
                                   {"content_id", std::string(32, 'c')},
                                   {"fingerprint", std::string(64, 'f')},
                                   {"config",
                                    {{"engram_layer_ids", {1, 2}},
                                     {"engram_num_embeddings", {kRows, kRows}},
                                     {"engram_max_ngram_size", 3},
                                     {"engram_n_heads", 2},
                                     {"engram_head_dim", kHeadDim}}},
                                   {"layout", {{"primes", {sizes, sizes}}}},
                                   {"layers", layers}};
  std::ofstream(folder / "engram.json") << manifest.dump();
}

std::string toml_of(const std::string& name, int32_t layer, const Folder& store) {
  return "format_version = 1\n[tables." + name + "]\nstore = '" + store.path() +
         "'\nlayer = " + std::to_string(layer) + "\n\n";
}

TEST_CASE("the registry by many threads") {
  const Folder store;
  write_store(store);
  const std::vector<uint8_t> expected[] = {
      formula_bytes({1, FormulaTensor::kValues, 0}, kRows * kHeadDim),
      formula_bytes({2, FormulaTensor::kValues, 0}, kRows * kHeadDim)};
  TableRegistry& registry = TableRegistry::instance();
  constexpr int kThreads = 4;
  constexpr int kTurns = 8;
  std::atomic<int> bound{0};
  std::atomic<int> refused{0};
  std::atomic<int> wrong{0};
  std::atomic<bool> done{false};
  const auto read = [&](const Table& table) {
    const auto& right = expected[table.info().layer - 1];
    wrong += std::memcmp(table.host_view().values, right.data(), right.size()) != 0;
  };
  // Who binds has a name of its own and one that all want; a table in use outlives its name.
  const auto bind = [&](int thread) {
    for (int turn = 0; turn < kTurns; ++turn) {
      const int32_t layer = 1 + turn % 2;
      const std::string own = "own" + std::to_string(thread);
      registry.bind(parse_tables(toml_of(own, layer, store), store.path(), "test"));
      const auto table = registry.require(own);
      try {
        registry.bind(parse_tables(toml_of("shared", layer, store), store.path(), "test"));
        ++bound;
        registry.unbind("shared");
      } catch (const Error&) {
        ++refused;
      }
      registry.unbind(own);
      read(*table);
    }
  };
  const auto look = [&] {
    while (!done) {
      for (const auto& [name, table] : registry.tables()) read(*table);
      wrong += registry.find("nobody") != nullptr;
    }
  };
  std::vector<std::thread> threads;
  std::vector<std::thread> lookers;
  for (int i = 0; i < 2; ++i) lookers.emplace_back(look);
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(bind, i);
  for (std::thread& thread : threads) thread.join();
  done = true;
  for (std::thread& thread : lookers) thread.join();
  CHECK(bound >= 1);
  CHECK(bound + refused == kThreads * kTurns);
  CHECK(wrong == 0);
  CHECK(registry.tables().empty());
}

TEST_CASE("shares load at once, each by several threads") {
  const Folder folder;
  constexpr int64_t kBytes = 2 * kBlockBytes + 12345;
  const FormulaKey key{3, FormulaTensor::kValues, 5};
  const std::vector<uint8_t> expected = formula_bytes(key, kBytes);
  write_file(folder / "values", expected);
  Source from_file{"engram.3.values", FileRange{(folder / "values").string(), 0, kBytes}, {}};
  Source from_formula{"engram.3.values", FileRange{"", 0, kBytes}, key};
  for (const Source* source : {&from_file, &from_formula}) {
    std::vector<uint8_t> found(static_cast<size_t>(kBytes));
    std::atomic<int64_t> num_bytes{0};
    const Loader loader({source});
    std::vector<std::thread> shares;
    for (int share = 0; share < 2; ++share) {
      shares.emplace_back([&, share] {
        LoadOptions options;
        options.share = share;
        options.shares = 2;
        options.num_threads = 3;
        options.add_bytes = [&](int64_t more) { num_bytes += more; };
        loader.run({{found.data(), kBytes, source}}, options);
      });
    }
    for (std::thread& share : shares) share.join();
    loader.check_unchanged();
    CHECK(num_bytes == kBytes);
    CHECK(found == expected);
  }
}

TEST_CASE("loading that is cancelled by another thread") {
  constexpr int64_t kBytes = kBlockBytes;
  Source source{"engram.3.values", FileRange{"", 0, kBytes}, FormulaKey{}};
  std::vector<uint8_t> found(static_cast<size_t>(kBytes));
  std::atomic<bool> cancelled{false};
  std::atomic<int64_t> num_bytes{0};
  const Loader loader({&source});
  std::thread other([&] {
    while (num_bytes == 0) std::this_thread::yield();
    cancelled = true;
  });
  LoadOptions options;
  options.num_threads = 4;
  options.cancelled = [&] { return cancelled.load(); };
  options.add_bytes = [&](int64_t more) { num_bytes += more; };
  CHECK_THROWS_AS(loader.run({{found.data(), kBytes, &source}}, options), Error);
  other.join();
}

}  // namespace
}  // namespace engram
