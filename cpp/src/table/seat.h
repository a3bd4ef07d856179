// SPDX-License-Identifier: Apache-2.0
//! \file seat.h
//! Which rank of which group this process is in a bind call, and with which GPU.
#pragma once

#include <string>

#include "engram/table_options.h"
#include "table/group.h"
#include "table/limits.h"

namespace engram {

//! This rank among the others.
struct Seat {
  std::string group;
  int rank = 0;
  int size = 1;
  int device = -1;    //!< its GPU; -1: none
  int gpu_node = -1;  //!< NUMA node next to that
};

//! What is free on a GPU that is to hold so many bytes; nothing is asked of device -1. Throws
//! Error.
GpuRoom gpu_room(int device, int64_t needed_bytes);

//! What [group] says, and for the rest what the launcher says. Throws Error.
GroupOptions group_options(const GroupSettings& settings);

//! This rank's GPU: the one that the calling thread has chosen; where it has chosen none, ranks
//! take the GPUs in turn. -1: there is none.
int choose_device(int rank);

//! The GPU that the calling thread has chosen; -1: none.
int chosen_device();

}  // namespace engram
