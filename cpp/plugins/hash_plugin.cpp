// SPDX-License-Identifier: Apache-2.0
//! EngramHash: token ids to row ids. Inputs and fields: hash_spec() below; arithmetic: layout.h.
#include "engram/ops.h"
#include "hash_sizes.h"
#include "paged_hash.h"
#include "plugin.h"

namespace engram::plugins {
namespace {

using nvinfer1::DataType;

//! Letters: T tokens, P requests + 1, V vocabulary, B requests, W = N-1 window, L layers, N orders,
//! C columns.
class HashOp final : public Op {
 public:
  explicit HashOp(const FieldValues& fields)
      : pad_token_id_(fields.int32("pad_token_id")),
        explicit_history_(fields.text("history") == "explicit"),
        has_boundaries_(fields.flag("has_cu_seqlens")) {
    ENGRAM_CHECK(explicit_history_ || fields.text("history") == "whole_prompt",
                 "field 'history': expected explicit, whole_prompt or kv_phantom, found '",
                 fields.text("history"), "'");
    check_pad_token_id(pad_token_id_);
    for (const char* name : {"tokens_per_block", "slot_bytes"}) {
      ENGRAM_CHECK(fields.int32(name) == 0, "field '", name, "': expected 0 where history is ",
                   fields.text("history"), ", found ", fields.int32(name));
    }
    const bool has_lookback_dead = fields.flag("has_lookback_dead");
    ENGRAM_CHECK(explicit_history_ || !has_lookback_dead,
                 "field 'has_lookback_dead': expected 0 where history is whole_prompt, found 1");
    positions_[kTokenIds] = add_input({"token_ids", {DataType::kINT32}, "T"});
    positions_[kPositions] = add_input({"positions", {DataType::kINT32, DataType::kINT64}, "T"});
    if (has_boundaries_)
      positions_[kCuSeqlens] = add_input({"cu_seqlens", {DataType::kINT32}, "P"});
    positions_[kTokenMap] = add_input({"token_map", {DataType::kINT32}, "V"});
    if (explicit_history_)
      positions_[kLookbackIds] = add_input({"lookback_ids", {DataType::kINT32}, "BW"});
    if (has_lookback_dead)
      positions_[kLookbackDead] = add_input({"lookback_dead", {DataType::kBOOL}, "BW"});
    if (fields.flag("has_dead_mask"))
      positions_[kDeadMask] = add_input({"dead_mask", {DataType::kBOOL}, "T"});
    positions_[kMultipliers] = add_input({"multipliers", {DataType::kINT64}, "LN"});
    positions_[kPrimes] = add_input({"primes", {DataType::kINT64}, "LC"});
    positions_[kOffsets] = add_input({"offsets", {DataType::kINT64}, "LC"});
    add_output({"hash_ids", {DataType::kINT32}, "TLC"});
    if (fields.flag("has_next_lookback")) {
      next_lookback_ = add_output({"next_lookback_ids", {DataType::kINT32}, "BW"});
    }
  }

  void check(const Sizes& sizes) const override {
    check_orders(sizes);
    if (sizes['N'] > 0) check_size("lookback_ids dimension 1", sizes['N'] - 1, sizes['W']);
    if (has_boundaries_) {
      ENGRAM_CHECK(sizes['P'] != 0, "cu_seqlens: expected at least 1 entry, found 0");
      if (sizes['P'] > 0) check_size("lookback_ids dimension 0", sizes['P'] - 1, sizes['B']);
    } else {
      check_size("lookback_ids dimension 0", sizes['T'], sizes['B']);
    }
    check_vocabulary(sizes, pad_token_id_);
  }

  void derive(SizeExprs* exprs, nvinfer1::IExprBuilder& builder) const override {
    if ((*exprs)['B'] != nullptr) return;
    const nvinfer1::IDimensionExpr& one = *builder.constant(1);
    const auto minus_one = [&](char letter) {
      return builder.operation(nvinfer1::DimensionOperation::kSUB, *(*exprs)[letter], one);
    };
    (*exprs)['B'] = has_boundaries_ ? minus_one('P') : (*exprs)['T'];
    (*exprs)['W'] = minus_one('N');
  }

