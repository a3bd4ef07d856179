// SPDX-License-Identifier: Apache-2.0
#include "table/numa.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "cuda_support.h"
#include "engram/error.h"
#include "table/pages.h"

namespace engram {
namespace {

// Of <linux/mempolicy.h>.
constexpr int kBind = 2;
constexpr int kInterleaveMode = 3;
constexpr int kLocalMode = 4;

//! The rest of the line after `key`; "" without such a line.
std::string line_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) == 0) return line.substr(key.size());
  }
  return "";
}

std::string list_text(const std::vector<int>& ids) {
  std::string text;
  for (const int id : ids) text += (text.empty() ? "" : ", ") + std::to_string(id);
  return text;
}

bool contains(const std::vector<int>& ids, int id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

std::string numa_policy_name(const NumaPolicy& policy) {
  switch (policy.kind) {
    case NumaPolicy::kDefault:
      return "default";
    case NumaPolicy::kLocal:
      return "local";
    case NumaPolicy::kInterleave:
      return "interleave";
    case NumaPolicy::kNode:
      return "node:" + std::to_string(policy.node);
    case NumaPolicy::kGpu:
      return "gpu";
  }
  return "?";
}

NumaPolicy parse_numa_policy(const std::string& name) {
  for (const NumaPolicy::Kind kind :
       {NumaPolicy::kDefault, NumaPolicy::kLocal, NumaPolicy::kInterleave, NumaPolicy::kGpu}) {
    if (name == numa_policy_name({kind, -1})) return {kind, -1};
  }
  if (name.compare(0, 5, "node:") == 0 && name.size() > 5 && name.size() <= 9 &&
      std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    return {NumaPolicy::kNode, std::atoi(name.c_str() + 5)};
  }
  throw Error(ENGRAM_INVALID_ARGUMENT,
              concat("numa: expected \"default\", \"local\", \"interleave\", \"gpu\" or \"node:N\" "
                     "with N such as 0, found \"",
                     name, "\""));
}

std::vector<int> parse_id_list(const std::string& text) {
  std::vector<int> ids;
  for (const char* at = text.c_str(); *at != '\0';) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    if (end == at) {
      ++at;  // blanks and commas
      continue;
    }
    const long last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    for (long id = first; id <= last && id < 4096; ++id) ids.push_back(static_cast<int>(id));
    at = end;
  }
  return ids;
}

std::vector<int> memory_nodes(const std::string& root) {
  for (const char* file : {"has_memory", "online"}) {
    const std::vector<int> nodes =
        parse_id_list(line_of(root + "sys/devices/system/node/" + file, ""));
    if (!nodes.empty()) return nodes;
  }
  return {0};
}

std::vector<int> allowed_nodes(const std::string& root) {
  const std::vector<int> nodes = memory_nodes(root);
  const std::vector<int> mems =
      parse_id_list(line_of(root + "proc/self/status", "Mems_allowed_list:"));
  std::vector<int> allowed;
  for (const int node : nodes) {
    if (contains(mems, node)) allowed.push_back(node);
  }
  return allowed.empty() ? nodes : allowed;  // a kernel without NUMA writes no such line
}

int current_node() {
  unsigned node = 0;
  return getcpu(nullptr, &node) == 0 ? static_cast<int>(node) : 0;
}

int gpu_node([[maybe_unused]] int device) {
#if ENGRAM_CUDA
  char id[32] = "";
  if (cudaDeviceGetPCIBusId(id, sizeof(id), device) != cudaSuccess) {
    cudaGetLastError();  // answered here, so no later call must see it
    return -1;
  }
  std::string folder = concat("/sys/bus/pci/devices/", id);
  std::transform(folder.begin(), folder.end(), folder.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  int node = -1;
  std::ifstream(folder + "/numa_node") >> node;
  return contains(memory_nodes(), node) ? node : -1;
#else
  return -1;
#endif
}

void check_numa_policy(const NumaPolicy& policy) {
  ENGRAM_CHECK(policy.kind != NumaPolicy::kGpu,
               "numa: expected a policy for one copy, found \"gpu\", which makes several");
  if (policy.kind != NumaPolicy::kNode) return;
  const std::vector<int> nodes = memory_nodes();
  ENGRAM_CHECK(contains(nodes, policy.node), "numa \"", numa_policy_name(policy),
               "\": expected a NUMA node of this machine that has memory (", list_text(nodes), ")");
  const std::vector<int> allowed = allowed_nodes();
  ENGRAM_CHECK(contains(allowed, policy.node), "numa \"", numa_policy_name(policy),
               "\": expected a node that this process's cpuset allows (", list_text(allowed),
               " of ", list_text(nodes), ")");
}

void set_numa_policy(uint8_t* begin, int64_t num_bytes, const NumaPolicy& policy) {
  check_numa_policy(policy);
  // One node has all pages whatever the policy; containers often forbid the call.
  if (policy.kind == NumaPolicy::kDefault || memory_nodes().size() == 1) return;
  int mode = kLocalMode;
  std::vector<int> chosen;
  if (policy.kind == NumaPolicy::kNode) {
    mode = kBind;
    chosen = {policy.node};
  } else if (policy.kind == NumaPolicy::kInterleave) {
    mode = kInterleaveMode;
    chosen = allowed_nodes();
  }
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask;
  for (const int node : chosen) {
    const size_t word = static_cast<size_t>(node) / kBits;
    if (word >= mask.size()) mask.resize(word + 1);
    mask[word] |= 1UL << (static_cast<size_t>(node) % kBits);
  }
  // The kernel reads one bit less than it is told of.
  const size_t num_bits = mask.empty() ? 0 : mask.size() * kBits + 1;
  if (syscall(SYS_mbind, begin, num_bytes, mode, mask.data(), num_bits, 0U) != 0) {
    throw Error(errno == ENOMEM ? ENGRAM_OUT_OF_MEMORY : ENGRAM_INVALID_ARGUMENT,
                concat("numa \"", numa_policy_name(policy), "\": expected the kernel to place ",
                       num_bytes, " bytes, found ", std::strerror(errno),
                       errno == EPERM ? " (a container needs CAP_SYS_NICE for mbind)" : ""));
  }
}

}  // namespace engram
