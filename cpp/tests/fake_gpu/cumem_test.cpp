// SPDX-License-Identifier: Apache-2.0
// Memory "cumem" with a driver that is made of host memory: parts, sharing, and what is left where
// something is refused.
#include "table/cumem.h"

#include <cstring>
#include <functional>

#include "../texts.h"
#include "doctest/doctest.h"
#include "engram/error.h"
#include "fake_gpus.h"

namespace engram {
namespace {

using fake::machine;

constexpr int64_t kGranule = 2 << 20;

//! Two GPUs for this process; nothing of theirs may be left at the end.
struct Gpus {
  Gpus() { machine() = {.visible = {"0000:1B:00.0", "0000:3B:00.0"}}; }
  ~Gpus() {
    CHECK(machine().num_handles == 0);
    CHECK(machine().num_mapped == 0);
    CHECK(machine().num_reserved == 0);
    machine() = {};
  }
};

TEST_CASE_FIXTURE(Gpus, "memory cumem is whole granules in at most 16 parts, and is shared") {
  for (const int64_t num_bytes :
       {int64_t{1}, kGranule, CumemMemory::kPartBytes + 1, 40 * CumemMemory::kPartBytes + 5}) {
    CAPTURE(num_bytes);
    const CumemMemory made = CumemMemory::create(1, {}, num_bytes, "table");
    CHECK(made.mapped_bytes() >= num_bytes);
    CHECK(made.mapped_bytes() < num_bytes + kGranule);
    const std::vector<FileDescriptor> files = made.export_descriptors();
    CHECK(static_cast<int64_t>(files.size()) <= CumemMemory::kMaxParts);
    CHECK((num_bytes <= CumemMemory::kPartBytes) == (files.size() == 1));
    const CumemMemory copy = CumemMemory::attach(1, files, num_bytes, "copy");
    for (int64_t i = 0; i < num_bytes; i += CumemMemory::kPartBytes / 2) {
      made.data()[i] = static_cast<uint8_t>(1 + i / CumemMemory::kPartBytes);
    }
    made.data()[num_bytes - 1] = 99;
    CHECK(copy.data() != made.data());
    for (int64_t i = 0; i < num_bytes - 1; i += CumemMemory::kPartBytes / 2) {
      CHECK(copy.data()[i] == static_cast<uint8_t>(1 + i / CumemMemory::kPartBytes));
    }
    CHECK(copy.data()[num_bytes - 1] == 99);
    CHECK(has(message_of([&] { CumemMemory::attach(1, {}, num_bytes, "copy"); }),
              concat("copy: memory \"cumem\": expected ", files.size(), " descriptors, found 0")));
  }
}

TEST_CASE_FIXTURE(Gpus, "the vote on cumem tries all of it") {
  CHECK(cumem_problem(0, {}) == "");
  CHECK(cumem_problem(1, {NumaPolicy::kInterleave, -1}) == "");
  CHECK(cumem_problem(2, {}).find("CUDA device 2") == 0);
  machine().shares = false;
  CHECK(cumem_problem(0, {}).find("found neither") != std::string::npos);
}

TEST_CASE_FIXTURE(Gpus, "cumem that the GPU cannot reach leaves nothing behind") {
  // The fake's memory belongs to the GPU with the number of the node.
  machine().refused = {{"0000:3B:00.0", "0000:1B:00.0"}};
  const std::string text = cumem_problem(1, {});
  CHECK(text.find("a granule on NUMA node 0: memory \"cumem\": access") == 0);
  CHECK(text.find("CUDA_ERROR_INVALID_DEVICE") != std::string::npos);
  machine().refused.clear();
  machine().garbled = {{"0000:3B:00.0", "0000:1B:00.0"}};
  CHECK(cumem_problem(1, {}).find("expected the bytes that were written") != std::string::npos);
}

}  // namespace
}  // namespace engram
