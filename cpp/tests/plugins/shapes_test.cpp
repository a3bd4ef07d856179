// SPDX-License-Identifier: Apache-2.0
// Shape and type rules of each plugin. Sizes below 0 are not known while the network is defined
// (harness.h).
#include <doctest/doctest.h>

#include <algorithm>

#include "cases.h"

using namespace harness;

namespace {

constexpr auto kI32 = DataType::kINT32;
constexpr auto kI64 = DataType::kINT64;
constexpr auto kBf16 = DataType::kBF16;
constexpr auto kBool = DataType::kBOOL;

using Shapes = std::vector<Shape>;

Plugin make(const std::string& name, const Fields& changes = {}) {
  return {name, fields_of(name, changes)};
}

//! T tokens, B requests, a vocabulary of 100, two layers of orders 2 to 4 with 8 heads.
Shapes hash_inputs(int64_t num_tokens, int64_t num_requests) {
  return {{num_tokens},
          {num_tokens},
          {num_requests + (num_requests < 0 ? -1 : 1)},
          {100},
          {num_requests, 3},
          {2, 4},
          {2, 24},
          {2, 24}};
}

//! Right inputs with one replaced are refused with this text.
void check_refused(const Plugin& plugin, Shapes inputs, size_t position, const Shape& wrong,
                   const std::string& text) {
  CAPTURE(position);
  inputs[position] = wrong;
  CHECK_FALSE(plugin.shapes(inputs));
  const std::string log = take_log();
  CAPTURE(log);
  CHECK(log.find(text) != std::string::npos);
}

}  // namespace

TEST_CASE("hash: shapes") {
  CHECK(make("EngramHash").shapes(hash_inputs(7, 3)) == Shapes{{7, 2, 24}});
  CHECK(make("EngramHash").shapes(hash_inputs(0, 0)) == Shapes{{0, 2, 24}});
  const Plugin next = make("EngramHash", {{"has_next_lookback", 1}});
  CHECK(next.shapes(hash_inputs(-7, -3)) == Shapes{{7, 2, 24}, {3, 3}});
  const Plugin whole =
      make("EngramHash", {{"history", std::string("whole_prompt")}, {"has_next_lookback", 1}});
  CHECK(whole.shapes({{-7}, {-7}, {-4}, {100}, {2, 4}, {2, 24}, {2, 24}}) ==
        Shapes{{7, 2, 24}, {3, 3}});
  const Plugin decode = make("EngramHash", {{"has_cu_seqlens", 0}, {"has_next_lookback", 1}});
  CHECK(decode.shapes({{-7}, {-7}, {100}, {-7, 3}, {2, 4}, {2, 24}, {2, 24}}) ==
        Shapes{{7, 2, 24}, {7, 3}});
  const Plugin masks = make("EngramHash", {{"has_lookback_dead", 1}, {"has_dead_mask", 1}});
  CHECK(masks.shapes({{7}, {7}, {4}, {100}, {3, 3}, {3, 3}, {7}, {2, 4}, {2, 24}, {2, 24}}) ==
        Shapes{{7, 2, 24}});
}

TEST_CASE("hash: history in a KV cache") {
  const Fields fields{
      {"history", std::string("kv_phantom")}, {"tokens_per_block", 32}, {"slot_bytes", 256}};
  const Plugin plugin = make("EngramHash", fields);
  const Shapes right{{-7},          {100}, {-2, 2}, {5, 2}, {-2, -3, 2, -4}, {-3},   {-3},
                     {-3, -1, -64}, {-3},  {-3},    {2, 4}, {2, 24},         {2, 24}};
  CHECK(plugin.shapes(right) == Shapes{{7, 2, 24}, {7}, {4}, {3, 3}});
  check_refused(plugin, right, 3, {5, 3}, "host_kv_cache_pool_mapping: expected size 2");
  check_refused(plugin, right, 3, {5}, "host_kv_cache_pool_mapping: expected 2 dimensions (AK)");
  check_refused(plugin, right, 6, {4, 1}, "context_lengths: expected 1 dimensions (B), found 2");
  for (const auto& [name, value, text] :
       {std::tuple{"tokens_per_block", 0, "field 'tokens_per_block': expected above 0, found 0"},
        std::tuple{"slot_bytes", 4, "field 'slot_bytes': expected a multiple of 4 from 8 on"},
        std::tuple{"slot_bytes", 10, "field 'slot_bytes': expected a multiple of 4 from 8 on"},
        std::tuple{"has_dead_mask", 1, "field 'has_dead_mask': expected 0 where history is kv_"}}) {
    Fields wrong = fields;
    wrong[name] = value;
    CHECK_FALSE(make("EngramHash", wrong));
    CHECK(take_log().find(text) != std::string::npos);
  }
}

