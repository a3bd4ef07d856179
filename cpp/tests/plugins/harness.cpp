// SPDX-License-Identifier: Apache-2.0
#include "harness.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <stdexcept>
#include <utility>

namespace harness {
namespace {

using nvinfer1::DimensionOperation;
using nvinfer1::IDimensionExpr;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

void* library_handle = nullptr;
bool tensorrt_loaded = false;

class Logger final : public nvinfer1::ILogger {
 public:
  void log(Severity, const char* message) noexcept override { text += std::string(message) + "\n"; }
  std::string text;
};

Logger logger;

class Finder final : public nvinfer1::ILoggerFinder {
 public:
  nvinfer1::ILogger* findLogger() override { return &logger; }
};

Finder finder;

//! Standard error, where messages go that find no logger (with TensorRT 11, whose finders are not
//! asked).
std::string take_standard_error() {
  std::fflush(stderr);
  std::string text(static_cast<size_t>(lseek(STDERR_FILENO, 0, SEEK_END)), '\0');
  const ssize_t count = pread(STDERR_FILENO, text.data(), text.size(), 0);
  text.resize(count < 0 ? 0 : static_cast<size_t>(count));
  if (ftruncate(STDERR_FILENO, 0) != 0 || lseek(STDERR_FILENO, 0, SEEK_SET) != 0) text.clear();
  const std::string prefix = "trtllm-engram: ";
  return text.compare(0, prefix.size(), prefix) == 0 ? text.substr(prefix.size()) : text;
}

template <typename Function>
Function symbol(const char* name) {
  void* const found = dlsym(library_handle, name);
  if (found == nullptr) throw std::runtime_error(dlerror());
  return reinterpret_cast<Function>(found);
}

std::vector<nvinfer1::IPluginCreatorInterface*> creators() {
  int32_t count = 0;
  using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
  auto* const first = symbol<GetCreators>("getCreators")(count);
  return {first, first + count};
}

//! A size that is known now, or only once the network runs.
class Expr final : public IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
 public:
  Expr(int64_t its_size, bool is_known) : size(its_size), known(is_known) { mImpl = this; }
  int64_t size;
  bool known;

 private:
  bool isConstant() const override { return known; }
  int64_t getConstantValue() const override { return known ? size : -1; }
  bool isSizeTensor() const override { return false; }
};

class ExprBuilder final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
 public:
  ExprBuilder() { mImpl = this; }
  const Expr* make(int64_t size, bool known) { return &exprs_.emplace_back(size, known); }

 private:
  const IDimensionExpr* constant(int64_t value) override { return make(value, true); }

  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& first,
                                  const IDimensionExpr& second) override {
    const auto& a = static_cast<const Expr&>(first);
    const auto& b = static_cast<const Expr&>(second);
    return make(apply(op, a.size, b.size), a.known && b.known);
  }

  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&,
                                          const IDimensionExpr&) override {
    throw std::logic_error("no plugin declares a size tensor");
  }

  static int64_t apply(DimensionOperation op, int64_t a, int64_t b) {
    switch (op) {
      case DimensionOperation::kSUM:
        return a + b;
      case DimensionOperation::kSUB:
        return a - b;
      case DimensionOperation::kPROD:
        return a * b;
      case DimensionOperation::kCEIL_DIV:
        return (a + b - 1) / b;
      default:
        throw std::logic_error("an operation that no plugin needs");
    }
  }

  std::deque<Expr> exprs_;
};

template <typename Interface>
Interface& capability(nvinfer1::IPluginV3& plugin, PluginCapabilityType type) {
  return *static_cast<Interface*>(plugin.getCapabilityInterface(type));
}

nvinfer1::PluginTensorDesc desc(const Shape& shape, DataType type) {
  nvinfer1::PluginTensorDesc made{};
  made.dims.nbDims = static_cast<int32_t>(shape.size());
  for (size_t axis = 0; axis < shape.size(); ++axis) made.dims.d[axis] = shape[axis];
  made.type = type;
  made.format = nvinfer1::TensorFormat::kLINEAR;
  return made;
}

Value value_of(const PluginField& field) {
  switch (field.type) {
    case PluginFieldType::kINT32:
      return *static_cast<const int32_t*>(field.data);
    case PluginFieldType::kFLOAT32:
      return *static_cast<const float*>(field.data);
    default:
      return std::string(static_cast<const char*>(field.data));
  }
}

std::vector<PluginField> as_plugin_fields(const Fields& fields) {
  std::vector<PluginField> made;
  for (const auto& [name, value] : fields) {
    if (const auto* const text = std::get_if<std::string>(&value)) {
      made.emplace_back(name.c_str(), text->c_str(), PluginFieldType::kCHAR,
                        static_cast<int32_t>(text->size()));
    } else {
      const auto* const number = std::get_if<int32_t>(&value);
      const void* const data =
          number != nullptr ? static_cast<const void*>(number) : &std::get<float>(value);
      made.emplace_back(name.c_str(), data,
                        number != nullptr ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32, 1);
    }
  }
  return made;
}

}  // namespace

void load(const char* library, const char* tensorrt) {
  if (tensorrt != nullptr) {
    if (dlopen(tensorrt, RTLD_NOW | RTLD_LOCAL) == nullptr) throw std::runtime_error(dlerror());
    tensorrt_loaded = true;
  }
  library_handle = dlopen(library, RTLD_LAZY | RTLD_LOCAL);
  if (library_handle == nullptr) throw std::runtime_error(dlerror());
  symbol<void (*)(nvinfer1::ILoggerFinder*)>("setLoggerFinder")(&finder);
  std::FILE* const captured = std::tmpfile();
  if (captured == nullptr || dup2(fileno(captured), STDERR_FILENO) < 0)
    throw std::runtime_error("no file for the log");
}

