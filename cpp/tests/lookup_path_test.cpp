// SPDX-License-Identifier: Apache-2.0
// Which path a lookup takes on a GPU, and how a sorted one lays out its workspace.
#include <cstdint>
#include <string>

#include "doctest/doctest.h"
#include "engram/engram.h"
#include "engram/ops.h"
#include "ops/row_runs.h"

namespace engram {
namespace {

engram_lookup_args lookup_of(int64_t num_tokens, int32_t form = ENGRAM_ROWS_BF16) {
  engram_lookup_args args = {};
  args.ids_stride = args.num_columns = 24;
  args.head_dim = 256;
  args.num_rows = 1000;
  args.num_tokens = num_tokens;
  args.form = form;
  return args;
}

TEST_CASE("lookup path: sorted for many tokens in host memory, with a workspace") {
  engram_lookup_args args = lookup_of(8192);
  args.workspace_bytes = INT64_MAX;
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_DIRECT);
  CHECK(lookup_workspace_bytes(args) == 0);
  args.values_in_host = 1;
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_SORTED);
  args.workspace_bytes = lookup_workspace_bytes(args);
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_SORTED);
  args.workspace_bytes -= 1;
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_DIRECT);
  args.path = ENGRAM_LOOKUP_SORTED;
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_SORTED);
  args = lookup_of(8);
  args.values_in_host = 1;
  args.workspace_bytes = INT64_MAX;
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_DIRECT);
}

TEST_CASE("lookup path: gathered for some tokens in host memory, where CPUs may") {
  engram_lookup_args args = lookup_of(8192);
  args.values_in_host = 1;
  args.workspace_bytes = INT64_MAX;
  args.lanes = &args;
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_GATHERED);
  CHECK(lookup_workspace_bytes(args) == 0);
  args.num_tokens = 255;
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_DIRECT);
  args.num_tokens = 256;
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_GATHERED);
  args.values_in_host = 0;
  CHECK(lookup_path(args) == ENGRAM_LOOKUP_DIRECT);
}

TEST_CASE("segments: every token that is written is in one, none is too long for a block") {
  for (const int64_t num_tokens : {0, 1, 127, 128, 8191, 8192, 8193, 16385, 100003}) {
    for (const int32_t form : {ENGRAM_ROWS_BF16, ENGRAM_ROWS_MXFP8_128X4}) {
      const engram_lookup_args args = lookup_of(num_tokens, form);
      const SegmentShape shape = segment_shape(args);
      const int64_t written = num_written_tokens(args);
      CHECK(written >= num_tokens);
      CHECK(shape.num_chunks * shape.chunk_tokens >= written);
      CHECK((shape.num_chunks - 1) * shape.chunk_tokens < std::max<int64_t>(written, 1));
      CHECK(shape.chunk_tokens <= kMaxSegmentTokens);
      CHECK(shape.num_segments == 24 * shape.num_chunks);
    }
  }
}

TEST_CASE("segments: more tokens take no less workspace") {
  int64_t before = 0;
  for (int64_t num_tokens = 1; num_tokens < 40000; num_tokens += 61) {
    const int64_t num_bytes = run_array_bytes(segment_shape(lookup_of(num_tokens)));
    CHECK(num_bytes >= before);
    before = num_bytes;
  }
}

TEST_CASE("runs: the arrays lie side by side in the workspace") {
  for (const int64_t num_tokens : {1, 257, 20000}) {
    const SegmentShape shape = segment_shape(lookup_of(num_tokens));
    auto* const begin = reinterpret_cast<uint8_t*>(uintptr_t{64});
    const RunArrays arrays = run_arrays(shape, begin);
    CHECK(static_cast<void*>(arrays.runs) == begin);
    CHECK(static_cast<void*>(arrays.num_runs) ==
          arrays.runs + shape.num_segments * shape.runs_per_segment());
    CHECK(static_cast<void*>(arrays.tokens) == arrays.num_runs + shape.num_segments);
    CHECK(static_cast<void*>(arrays.tokens + shape.num_segments * shape.chunk_tokens) ==
          begin + run_array_bytes(shape));
  }
}

TEST_CASE("lookup path: what is refused before a GPU is looked for") {
  const auto refusal = [](const engram_lookup_args& args) -> std::string {
    const engram_exec gpu = {.device = 0, .num_threads = 0, .stream = nullptr};
    CHECK(engram_lookup(&args, &gpu) != ENGRAM_OK);
    return engram_last_error();
  };
  alignas(16) uint8_t bytes[64];
  int32_t id = 0;
  engram_lookup_args args = lookup_of(1);
  args.values = args.scales = bytes;
  args.ids = &id;
  args.out = bytes;
  args.path = 4;
  CHECK(refusal(args) == "path: expected 0 to 3, got 4");
  args.path = ENGRAM_LOOKUP_GATHERED;
  CHECK(refusal(args) == "lanes: expected an array, got NULL");
  args.path = ENGRAM_LOOKUP_SORTED;
  CHECK(refusal(args) == "workspace_bytes: expected 528 or more, got 0");
  args.workspace_bytes = 528;
  CHECK(refusal(args) == "workspace: expected an array, got NULL");
  args.workspace = bytes + 4;
  CHECK(refusal(args) ==
        "workspace: expected an address aligned to 8 bytes, got one 4 bytes past it");
  args.num_read_blocks = -1;
  CHECK(refusal(args) == "num_read_blocks: expected 0 or more, got -1");
}

TEST_CASE("lookup workspace: by sizes alone") {
  engram_lookup_args args = lookup_of(512);
  int64_t num_bytes = -1;
  CHECK(engram_lookup_workspace(&args, &num_bytes) == ENGRAM_OK);
  CHECK(num_bytes == 0);
  args.values_in_host = 1;
  CHECK(engram_lookup_workspace(&args, &num_bytes) == ENGRAM_OK);
  CHECK(num_bytes == 24 * (513 * 8 + 4 + 512 * 2));
  args.head_dim = 31;
  CHECK(engram_lookup_workspace(&args, &num_bytes) == ENGRAM_INVALID_ARGUMENT);
  CHECK(engram_lookup_workspace(&args, nullptr) == ENGRAM_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace engram