TEST_CASE("hash: what does not fit") {
  const Plugin plugin = make("EngramHash");
  const Shapes right = hash_inputs(7, 3);
  check_refused(plugin, right, 1, {6}, "positions: expected size 7 in dimension 0");
  check_refused(plugin, right, 1, {7, 1}, "positions: expected 1 dimensions (T), found 2");
  check_refused(plugin, right, 2, {0}, "cu_seqlens: expected at least 1 entry, found 0");
  check_refused(plugin, right, 2, {5}, "lookback_ids dimension 0: expected 4, found 3");
  check_refused(plugin, right, 3, {2},
                "field 'pad_token_id': expected below 2 (token_map), found 2");
  check_refused(plugin, right, 4, {3, 2}, "lookback_ids dimension 1: expected 3, found 2");
  check_refused(plugin, right, 5, {2, 9}, "multipliers: expected 2 to 8 in dimension 1, found 9");
  Shapes uneven = right;
  uneven[6] = {2, 25};
  check_refused(plugin, uneven, 7, {2, 25},
                "primes: expected a multiple of 3 in dimension 1, found 25");
  check_refused(plugin, right, 6, {1, 24}, "primes: expected size 2 in dimension 0");
  check_refused(plugin, right, 7, {2, 23}, "offsets: expected size 24 in dimension 1");
  CHECK_FALSE(plugin.shapes({{7}, {7}}));
  CHECK(take_log().find("expected 8 inputs (token_ids, positions, cu_seqlens, token_map, "
                        "lookback_ids, multipliers, "
                        "primes, offsets), found 2") != std::string::npos);
  CHECK_FALSE(
      make("EngramHash", {{"history", std::string("whole_prompt")}, {"has_lookback_dead", 1}}));
  take_log();
}

TEST_CASE("hash: types") {
  const Plugin plugin = make("EngramHash", {{"has_next_lookback", 1}});
  for (const DataType positions : {kI32, kI64}) {
    CHECK(plugin.types({kI32, positions, kI32, kI32, kI32, kI64, kI64, kI64}) ==
          std::vector{kI32, kI32});
    CHECK(plugin.supports({kI32, positions}, 8));
  }
  CHECK_FALSE(plugin.types({kI32, kBf16, kI32, kI32, kI32, kI64, kI64, kI64}));
  CHECK(take_log().find("positions: expected type INT32 or INT64, found BF16") !=
        std::string::npos);
  CHECK_FALSE(plugin.supports({kI64}, 8));
  CHECK(plugin.supports({kI32, kI32, kI32, kI32, kI32, kI64, kI64, kI64, kI32}, 8));
}

