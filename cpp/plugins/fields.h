// SPDX-License-Identifier: Apache-2.0
//! \file fields.h
//! Typed creator fields: declared once per plugin, parsed strictly, written back into the plan.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace engram::plugins {

//! Raised when the meaning of a plan's fields changes; older plans of the same major version stay
//! readable.
constexpr int32_t kPlanFormatVersion = 1;

//! Alternatives are PluginFieldType kINT32, kFLOAT32 and kCHAR.
using FieldValue = std::variant<int32_t, float, std::string>;

struct FieldSpec {
  const char* name;
  FieldValue fallback;  //!< its type is the field's type
  bool required;        //!< then `fallback` is no value, only a type
  const char* doc;
  //! Does another value make another kernel? Only a table's name does not.
  bool in_timing_id = true;
};

using FieldSpecs = std::vector<FieldSpec>;

inline FieldSpec required_int(const char* name, const char* doc) {
  return {name, int32_t{0}, true, doc};
}
inline FieldSpec required_float(const char* name, const char* doc) {
  return {name, 0.0F, true, doc};
}
inline FieldSpec required_text(const char* name, const char* doc) {
  return {name, std::string(), true, doc};
}
inline FieldSpec optional_int(const char* name, int32_t fallback, const char* doc) {
  return {name, fallback, false, doc};
}
inline FieldSpec optional_text(const char* name, const char* fallback, const char* doc) {
  return {name, std::string(fallback), false, doc};
}

//! "INT32", "FLOAT32" or "CHAR".
const char* field_type_name(const FieldSpec& spec);

//! What TensorRT sees of the specs: names and types, with no values.
std::vector<nvinfer1::PluginField> declared_fields(const FieldSpecs& specs);

//! The values of one plugin: every spec has one.
class FieldValues {
 public:
  //! Refuses by name what is unknown, of another type, of another length, given twice or missing,
  //! and a newer format_version. `specs` must outlive this object.
  FieldValues(const FieldSpecs& specs, const nvinfer1::PluginFieldCollection& given);

  int32_t int32(const char* name) const;
  float float32(const char* name) const;
  const std::string& text(const char* name) const;
  //! An INT32 field that is 0 or 1.
  bool flag(const char* name) const;

  //! "name=value;..." of the fields that a kernel's speed can depend on.
  std::string timing_id() const;

  //! All fields, pointing into this object.
  std::vector<nvinfer1::PluginField> to_plugin_fields() const;

 private:
  const FieldValue& value(const char* name) const;

  const FieldSpecs* specs_;
  std::vector<FieldValue> values_;  //!< in the order of the specs
};

}  // namespace engram::plugins
