// SPDX-License-Identifier: Apache-2.0
// Lookups of GPUs in tables on disk, by a run time that does work when a test says so.
#include "table/disk_lane.h"

#include <unistd.h>

#include <algorithm>

#include "../made_disk_table.h"
#include "../random.h"
#include "../texts.h"
#include "doctest/doctest.h"
#include "engram/ops.h"
#include "fake_gpus.h"
#include "fault.h"
#include "refused_lookups.h"

namespace engram {
namespace {

constexpr int kColumns = 24;
constexpr int kLayer = 7;
const cudaStream_t kStreams[] = {reinterpret_cast<cudaStream_t>(0x10),
                                 reinterpret_cast<cudaStream_t>(0x20)};

//! A table of `made`'s files, which it keeps.
std::shared_ptr<const Table> table_of(std::shared_ptr<MadeDiskTable> made) {
  TableInfo info{.store = "engram.1", .layer = kLayer, .num_columns = kColumns};
  info.head_dim = kDiskHeadDim;
  info.num_rows = kDiskRows;
  const std::shared_ptr<DiskReader> reader(made, &made->reader());
  const auto lanes = std::make_shared<Lanes>();
  auto table = std::make_shared<Table>(TableOptions{}, info, TableHistory{}, nullptr, nullptr,
                                       nullptr, reader, nullptr, lanes);
  lanes->belong_to(table);
  return table;
}

//! Ids of tokens that are `stride` apart, and room for their rows in any form.
struct Call {
  int64_t num_tokens;
  int64_t stride = kColumns;
  int32_t form = ENGRAM_ROWS_BF16;
  std::vector<int32_t> ids = {};
  std::vector<uint16_t> out = {};
  std::vector<uint8_t> scales = {};

  Call(int64_t tokens, uint32_t seed, int64_t apart = kColumns, int32_t rows = ENGRAM_ROWS_BF16)
      : num_tokens(tokens), stride(apart), form(rows) {
    const auto size = static_cast<size_t>(tokens * apart);
    ids = Random(seed).integers<int32_t>(size + 1, -100, kDiskRows + 99);
    for (size_t i = 0; i < size; i += 37) ids[i] = kLostId;
    out.resize(static_cast<size_t>(tokens * kColumns * kDiskHeadDim) + 8, 0xAAAA);
    scales.resize(static_cast<size_t>((tokens + 127) / 128 * 128 * kColumns * kDiskScales), 0xAA);
  }

  engram_lookup_args args() {
    engram_lookup_args made{};
    made.ids = ids.data();
    made.ids_stride = stride;
    made.num_tokens = num_tokens;
    made.num_columns = kColumns;
    made.head_dim = kDiskHeadDim;
    made.form = form;
    made.out = out.data();
    made.out_scales = scales.data();
    return made;
  }

  //! Whether the result is that of a lookup in memory.
  bool is_right(const MadeDiskTable& table) const {
    Call twin = *this;
    std::fill(twin.out.begin(), twin.out.end(), 0xAAAA);
    std::fill(twin.scales.begin(), twin.scales.end(), 0xAA);
    engram_lookup_args args = twin.args();
    args.values = table.value_bytes();
    args.scales = table.scale_bytes();
    args.num_rows = kDiskRows;
    lookup_cpu(args, 1);
    return out == twin.out && scales == twin.scales;
  }
};

struct Fixture {
  std::shared_ptr<MadeDiskTable> made = std::make_shared<MadeDiskTable>(ScalesIn::kFile, 1 << 20);
  std::shared_ptr<const Table> table;
  int64_t made_before;

  Fixture() {
    fake::machine() = {};
    fake::machine().visible = {"0000:1B:00.0"};
    fault_word(0);
    made_before = fake::num_made();
    table = table_of(made);
  }
  ~Fixture() {
    table.reset();
    CHECK(fake::num_made() == made_before);
    CHECK(fake::num_forbidden() == 0);
    CHECK_FALSE(fake::has_pending_error());
  }

