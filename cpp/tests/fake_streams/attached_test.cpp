// SPDX-License-Identifier: Apache-2.0
// Plugins in an execution context: who returns a fault of the device, which table a clone has, and
// in what order a prefetch and the lookup that waits for it run.
#include <array>

#include "../made_disk_table.h"
#include "../plugins/cases.h"
#include "doctest/doctest.h"
#include "engram/table.h"
#include "fake_streams.h"
#include "fault.h"
#include "table/lane.h"

namespace engram {
namespace {

using harness::Fields;
using harness::fields_of;
using harness::Plugin;
using harness::Shape;
using harness::take_log;
using nvinfer1::TensorRTPhase;

constexpr const char* kTable = "engram.1";
const std::vector<Shape> kIds{{1, 2, 24}};
const std::vector<Shape> kIdsAndRows{{1, 2, 24}, {1, 6144}};

//! Stands for an execution context, by its address.
class Context final : public nvinfer1::IPluginResourceContext {
 public:
  nvinfer1::IGpuAllocator* getGpuAllocator() const noexcept override { return nullptr; }
  nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
};

TableRegistry& registry() { return TableRegistry::instance(); }

//! A bound table, a context with a stream, and memory of one token.
struct Fixture {
  Context context;
  cudaStream_t stream = nullptr;
  alignas(16) std::array<int32_t, 2 * 24> ids{};
  alignas(16) std::array<uint16_t, 6144> rows{};
  alignas(16) std::array<uint16_t, 6144> out{};

  Fixture() {
    static const bool loaded = (harness::load(nullptr, nullptr), true);
    REQUIRE(loaded);
    bind();
    cudaStreamCreateWithFlags(&stream, 0);
  }
  ~Fixture() {
    registry().unbind(kTable);
    cudaStreamDestroy(stream);
  }

  static void bind() { registry().bind({.tables = {{kTable, {}}}}); }
  static void bind_on_disk() {
    registry().unbind(kTable);
    registry().bind({.tables = {{kTable, {.placement = Placement::kDisk}}}});
  }

  Plugin attach(const std::string& name, const Fields& changes = {}) {
    return Plugin(name, fields_of(name, changes), TensorRTPhase::kRUNTIME).attach(&context);
  }
  Plugin attach_waiting() { return attach("EngramLookup", {{"prefetched", 1}}); }