TEST_CASE("lookup: shapes and types") {
  const Shapes ids{{-7, 2, 24}};
  CHECK(make("EngramLookup").shapes(ids) == Shapes{{7, 6144}});
  CHECK(make("EngramLookup").types({kI32}) == std::vector{kBf16});
  const Plugin linear = make("EngramLookup", {{"output", std::string("mxfp8_linear")}});
  CHECK(linear.shapes(ids) == Shapes{{7, 6144}, {7, 48}});
  CHECK(linear.types({kI32}) == std::vector{DataType::kFP8, kI32});
  const Plugin tiled = make(
      "EngramLookup", {{"output", std::string("mxfp8_128x4")}, {"values", std::string("words")}});
  CHECK(tiled.shapes(ids) == Shapes{{7, 1536}, {48 * 128}});
  CHECK(tiled.shapes({{129, 2, 24}}) == Shapes{{129, 1536}, {2 * 48 * 128}});
  CHECK(tiled.shapes({{0, 2, 24}}) == Shapes{{0, 1536}, {0}});
  CHECK(tiled.types({kI32}) == std::vector{kI32, kI32});
  const Plugin odd = make(
      "EngramLookup", {{"head_dim", 96}, {"layer_idx", 0}, {"output", std::string("mxfp8_128x4")}});
  CHECK(odd.shapes({{5, 1, 3}}) == Shapes{{5, 288}, {3 * 128}});
}

TEST_CASE("lookup: what does not fit") {
  check_refused(make("EngramLookup"), {{}}, 0, {7, 24},
                "hash_ids: expected 3 dimensions (TLC), found 2");
  check_refused(make("EngramLookup", {{"layer_idx", 2}}), {{}}, 0, {7, 2, 24},
                "field 'layer_idx': expected below 2 (hash_ids dimension 1), found 2");
  check_refused(make("EngramLookup", {{"head_dim", 96}, {"output", std::string("mxfp8_linear")}}),
                {{}}, 0, {7, 2, 3}, "found 9 scales");
  CHECK_FALSE(make("EngramLookup").types({kI64}));
  CHECK(take_log().find("hash_ids: expected type INT32, found INT64") != std::string::npos);
}

TEST_CASE("lookup: the workspace of a table in host memory, for the most tokens") {
  CHECK(make("EngramLookup").workspace_bytes({{8, 2, 24}}) == 0);
  CHECK(make("EngramLookup").workspace_bytes({{8192, 2, 24}}) == 24 * (8193 * 8 + 4 + 8192 * 2));
  CHECK(make("EngramLookup", {{"prefetched", 1}}).workspace_bytes({{8192, 2, 24}, {8192, 6144}}) ==
        0);
  // Its side stream still works when another layer has TensorRT's workspace.
  CHECK(make("EngramPrefetch").workspace_bytes({{8192, 2, 24}}) == 0);
}

TEST_CASE("prefetch and the lookup that waits") {
  const Shapes ids{{-7, 2, 24}};
  CHECK(make("EngramPrefetch").shapes(ids) == Shapes{{7, 6144}});
  CHECK(make("EngramPrefetch").types({kI32}) == std::vector{kBf16});
  const Plugin lookup = make("EngramLookup", {{"prefetched", 1}});
  CHECK(lookup.shapes({{-7, 2, 24}, {-7, 6144}}) == Shapes{{7, 6144}});
  CHECK(lookup.types({kI32, kBf16}) == std::vector{kBf16});
  check_refused(lookup, {{7, 2, 24}, {}}, 1, {7, 6143},
                "rows dimension 1: expected 6144, found 6143");
  check_refused(lookup, {{7, 2, 24}, {}}, 1, {6, 6144}, "rows: expected size 7 in dimension 0");
  const Fields mxfp8{{"output", std::string("mxfp8_linear")}, {"prefetched", 1}};
  const Plugin scaled = make("EngramLookup", mxfp8);
  CHECK(scaled.shapes({{-7, 2, 24}, {-7, 6144}, {-7, 48}}) == Shapes{{7, 6144}, {7, 48}});
  CHECK(scaled.types({kI32, DataType::kFP8, kI32}) == std::vector{DataType::kFP8, kI32});
  check_refused(scaled, {{7, 2, 24}, {7, 6144}, {}}, 2, {7, 47},
                "scales dimension 1: expected 48, found 47");
  CHECK(make("EngramPrefetch").enqueue_nothing({{0, 2, 24}}) == 0);
  CHECK(lookup.enqueue_nothing({{0, 2, 24}, {0, 6144}}) == 0);
}

