// SPDX-License-Identifier: Apache-2.0
#include "refused_plugin.h"

#include <memory>
#include <vector>

#include "log.h"
#include "plugin.h"

namespace engram::plugins {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

size_t element_bytes(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kCHAR:
    case PluginFieldType::kINT8:
      return 1;
    case PluginFieldType::kFLOAT16:
    case PluginFieldType::kBF16:
    case PluginFieldType::kINT16:
      return 2;
    case PluginFieldType::kFLOAT32:
    case PluginFieldType::kINT32:
      return 4;
    case PluginFieldType::kFLOAT64:
    case PluginFieldType::kINT64:
      return 8;
    default:
      return 0;
  }
}

//! A field of its own, which ends in a NUL for whoever reads a text.
struct KeptField {
  std::string name;
  std::string data;
  PluginFieldType type;
  int32_t length;
};

class RefusedPlugin final : public IPluginV3,
                            public nvinfer1::IPluginV3OneCore,
                            public nvinfer1::IPluginV3OneBuild,
                            public nvinfer1::IPluginV3OneRuntime {
 public:
  RefusedPlugin(const char* name, std::string reason, std::vector<KeptField> kept)
      : name_(name), reason_(std::move(reason)), kept_(std::move(kept)) {
    for (const KeptField& field : kept_) {
      fields_.emplace_back(field.name.c_str(), field.data.data(), field.type, field.length);
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  // The fields point into this very object.
  RefusedPlugin(const RefusedPlugin&) = delete;
  RefusedPlugin& operator=(const RefusedPlugin&) = delete;

  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }

  IPluginV3* clone() noexcept override {
    return guarded(name_, "clone", static_cast<IPluginV3*>(nullptr), [this]() -> IPluginV3* {
      return std::make_unique<RefusedPlugin>(name_, reason_, kept_).release();
    });
  }

  const char* getPluginName() const noexcept override { return name_; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  int32_t getNbOutputs() const noexcept override { return 0; }
  int32_t getOutputDataTypes(DataType*, int32_t, const DataType*, int32_t) const noexcept override {
    return refuse("getOutputDataTypes");
  }
  int32_t getOutputShapes(const DimsExprs*, int32_t, const DimsExprs*, int32_t, DimsExprs*, int32_t,
                          nvinfer1::IExprBuilder&) noexcept override {
    return refuse("getOutputShapes");
  }
  bool supportsFormatCombination(int32_t, const DynamicPluginTensorDesc*, int32_t,
                                 int32_t) noexcept override {
    return false;
  }
  int32_t configurePlugin(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) noexcept override {
    return refuse("configurePlugin");
  }

  int32_t onShapeChange(const PluginTensorDesc*, int32_t, const PluginTensorDesc*,
                        int32_t) noexcept override {
    return refuse("onShapeChange");
  }
  int32_t enqueue(const PluginTensorDesc*, const PluginTensorDesc*, const void* const*,
                  void* const*, void*, cudaStream_t) noexcept override {
    return refuse("enqueue");
  }
  IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
    refuse("attachToContext");
    return nullptr;
  }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  int32_t refuse(const char* method) const noexcept {
    return guarded(name_, method, [this] { throw Error(ENGRAM_INVALID_ARGUMENT, reason_); });
  }

  const char* name_;
  std::string reason_;
  std::vector<KeptField> kept_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

}  // namespace

IPluginV3* make_refused_plugin(const char* name, std::string reason,
                               const PluginFieldCollection& fields) {
  std::vector<KeptField> kept;
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    const PluginField& field = fields.fields[i];
    const size_t bytes = field.data == nullptr || field.length < 0
                             ? 0
                             : element_bytes(field.type) * static_cast<size_t>(field.length);
    kept.push_back({field.name == nullptr ? "" : field.name,
                    std::string(static_cast<const char*>(field.data), bytes), field.type,
                    bytes == 0 ? 0 : field.length});
  }
  return std::make_unique<RefusedPlugin>(name, std::move(reason), std::move(kept)).release();
}

}  // namespace engram::plugins