  int32_t prefetch(const Plugin& plugin) {
    return plugin.enqueue(kIds, {ids.data()}, {rows.data()}, stream);
  }
  int32_t wait(const Plugin& plugin) {
    return plugin.enqueue(kIdsAndRows, {ids.data(), rows.data()}, {out.data()}, stream);
  }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a fault of the device is EngramHash's to return, and no other's") {
  const Fields paged{
      {"history", std::string("kv_phantom")}, {"tokens_per_block", 32}, {"slot_bytes", 256}};
  struct Case {
    const char* name;
    Fields changes;
    std::vector<Shape> no_tokens;
  };
  const std::vector<Case> cases{
      {"EngramLookup", {}, {{0, 2, 24}}},
      {"EngramPrefetch", {}, {{0, 2, 24}}},
      {"EngramLookup", {{"prefetched", 1}}, {{0, 2, 24}, {0, 6144}}},
      {"EngramProject", {}, {{0, 64}, {64, 16}, {1}}},
      {"EngramGate", {}, {{0, 4, 64}, {0, 320}, {4, 64}, {4, 64}}},
      {"EngramHash", {}, {{0}, {0}, {1}, {100}, {0, 3}, {2, 4}, {2, 24}, {2, 24}}},
      {"EngramHash",
       paged,
       {{0},
        {100},
        {1, 2},
        {5, 2},
        {1, 0, 2, 4},
        {0},
        {0},
        {0, 1, 64},
        {0},
        {0},
        {2, 4},
        {2, 24},
        {2, 24}}},
  };
  for (const Case& each : cases) {
    CAPTURE(each.name);
    const Plugin plugin = attach(each.name, each.changes);
    REQUIRE(plugin);
    store_fault(fault_word(0), FaultCode::kTokenId, 3, 99);
    const bool is_hash = each.name == std::string("EngramHash");
    CHECK((plugin.enqueue_nothing(each.no_tokens) != 0) == is_hash);
    CHECK((take_log().find("token_ids[3]: expected an id inside") != std::string::npos) == is_hash);
    CHECK((*fault_word(0) == 0) == is_hash);
    CHECK(plugin.enqueue_nothing(each.no_tokens) == 0);
  }
}

TEST_CASE_FIXTURE(Fixture, "a plugin that is not attached runs while building alone") {
  const auto make = [](TensorRTPhase phase) {
    return Plugin("EngramLookup", fields_of("EngramLookup"), phase);
  };
  const auto gather = [&](const Plugin& plugin) {
    out.fill(7);
    return plugin.enqueue(kIds, {ids.data()}, {out.data()}, stream);
  };
  const Plugin original = make(TensorRTPhase::kRUNTIME);
  const Plugin clone = original.clone();
  for (const Plugin* const plugin : {&original, &clone}) {
    CHECK(gather(*plugin) != 0);
    CHECK(take_log().find("EngramLookup.enqueue: expected a plugin attached to an execution "
                          "context") != std::string::npos);
    CHECK(out.front() == 7);
  }
  CHECK(gather(make(TensorRTPhase::kBUILD)) == 0);
}

TEST_CASE_FIXTURE(Fixture, "a build reads no table, whatever its name is bound to") {
  for (const char* const name : {"EngramLookup", "EngramPrefetch"}) {
    for (const char digit : {'a', 'b'}) {  // of the bound table's layout, and of another
      const Fields fields = fields_of(name, {{"fingerprint", std::string(64, digit)}});
      const Plugin plugin = Plugin(name, fields, TensorRTPhase::kBUILD).attach(&context);
      REQUIRE(plugin);
      const int num_gathers = fake::last_gather().number;
      out.fill(7);
      CHECK(plugin.enqueue(kIds, {ids.data()}, {out.data()}, stream) == 0);
      CHECK(out == decltype(out){});
      CHECK(fake::last_gather().number == num_gathers);
    }
  }
  CHECK(take_log().empty());
}

TEST_CASE_FIXTURE(Fixture, "a clone has its original's table, whatever the name means by then") {
  const Plugin original = attach("EngramLookup");
  const std::weak_ptr<const Table> table = registry().find(kTable);
  const uint8_t* const values = table.lock()->view(0).values;
  const auto gathers_from = [&](const Plugin& plugin) {
    REQUIRE(plugin);
    CHECK(plugin.enqueue(kIds, {ids.data()}, {out.data()}, stream) == 0);
    return fake::last_gather().values;
  };
  registry().unbind(kTable);
  const Plugin clone = original.clone();
  CHECK(gathers_from(clone) == values);
  CHECK_FALSE(attach("EngramLookup"));
  CHECK(take_log().find("table 'engram.1': expected a bound name") != std::string::npos);
  bind();
  CHECK(gathers_from(clone.clone()) == values);
  CHECK(gathers_from(attach("EngramLookup")) != values);
}

TEST_CASE_FIXTURE(Fixture, "a table is freed with the last of its clones") {
  std::weak_ptr<const Table> table = registry().find(kTable);
  {
    const Plugin clone = attach("EngramLookup").clone();
    registry().unbind(kTable);
    CHECK_FALSE(table.expired());
  }
  CHECK(table.expired());
}

TEST_CASE_FIXTURE(Fixture, "clones of a prefetch and of the lookup that waits share their lane") {
  const Plugin prefetches = attach("EngramPrefetch");
  const Plugin waits = attach_waiting();
  registry().unbind(kTable);
  CHECK(prefetch(prefetches.clone()) == 0);
  CHECK_FALSE(fake::runs_after(stream, fake::last_gather()));
  CHECK(wait(waits.clone()) == 0);
  CHECK(fake::runs_after(stream, fake::last_gather()));
}

TEST_CASE_FIXTURE(Fixture, "a prefetch waits for the gather that a failed step left") {
  const Plugin prefetches = attach("EngramPrefetch");
  const Plugin waits = attach_waiting();
  CHECK(prefetch(prefetches) == 0);
  const fake::Gather left = fake::last_gather();
  CHECK_FALSE(fake::runs_after(stream, left));
  CHECK(prefetch(prefetches) == 0);
  CHECK(fake::runs_after(stream, left));
  CHECK_FALSE(fake::runs_after(stream, fake::last_gather()));
  CHECK(wait(waits) == 0);
  CHECK(fake::runs_after(stream, fake::last_gather()));
  CHECK(wait(waits) != 0);
  CHECK(take_log().find("found none started") != std::string::npos);
}

TEST_CASE_FIXTURE(Fixture, "rows on disk are there when a gather begins, on either stream") {
  bind_on_disk();
  const auto are_read = [&] {
    const uint8_t* const found = fake::last_gather().values;
    for (int i = 0; i < 24; ++i) {
      const int32_t id = ids[static_cast<size_t>(24 + i)];  // of the layer that is looked up
      const uint8_t* const right = fake::disk_table().value_bytes() + row_offset(id, kDiskHeadDim);
      CHECK(memcmp(found + row_offset(i, kDiskHeadDim), right, kDiskHeadDim) == 0);
    }
  };
  const Plugin looks_up = attach("EngramLookup");
  const Plugin prefetches = attach("EngramPrefetch");
  const Plugin waits = attach_waiting();
  registry().unbind(kTable);  // both keep it
  for (int32_t turn = 0; turn < 3; ++turn) {
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i) * 97 + turn;
    CHECK(looks_up.enqueue(kIds, {ids.data()}, {out.data()}, stream) == 0);
    are_read();
    ids[24] = 19999;
    CHECK(prefetch(prefetches) == 0);
    are_read();
    CHECK_FALSE(fake::runs_after(stream, fake::last_gather()));
    CHECK(wait(waits) == 0);
    CHECK(fake::runs_after(stream, fake::last_gather()));
  }
  bind();
}

//! Layer 1's table by layer 0's ids would be rows of the right form.
TEST_CASE_FIXTURE(Fixture, "ids of another layer than the table's are told") {
  const auto look_up = [&](const std::string& name, int32_t layer_idx, const Shape& shape) {
    const Plugin plugin = attach(name, {{"layer_idx", layer_idx}});
    return plugin.enqueue({shape}, {ids.data()}, {out.data()}, stream);
  };
  for (const std::string name : {"EngramLookup", "EngramPrefetch"}) {
    CHECK(look_up(name, 0, {1, 2, 24}) != 0);
    CHECK(take_log().find("field 'layer_idx': expected 1, the place of layer 1 among the 2 of the "
                          "layout, found 0") != std::string::npos);
    CHECK(look_up(name, 1, {1, 2, 24}) == 0);
    CHECK(look_up(name, 0, {1, 1, 24}) == 0);  // a network's own slice, of whichever layer
    CHECK(take_log().empty());
  }
}

TEST_CASE_FIXTURE(Fixture, "a graph keeps the table on disk of a plugin that is gone") {
  bind_on_disk();
  const std::weak_ptr<const Table> table = registry().find(kTable);
  fake::begin_capture(stream);
  CHECK(attach("EngramLookup").enqueue(kIds, {ids.data()}, {out.data()}, stream) == 0);
  registry().unbind(kTable);
  free_left_lanes();
  CHECK_FALSE(table.expired());
  fake::end_capture();
  free_left_lanes();
  CHECK(table.expired());
  bind();
}

TEST_CASE_FIXTURE(Fixture, "nobody waits for what a failed capture left") {
  const Plugin prefetches = attach("EngramPrefetch");
  const Plugin waits = attach_waiting();
  fake::begin_capture(stream);
  CHECK(prefetch(prefetches) == 0);
  fake::end_capture();
  CHECK(prefetch(prefetches) == 0);
  CHECK(wait(waits) == 0);
  CHECK(fake::runs_after(stream, fake::last_gather()));
  CHECK(take_log().empty());
}

TEST_CASE_FIXTURE(Fixture, "a capture waits for the gather that a failed step left") {
  const Plugin prefetches = attach("EngramPrefetch");
  const Plugin waits = attach_waiting();
  CHECK(prefetch(prefetches) == 0);
  const fake::Gather left = fake::last_gather();
  fake::begin_capture(stream);
  CHECK(prefetch(prefetches) == 0);
  CHECK(fake::runs_after(stream, left));
  CHECK_FALSE(fake::runs_after(stream, fake::last_gather()));
  CHECK(wait(waits) == 0);
  CHECK(fake::runs_after(stream, fake::last_gather()));
  fake::end_capture();
  CHECK(take_log().empty());
}

}  // namespace engram
