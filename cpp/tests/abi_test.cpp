// SPDX-License-Identifier: Apache-2.0
// The C ABI as a caller meets it, at sizes where the sanitizers see any access past an end.
#include <cstdlib>
#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "engram/engram.h"
#include "engram/row.h"

extern "C" int32_t abi_version_in_c(void);

namespace {

constexpr int kHeadDim = 64;
constexpr int kColumns = 6;
constexpr int kRows = 97;
constexpr int kScales = kHeadDim / engram::kScaleBlock;
constexpr int kPackedRow = kHeadDim + kScales;

engram_exec cpu(int num_threads) {
  return {.device = -1, .num_threads = num_threads, .stream = nullptr};
}

//! Heap array of exactly `size` bytes on a 64-byte boundary: the sanitizers watch its end.
class Bytes {
 public:
  explicit Bytes(size_t size) : size_(size) {
    void* memory = nullptr;
    REQUIRE(posix_memalign(&memory, 64, size) == 0);
    data_ = static_cast<uint8_t*>(memory);
  }
  ~Bytes() { std::free(data_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  uint8_t* data() const { return data_; }
  uint8_t& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_;
  size_t size_;
};

void fill(const Bytes& bytes, unsigned step) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * step + 1) & 0x7E;
}

struct HashCase {
  std::vector<int64_t> multipliers = {3, 5, 7, 11, 13, 17};
  std::vector<int64_t> primes = {101, 103, 107, 109, 113, 127, 131, 137};
  std::vector<int64_t> offsets = {0, 101, 204, 311, 0, 113, 240, 371};
  std::vector<int32_t> token_map = {0, 1, 2, 1, 3};
  std::vector<int32_t> token_ids = {4, 1, 3, 0, 2};
  std::vector<int32_t> positions = {0, 1, 2, 7, 8};
  std::vector<int32_t> cu_seqlens = {0, 3, 5};
  std::vector<int32_t> lookback = {-1, -1, 4, 1};
  std::vector<int32_t> ids = std::vector<int32_t>(5 * 8);

  engram_hash_args args() {
    engram_hash_args args = {};
    args.multipliers = multipliers.data();
    args.primes = primes.data();
    args.offsets = offsets.data();
    args.token_map = token_map.data();
    args.token_ids = token_ids.data();
    args.positions = positions.data();
    args.cu_seqlens = cu_seqlens.data();
    args.lookback_ids = lookback.data();
    args.hash_ids = ids.data();
    args.num_tokens = 5;
    args.num_requests = 2;
    args.num_layers = 2;
    args.max_ngram_size = 3;
    args.num_heads = 2;
    args.vocab_size = 5;
    args.pad_token_id = 2;
    args.positions_dtype = ENGRAM_INT32;
    return args;
  }
};

engram_status hash(HashCase& test) {
  const engram_hash_args args = test.args();
  const engram_exec exec = cpu(2);
  return engram_hash(&args, &exec);
}

TEST_CASE("the header means the same in C") {
  CHECK(engram_abi_version() == ENGRAM_ABI_VERSION);
  CHECK(abi_version_in_c() == ENGRAM_ABI_VERSION);
}

TEST_CASE("hash: a bigram by hand") {
  HashCase test;
  REQUIRE(hash(test) == ENGRAM_OK);
  // Token 1 of request 0: raw 1 after raw 4, compressed 1 after 3.
  CHECK(test.ids[8] == ((1 * 3) ^ (3 * 5)) % 101);
  // Token 0 of request 1 looks back at raw 4 and 1: compressed 0, 3, 1.
  CHECK(test.ids[3 * 8 + 2] == ((0 * 3) ^ (3 * 5) ^ (1 * 7)) % 107 + 204);
}

TEST_CASE("hash: bad ids and boundaries are refused") {
  HashCase test;
  SUBCASE("id past the vocabulary") { test.token_ids[4] = 5; }
  SUBCASE("negative id") { test.token_ids[0] = -1; }
  SUBCASE("falling boundaries") { test.cu_seqlens = {0, 6, 5}; }
  SUBCASE("short boundaries") { test.cu_seqlens = {0, 3, 4}; }
  CHECK(hash(test) == ENGRAM_INVALID_ARGUMENT);
  CHECK(std::string(engram_last_error()).find("expected") != std::string::npos);
}

TEST_CASE("lookup: rows, and zeros for ids outside the table") {
  const Bytes values(kRows * kHeadDim);
  const Bytes scales(kRows * kScales);
  fill(values, 7);
  fill(scales, 3);
  const std::vector<int32_t> ids = {0, 96, -1, 97, 5, 5, 41, 2, 96, 0, 11, INT32_MAX};
  constexpr int64_t kTokens = 2;
  const Bytes packed(kTokens * kColumns * kPackedRow);
  engram_lookup_args args = {};
  args.values = values.data();
  args.scales = scales.data();
  args.ids = ids.data();
  args.out = packed.data();
  args.ids_stride = kColumns;
  args.num_rows = kRows;
  args.num_tokens = kTokens;
  args.num_columns = kColumns;
  args.head_dim = kHeadDim;
  args.form = ENGRAM_ROWS_PACKED;
  const engram_exec exec = cpu(2);
  REQUIRE(engram_lookup(&args, &exec) == ENGRAM_OK);
  int wrong = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    for (size_t b = 0; b < kPackedRow; ++b) {
      const auto row = static_cast<size_t>(ids[i]);
      const uint8_t expected = ids[i] < 0 || ids[i] >= kRows ? 0
                               : b < kHeadDim                ? values[row * kHeadDim + b]
                                                             : scales[row * kScales + b - kHeadDim];
      wrong += packed[i * kPackedRow + b] != expected;
    }
  }
  CHECK(wrong == 0);