  void look(Call& call, cudaStream_t stream) const {
    table->lanes()->lookup(call.args(), 0, stream);
  }
  int64_t num_lanes() const { return (fake::num_made() - made_before) / 2; }  // memory and event
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "rows on disk reach a GPU in every form, in parts and from ids apart") {
  for (const int32_t form :
       {ENGRAM_ROWS_BF16, ENGRAM_ROWS_PACKED, ENGRAM_ROWS_MXFP8_LINEAR, ENGRAM_ROWS_MXFP8_128X4}) {
    for (const int64_t num_tokens : {0, 1, 129, 2561, 5200}) {
      CAPTURE(form);
      CAPTURE(num_tokens);
      Call call(num_tokens, 1, num_tokens == 129 ? 3 * kColumns : kColumns, form);
      look(call, kStreams[0]);
      CHECK(call.is_right(*made));
    }
  }
  CHECK(num_lanes() == 1);
}

TEST_CASE_FIXTURE(Fixture, "lookups that run at once have lanes of their own, later ones theirs") {
  std::vector<Call> calls;
  for (uint32_t i = 0; i < 4; ++i) calls.emplace_back(50, i);
  for (const cudaStream_t stream : kStreams) fake::hold(stream);
  for (size_t i = 0; i < calls.size(); ++i) look(calls[i], kStreams[i % 2]);
  CHECK(num_lanes() == 4);
  for (const cudaStream_t stream : {kStreams[1], kStreams[0]}) fake::release(stream);
  for (const Call& call : calls) CHECK(call.is_right(*made));
  Call later(50, 9);
  look(later, kStreams[0]);
  CHECK(later.is_right(*made));
  CHECK(num_lanes() == 4);
}

TEST_CASE_FIXTURE(Fixture, "a table that ends waits for the lookups that run") {
  Call call(200, 1);
  fake::hold(kStreams[0]);
  look(call, kStreams[0]);
  CHECK_FALSE(call.is_right(*made));
  table.reset();
  CHECK(call.is_right(*made));
  fake::release(kStreams[0]);
}

TEST_CASE_FIXTURE(Fixture, "a graph keeps its table and reads the ids of each replay") {
  const std::weak_ptr<const Table> left = table;
  std::vector<Call> calls{Call(3, 1), Call(3000, 2)};
  std::vector<cudaGraph_t> graphs;
  for (Call& call : calls) {
    graphs.push_back(fake::begin_capture(kStreams[0]));
    look(call, kStreams[0]);
    fake::end_capture();
    CHECK_FALSE(call.is_right(*made));
  }
  Call beside(40, 3);
  look(beside, kStreams[0]);
  table.reset();
  for (uint32_t seed = 10; seed < 13; ++seed) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const Call other(calls[i].num_tokens, seed);
      std::copy(other.ids.begin(), other.ids.end(), calls[i].ids.begin());  // in its place
      fake::replay(graphs[i]);
      CHECK(calls[i].is_right(*made));
    }
  }
  for (const cudaGraph_t graph : graphs) {
    fake::end(graph);
    CHECK_FALSE(left.expired());
    if (graph == graphs.front()) free_left_lanes();
  }
  free_left_lanes();
  CHECK(left.expired());
}

TEST_CASE_FIXTURE(Fixture, "graphs of one lane's caller keep that lane") {
  auto lane = make_lane(table, 0);
  const std::weak_ptr<Lane> left = lane;
  Call call(5, 1);
  const cudaGraph_t graph = fake::begin_capture(kStreams[0]);
  CHECK(lane->lookup(call.args(), kStreams[0]) == cudaSuccess);
  fake::end_capture();
  lane.reset();
  table.reset();
  fake::replay(graph);
  CHECK(call.is_right(*made));
  fake::end(graph);
  free_left_lanes();
  CHECK(left.expired());
}

TEST_CASE_FIXTURE(Fixture, "rows that cannot be read are NaN and a fault of table and device") {
  Call call(2, 1);
  std::fill(call.ids.begin(), call.ids.end(), 5);
  look(call, kStreams[0]);
  CHECK(call.is_right(*made));
  throw_pending_fault(0);
  REQUIRE(truncate(made->file().path().c_str(), kValuesAt) == 0);
  const auto is_fault = [&](int32_t row) {
    std::fill(call.ids.begin(), call.ids.end(), row);
    call.ids[1] = -1;
    look(call, kStreams[0]);
    CHECK(call.out.front() == kBf16Nan);
    CHECK(call.out[kDiskHeadDim] == 0);
    CHECK(made->reader().take_fault()->find(made->file().path()) != std::string::npos);
  };
  is_fault(6);
  const std::string text = message_of([] { throw_pending_fault(0); });
  CHECK(text.find("layer 7: rows of its table on disk could not be read") != std::string::npos);
  is_fault(7);
  forget_fault(pack_fault(FaultCode::kUnreadRows, kLayer + 1, 0));
  CHECK(*fault_word(0) != 0);
  forget_fault(pack_fault(FaultCode::kUnreadRows, kLayer, 0));
  CHECK(*fault_word(0) == 0);
}

TEST_CASE_FIXTURE(Fixture, "what a call cannot have right is refused, and no lane is lost") {
  Call call(2, 1);
  engram_lookup_args args = call.args();
  ++args.num_columns;
  ++args.ids_stride;
  args.num_tokens = 1;
  const auto refused = [&] {
    return message_of([&] { table->lanes()->lookup(args, 0, kStreams[0]); });
  };
  CHECK(refused() == "num_columns: expected 1 to 24, got 25");
  args = call.args();
  args.out = reinterpret_cast<uint8_t*>(args.out) + 2;
  for (int i = 0; i < 3; ++i) CHECK(refused().find("out: expected an address") == 0);
  CHECK(num_lanes() == 1);
}

TEST_CASE_FIXTURE(Fixture, "each call of CUDA refused: one line, and the next lookup is right") {
  check_refused_lookups(
      kStreams[0],
      [&](uint32_t seed) {
        table = table_of(made);
        return Call(300, seed);
      },
      [&](Call& call) { look(call, kStreams[0]); },
      [&] {
        Call next(300, 99);
        look(next, kStreams[0]);
        return next.is_right(*made);
      });
}

}  // namespace engram
