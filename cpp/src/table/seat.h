// SPDX-License-Identifier: Apache-2.0
//! \file seat.h
//! Which rank of which group this process is in a bind call, and with which GPU.
#pragma once

#include <string>

#include "engram/table_options.h"
#include "table/group.h"

namespace engram {

//! This rank among the others.
struct Seat {
  std::string group;
  int rank = 0;
  int size = 1;
  int device = -1;    //!< its GPU; -1: none
  int gpu_node = -1;  //!< NUMA node next to that
};

//! What [group] says, and for the rest what the launcher says. Throws Error.
GroupOptions group_options(const GroupSettings& settings);

//! This rank's GPU: the one that the calling thread has chosen; where it has chosen none, ranks
//! take the GPUs in turn. -1: there is none.
int choose_device(int rank);

}  // namespace engram
