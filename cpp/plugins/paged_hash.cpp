// SPDX-License-Identifier: Apache-2.0
#include "paged_hash.h"

#include "cuda_support.h"
#include "engram/history.h"
#include "engram/ops.h"
#include "hash_sizes.h"

namespace engram::plugins {
namespace {

using nvinfer1::DataType;

constexpr int32_t kContextRequest = 0;  //!< in host_request_types; a generation step is 1

//! Letters: T tokens, B requests (beams count), P requests + 1, V vocabulary, W = N-1 window, L
//! layers, N orders, C columns; Q pools, K = 2 (keys and values, primary and secondary), A
//! attention layers, M blocks of a request; R prompts, G beams, S positions.
class PagedHashOp final : public Op {
 public:
  explicit PagedHashOp(const FieldValues& fields)
      : pad_token_id_(fields.int32("pad_token_id")),
        tokens_per_block_(fields.int32("tokens_per_block")),
        slot_bytes_(fields.int32("slot_bytes")) {
    check_pad_token_id(pad_token_id_);
    ENGRAM_CHECK(tokens_per_block_ > 0, "field 'tokens_per_block': expected above 0, found ",
                 tokens_per_block_);
    ENGRAM_CHECK(slot_bytes_ >= kLeastSlotBytes && slot_bytes_ % 4 == 0,
                 "field 'slot_bytes': expected a multiple of 4 from ", kLeastSlotBytes,
                 " on, found ", slot_bytes_);
    for (const char* name : {"has_lookback_dead", "has_dead_mask", "has_next_lookback"}) {
      ENGRAM_CHECK(!fields.flag(name), "field '", name,
                   "': expected 0 where history is kv_phantom, found 1");
    }
    ENGRAM_CHECK(fields.flag("has_cu_seqlens"),
                 "field 'has_cu_seqlens': expected 1 where history is kv_phantom, found 0");
    add_input({"token_ids", {DataType::kINT32}, "T"});
    add_input({"token_map", {DataType::kINT32}, "V"});
    add_input({"host_kv_cache_pool_pointers", {DataType::kINT64}, "QK"});
    add_input({"host_kv_cache_pool_mapping", {DataType::kINT32}, "AK"});
    add_input({"kv_cache_block_offsets", {DataType::kINT32}, "QBKM"});
    add_input({"sequence_length", {DataType::kINT32}, "B"});
    add_input({"context_lengths", {DataType::kINT32}, "B"});
    add_input({"cache_indirection", {DataType::kINT32}, "RGS"});
    add_input({"host_request_types", {DataType::kINT32}, "B"});
    add_input({"host_context_lengths", {DataType::kINT32}, "B"});
    add_input({"multipliers", {DataType::kINT64}, "LN"});
    add_input({"primes", {DataType::kINT64}, "LC"});
    add_input({"offsets", {DataType::kINT64}, "LC"});
    add_output({"hash_ids", {DataType::kINT32}, "TLC"});
    add_output({"positions", {DataType::kINT32}, "T"});
    add_output({"cu_seqlens", {DataType::kINT32}, "P"});
    add_output({"lookback_ids", {DataType::kINT32}, "BW"});
  }

  void check(const Sizes& sizes) const override {
    check_orders(sizes);
    check_size("host_kv_cache_pool_pointers dimension 1", 2, sizes['K']);
    ENGRAM_CHECK(sizes['A'] != 0, "host_kv_cache_pool_mapping: expected at least 1 layer, found 0");
    check_vocabulary(sizes, pad_token_id_);
  }

  void derive(SizeExprs* exprs, nvinfer1::IExprBuilder& builder) const override {
    const nvinfer1::IDimensionExpr& one = *builder.constant(1);
    using Operation = nvinfer1::DimensionOperation;
    (*exprs)['P'] = builder.operation(Operation::kSUM, *(*exprs)['B'], one);
    (*exprs)['W'] = builder.operation(Operation::kSUB, *(*exprs)['N'], one);
  }

  bool starts_step() const override { return true; }

  //! NOTE: reads host inputs, which TensorRT-LLM binds in host memory: but not while building, when
  //! TensorRT makes all inputs up on the GPU.
  cudaError_t enqueue(const Call& call) const override {
    if (call.fault == nullptr) return clear(call);
    const engram_history_args history = history_args(call);
    const engram_hash_args hash = hash_args(call, history);
    check_history(history);
    check_hash(hash);
    check_cuda(history_cuda(history, call.fault, call.stream), "history");
    return hash_cuda(hash, call.fault, call.stream);
  }

 private:
  enum Input {
    kTokenIds,
    kTokenMap,
    kPoolPointers,
    kPoolMapping,
    kBlockOffsets,
    kSequenceLength,
    kContextLengths,
    kCacheIndirection,
    kHostRequestTypes,
    kHostContextLengths,
    kMultipliers,
    kPrimes,
    kOffsets,
    kNumInputs
  };
  enum Output { kHashIds, kPositions, kCuSeqlens, kLookbackIds, kNumOutputs };

