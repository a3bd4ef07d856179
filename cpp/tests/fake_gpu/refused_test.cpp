// SPDX-License-Identifier: Apache-2.0
// Each call of CUDA refused in turn, and a rank killed at each: what is said, and what is left.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

#include "../texts.h"
#include "bound.h"
#include "table/cumem.h"
#include "table/device_table.h"
#include "table/gpu_hot_rows.h"

namespace engram {
namespace {

const std::string kNoError = "no error";  // of message_of()

//! What an error is about: the table, the GPU, or what is tried before there is a table.
constexpr std::array<const char*, 4> kNamed{"engram.1", "CUDA device 0", "GPU 0000:1B:00.0",
                                            "trial of peer access"};

int64_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

//! What is still there of CUDA's, in one line; empty for nothing.
std::string left() {
  const auto& all = machine();
  std::string text;
  if (all.num_handles != 0) text += concat(all.num_handles, " handles, ");
  if (all.num_mapped != 0) text += concat(all.num_mapped, " mapped, ");
  if (all.num_reserved != 0) text += concat(all.num_reserved, " reserved, ");
  if (fake::num_made() != 0) text += concat(fake::num_made(), " buffers, ");
  if (fake::has_pending_error()) text += "an error, ";
  return text;
}

//! Has `bind` meet a refusal at its first call, its second, and so on to its last. An error names
//! the table or the GPU; where it can do without the call it succeeds.
void refuse_each(const std::function<void()>& bind) {
  see_only(kGpus[0]);
  machine().refuse_at = -1;
  bind();
  const int64_t files = open_files();
  int num_errors = 0;
  for (int64_t call = 0; call == 0 || machine().num_calls > machine().refuse_at; ++call) {
    CAPTURE(call);
    machine().num_calls = 0;
    machine().refuse_at = call;
    const std::string text = message_of(bind);
    CAPTURE(text);
    const bool refused = text != kNoError;
    num_errors += refused;
    const bool named = std::any_of(kNamed.begin(), kNamed.end(),
                                   [&](const char* part) { return text.find(part) != text.npos; });
    CHECK((named || !refused));
    CHECK(left() == "");
    CHECK(open_files() == files);
  }
  CHECK(num_errors > 5);
  machine() = {};
}

TEST_CASE("memory cumem: each call refused") {
  constexpr int64_t kBytes = CumemMemory::kPartBytes + 1;  // two parts
  refuse_each([] {
    const CumemMemory made = CumemMemory::create(0, {}, kBytes, "engram.1");
    const CumemMemory copy = CumemMemory::attach(0, made.export_descriptors(), kBytes, "engram.1");
    made.data()[kBytes - 1] = 99;
    CHECK(copy.data()[kBytes - 1] == 99);
  });
}

TEST_CASE("the vote on cumem: each call refused is an answer, not an error") {
  see_only(kGpus[0]);
  CHECK(cumem_problem(0, {}) == "");
  for (int64_t call = 0; call == 0 || machine().num_calls > machine().refuse_at; ++call) {
    CAPTURE(call);
    machine().num_calls = 0;
    machine().refuse_at = call;
    cumem_problem(0, {});
    CHECK(left() == "");
  }
  machine() = {};
}

TEST_CASE("a copy on a GPU: each call refused, from a file and by formula") {
  const ArrayFile file;
  for (const Source& source : {file.source(), formula_source()}) {
    refuse_each([&] {
      const auto array = make_device_array(source, 0, source.file.num_bytes, !source.formula);
      array->load(0, {}, {});
      const uint8_t* const bytes = array->on_device(0);
      CHECK(num_wrong(bytes, source.file.num_bytes) == 0);
    });
  }
}

TEST_CASE("hot rows of a GPU: each call refused") {
  constexpr int kHeadDim = 64;
  const std::vector<uint8_t> values(100 * kHeadDim);
  const std::vector<uint8_t> scales(100 * kHeadDim / kScaleBlock);
  const HotSource source{.label = "engram.1",
                         .values = values.data(),
                         .scales = scales.data(),
                         .head_dim = kHeadDim,
                         .num_columns = 1};
  refuse_each([&] {
    GpuHotRows hot(source, make_hot_buckets({3, 5, 8}, 64), 4);
    const engram_hot_rows there = hot.on_device(0);
    CHECK(there.num_buckets > 0);
    CHECK(hot.counts()[0].num_found == 0);
  });
}

TEST_CASE("a part on a GPU: each call refused to a process alone") {
  const ArrayFile file;
  refuse_each([&] {
    const std::string read = Bound(0, 1, file.source()).read();
    CHECK(read == "0 wrong");
  });
}

TEST_CASE("a call refused to one rank is every rank's error, and leaves nothing on any") {
  for (const int refused : {0, 1}) {
    Ranks ranks(2, [&](int rank, const Channel& channel) {
      see_only(kGpus[static_cast<size_t>(rank)]);
      for (int64_t call = 0;; ++call) {
        machine().num_calls = 0;
        machine().refuse_at = rank == refused ? call : -1;
        const std::string text = message_of(
            [&] { Bound(rank, 2, formula_source(kShort), true, concat("-", call), kShort); });
        if (machine().num_calls <= machine().refuse_at) _exit(0);
        channel.say(text + left());
        channel.wait();
      }
    });
    const std::string begins = concat("rank ", refused, ": ");
    int num_errors = 0;
    for (;;) {
      const std::string mine = ranks.line(refused);
      CAPTURE(mine);
      const std::string other = ranks.line(1 - refused);
      if (mine.empty()) {  // past its last call
        CHECK(other == kNoError);
        break;
      }
      CHECK(other == mine);
      if (mine != kNoError) {
        CHECK(mine.find(begins) == 0);
        ++num_errors;
      }
      ranks.go_on(0);
      ranks.go_on(1);
    }
    CHECK(num_errors > 10);
  }
}

TEST_CASE("a rank killed at any call is the other's error, and leaves nothing there") {
  int64_t num_calls = 0;
  for (int64_t call = 0; call == 0 || call < num_calls; call += 3) {
    for (const int killed : {0, 1}) {
      CAPTURE(call);
      CAPTURE(killed);
      Ranks ranks(2, [&](int rank, const Channel& channel) {
        see_only(kGpus[static_cast<size_t>(rank)]);
        if (rank == killed) machine().die_at = call;
        const std::string text = message_of([&] {
          const Bound bound(rank, 2, formula_source(kShort), true, "", kShort);
          if (rank != killed) return;
          channel.say(concat(machine().num_calls));
          channel.wait();
        });
        channel.say(text + left());
      });
      const std::string last = ranks.line(killed);  // where it came through
      const std::string text = ranks.line(1 - killed);
      CAPTURE(text);
      if (last.empty()) {
        CHECK(text.find(concat("rank ", killed, ": died in ")) == 0);
        num_calls = call + 4;
      } else {
        CHECK(text == kNoError);
      }
    }
  }
  CHECK(num_calls > 20);
}

}  // namespace
}  // namespace engram
