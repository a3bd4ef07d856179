// SPDX-License-Identifier: Apache-2.0
//! \file tensors.h
//! Tensors of a plugin, declared once: types, and one letter a dimension. Equal letters must have
//! equal sizes; all checks of rank, type and size and most output shapes follow from that.
#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace engram::plugins {

struct TensorSpec {
  const char* name;
  std::vector<nvinfer1::DataType>
      types;              //!< allowed types; of an output, the first is the one it has
  std::string dims;       //!< capital letters, such as "TLC"
  int same_type_as = -1;  //!< an output whose type is that of this input
};

using TensorSpecs = std::vector<TensorSpec>;

//! A size, or an expression of one, per letter.
template <typename Value>
class PerLetter {
 public:
  explicit PerLetter(Value unset) { values_.fill(unset); }
  Value& operator[](char letter) { return values_[letter - 'A']; }
  const Value& operator[](char letter) const { return values_[letter - 'A']; }

 private:
  std::array<Value, 26> values_;
};

constexpr int64_t kUnknownSize = -1;

//! TensorRT has no type for raw bytes: four to an INT32, in memory order.
constexpr int kBytesPerWord = 4;

//! kUnknownSize while TensorRT does not know a dimension, and for letters that no tensor has.
using Sizes = PerLetter<int64_t>;
using SizeExprs = PerLetter<const nvinfer1::IDimensionExpr*>;

const char* data_type_name(nvinfer1::DataType type);

//! Refuses another number of inputs, naming those expected.
void check_count(const TensorSpecs& specs, int32_t count, const char* what);

//! Refuses a type that the tensor may not have.
void check_type(const TensorSpec& spec, nvinfer1::DataType type);

//! Takes one tensor's dimensions into `sizes`; refuses another rank and a letter that disagrees.
void match_tensor(const TensorSpec& spec, const nvinfer1::Dims& dims, Sizes* sizes);

//! Sizes of all letters, from dims_of(i) of each tensor.
template <typename DimsOf>
Sizes match_sizes(const TensorSpecs& specs, DimsOf&& dims_of) {
  Sizes sizes(kUnknownSize);
  for (size_t i = 0; i < specs.size(); ++i) {
    match_tensor(specs[i], dims_of(i), &sizes);
  }
  return sizes;
}

//! The same for expressions, whose constant values are checked; also returns the expression of each
//! letter.
Sizes match_exprs(const TensorSpecs& specs, const nvinfer1::DimsExprs* tensors, SizeExprs* exprs);

//! Refuses a size that does not follow from others; unknown sizes (negative) pass.
void check_size(const char* what, int64_t expected, int64_t found);

}  // namespace engram::plugins
