// SPDX-License-Identifier: Apache-2.0
//! \file harness.h
//! Plays TensorRT's part for the plugins of a built library: makes them from fields, and asks for
//! types and shapes with an expression builder of its own. Needs TensorRT's headers, but neither
//! TensorRT nor a GPU.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace harness {

using Value = std::variant<int32_t, float, std::string>;
using Fields = std::map<std::string, Value>;
using Shape = std::vector<int64_t>;
using nvinfer1::DataType;

//! The library under test (null: this very program) and, where a path is given, a TensorRT loaded
//! before it.
void load(const char* library, const char* tensorrt);
bool has_tensorrt();

//! All that the plugins have logged since the last call.
std::string take_log();

//! The pointer that the creator of this name has; null where there is none.
nvinfer1::IPluginCreatorV3One* creator(const std::string& name);
std::vector<std::string> creator_names();

class Plugin {
 public:
  //! Asks the creator; operator bool says whether it made one.
  Plugin(const std::string& name, const Fields& fields,
         nvinfer1::TensorRTPhase phase = nvinfer1::TensorRTPhase::kBUILD);
  explicit Plugin(nvinfer1::IPluginV3* plugin) : plugin_(plugin) {}

  explicit operator bool() const { return plugin_ != nullptr; }
  Plugin clone() const { return Plugin(plugin_->clone()); }
  //! Needs a GPU, or a CUDA run time that plays one.
  Plugin attach(nvinfer1::IPluginResourceContext* context) const {
    return Plugin(runtime().attachToContext(context));
  }
  nvinfer1::IPluginV3OneCore& core() const;
  nvinfer1::IPluginV3OneBuild& build() const;
  nvinfer1::IPluginV3OneRuntime& runtime() const;

  //! Output shapes; a size below 0 is one that TensorRT does not know yet, but that will be its
  //! absolute value.
  std::optional<std::vector<Shape>> shapes(const std::vector<Shape>& inputs) const;
  //! Output types.
  std::optional<std::vector<DataType>> types(const std::vector<DataType>& inputs) const;
  //! supportsFormatCombination of the last of these tensors, all linear.
  bool supports(const std::vector<DataType>& tensors, int num_inputs) const;
  //! Bytes of workspace for inputs of up to these shapes.
  size_t workspace_bytes(const std::vector<Shape>& inputs) const;
  //! enqueue of linear INT32 tensors, without a workspace.
  int32_t enqueue(const std::vector<Shape>& shapes, const std::vector<const void*>& inputs,
                  const std::vector<void*>& outputs, cudaStream_t stream) const;
  //! enqueue with null pointers and no stream: what may be done with nothing to do.
  int32_t enqueue_nothing(const std::vector<Shape>& inputs) const;
  //! What a plan would hold.
  Fields serialised() const;

 private:
  std::unique_ptr<nvinfer1::IPluginV3> plugin_;
};

}  // namespace harness
