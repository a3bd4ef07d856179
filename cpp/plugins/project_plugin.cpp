// SPDX-License-Identifier: Apache-2.0
//! EngramProject: rows to keys and value, kv = x W^T with an FP8 weight and one E8M0 scale per
//! 32x32 block.
#include <string>

#include "engram/ops.h"
#include "engram/row.h"
#include "plugin.h"

namespace engram::plugins {
namespace {

using nvinfer1::DataType;

engram_weight_layout layout_of(const std::string& name) {
  if (name == "row_major") return ENGRAM_WEIGHT_ROW_MAJOR;
  ENGRAM_CHECK(name == "sm90_v1", "field 'weight_layout': expected row_major or sm90_v1, found '",
               name, "'");
  return ENGRAM_WEIGHT_SM90_V1;
}

//! Letters: T tokens, I inputs, O outputs, J = I/4 words of a weight row, S words of all scales.
class ProjectOp final : public Op {
 public:
  explicit ProjectOp(const FieldValues& fields)
      : weight_layout_(layout_of(fields.text("weight_layout"))) {
    add_input({"x", {DataType::kBF16}, "TI"});
    add_input({"weight", {DataType::kINT32}, "OJ"});
    add_input({"scale", {DataType::kINT32}, "S"});
    add_output({"kv", {DataType::kBF16}, "TO"});
  }

  void check(const Sizes& sizes) const override {
    const int64_t in_features = sizes['I'];
    if (in_features < 0) return;
    ENGRAM_CHECK(in_features > 0 && in_features % kScaleBlock == 0, "x: expected a multiple of ",
                 kScaleBlock, " in dimension 1, found ", in_features);
    check_size("weight dimension 1 (words of 4 bytes)", in_features / kBytesPerWord, sizes['J']);
    ENGRAM_CHECK(sizes['O'] != 0, "weight: expected at least 1 in dimension 0, found 0");
    if (sizes['O'] < 0) return;
    const int64_t num_scales = ceil_div(sizes['O'], kScaleBlock) * (in_features / kScaleBlock);
    check_size("scale dimension 0 (words of 4 bytes)", ceil_div(num_scales, kBytesPerWord),
               sizes['S']);
  }

  cudaError_t enqueue(const Call& call) const override {
    engram_project_args args{};
    args.x = static_cast<const uint16_t*>(call.inputs[kX]);
    args.weight = static_cast<const uint8_t*>(call.inputs[kWeight]);
    args.scale = static_cast<const uint8_t*>(call.inputs[kScale]);
    args.out = static_cast<uint16_t*>(call.outputs[0]);
    args.num_tokens = call.sizes['T'];
    args.in_features = static_cast<int32_t>(call.sizes['I']);
    args.out_features = static_cast<int32_t>(call.sizes['O']);
    args.weight_layout = weight_layout_;
    check_project(args);
    check_project_on_gpu(args);
    return project_cuda(args, call.stream);
  }

 private:
  enum Position { kX, kWeight, kScale, kNumInputs };

  const engram_weight_layout weight_layout_;
};

}  // namespace

const OpSpec& project_spec() {
  static const OpSpec spec{
      "EngramProject",
      "rows to keys and value",
      {required_text("weight_layout",
                     "order of the weight's bytes: row_major is [out_features, in_features], "
                     "sm90_v1 (engram.h) is for compute capability 9.0 alone"),
       format_version_field()},
      [](const FieldValues& fields) -> std::unique_ptr<Op> {
        return std::make_unique<ProjectOp>(fields);
      }};
  return spec;
}

}  // namespace engram::plugins