  const Bytes wide(kTokens * kColumns * kHeadDim * 2);
  args.out = wide.data();
  args.form = ENGRAM_ROWS_BF16;
  REQUIRE(engram_lookup(&args, &exec) == ENGRAM_OK);
  CHECK(reinterpret_cast<const uint16_t*>(wide.data())[40] ==
        engram::bf16_from_fp8(values[40], scales[1]));

  const Bytes staged(packed.size());
  const Bytes staged_scales(
      static_cast<size_t>(engram::staged_scale_bytes(kTokens, kColumns * kScales)));
  engram_stage_args stage = {};
  stage.packed = packed.data();
  stage.values = staged.data();
  stage.scales = staged_scales.data();
  stage.num_tokens = kTokens;
  stage.num_columns = kColumns;
  stage.head_dim = kHeadDim;
  REQUIRE(engram_stage(&stage, &exec) == ENGRAM_OK);
  CHECK(staged[3] == values[3]);
}

TEST_CASE("no tokens: nothing is read") {
  const engram_exec exec = cpu(0);
  HashCase test;
  engram_hash_args hash_args = test.args();
  hash_args.num_tokens = 0;
  hash_args.num_requests = 0;
  hash_args.token_ids = nullptr;
  hash_args.positions = nullptr;
  hash_args.cu_seqlens = nullptr;
  hash_args.lookback_ids = nullptr;
  hash_args.hash_ids = nullptr;
  CHECK(engram_hash(&hash_args, &exec) == ENGRAM_OK);
  engram_lookup_args lookup_args = {};
  lookup_args.ids_stride = kColumns;
  lookup_args.num_columns = kColumns;
  lookup_args.head_dim = kHeadDim;
  CHECK(engram_lookup(&lookup_args, &exec) == ENGRAM_OK);
}

TEST_CASE("null structs, bad sizes and absent devices give a status") {
  const engram_exec exec = cpu(0);
  CHECK(engram_hash(nullptr, &exec) == ENGRAM_INVALID_ARGUMENT);
  engram_gate_args gate = {};
  gate.hc_mult = -1;
  CHECK(engram_gate(&gate, &exec) == ENGRAM_INVALID_ARGUMENT);
  CHECK(engram_gate(&gate, nullptr) == ENGRAM_INVALID_ARGUMENT);
  const engram_exec gpu = {.device = 0, .num_threads = 0, .stream = nullptr};
  HashCase test;
  const engram_hash_args args = test.args();
  CHECK(engram_hash(&args, &gpu) == ENGRAM_CUDA_UNAVAILABLE);
}

//! The status of a call and, where it is refused, its text.
std::string refusal(engram_status status) {
  return status == ENGRAM_INVALID_ARGUMENT ? engram_last_error() : std::to_string(status);
}