  template <typename T>
  static const T* input(const Call& call, Input which) {
    return static_cast<const T*>(call.inputs[which]);
  }
  static int32_t* output(const Call& call, Output which) {
    return static_cast<int32_t*>(call.outputs[which]);
  }

  cudaError_t clear(const Call& call) const {
    const Sizes& sizes = call.sizes;
    const int64_t row = row_offset(sizes['L'], sizes['C']);
    const int64_t counts[kNumOutputs] = {row_offset(sizes['T'], row), sizes['T'], sizes['B'] + 1,
                                         row_offset(sizes['B'], sizes['N'] - 1)};
    for (int i = 0; i < kNumOutputs; ++i) {
      const auto bytes = static_cast<size_t>(counts[i]) * sizeof(int32_t);
      check_cuda(cudaMemsetAsync(call.outputs[i], 0, bytes, call.stream), "clearing outputs");
    }
    return cudaSuccess;
  }

  engram_history_args history_args(const Call& call) const {
    const Sizes& sizes = call.sizes;
    const auto num_requests = static_cast<int32_t>(sizes['B']);
    // The reserved layer is the first.
    const auto* const mapping = input<int32_t>(call, kPoolMapping);
    const int32_t pool = mapping[0];
    ENGRAM_CHECK(pool >= 0 && pool < sizes['Q'] && mapping[1] >= 0,
                 "host_kv_cache_pool_mapping[0]: expected a pool below ", sizes['Q'],
                 " and a layer in it, found ", pool, " and ", mapping[1]);
    const int64_t field_bytes = row_offset(tokens_per_block_, slot_bytes_);
    const auto address = [&](int which) -> uint8_t* {
      const int64_t begin = input<int64_t>(call, kPoolPointers)[2 * pool + which];
      return begin == 0
                 ? nullptr
                 : reinterpret_cast<uint8_t*>(begin) + row_offset(2 * mapping[1], field_bytes);
    };
    const auto* const types = input<int32_t>(call, kHostRequestTypes);
    const auto* const lengths = input<int32_t>(call, kHostContextLengths);
    int32_t num_contexts = 0;
    int64_t num_context_tokens = 0;
    while (num_contexts < num_requests && types[num_contexts] == kContextRequest) {
      num_context_tokens += lengths[num_contexts++];
    }
    const int64_t offsets = row_offset(pool, row_offset(2 * num_requests, sizes['M']));
    return {.primary_pool = address(0),
            .secondary_pool = address(1),
            .block_offsets = input<int32_t>(call, kBlockOffsets) + offsets,
            .sequence_lengths = input<int32_t>(call, kSequenceLength),
            .context_lengths = input<int32_t>(call, kContextLengths),
            .cache_indirection = sizes['G'] > 1 ? input<int32_t>(call, kCacheIndirection) : nullptr,
            .token_ids = input<int32_t>(call, kTokenIds),
            .positions = output(call, kPositions),
            .cu_seqlens = output(call, kCuSeqlens),
            .lookback_ids = output(call, kLookbackIds),
            .num_tokens = sizes['T'],
            .num_requests = num_requests,
            .num_contexts = num_contexts,
            .num_context_tokens = static_cast<int32_t>(num_context_tokens),
            .max_blocks = static_cast<int32_t>(sizes['M']),
            .tokens_per_block = tokens_per_block_,
            .slot_bytes = slot_bytes_,
            .beam_width = static_cast<int32_t>(sizes['G'] > 1 ? sizes['G'] : 1),
            .max_sequence = static_cast<int32_t>(sizes['S']),
            .max_ngram_size = static_cast<int32_t>(sizes['N'])};
  }

  engram_hash_args hash_args(const Call& call, const engram_history_args& history) const {
    const Sizes& sizes = call.sizes;
    return {.multipliers = input<int64_t>(call, kMultipliers),
            .primes = input<int64_t>(call, kPrimes),
            .offsets = input<int64_t>(call, kOffsets),
            .token_map = input<int32_t>(call, kTokenMap),
            .token_ids = history.token_ids,
            .positions = history.positions,
            .cu_seqlens = history.cu_seqlens,
            .lookback_ids = history.lookback_ids,
            .hash_ids = output(call, kHashIds),
            .num_tokens = sizes['T'],
            .num_requests = history.num_requests,
            .num_layers = static_cast<int32_t>(sizes['L']),
            .max_ngram_size = history.max_ngram_size,
            .num_heads = static_cast<int32_t>(sizes['C'] / (sizes['N'] - 1)),
            .vocab_size = static_cast<int32_t>(sizes['V']),
            .pad_token_id = pad_token_id_,
            .positions_dtype = ENGRAM_INT32};
  }

  int32_t pad_token_id_;
  int32_t tokens_per_block_;
  int32_t slot_bytes_;
};

}  // namespace

std::unique_ptr<Op> make_paged_hash(const FieldValues& fields) {
  return std::make_unique<PagedHashOp>(fields);
}

}  // namespace engram::plugins
