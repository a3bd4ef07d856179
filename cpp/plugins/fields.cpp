// SPDX-License-Identifier: Apache-2.0
#include "fields.h"

#include <cstring>
#include <iomanip>

#include "engram/error.h"

namespace engram::plugins {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

PluginFieldType field_type(const FieldValue& value) {
  constexpr PluginFieldType kTypes[] = {PluginFieldType::kINT32, PluginFieldType::kFLOAT32,
                                        PluginFieldType::kCHAR};
  return kTypes[value.index()];
}

const char* type_name(PluginFieldType type) {
  constexpr const char* kNames[] = {"FLOAT16", "FLOAT32", "FLOAT64", "INT8",    "INT16",
                                    "INT32",   "CHAR",    "DIMS",    "UNKNOWN", "BF16",
                                    "INT64",   "FP8",     "INT4",    "FP4"};
  const auto index = static_cast<size_t>(type);
  return index < std::size(kNames) ? kNames[index] : "a type that these headers do not know";
}

std::string names(const FieldSpecs& specs) {
  std::string text;
  for (const FieldSpec& spec : specs) text += (text.empty() ? "" : ", ") + std::string(spec.name);
  return text;
}

FieldValue read_value(const FieldSpec& spec, const PluginField& field) {
  const PluginFieldType expected = field_type(spec.fallback);
  ENGRAM_CHECK(field.type == expected, "field '", spec.name, "': expected type ",
               type_name(expected), ", found ", type_name(field.type));
  if (expected == PluginFieldType::kCHAR) {
    ENGRAM_CHECK(field.length >= 0 && (field.data != nullptr || field.length == 0), "field '",
                 spec.name, "': expected text, found length ", field.length, " and no data");
    std::string text;
    if (field.length > 0) {
      text.assign(static_cast<const char*>(field.data), static_cast<size_t>(field.length));
    }
    // Some senders count a terminating zero byte, some do not.
    text.resize(text.find_last_not_of('\0') + 1);  // npos + 1 is 0
    ENGRAM_CHECK(text.find('\0') == std::string::npos, "field '", spec.name,
                 "': expected text, found a zero byte inside it");
    return text;
  }
  ENGRAM_CHECK(field.length == 1 && field.data != nullptr, "field '", spec.name,
               "': expected 1 value, found ", field.data == nullptr ? 0 : field.length);
  if (expected == PluginFieldType::kINT32) {
    int32_t value;
    std::memcpy(&value, field.data, sizeof value);
    return value;
  }
  float value;
  std::memcpy(&value, field.data, sizeof value);
  return value;
}

}  // namespace

const char* field_type_name(const FieldSpec& spec) { return type_name(field_type(spec.fallback)); }

std::vector<PluginField> declared_fields(const FieldSpecs& specs) {
  std::vector<PluginField> fields;
  for (const FieldSpec& spec : specs)
    fields.emplace_back(spec.name, nullptr, field_type(spec.fallback), 1);
  return fields;
}

FieldValues::FieldValues(const FieldSpecs& specs, const nvinfer1::PluginFieldCollection& given)
    : specs_(&specs) {
  std::vector<std::optional<FieldValue>> found(specs.size());
  ENGRAM_CHECK(given.nbFields <= 0 || given.fields != nullptr, "expected ", given.nbFields,
               " fields, found none");
  for (int32_t i = 0; i < given.nbFields; ++i) {
    const PluginField& field = given.fields[i];
    ENGRAM_CHECK(field.name != nullptr, "field ", i, ": expected a name, found none");
    size_t index = 0;
    while (index < specs.size() && std::strcmp(specs[index].name, field.name) != 0) ++index;
    ENGRAM_CHECK(index < specs.size(), "field '", field.name, "': expected one of ", names(specs),
                 ", found an unknown name");
    ENGRAM_CHECK(!found[index], "field '", field.name, "': expected once, found twice");
    found[index] = read_value(specs[index], field);
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    ENGRAM_CHECK(found[i] || !specs[i].required, "field '", specs[i].name,
                 "': expected a value of type ", field_type_name(specs[i]),
                 ", found no such field");
    values_.push_back(found[i] ? *found[i] : specs[i].fallback);
  }
  const int32_t version = int32("format_version");
  ENGRAM_CHECK(version >= 1 && version <= kPlanFormatVersion,
               "field 'format_version': expected 1 to ", kPlanFormatVersion, ", found ", version,
               version < 1 ? "" : "; a newer plan needs a newer trtllm-engram");
}

const FieldValue& FieldValues::value(const char* name) const {
  for (size_t i = 0; i < specs_->size(); ++i) {
    if (std::strcmp((*specs_)[i].name, name) == 0) return values_[i];
  }
  throw Error(ENGRAM_INTERNAL_ERROR, concat("no field '", name, "'"));
}

int32_t FieldValues::int32(const char* name) const { return std::get<int32_t>(value(name)); }
float FieldValues::float32(const char* name) const { return std::get<float>(value(name)); }
const std::string& FieldValues::text(const char* name) const {
  return std::get<std::string>(value(name));
}

bool FieldValues::flag(const char* name) const {
  const int32_t flag = int32(name);
  ENGRAM_CHECK(flag == 0 || flag == 1, "field '", name, "': expected 0 or 1, found ", flag);
  return flag == 1;
}

std::string FieldValues::timing_id() const {
  std::ostringstream text;
  text.precision(9);  // enough to tell any two FP32 values apart
  for (size_t i = 0; i < specs_->size(); ++i) {
    if (!(*specs_)[i].in_timing_id) continue;
    text << (*specs_)[i].name << '=';
    if (const auto* const quoted = std::get_if<std::string>(&values_[i])) {
      text << std::quoted(*quoted);
    } else {
      std::visit([&text](const auto& value) { text << value; }, values_[i]);
    }
    text << ';';
  }
  return text.str();
}

std::vector<PluginField> FieldValues::to_plugin_fields() const {
  std::vector<PluginField> fields;
  for (size_t i = 0; i < specs_->size(); ++i) {
    const FieldValue& value = values_[i];
    const auto* const text = std::get_if<std::string>(&value);
    const void* const data =
        std::visit([](const auto& held) { return static_cast<const void*>(&held); }, value);
    // With its terminating zero: no field of a plan is ever empty.
    fields.emplace_back((*specs_)[i].name, text == nullptr ? data : text->c_str(),
                        field_type(value),
                        text == nullptr ? 1 : static_cast<int32_t>(text->size()) + 1);
  }
  return fields;
}

}  // namespace engram::plugins
