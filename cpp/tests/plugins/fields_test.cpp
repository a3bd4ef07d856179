// SPDX-License-Identifier: Apache-2.0
// What holds for every plugin: creators, fields, clones, plans and timing-cache ids.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include "cases.h"

using namespace harness;
using nvinfer1::PluginCapabilityType;
using nvinfer1::TensorRTPhase;

namespace {

//! Another value that the field may have.
Value changed(const std::string& field, const Value& value) {
  if (field == "history") return std::string("whole_prompt");
  if (field == "output") return std::string("mxfp8_linear");
  if (field == "values") return std::string("words");
  if (field == "weight_layout") return std::string("sm90_v1");
  if (field == "fingerprint") return std::string(64, 'b');
  if (field == "head_dim" || field == "tokens_per_block") return 64;
  if (field == "slot_bytes") return 128;
  if (const auto* const number = std::get_if<int32_t>(&value))
    return *number == 0 ? 1 : *number - 1;
  if (const auto* const number = std::get_if<float>(&value)) return *number * 2;
  return std::get<std::string>(value) + "x";
}

//! What other fields must be where this one is not its default.
Fields beside(const std::string& field) {
  if (field == "values") return {{"output", std::string("mxfp8_linear")}};
  if (field == "tokens_per_block" || field == "slot_bytes")
    return {{"history", std::string("kv_phantom")}, {"tokens_per_block", 32}, {"slot_bytes", 64}};
  return {};
}

//! A format that others may follow.
bool has_one_value(const std::string& field) { return field == "format_version"; }

}  // namespace

TEST_CASE("creators") {
  std::vector<std::string> expected;
  for (const auto& [name, fields] : right_fields()) expected.push_back(name);
  std::vector<std::string> found = creator_names();
  std::sort(found.begin(), found.end());
  CHECK(found == expected);
  for (const std::string& name : found) {
    CHECK(creator(name)->getPluginVersion() == std::string("1"));
    CHECK(creator(name)->getPluginNamespace() == std::string());
    CHECK(creator(name)->getFieldNames()->nbFields > 1);
  }
}

TEST_CASE("no fields make no plugin") {
  for (const auto& [name, fields] : right_fields()) {
    CAPTURE(name);
    CHECK_FALSE(Plugin(name, {}));
    CHECK(take_log().find("found no such field") != std::string::npos);
    CHECK(creator(name)->createPlugin(name.c_str(), nullptr, TensorRTPhase::kBUILD) == nullptr);
    take_log();
  }
}

TEST_CASE("each missing required field is named") {
  for (const auto& [name, fields] : right_fields()) {
    for (const auto& [field, value] : fields) {
      CAPTURE(field);
      Fields rest = fields;
      rest.erase(field);
      CHECK_FALSE(Plugin(name, rest));
      CHECK(take_log().find(name + ".createPlugin: field '" + field + "': expected") == 0);
    }
  }
}

TEST_CASE("unknown and mistyped fields are named") {
  for (const auto& [name, fields] : right_fields()) {
    CAPTURE(name);
    CHECK_FALSE(Plugin(name, fields_of(name, {{"no_such", 1}})));
    CHECK(take_log().find("field 'no_such': expected one of ") != std::string::npos);
    for (const auto& [field, value] : fields) {
      const Value mistyped = std::holds_alternative<float>(value) ? Value(1) : Value(1.0F);
      CHECK_FALSE(Plugin(name, fields_of(name, {{field, mistyped}})));
      CHECK(take_log().find("field '" + field + "': expected type ") != std::string::npos);
    }
  }
}

TEST_CASE("a field of several values, without data or given twice is refused") {
  const float eps[] = {1.0F, 2.0F};
  using nvinfer1::PluginField;
  using nvinfer1::PluginFieldType;
  const PluginField one("eps", eps, PluginFieldType::kFLOAT32, 1);
  const std::vector<std::vector<PluginField>> cases{
      {PluginField("eps", eps, PluginFieldType::kFLOAT32, 2)},
      {PluginField("eps", nullptr, PluginFieldType::kFLOAT32, 1)},
      {PluginField(nullptr, eps, PluginFieldType::kFLOAT32, 1)},
      {one, one}};
  for (const auto& fields : cases) {
    const nvinfer1::PluginFieldCollection collection{static_cast<int32_t>(fields.size()),
                                                     fields.data()};
    CHECK(creator("EngramGate")->createPlugin("gate", &collection, TensorRTPhase::kBUILD) ==
          nullptr);
    CHECK(take_log().find("expected") != std::string::npos);
  }
}

TEST_CASE("bad values are named") {
  const std::vector<std::pair<std::string, Fields>> cases{
      {"EngramHash", {{"history", std::string("phantom")}}},
      {"EngramHash", {{"pad_token_id", -1}}},
      {"EngramHash", {{"has_dead_mask", 2}}},
      {"EngramHash", {{"slot_bytes", 64}}},
      {"EngramHash", {{"tokens_per_block", 32}}},
      {"EngramLookup", {{"table", std::string()}}},
      {"EngramLookup", {{"fingerprint", std::string("f")}}},
      {"EngramLookup", {{"fingerprint", std::string(64, 'F')}}},
      {"EngramLookup", {{"layer", -1}}},
      {"EngramLookup", {{"head_dim", 40}}},
      {"EngramLookup", {{"layer_idx", -1}}},
      {"EngramLookup", {{"output", std::string("fp4")}}},
      {"EngramLookup", {{"values", std::string("bytes")}}},
      {"EngramLookup", {{"values", std::string("words")}}},
      {"EngramProject", {{"weight_layout", std::string("x")}}},
      {"EngramGate", {{"eps", -1.0F}}},
      {"EngramGate", {{"eps", 1.5F}}},
      {"EngramGate", {{"eps", std::numeric_limits<float>::quiet_NaN()}}},
      {"EngramGate", {{"in_place", 3}}},
      {"EngramGate", {{"format_version", 0}}},
      {"EngramLookup", {{"table", std::string("engram\0.1", 9)}}},
  };
  for (const auto& [name, bad] : cases) {
    const std::string field = bad.begin()->first;
    CAPTURE(field);
    CHECK_FALSE(Plugin(name, fields_of(name, bad)));
    const std::string said = take_log();
    CHECK(said.find("field '" + field + "': expected ") != std::string::npos);
    CHECK(said.find("a newer plan") == std::string::npos);
  }
}

