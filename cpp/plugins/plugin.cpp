// SPDX-License-Identifier: Apache-2.0
#include "plugin.h"

#include <algorithm>

#include "cuda_support.h"
#include "fault.h"
#include "log.h"

namespace engram::plugins {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

constexpr int kFirstVersionWithAliasing = 100300;

//! Build is the newest build interface that the running TensorRT knows, and that the Op has a use
//! for.
template <typename Build>
class Plugin : public IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public Build,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  Plugin(const OpSpec& spec, FieldValues values, std::shared_ptr<const Op> op, TensorRTPhase phase)
      : spec_(spec), values_(std::move(values)), op_(std::move(op)), phase_(phase) {
    timing_id_ = concat(spec.name, ";", values_.timing_id());
    fields_ = values_.to_plugin_fields();
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  // The fields point into this very object.
  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;

  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<Build*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }

  IPluginV3* clone() noexcept override {
    return guarded(spec_.name, "clone", static_cast<IPluginV3*>(nullptr), [this]() -> IPluginV3* {
      auto copy = std::make_unique<Plugin>(spec_, values_, op_, phase_);
      copy->device_ = device_;
      copy->fault_ = fault_;
      return copy.release();
    });
  }

  const char* getPluginName() const noexcept override { return spec_.name; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  int32_t getNbOutputs() const noexcept override {
    return static_cast<int32_t>(op_->outputs().size());
  }

  int32_t getOutputDataTypes(DataType* outputs, int32_t num_outputs, const DataType* inputs,
                             int32_t num_inputs) const noexcept override {
    return guarded(spec_.name, "getOutputDataTypes", [&] {
      check_count(op_->inputs(), num_inputs, "inputs");
      check_count(op_->outputs(), num_outputs, "outputs");
      for (int32_t i = 0; i < num_inputs; ++i) check_type(op_->inputs()[i], inputs[i]);
      for (int32_t i = 0; i < num_outputs; ++i) {
        const TensorSpec& output = op_->outputs()[i];
        outputs[i] = output.same_type_as < 0 ? output.types.front() : inputs[output.same_type_as];
      }
    });
  }

  int32_t getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t,
                          DimsExprs* outputs, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override {
    return guarded(spec_.name, "getOutputShapes", [&] {
      check_count(op_->inputs(), num_inputs, "inputs");
      check_count(op_->outputs(), num_outputs, "outputs");
      SizeExprs exprs(nullptr);
      const Sizes sizes = match_exprs(op_->inputs(), inputs, &exprs);
      op_->check(sizes);
      op_->derive(&exprs, builder);
      for (int32_t i = 0; i < num_outputs; ++i) {
        const std::string& dims = op_->outputs()[i].dims;
        outputs[i].nbDims = static_cast<int32_t>(dims.size());
        for (size_t axis = 0; axis < dims.size(); ++axis) outputs[i].d[axis] = exprs[dims[axis]];
      }
    });
  }

  bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                 int32_t num_inputs, int32_t num_outputs) noexcept override {
    return guarded(spec_.name, "supportsFormatCombination", false, [&] {
      check_count(op_->inputs(), num_inputs, "inputs");
      check_count(op_->outputs(), num_outputs, "outputs");
      const TensorSpec& spec =
          position < num_inputs ? op_->inputs()[position] : op_->outputs()[position - num_inputs];
      const PluginTensorDesc& desc = tensors[position].desc;
      if (desc.format != nvinfer1::TensorFormat::kLINEAR) return false;
      if (spec.same_type_as >= 0) return desc.type == tensors[spec.same_type_as].desc.type;
      return std::find(spec.types.begin(), spec.types.end(), desc.type) != spec.types.end();
    });
  }

