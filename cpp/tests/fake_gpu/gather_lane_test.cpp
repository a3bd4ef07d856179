// SPDX-License-Identifier: Apache-2.0
// Rows of a table in host memory that threads gather for a GPU, by a run time that does work when a
// test says so. The threads are real ones.
#include "table/gather_lane.h"

#include <algorithm>
#include <vector>

#include "../random.h"
#include "../texts.h"
#include "doctest/doctest.h"
#include "engram/ops.h"
#include "fake_gpus.h"
#include "refused_lookups.h"

namespace engram {
namespace {

constexpr int kColumns = 5;
constexpr int kHeadDim = 64;
constexpr int kScales = kHeadDim / kScaleBlock;
constexpr int64_t kRows = 3000;
const cudaStream_t kStreams[] = {reinterpret_cast<cudaStream_t>(0x10),
                                 reinterpret_cast<cudaStream_t>(0x20)};

class HostBytes final : public TableArray {
 public:
  HostBytes(const uint8_t* bytes, bool on_gpu) : bytes_(bytes), on_gpu_(on_gpu) {}
  const uint8_t* on_device(int) override { return bytes_; }
  const uint8_t* on_host() override { return on_gpu_ ? nullptr : bytes_; }

 private:
  const uint8_t* bytes_;
  bool on_gpu_;
};

struct Call {
  int64_t num_tokens;
  int32_t form;
  std::vector<int32_t> ids;
  std::vector<uint16_t> out;
  std::vector<uint8_t> scales;

  Call(int64_t tokens, uint32_t seed, int32_t rows = ENGRAM_ROWS_BF16)
      : num_tokens(tokens),
        form(rows),
        ids(Random(seed).integers<int32_t>(static_cast<size_t>(tokens * kColumns) + 1, -100,
                                           kRows + 99)),
        out(static_cast<size_t>(tokens * kColumns * kHeadDim) + 8, 0xAAAA),
        scales(static_cast<size_t>(tokens * kColumns * kScales) + 8, 0xAA) {
    for (size_t i = 0; i < ids.size(); i += 37) ids[i] = kLostId;
    for (size_t i = 0; i < ids.size(); i += 2) ids[i] = 7 + static_cast<int32_t>(i % 3);
  }

  void fill(engram_lookup_args* args) {
    args->ids = ids.data();
    args->ids_stride = args->num_columns = kColumns;
    args->num_tokens = num_tokens;
    args->head_dim = kHeadDim;
    args->form = form;
    args->out = out.data();
    args->out_scales = scales.data();
  }
};

struct Fixture {
  std::vector<uint8_t> values = Random(1).integers<uint8_t>(kRows * kHeadDim, 0, 126);
  std::vector<uint8_t> scales = Random(2).integers<uint8_t>(kRows * kScales, 100, 140);
  std::shared_ptr<Table> table;
  int64_t made_before;

  Fixture() {
    fake::machine() = {};
    fake::machine().visible = {"0000:1B:00.0"};
    made_before = fake::num_made();
    bind(false);
  }
  ~Fixture() {
    table.reset();
    CHECK(fake::num_made() == made_before);
    CHECK(fake::num_forbidden() == 0);
    CHECK_FALSE(fake::has_pending_error());
  }

  void bind(bool scales_on_gpu) {
    TableInfo info{.store = "engram.1", .layer = 7, .num_columns = kColumns};
    info.head_dim = kHeadDim;
    info.num_rows = kRows;
    TableOptions options;
    options.gather_threads = 3;
    const auto lanes = std::make_shared<Lanes>();
    table = std::make_shared<Table>(options, info, TableHistory{},
                                    std::make_unique<HostBytes>(values.data(), false),
                                    std::make_unique<HostBytes>(scales.data(), scales_on_gpu),
                                    nullptr, nullptr, nullptr, lanes);
    lanes->belong_to(table);
  }