//! By a plugin that does nothing: TensorRT 10.6 ends the process where it gets none.
TEST_CASE("a newer plan is refused") {
  const std::string reason = "field 'format_version': expected 1 to 1, found 2";
  for (const auto& [name, fields] : right_fields()) {
    CAPTURE(name);
    const Fields newer = fields_of(name, {{"format_version", 2}});
    const Plugin plugin(name, newer, TensorRTPhase::kRUNTIME);
    REQUIRE(plugin);
    CHECK(take_log().find(name + ".createPlugin: " + reason) != std::string::npos);
    const Plugin clone = plugin.clone();
    for (const Plugin* const each : {&plugin, &clone}) {
      CHECK(each->core().getPluginName() == name);
      CHECK(each->serialised() == newer);
      CHECK_FALSE(each->attach(nullptr));
      CHECK(take_log().find(name + ".attachToContext: " + reason) != std::string::npos);
      CHECK(each->runtime().onShapeChange(nullptr, 0, nullptr, 0) != 0);
      CHECK(each->runtime().enqueue(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) != 0);
      CHECK(take_log().find(name + ".enqueue: " + reason) != std::string::npos);
    }
    CHECK_FALSE(Plugin(name, newer));
    CHECK(take_log().find(reason) != std::string::npos);
  }
}

TEST_CASE("capabilities") {
  for (const auto& [name, fields] : right_fields()) {
    CAPTURE(name);
    const Plugin plugin(name, fields);
    REQUIRE(plugin);
    CHECK(plugin.core().getPluginName() == name);
    CHECK(plugin.core().getPluginVersion() == std::string("1"));
    CHECK(plugin.core().getPluginNamespace() == std::string());
    CHECK(plugin.core().getInterfaceInfo().kind == std::string("PLUGIN_V3ONE_CORE"));
    CHECK(plugin.build().getInterfaceInfo().kind == std::string("PLUGIN_V3ONE_BUILD"));
    CHECK(plugin.build().getInterfaceInfo().major == 1);
    CHECK(plugin.build().getNbTactics() == 0);
    CHECK(plugin.runtime().getInterfaceInfo().kind == std::string("PLUGIN_V3ONE_RUNTIME"));
  }
}

TEST_CASE("aliased input only where TensorRT has it") {
  const Plugin plugin("EngramGate", fields_of("EngramGate", {{"in_place", 1}}));
  REQUIRE(plugin);
  REQUIRE(plugin.build().getInterfaceInfo().major == (has_tensorrt() ? 2 : 1));
  if (has_tensorrt()) {
    auto& build = static_cast<nvinfer1::IPluginV3OneBuildV2&>(plugin.build());
    CHECK(build.getAliasedInput(0) == 0);
    CHECK(build.getAliasedInput(1) == -1);
  }
}

TEST_CASE("plans: what is serialised makes the same plugin") {
  for (const auto& [name, fields] : right_fields()) {
    CAPTURE(name);
    const Plugin plugin(name, fields);
    const Fields plan = plugin.serialised();
    CHECK(plan.size() == static_cast<size_t>(creator(name)->getFieldNames()->nbFields));
    CHECK(std::get<int32_t>(plan.at("format_version")) == 1);
    for (const auto& [field, value] : fields) CHECK(plan.at(field) == value);
    const Plugin reloaded(name, plan, TensorRTPhase::kRUNTIME);
    REQUIRE(reloaded);
    CHECK(reloaded.serialised() == plan);
    CHECK(reloaded.build().getTimingCacheID() == std::string(plugin.build().getTimingCacheID()));
    const Plugin copy = reloaded.clone();
    REQUIRE(copy);
    CHECK(copy.serialised() == plan);
    CHECK(copy.core().getPluginName() == name);
  }
}

TEST_CASE(
    "timing-cache ids: equal fields equal ids, another value another id, but for a table's name") {
  std::vector<std::string> ids;
  for (const auto& [name, fields] : right_fields()) {
    const Plugin plugin(name, fields);
    const std::string id = plugin.build().getTimingCacheID();
    CHECK(id == Plugin(name, fields).build().getTimingCacheID());
    CHECK(id == plugin.clone().build().getTimingCacheID());
    ids.push_back(id);
    for (const auto& [field, value] : plugin.serialised()) {
      if (has_one_value(field)) continue;
      CAPTURE(field);
      Fields fields_with = fields_of(name, beside(field));
      const Plugin one(name, fields_with);
      REQUIRE(one);
      fields_with[field] = changed(field, value);
      const Plugin other(name, fields_with);
      REQUIRE(other);
      const std::string id_of_one = one.build().getTimingCacheID();
      CHECK((id_of_one == other.build().getTimingCacheID()) == (field == "table"));
    }
  }
  std::sort(ids.begin(), ids.end());
  CHECK(std::unique(ids.begin(), ids.end()) == ids.end());
}