bool has_tensorrt() { return tensorrt_loaded; }

std::string take_log() { return std::exchange(logger.text, {}) + take_standard_error(); }

std::vector<std::string> creator_names() {
  std::vector<std::string> names;
  for (auto* const found : creators()) {
    names.emplace_back(static_cast<nvinfer1::IPluginCreatorV3One*>(found)->getPluginName());
  }
  return names;
}

nvinfer1::IPluginCreatorV3One* creator(const std::string& name) {
  for (auto* const found : creators()) {
    auto* const made = static_cast<nvinfer1::IPluginCreatorV3One*>(found);
    if (made->getPluginName() == name) return made;
  }
  return nullptr;
}

Plugin::Plugin(const std::string& name, const Fields& fields, nvinfer1::TensorRTPhase phase) {
  const std::vector<PluginField> list = as_plugin_fields(fields);
  const nvinfer1::PluginFieldCollection collection{static_cast<int32_t>(list.size()), list.data()};
  plugin_.reset(creator(name)->createPlugin(name.c_str(), &collection, phase));
}

nvinfer1::IPluginV3OneCore& Plugin::core() const {
  return capability<nvinfer1::IPluginV3OneCore>(*plugin_, PluginCapabilityType::kCORE);
}

nvinfer1::IPluginV3OneBuild& Plugin::build() const {
  return capability<nvinfer1::IPluginV3OneBuild>(*plugin_, PluginCapabilityType::kBUILD);
}

nvinfer1::IPluginV3OneRuntime& Plugin::runtime() const {
  return capability<nvinfer1::IPluginV3OneRuntime>(*plugin_, PluginCapabilityType::kRUNTIME);
}

std::optional<std::vector<Shape>> Plugin::shapes(const std::vector<Shape>& inputs) const {
  ExprBuilder builder;
  std::vector<nvinfer1::DimsExprs> exprs;
  for (const Shape& shape : inputs) {
    nvinfer1::DimsExprs& made = exprs.emplace_back();
    made.nbDims = static_cast<int32_t>(shape.size());
    for (size_t axis = 0; axis < shape.size(); ++axis)
      made.d[axis] = builder.make(std::abs(shape[axis]), shape[axis] >= 0);
  }
  std::vector<nvinfer1::DimsExprs> outputs(static_cast<size_t>(build().getNbOutputs()));
  if (build().getOutputShapes(exprs.data(), static_cast<int32_t>(exprs.size()), nullptr, 0,
                              outputs.data(), static_cast<int32_t>(outputs.size()), builder) != 0) {
    return std::nullopt;
  }
  std::vector<Shape> made;
  for (const nvinfer1::DimsExprs& output : outputs) {
    Shape& shape = made.emplace_back();
    for (int32_t axis = 0; axis < output.nbDims; ++axis)
      shape.push_back(static_cast<const Expr*>(output.d[axis])->size);
  }
  return made;
}

std::optional<std::vector<DataType>> Plugin::types(const std::vector<DataType>& inputs) const {
  std::vector<DataType> outputs(static_cast<size_t>(build().getNbOutputs()));
  const int32_t failed =
      build().getOutputDataTypes(outputs.data(), static_cast<int32_t>(outputs.size()),
                                 inputs.data(), static_cast<int32_t>(inputs.size()));
  return failed != 0 ? std::nullopt : std::optional(outputs);
}

bool Plugin::supports(const std::vector<DataType>& tensors, int num_inputs) const {
  std::vector<nvinfer1::DynamicPluginTensorDesc> descs;
  for (const DataType type : tensors) descs.push_back({desc({}, type), {}, {}, {}});
  return build().supportsFormatCombination(static_cast<int32_t>(tensors.size()) - 1, descs.data(),
                                           num_inputs, build().getNbOutputs());
}

size_t Plugin::workspace_bytes(const std::vector<Shape>& inputs) const {
  std::vector<nvinfer1::DynamicPluginTensorDesc> descs;
  for (const Shape& shape : inputs) {
    const nvinfer1::PluginTensorDesc most = desc(shape, DataType::kINT32);
    descs.push_back({most, {}, most.dims, {}});
  }
  return build().getWorkspaceSize(descs.data(), static_cast<int32_t>(descs.size()), nullptr, 0);
}

int32_t Plugin::enqueue(const std::vector<Shape>& shapes, const std::vector<const void*>& inputs,
                        const std::vector<void*>& outputs, cudaStream_t stream) const {
  std::vector<nvinfer1::PluginTensorDesc> descs;
  for (const Shape& shape : shapes) descs.push_back(desc(shape, DataType::kINT32));
  return runtime().enqueue(descs.data(), nullptr, inputs.data(), outputs.data(), nullptr, stream);
}

int32_t Plugin::enqueue_nothing(const std::vector<Shape>& inputs) const {
  const auto num_outputs = static_cast<size_t>(build().getNbOutputs());
  return enqueue(inputs, std::vector<const void*>(inputs.size()), std::vector<void*>(num_outputs),
                 nullptr);
}

Fields Plugin::serialised() const {
  Fields fields;
  const nvinfer1::PluginFieldCollection* const collection = runtime().getFieldsToSerialize();
  for (int32_t i = 0; i < collection->nbFields; ++i) {
    fields.emplace(collection->fields[i].name, value_of(collection->fields[i]));
  }
  return fields;
}

}  // namespace harness
