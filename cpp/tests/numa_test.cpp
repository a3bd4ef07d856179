// SPDX-License-Identifier: Apache-2.0
#include "table/numa.h"

#include <sys/syscall.h>

#include "memories.h"

namespace engram {
namespace {

//! Bytes of a range on each node, by node id, estimated from pages at equal distances; pages that
//! this process has not mapped are left out. Empty where the kernel does not say.
std::vector<int64_t> node_bytes(const uint8_t* begin, int64_t num_bytes) {
  const int64_t page_bytes = small_page_bytes();
  const int64_t num_pages = (num_bytes + page_bytes - 1) / page_bytes;
  const int64_t count = std::min<int64_t>(1024, num_pages);
  std::vector<const void*> pages;
  for (int64_t i = 0; i < count; ++i) {
    pages.push_back(begin + i * num_pages / count * page_bytes);
  }
  std::vector<int> status(pages.size(), -1);
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, status.data(), 0) != 0) {
    return {};
  }
  std::vector<int64_t> bytes;
  for (const int node : status) {
    if (node < 0) continue;  // not mapped here
    if (static_cast<size_t>(node) >= bytes.size()) bytes.resize(static_cast<size_t>(node) + 1);
    bytes[static_cast<size_t>(node)] += num_bytes / count;
  }
  return bytes;
}

TEST_CASE("NUMA nodes of this machine") {
  CHECK(parse_id_list("0-2,5\n") == std::vector<int>{0, 1, 2, 5});
  CHECK(parse_id_list("7") == std::vector<int>{7});
  CHECK(parse_id_list("").empty());
  const std::vector<int> nodes = memory_nodes();
  REQUIRE(!nodes.empty());
  REQUIRE(!allowed_nodes().empty());
  for (const NumaPolicy& policy :
       {NumaPolicy{}, NumaPolicy{NumaPolicy::kLocal, -1}, NumaPolicy{NumaPolicy::kInterleave, -1},
        NumaPolicy{NumaPolicy::kNode, allowed_nodes().back()}}) {
    CAPTURE(numa_policy_name(policy));
    for (const MemoryKind kind : kKinds) {
      HostMemory memory = HostMemory::create({.kind = kind, .numa = policy}, 32 * kMebi, "placed");
      memory.prefault(0, memory.num_bytes());
      const std::vector<int64_t> bytes = node_bytes(memory.data(), memory.num_bytes());
      if (bytes.empty()) continue;  // the kernel or a container says nothing
      int64_t sum = 0;
      for (size_t node = 0; node < bytes.size(); ++node) {
        sum += bytes[node];
        if (policy.kind == NumaPolicy::kNode) {
          CHECK((bytes[node] == 0 || static_cast<int>(node) == policy.node));
        }
        if (policy.kind == NumaPolicy::kInterleave) {
          const auto count = static_cast<int64_t>(allowed_nodes().size());
          CHECK(bytes[node] <= 32 * kMebi / count * 5 / 4);
        }
      }
      CHECK(sum > 31 * kMebi);
    }
  }
}

}  // namespace
}  // namespace engram
