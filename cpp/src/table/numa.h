// SPDX-License-Identifier: Apache-2.0
//! \file numa.h
//! NUMA nodes of this machine, and on which of them memory goes. By system calls and sysfs alone;
//! a machine (or kernel) without NUMA has the one node 0.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace engram {

struct NumaPolicy {
  enum Kind {
    kDefault,     //!< the task's own policy (numactl, cpuset), as for any memory
    kLocal,       //!< the node of the thread that touches a page first
    kInterleave,  //!< page by page over all nodes that this process may use
    kNode,        //!< `node` alone
    kGpu,         //!< one copy on the node of each GPU: who binds tables turns it into kNode
  };
  Kind kind = kDefault;
  int node = -1;  //!< of kNode
};

inline bool operator==(const NumaPolicy& a, const NumaPolicy& b) {
  return a.kind == b.kind && a.node == b.node;
}

//! "default", "local", "interleave", "node:1" or "gpu".
std::string numa_policy_name(const NumaPolicy& policy);
//! The inverse. Throws Error, naming what there is.
NumaPolicy parse_numa_policy(const std::string& name);

//! Nodes with memory of their own, ascending. `root` is another one in tests alone.
std::vector<int> memory_nodes(const std::string& root = "/");
//! Those of them that this process may use: its cpuset's mems_allowed, ascending.
std::vector<int> allowed_nodes(const std::string& root = "/");
//! The node of the CPU that this thread runs on now.
int current_node();
//! The node next to a CUDA device; -1 where the machine does not say (virtual machines) or there
//! is no such device.
int gpu_node(int device);

//! Refuses a policy that this process cannot have: a node that is not there or outside its cpuset
//! (ENGRAM_INVALID_ARGUMENT, with both), and kGpu.
void check_numa_policy(const NumaPolicy& policy);

//! Lays the policy on a mapping whose pages are not there yet, in place of the task's own policy
//! (a numactl --membind does not defeat it). Memory that other processes map too carries it for
//! all of them. kDefault changes nothing. Throws Error, also where the kernel refuses.
void set_numa_policy(uint8_t* begin, int64_t num_bytes, const NumaPolicy& policy);

//! "0-3,8" as numbers; the kernel's form of lists of nodes and CPUs.
std::vector<int> parse_id_list(const std::string& text);

}  // namespace engram
