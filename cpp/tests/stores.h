// SPDX-License-Identifier: Apache-2.0
//! \file stores.h
//! Stores in name alone, for tables that a formula fills, and a look at every byte of such a table.
#pragma once

#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "engram/error.h"
#include "engram/table.h"
#include "nlohmann/json.hpp"
#include "ranks.h"
#include "table/formula.h"

namespace engram {

constexpr int64_t kStoreRows = 40000;
constexpr int64_t kStoreHeadDim = 64;

//! STORE/engram.json of layers 1 and 2 in a folder, of four columns each.
inline void write_store(const Folder& folder, const std::string& content_id = "c") {
  using nlohmann::json;
  const auto part = [](const char* dtype, int64_t row_bytes) -> json {
    const int64_t num_bytes = kStoreRows * row_bytes;
    return {{"root", "store"}, {"file", "none"},
            {"offset", 0},     {"shape", {kStoreRows, row_bytes}},
            {"dtype", dtype},  {"file_size", num_bytes},
            {"mtime_ns", 0},   {"block_sums", {std::string(32, '0')}}};
  };
  json layers = json::array();
  for (const int32_t layer : {1, 2}) {
    layers.push_back({{"layer", layer},
                      {"tensors",
                       {{"embed.weight", part("F8_E4M3", kStoreHeadDim)},
                        {"embed.scale", part("F8_E8M0", kStoreHeadDim / 32)}}}});
  }
  const json sizes = {{kStoreRows / 4, kStoreRows / 4}, {kStoreRows / 4, kStoreRows / 4}};
  const json manifest = {{"format", "trtllm-engram store"},
                         {"format_version", 1},
                         {"requires", "0.1.0"},
                         {"checkpoint", nullptr},
                         {"content_id", content_id},
                         {"fingerprint", std::string(64, 'f')},
                         {"config",
                          {{"engram_layer_ids", {1, 2}},
                           {"engram_num_embeddings", {kStoreRows, kStoreRows}},
                           {"engram_max_ngram_size", 3},
                           {"engram_n_heads", 2},
                           {"engram_head_dim", kStoreHeadDim}}},
                         {"layout", {{"primes", {sizes, sizes}}}},
                         {"layers", layers}};
  const std::string path = folder.path() + "/engram.json";
  std::ofstream(path) << manifest.dump();
  REQUIRE(chmod(path.c_str(), 0600) == 0);
}

//! Tables "one" and "two" of its layers.
inline Bindings bindings_of(const Folder& store, uint64_t seed = 0) {
  Bindings bindings;
  for (const auto& [name, layer] : {std::pair("one", 1), std::pair("two", 2)}) {
    TableOptions& options = bindings.tables[name];
    options.store = store.path();
    options.layer = layer;
    options.formula_seed = seed;
  }
  return bindings;
}

//! "right", or which table is not the formula's.
inline std::string look_at(const TablesByName& tables, uint64_t seed = 0) {
  for (const auto& [name, table] : tables) {
    const TableView view = table->host_view();
    for (const auto& [tensor, there, row_bytes] :
         {std::tuple(FormulaTensor::kValues, view.values, kStoreHeadDim),
          std::tuple(FormulaTensor::kScales, view.scales, kStoreHeadDim / 32)}) {
      std::vector<uint8_t> expected(static_cast<size_t>(kStoreRows * row_bytes));
      fill_formula({table->info().layer, tensor, seed}, 0, kStoreRows * row_bytes, expected.data());
      if (std::memcmp(expected.data(), there, expected.size()) != 0) return name + " is wrong";
    }
  }
  return tables.size() == 2 ? "right" : "not both tables";
}

}  // namespace engram