TEST_CASE("windows without tokens: requests need boundaries, and arrays of their own") {
  HashCase test;
  std::vector<int32_t> next(4, -7);
  const std::vector<int32_t> no_tokens = {0, 0, 0};
  engram_hash_args args = test.args();
  args.num_tokens = 0;
  args.token_ids = nullptr;
  args.cu_seqlens = no_tokens.data();
  args.next_lookback_ids = next.data();
  const engram_exec exec = cpu(1);
  REQUIRE(engram_hash(&args, &exec) == ENGRAM_OK);
  CHECK(next == test.lookback);
  args.next_lookback_ids = test.lookback.data();
  CHECK(refusal(engram_hash(&args, &exec)) ==
        "next_lookback_ids: expected another array than lookback_ids, got the same");
  args.next_lookback_ids = next.data();
  args.cu_seqlens = nullptr;
  CHECK(refusal(engram_hash(&args, &exec)) ==
        "num_requests: expected 0, one per token without cu_seqlens, got 2");
}

template <typename T>
T* bytes_past(T* array, size_t num_bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(array) + num_bytes);
}

TEST_CASE("arrays at addresses that their elements cannot have") {
  HashCase test;
  engram_hash_args hash = test.args();
  hash.primes = bytes_past(hash.primes, 4);
  const engram_exec exec = cpu(1);
  CHECK(refusal(engram_hash(&hash, &exec)) ==
        "primes: expected an address aligned to 8 bytes, got one 4 bytes past it");
  hash = test.args();
  hash.positions_dtype = ENGRAM_INT64;
  hash.positions = bytes_past(hash.multipliers, 4);
  CHECK(refusal(engram_hash(&hash, &exec)).find("positions: expected an address aligned") == 0);
  std::vector<uint16_t> element(1);
  engram_gate_args gate = {};
  gate.hidden = gate.out = element.data();
  gate.kv = bytes_past(element.data(), 1);
  gate.q_weight = gate.k_weight = element.data();
  gate.num_tokens = gate.hc_mult = gate.hidden_size = 1;
  gate.dtype = ENGRAM_BFLOAT16;
  CHECK(refusal(engram_gate(&gate, &exec)) ==
        "kv: expected an address aligned to 2 bytes, got one 1 bytes past it");
}

TEST_CASE(
    "a GPU's accesses of several bytes: other addresses are refused before it is looked for") {
  const std::string no_gpu = std::to_string(ENGRAM_CUDA_UNAVAILABLE);
  const engram_exec gpu = {.device = 0, .num_threads = 0, .stream = nullptr};
  const Bytes memory(1024);
  const std::vector<int32_t> ids(1);
  engram_lookup_args lookup = {};
  lookup.values = memory.data() + 8;
  lookup.scales = memory.data() + 1;
  lookup.ids = ids.data();
  lookup.out = memory.data() + 512;
  lookup.out_scales = memory.data() + 1;
  lookup.ids_stride = lookup.num_rows = lookup.num_tokens = lookup.num_columns = 1;
  lookup.head_dim = kHeadDim;
  for (const int32_t form : {ENGRAM_ROWS_MXFP8_LINEAR, ENGRAM_ROWS_MXFP8_128X4}) {
    lookup.form = form;
    CHECK(refusal(engram_lookup(&lookup, &gpu)) ==
          "values: expected an address aligned to 16 bytes, got one 8 bytes past it");
  }
  lookup.form = ENGRAM_ROWS_BF16;
  CHECK(refusal(engram_lookup(&lookup, &gpu)) == no_gpu);
  lookup.out = memory.data() + 520;
  CHECK(refusal(engram_lookup(&lookup, &gpu)) ==
        "out: expected an address aligned to 16 bytes, got one 8 bytes past it");
  lookup.form = ENGRAM_ROWS_PACKED;
  lookup.out = memory.data() + 513;
  CHECK(refusal(engram_lookup(&lookup, &gpu)) == no_gpu);
  lookup.values = memory.data() + 4;
  CHECK(refusal(engram_lookup(&lookup, &gpu)) ==
        "values: expected an address aligned to 8 bytes, got one 4 bytes past it");
  lookup.values = memory.data() + 8;
  lookup.hot.num_buckets = -1;
  CHECK(refusal(engram_lookup(&lookup, &gpu)) ==
        "hot.num_buckets: expected 0 to 2147483647, got -1");
  lookup.hot.num_buckets = 1;
  CHECK(refusal(engram_lookup(&lookup, &gpu)) == "hot.keys: expected an array, got NULL");
  auto* const line = memory.data() + (32 - reinterpret_cast<uintptr_t>(memory.data()) % 32);
  lookup.hot.keys = reinterpret_cast<const int32_t*>(line + 16);
  CHECK(refusal(engram_lookup(&lookup, &gpu)) ==
        "hot.keys: expected an address aligned to 32 bytes, got one 16 bytes past it");
  lookup.hot.keys = reinterpret_cast<const int32_t*>(line);
  CHECK(refusal(engram_lookup(&lookup, &gpu)) == "hot.values: expected an array, got NULL");
  lookup.hot.values = line + 4;
  CHECK(refusal(engram_lookup(&lookup, &gpu)) ==
        "hot.values: expected an address aligned to 8 bytes, got one 4 bytes past it");
  lookup.hot.values = line;
  lookup.hot.adaptive.num_buckets = 1;
  CHECK(refusal(engram_lookup(&lookup, &gpu)) == "hot.adaptive.slots: expected an array, got NULL");
  lookup.hot.adaptive.slots = reinterpret_cast<uint64_t*>(line + 16);
  CHECK(refusal(engram_lookup(&lookup, &gpu)) ==
        "hot.adaptive.slots: expected an address aligned to 32 bytes, got one 16 bytes past it");
  lookup.hot.adaptive.slots = reinterpret_cast<uint64_t*>(line);
  CHECK(refusal(engram_lookup(&lookup, &gpu)) ==
        "hot.adaptive.values: expected an array, got NULL");
  lookup.hot.adaptive.num_buckets = 0;
  CHECK(refusal(engram_lookup(&lookup, &gpu)) == no_gpu);

  engram_project_args project = {};
  project.x = reinterpret_cast<const uint16_t*>(memory.data() + 16);
  project.weight = memory.data() + 8;
  project.scale = memory.data() + 1;
  project.out = reinterpret_cast<uint16_t*>(memory.data() + 2);
  project.num_tokens = project.out_features = 1;
  project.in_features = engram::kScaleBlock;
  CHECK(refusal(engram_project(&project, &gpu)) ==
        "weight: expected an address aligned to 16 bytes, got one 8 bytes past it");
  project.weight = memory.data() + 32;
  CHECK(refusal(engram_project(&project, &gpu)) == no_gpu);
  project.x = reinterpret_cast<const uint16_t*>(memory.data() + 2);
  CHECK(refusal(engram_project(&project, &gpu)) ==
        "x: expected an address aligned to 16 bytes, got one 2 bytes past it");
}

