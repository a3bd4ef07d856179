// SPDX-License-Identifier: Apache-2.0
//! \file plan.h
//! What the ranks of a bind agree on before any of them allocates. Each says what it wants and can
//! (its vote); from all votes every rank makes the same plan, or throws the same Error. No memory,
//! no sockets.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engram/table.h"
#include "nlohmann/json.hpp"
#include "table/limits.h"

namespace engram {

//! What a rank says of one table.
struct TableVote {
  //! By key, what all ranks must say alike.
  std::map<std::string, std::string> same;
  //! By kind of memory that may be taken, the first choice first: why this rank cannot have it;
  //! empty where it can. Nothing of it where no array is to be allocated in host memory.
  std::vector<std::pair<MemoryKind, std::string>> kinds;
};

struct Vote {
  std::map<std::string, TableVote> tables;
  int node = 0;       //!< NUMA node that the rank runs on
  int gpu_node = -1;  //!< NUMA node next to its GPU; -1: unknown
  Limits limits;
};

//! The policy for one copy: kGpu is the node next to the GPU, and kDefault where that is unknown.
NumaPolicy policy_for(const NumaPolicy& wanted, int gpu_node);

nlohmann::json to_json(const Vote& vote);
Vote vote_from_json(const nlohmann::json& json);

//! One allocation of a table's arrays, and who maps it.
struct Copy {
  int owner = 0;             //!< rank that allocates
  std::vector<int> members;  //!< ranks that map it and load it, each a share
  NumaPolicy numa;

  //! Place of a rank among the members; none: it is not one.
  std::optional<int> share_of(int rank) const;
};

struct TablePlan {
  MemoryKind kind = MemoryKind::kPrivate;
  std::vector<Copy> copies;  //!< each rank is a member of one; empty: nothing to allocate

  const Copy& copy_of(int rank) const;
};

struct Plan {
  std::map<std::string, TablePlan> tables;
  std::vector<std::string> warnings;
};

//! `votes` by rank. `tables` are any rank's, since all agree, or else Error.
Plan make_plan(const std::map<std::string, TableOptions>& tables, const std::vector<Vote>& votes);

//! Blocks of the arrays so far, by the ranks that hold them together: these load what comes next in
//! one sequence with them (load.h).
using BlocksDealt = std::map<std::vector<int>, int64_t>;

//! What check_room() is asked for one array of a table, the next one in `dealt`.
std::vector<RoomRequest> room_requests(const std::string& label, const TablePlan& plan,
                                       PageKind pages, int64_t num_bytes, int num_ranks,
                                       BlocksDealt* dealt);

}  // namespace engram
