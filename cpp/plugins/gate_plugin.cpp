// SPDX-License-Identifier: Apache-2.0
//! EngramGate: writes the value into the residual stream; in place where TensorRT allows an output
//! to alias an input.
#include "engram/ops.h"
#include "plugin.h"

namespace engram::plugins {
namespace {

using nvinfer1::DataType;

int32_t gate_dtype(DataType type) {
  switch (type) {
    case DataType::kBF16:
      return ENGRAM_BFLOAT16;
    case DataType::kHALF:
      return ENGRAM_FLOAT16;
    case DataType::kFLOAT:
      return ENGRAM_FLOAT32;
    default:
      throw Error(ENGRAM_INVALID_ARGUMENT,
                  concat("hidden: expected type BF16, FP16 or FP32, found ", data_type_name(type)));
  }
}

//! Letters: T tokens, M copies (hc_mult), K hidden size, E = (M+1)*K.
class GateOp final : public Op {
 public:
  explicit GateOp(const FieldValues& fields)
      : eps_(fields.float32("eps")),
        in_place_(fields.flag("in_place")),
        has_token_mask_(fields.flag("has_token_mask")) {
    ENGRAM_CHECK(eps_ >= 0.0F && eps_ <= 1.0F, "field 'eps': expected 0 to 1, found ", eps_);
    add_input({"hidden", {DataType::kBF16, DataType::kHALF, DataType::kFLOAT}, "TMK"});
    add_input({"kv", {DataType::kBF16}, "TE"});
    add_input({"q_weight", {DataType::kBF16}, "MK"});
    add_input({"k_weight", {DataType::kBF16}, "MK"});
    if (has_token_mask_) add_input({"token_mask", {DataType::kBOOL}, "T"});
    add_output({"out", {DataType::kBF16, DataType::kHALF, DataType::kFLOAT}, "TMK", kHidden});
  }

  void check(const Sizes& sizes) const override {
    ENGRAM_CHECK(sizes['M'] != 0 && sizes['K'] != 0,
                 "hidden: expected at least 1 in dimensions 1 and 2, found ", sizes['M'], " and ",
                 sizes['K']);
    if (sizes['M'] < 0 || sizes['K'] < 0) return;
    check_size("kv dimension 1, (hc_mult + 1) * hidden size", (sizes['M'] + 1) * sizes['K'],
               sizes['E']);
  }

  int aliased_input() const override { return in_place_ ? kHidden : -1; }

  cudaError_t enqueue(const Call& call) const override {
    engram_gate_args args{};
    args.hidden = call.inputs[kHidden];
    args.kv = static_cast<const uint16_t*>(call.inputs[kKv]);
    args.q_weight = static_cast<const uint16_t*>(call.inputs[kQWeight]);
    args.k_weight = static_cast<const uint16_t*>(call.inputs[kKWeight]);
    if (has_token_mask_) args.token_mask = static_cast<const uint8_t*>(call.inputs[kTokenMask]);
    args.out = call.outputs[0];
    args.num_tokens = call.sizes['T'];
    args.hc_mult = static_cast<int32_t>(call.sizes['M']);
    args.hidden_size = static_cast<int32_t>(call.sizes['K']);
    args.dtype = gate_dtype(call.input_descs[kHidden].type);
    args.eps = eps_;
    check_gate(args);
    return gate_cuda(args, call.stream);
  }

 private:
  enum Position { kHidden, kKv, kQWeight, kKWeight, kTokenMask, kNumInputs };

  float eps_;
  bool in_place_;
  bool has_token_mask_;
};

}  // namespace

const OpSpec& gate_spec() {
  static const OpSpec spec{
      "EngramGate",
      "writes the gated value into the residual stream",
      {required_float("eps", "rms_norm_eps of the model"),
       optional_int("has_token_mask", 0,
                    "1: input token_mask is there; a token with 0 stays as it is"),
       optional_int("in_place", 0,
                    "1: the output may alias hidden, where TensorRT's preview feature allows it"),
       format_version_field()},
      [](const FieldValues& fields) -> std::unique_ptr<Op> {
        return std::make_unique<GateOp>(fields);
      }};
  return spec;
}

}  // namespace engram::plugins