TEST_CASE("project") {
  const Plugin plugin = make("EngramProject");
  const Shapes right{{-7, 6144}, {25600, 1536}, {800 * 192 / 4}};
  CHECK(plugin.shapes(right) == Shapes{{7, 25600}});
  CHECK(plugin.shapes({{3, 96}, {33, 24}, {2}}) == Shapes{{3, 33}});
  CHECK(plugin.types({kBf16, kI32, kI32}) == std::vector{kBf16});
  CHECK_FALSE(plugin.supports({DataType::kHALF}, 3));
  check_refused(plugin, right, 0, {7, 6100},
                "x: expected a multiple of 32 in dimension 1, found 6100");
  check_refused(plugin, right, 1, {25600, 6144},
                "weight dimension 1 (words of 4 bytes): expected 1536, found 6144");
  check_refused(plugin, right, 1, {0, 1536}, "weight: expected at least 1 in dimension 0, found 0");
  check_refused(plugin, right, 2, {38399},
                "scale dimension 0 (words of 4 bytes): expected 38400, found 38399");
}

TEST_CASE("gate") {
  const Plugin plugin = make("EngramGate");
  const Shapes right{{-7, 4, 5120}, {-7, 25600}, {4, 5120}, {4, 5120}};
  CHECK(plugin.shapes(right) == Shapes{{7, 4, 5120}});
  CHECK(plugin.shapes({{0, 1, 100}, {0, 200}, {1, 100}, {1, 100}}) == Shapes{{0, 1, 100}});
  for (const DataType type : {kBf16, DataType::kHALF, DataType::kFLOAT}) {
    CHECK(plugin.types({type, kBf16, kBf16, kBf16}) == std::vector{type});
    CHECK(plugin.supports({type, kBf16, kBf16, kBf16, type}, 4));
    CHECK_FALSE(plugin.supports({type, kBf16, kBf16, kBf16, kI32}, 4));
  }
  CHECK_FALSE(plugin.types({DataType::kFP8, kBf16, kBf16, kBf16}));
  CHECK(take_log().find("hidden: expected type BF16 or FP16 or FP32, found FP8") !=
        std::string::npos);
  check_refused(plugin, right, 1, {-7, 20480},
                "kv dimension 1, (hc_mult + 1) * hidden size: expected 25600, found 20480");
  check_refused(plugin, right, 2, {4, 5121}, "q_weight: expected size 5120 in dimension 1");
  check_refused(plugin, {{-7, 0, 64}, {-7, 64}, {}, {0, 64}}, 2, {0, 64},
                "hidden: expected at least 1 in dimensions 1 and 2, found 0 and 64");
  const Plugin masked = make("EngramGate", {{"has_token_mask", 1}});
  CHECK(masked.types({kBf16, kBf16, kBf16, kBf16, kBool}) == std::vector{kBf16});
  CHECK_FALSE(masked.types({kBf16, kBf16, kBf16, kBf16, kI32}));
  take_log();
}

TEST_CASE("no tokens: nothing is read, and pointers may be null") {
  CHECK(make("EngramHash").enqueue_nothing(hash_inputs(0, 0)) == 0);
  CHECK(make("EngramHash", {{"has_next_lookback", 1}}).enqueue_nothing(hash_inputs(0, 0)) == 0);
  CHECK(make("EngramLookup").enqueue_nothing({{0, 2, 24}}) == 0);
  CHECK(make("EngramProject").enqueue_nothing({{0, 64}, {64, 16}, {1}}) == 0);
  CHECK(make("EngramGate").enqueue_nothing({{0, 4, 64}, {0, 320}, {4, 64}, {4, 64}}) == 0);
  CHECK(take_log().empty());
}

TEST_CASE("only linear formats are taken") {
  const Plugin plugin = make("EngramGate");
  nvinfer1::DynamicPluginTensorDesc vectorised{};
  vectorised.desc.type = kBf16;
  vectorised.desc.format = nvinfer1::TensorFormat::kCHW4;
  CHECK_FALSE(plugin.build().supportsFormatCombination(0, &vectorised, 4, 1));
}