  int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const DynamicPluginTensorDesc*, int32_t num_outputs) noexcept override {
    return guarded(spec_.name, "configurePlugin", [&] {
      check_count(op_->outputs(), num_outputs, "outputs");
      check_inputs(num_inputs,
                   [inputs](size_t i) -> const PluginTensorDesc& { return inputs[i].desc; });
    });
  }

  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const DynamicPluginTensorDesc*, int32_t) const noexcept override {
    return guarded(spec_.name, "getWorkspaceSize", size_t{0}, [&] {
      check_count(op_->inputs(), num_inputs, "inputs");
      const Sizes sizes = match_sizes(
          op_->inputs(), [inputs](size_t i) -> const nvinfer1::Dims& { return inputs[i].max; });
      return static_cast<size_t>(op_->workspace_bytes(sizes));
    });
  }

  //! A method of IPluginV3OneBuildV2; where Build is an older interface it overrides nothing and
  //! nobody calls it.
  virtual int32_t getAliasedInput(int32_t output) noexcept {
    return output == 0 ? op_->aliased_input() : -1;
  }

  char const* getTimingCacheID() noexcept override { return timing_id_.c_str(); }
  char const* getMetadataString() noexcept override { return timing_id_.c_str(); }

  int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t num_inputs, const PluginTensorDesc*,
                        int32_t num_outputs) noexcept override {
    return guarded(spec_.name, "onShapeChange", [&] {
      check_count(op_->outputs(), num_outputs, "outputs");
      check_inputs(num_inputs, [inputs](size_t i) -> const PluginTensorDesc& { return inputs[i]; });
    });
  }

  int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override {
    return guarded(spec_.name, "enqueue", [&] {
      // TensorRT 10.6 goes on with a plugin whose attachToContext failed.
      ENGRAM_CHECK(fault_ != nullptr || phase_ == TensorRTPhase::kBUILD,
                   "expected a plugin attached to an execution context, found one that is not");
      const Sizes sizes = match_sizes(
          op_->inputs(),
          [input_descs](size_t i) -> const nvinfer1::Dims& { return input_descs[i].dims; });
      op_->check(sizes);
      if (fault_ != nullptr && op_->starts_step()) throw_pending_fault(device_);
      if (op_->is_empty(sizes)) return;
      check_cuda(op_->enqueue({sizes, input_descs, inputs, outputs, fault_, workspace, stream}),
                 "launch");
    });
  }

  IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override {
    return guarded(spec_.name, "attachToContext", static_cast<IPluginV3*>(nullptr),
                   [&]() -> IPluginV3* {
                     Attachment attachment{context, 0, phase_ == TensorRTPhase::kBUILD};
                     check_cuda(cudaGetDevice(&attachment.device), "cudaGetDevice");
                     std::unique_ptr<Op> op = spec_.make(values_);
                     op->attach(attachment);
                     auto copy = std::make_unique<Plugin>(spec_, values_, std::move(op), phase_);
                     copy->device_ = attachment.device;
                     if (!attachment.building) copy->fault_ = fault_word(attachment.device);
                     return copy.release();
                   });
  }

  const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  template <typename DescOf>
  void check_inputs(int32_t num_inputs, DescOf&& desc_of) const {
    check_count(op_->inputs(), num_inputs, "inputs");
    for (size_t i = 0; i < op_->inputs().size(); ++i) check_type(op_->inputs()[i], desc_of(i).type);
    op_->check(match_sizes(op_->inputs(),
                           [&](size_t i) -> const nvinfer1::Dims& { return desc_of(i).dims; }));
  }

  const OpSpec& spec_;
  FieldValues values_;
  //! Shared by clones, which so have the same table and lane, whatever a name means by then.
  std::shared_ptr<const Op> op_;
  TensorRTPhase phase_;
  int device_ = 0;
  uint64_t* fault_ = nullptr;  //!< that of device_; null: not attached, or building
  std::string timing_id_;
  std::vector<nvinfer1::PluginField> fields_;
  PluginFieldCollection collection_{};
};

}  // namespace

FieldSpec format_version_field() {
  return optional_int("format_version", kPlanFormatVersion,
                      "version of the meaning of these fields");
}

IPluginV3* make_plugin(const OpSpec& spec, const PluginFieldCollection& fields,
                       TensorRTPhase phase) {
  FieldValues values(spec.fields, fields);
  std::unique_ptr<Op> op = spec.make(values);
  if (op->aliased_input() >= 0 && tensorrt_version() >= kFirstVersionWithAliasing) {
    return new Plugin<nvinfer1::IPluginV3OneBuildV2>(spec, std::move(values), std::move(op), phase);
  }
  return new Plugin<nvinfer1::IPluginV3OneBuild>(spec, std::move(values), std::move(op), phase);
}

}  // namespace engram::plugins
