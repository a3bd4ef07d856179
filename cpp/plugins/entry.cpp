// SPDX-License-Identifier: Apache-2.0
//! What TensorRT finds in this library: the creators, by its registry's load_library, or in a host
//! that only dlopens, by registration in a constructor. Both at once is one registration.
#include "copies.h"
#include "guard.h"
#include "log.h"
#include "nlohmann/json.hpp"
#include "plugin.h"
#include "refused_plugin.h"
#include "tensorrt_registry.h"

namespace engram::plugins {
namespace {

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(const OpSpec& spec) : spec_(spec), fields_(declared_fields(spec.fields)) {
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  nvinfer1::IPluginV3* createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    constexpr nvinfer1::IPluginV3* kNone = nullptr;
    const nvinfer1::PluginFieldCollection given =
        fields == nullptr ? nvinfer1::PluginFieldCollection{} : *fields;
    std::string reason;
    nvinfer1::IPluginV3* const made = guarded(spec_.name, "createPlugin", kNone, [&] {
      try {
        require_first_copy();
        return make_plugin(spec_, given, phase);
      } catch (const std::exception& error) {
        reason = error.what();
        throw;
      }
    });
    if (made != nullptr || phase != nvinfer1::TensorRTPhase::kRUNTIME) return made;
    return guarded(spec_.name, "createPlugin", kNone,
                   [&] { return make_refused_plugin(spec_.name, reason, given); });
  }

  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return spec_.name; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  const OpSpec& spec_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

std::vector<const OpSpec*> op_specs() {
  return {&hash_spec(), &lookup_spec(), &prefetch_spec(), &project_spec(), &gate_spec()};
}

//! One for each plugin, for the life of the process: whoever tears down last may still ask them.
const std::vector<nvinfer1::IPluginCreatorInterface*>& creators() {
  static const auto& all = *[] {
    auto* const made = new std::vector<nvinfer1::IPluginCreatorInterface*>();
    for (const OpSpec* const spec : op_specs()) made->push_back(new Creator(*spec));
    return made;
  }();
  return all;
}

std::string describe_plugins() {
  nlohmann::ordered_json plugins;
  for (const OpSpec* const spec : op_specs()) {
    nlohmann::ordered_json fields;
    for (const FieldSpec& field : spec->fields) {
      nlohmann::ordered_json& entry = fields[field.name];
      entry = {{"type", field_type_name(field)}, {"required", field.required}};
      if (!field.required)
        std::visit([&entry](const auto& value) { entry["default"] = value; }, field.fallback);
      entry["doc"] = field.doc;
    }
    plugins[spec->name] = {{"doc", spec->doc}, {"fields", fields}};
  }
  return plugins.dump();
}

bool register_creators() {
  require_first_copy();
  return register_with_tensorrt(creators());
}

//! For hosts that only dlopen or preload this library after TensorRT.
__attribute__((constructor)) void register_when_loaded() {
  guarded("libtrtllm_engram.so", "constructor", [] { register_creators(); });
}

}  // namespace
}  // namespace engram::plugins

using namespace engram::plugins;

extern "C" {

ENGRAM_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& num_creators) {
  num_creators = 0;
  return guarded("libtrtllm_engram.so", "getCreators",
                 static_cast<nvinfer1::IPluginCreatorInterface* const*>(nullptr), [&num_creators] {
                   engram::require_first_copy();
                   num_creators = static_cast<int32_t>(creators().size());
                   return creators().data();
                 });
}

//! Creators of the V2 generation, which TensorRT 10 asks libraries without getCreators for: none.
ENGRAM_API void* const* getPluginCreators(int32_t& num_creators) {
  num_creators = 0;
  return nullptr;
}

ENGRAM_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { set_logger_finder(finder); }

ENGRAM_API engram_status engram_register_plugins() {
  return engram::guard([] {
    ENGRAM_CHECK(register_creators(),
                 "plugins: expected a loaded TensorRT (libnvinfer) that takes them, found ",
                 tensorrt_version() == 0 ? "none" : "one that refused");
  });
}

ENGRAM_API const char* engram_plugin_fields() {
  return guarded("libtrtllm_engram.so", "engram_plugin_fields", "{}", [] {
    static const std::string text = describe_plugins();
    return text.c_str();
  });
}

}  // extern "C"
