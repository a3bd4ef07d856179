// SPDX-License-Identifier: Apache-2.0
#include "table/numa.h"

#include "memories.h"

namespace engram {
namespace {

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
