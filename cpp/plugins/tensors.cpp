// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <algorithm>

#include "engram/error.h"

namespace engram::plugins {

const char* data_type_name(nvinfer1::DataType type) {
  constexpr const char* kNames[] = {"FP32", "FP16", "INT8",  "INT32", "BOOL", "UINT8",
                                    "FP8",  "BF16", "INT64", "INT4",  "FP4",  "E8M0"};
  const auto index = static_cast<size_t>(type);
  return index < std::size(kNames) ? kNames[index] : "a type that these headers do not know";
}

void check_count(const TensorSpecs& specs, int32_t count, const char* what) {
  if (count == static_cast<int32_t>(specs.size())) return;
  std::string names;
  for (const TensorSpec& spec : specs)
    names += (names.empty() ? "" : ", ") + std::string(spec.name);
  throw Error(ENGRAM_INVALID_ARGUMENT,
              concat("expected ", specs.size(), " ", what, " (", names, "), found ", count));
}

void check_type(const TensorSpec& spec, nvinfer1::DataType type) {
  if (std::find(spec.types.begin(), spec.types.end(), type) != spec.types.end()) return;
  std::string names;
  for (const nvinfer1::DataType allowed : spec.types)
    names += (names.empty() ? "" : " or ") + std::string(data_type_name(allowed));
  throw Error(ENGRAM_INVALID_ARGUMENT,
              concat(spec.name, ": expected type ", names, ", found ", data_type_name(type)));
}

void match_tensor(const TensorSpec& spec, const nvinfer1::Dims& dims, Sizes* sizes) {
  ENGRAM_CHECK(dims.nbDims == static_cast<int32_t>(spec.dims.size()), spec.name, ": expected ",
               spec.dims.size(), " dimensions (", spec.dims, "), found ", dims.nbDims);
  for (size_t axis = 0; axis < spec.dims.size(); ++axis) {
    int64_t& known = (*sizes)[spec.dims[axis]];
    const int64_t found = dims.d[axis];
    if (found < 0) continue;
    ENGRAM_CHECK(known < 0 || known == found, spec.name, ": expected size ", known,
                 " in dimension ", axis, " (", spec.dims[axis], " of the inputs before it), found ",
                 found);
    known = found;
  }
}

Sizes match_exprs(const TensorSpecs& specs, const nvinfer1::DimsExprs* tensors, SizeExprs* exprs) {
  return match_sizes(specs, [&](size_t i) {
    nvinfer1::Dims dims{};
    dims.nbDims = tensors[i].nbDims;
    for (int32_t axis = 0; axis < dims.nbDims; ++axis) {
      const nvinfer1::IDimensionExpr* const expr = tensors[i].d[axis];
      dims.d[axis] = expr->isConstant() ? expr->getConstantValue() : kUnknownSize;
      // A constant is worth more than an expression that only has to equal it.
      if (axis >= static_cast<int32_t>(specs[i].dims.size())) continue;
      const nvinfer1::IDimensionExpr*& kept = (*exprs)[specs[i].dims[static_cast<size_t>(axis)]];
      if (kept == nullptr || (expr->isConstant() && !kept->isConstant())) kept = expr;
    }
    return dims;
  });
}

void check_size(const char* what, int64_t expected, int64_t found) {
  ENGRAM_CHECK(expected < 0 || found < 0 || expected == found, what, ": expected ", expected,
               ", found ", found);
}

}  // namespace engram::plugins