  bool starts_step() const override { return true; }

  bool is_empty(const Sizes& sizes) const override {
    return sizes['T'] == 0 && (next_lookback_ < 0 || num_requests(sizes) == 0);
  }

  cudaError_t enqueue(const Call& call) const override {
    const Sizes& sizes = call.sizes;
    engram_hash_args args{};
    args.multipliers = input<int64_t>(call, kMultipliers);
    args.primes = input<int64_t>(call, kPrimes);
    args.offsets = input<int64_t>(call, kOffsets);
    args.token_map = input<int32_t>(call, kTokenMap);
    args.token_ids = input<int32_t>(call, kTokenIds);
    args.positions = input<void>(call, kPositions);
    args.cu_seqlens = input<int32_t>(call, kCuSeqlens);
    args.lookback_ids = input<int32_t>(call, kLookbackIds);
    args.lookback_dead = input<uint8_t>(call, kLookbackDead);
    args.dead_mask = input<uint8_t>(call, kDeadMask);
    args.hash_ids = static_cast<int32_t*>(call.outputs[0]);
    if (next_lookback_ >= 0)
      args.next_lookback_ids = static_cast<int32_t*>(call.outputs[next_lookback_]);
    args.num_tokens = sizes['T'];
    args.num_requests = static_cast<int32_t>(num_requests(sizes));
    args.num_layers = static_cast<int32_t>(sizes['L']);
    args.max_ngram_size = static_cast<int32_t>(sizes['N']);
    args.num_heads = static_cast<int32_t>(sizes['C'] / (sizes['N'] - 1));
    args.vocab_size = static_cast<int32_t>(sizes['V']);
    args.pad_token_id = pad_token_id_;
    args.positions_dtype = call.input_descs[positions_[kPositions]].type == DataType::kINT64
                               ? ENGRAM_INT64
                               : ENGRAM_INT32;
    check_hash(args);
    return hash_cuda(args, call.fault, call.stream);
  }

 private:
  enum Position {
    kTokenIds,
    kPositions,
    kCuSeqlens,
    kTokenMap,
    kLookbackIds,
    kLookbackDead,
    kDeadMask,
    kMultipliers,
    kPrimes,
    kOffsets,
    kNumInputs
  };

  template <typename T>
  const T* input(const Call& call, Position which) const {
    return positions_[which] < 0 ? nullptr : static_cast<const T*>(call.inputs[positions_[which]]);
  }

  int64_t num_requests(const Sizes& sizes) const {
    return has_boundaries_ ? sizes['P'] - 1 : sizes['T'];
  }

  int32_t pad_token_id_;
  bool explicit_history_;
  bool has_boundaries_;
  int next_lookback_ = -1;
  std::array<int, kNumInputs> positions_ = [] {
    std::array<int, kNumInputs> absent{};
    absent.fill(-1);
    return absent;
  }();
};

}  // namespace

const OpSpec& hash_spec() {
  static const OpSpec spec{
      "EngramHash",
      "token ids to row ids",
      {required_int("pad_token_id", "raw id that blocked and unknown positions count as"),
       required_text(
           "history",
           "explicit: lookback inputs hold the tokens before this call; whole_prompt: no past; "
           "kv_phantom: they lie in TensorRT-LLM's KV cache, whose tensors are inputs "
           "(docs/trtllm.md)"),
       optional_int("has_cu_seqlens", 1,
                    "1: input cu_seqlens bounds the requests; 0: one token per request"),
       optional_int("has_lookback_dead", 0, "1: input lookback_dead is there"),
       optional_int("has_dead_mask", 0, "1: input dead_mask is there"),
       optional_int("has_next_lookback", 0, "1: output next_lookback_ids is there"),
       optional_int("tokens_per_block", 0, "kv_phantom: of the KV cache"),
       optional_int("slot_bytes", 0, "kv_phantom: of a token's key in the reserved layer"),
       format_version_field()},
      [](const FieldValues& fields) -> std::unique_ptr<Op> {
        if (fields.text("history") == "kv_phantom") return make_paged_hash(fields);
        return std::make_unique<HashOp>(fields);
      }};
  return spec;
}

}  // namespace engram::plugins