TEST_CASE("project and gate: sizes that no vector divides") {
  constexpr int kIn = 96;
  constexpr int kOut = 45;
  constexpr int kTokens = 3;
  const std::vector<uint16_t> x(kTokens * kIn, 0x3F80);  // 1.0
  const Bytes weight(kOut * kIn);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = 0x38;  // 1.0
  const std::vector<uint8_t> scale(2 * 3, 127);
  std::vector<uint16_t> out(kTokens * kOut);
  engram_project_args project = {};
  project.x = x.data();
  project.weight = weight.data();
  project.scale = scale.data();
  project.out = out.data();
  project.num_tokens = kTokens;
  project.in_features = kIn;
  project.out_features = kOut;
  const engram_exec exec = cpu(2);
  REQUIRE(engram_project(&project, &exec) == ENGRAM_OK);
  CHECK(out == std::vector<uint16_t>(kTokens * kOut, 0x42C0));  // 96.0

  constexpr int kCopies = 2;
  constexpr int kHidden = 15;
  const std::vector<uint16_t> hidden(kTokens * kCopies * kHidden, 0x3F80);
  const std::vector<uint8_t> token_mask = {1, 0, 1};
  const std::vector<uint16_t> norm(kCopies * kHidden, 0x3F80);
  std::vector<uint16_t> gated(hidden.size());
  engram_gate_args gate = {};
  gate.hidden = hidden.data();
  gate.kv = out.data();
  gate.q_weight = norm.data();
  gate.k_weight = norm.data();
  gate.token_mask = token_mask.data();
  gate.out = gated.data();
  gate.num_tokens = kTokens;
  gate.hc_mult = kCopies;
  gate.hidden_size = kHidden;
  gate.dtype = ENGRAM_BFLOAT16;
  gate.eps = 1e-6f;
  REQUIRE(engram_gate(&gate, &exec) == ENGRAM_OK);
  CHECK(gated[0] > hidden[0]);
  CHECK(gated[kCopies * kHidden] == hidden[0]);  // masked
}

}  // namespace