  engram_lookup_args args(Call& call) const {
    engram_lookup_args made{};
    made.values = values.data();
    made.scales = scales.data();
    made.num_rows = kRows;
    made.values_in_host = 1;
    made.lanes = table->lanes();
    made.path = ENGRAM_LOOKUP_GATHERED;
    call.fill(&made);
    return made;
  }
  void look(Call& call, cudaStream_t stream) const {
    table->lanes()->lookup(args(call), 0, stream);
  }

  //! Whether the result is that of a lookup on the CPU.
  bool is_right(const Call& call) const {
    Call twin = call;
    std::fill(twin.out.begin(), twin.out.end(), 0xAAAA);
    std::fill(twin.scales.begin(), twin.scales.end(), 0xAA);
    engram_lookup_args wanted = args(twin);
    wanted.path = ENGRAM_LOOKUP_AUTO;
    lookup_cpu(wanted, 1);
    return call.out == twin.out && call.scales == twin.scales;
  }
  int64_t num_lanes() const { return (fake::num_made() - made_before) / 3; }  // two memories, event
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "gathered rows reach a GPU in every form, in pieces and in parts") {
  for (const bool scales_on_gpu : {false, true}) {
    bind(scales_on_gpu);
    for (const int32_t form : {ENGRAM_ROWS_BF16, ENGRAM_ROWS_PACKED, ENGRAM_ROWS_MXFP8_LINEAR}) {
      for (const int64_t num_tokens : {0, 1, 129, 700, 2100, 8192, 9001}) {
        CAPTURE(scales_on_gpu);
        CAPTURE(form);
        CAPTURE(num_tokens);
        Call call(num_tokens, 3, form);
        look(call, kStreams[0]);
        CHECK(is_right(call));
      }
    }
    CHECK(num_lanes() == 1);
  }
}

TEST_CASE_FIXTURE(Fixture, "gathers that run at once have lanes of their own, later ones theirs") {
  std::vector<Call> calls;
  for (uint32_t i = 0; i < 4; ++i) calls.emplace_back(600, i);
  for (const cudaStream_t stream : kStreams) fake::hold(stream);
  for (size_t i = 0; i < calls.size(); ++i) look(calls[i], kStreams[i % 2]);
  CHECK(num_lanes() == 4);
  for (const cudaStream_t stream : {kStreams[1], kStreams[0]}) fake::release(stream);
  for (const Call& call : calls) CHECK(is_right(call));
  for (uint32_t seed = 10; seed < 60; ++seed) {
    Call later(400 + 10 * seed, seed);
    look(later, kStreams[0]);
    CHECK(is_right(later));
  }
  CHECK(num_lanes() == 4);
}

TEST_CASE_FIXTURE(Fixture, "a graph keeps the table that it gathers from") {
  const std::weak_ptr<const Table> left = table;
  Call call(1500, 1);
  const cudaGraph_t graph = fake::begin_capture(kStreams[0]);
  look(call, kStreams[0]);
  fake::end_capture();
  engram_lookup_args wanted = args(call);
  table.reset();
  for (uint32_t seed = 10; seed < 13; ++seed) {
    const Call other(call.num_tokens, seed);
    std::copy(other.ids.begin(), other.ids.end(), call.ids.begin());  // in its place
    fake::replay(graph);
    std::vector<uint16_t> out(call.out.size(), 0xAAAA);
    wanted.out = out.data();
    wanted.path = ENGRAM_LOOKUP_AUTO;
    lookup_cpu(wanted, 1);
    CHECK(call.out == out);
  }
  fake::end(graph);
  CHECK_FALSE(left.expired());
  free_left_lanes();
  CHECK(left.expired());
}

TEST_CASE_FIXTURE(Fixture, "each call of CUDA refused: one line, and the next gather is right") {
  check_refused_lookups(
      kStreams[0],
      [&](uint32_t seed) {
        bind(false);
        return Call(600, seed);
      },
      [&](Call& call) { look(call, kStreams[0]); },
      [&] {
        Call next(600, 99);
        look(next, kStreams[0]);
        return is_right(next);
      });
}

}  // namespace engram
