// SPDX-License-Identifier: Apache-2.0
//! \file points.h
//! Named places in the table code at which tests stop a process and end it: that nothing is left
//! behind, and that the others go on, must hold at each. Nothing of it is in a build without
//! -DENGRAM_STOP_POINTS (the CMake preset "sanitize").
//!
//! TRTLLM_ENGRAM_STOP_AT="name" or "name@rank" (the keeper is "name@keeper"): the process writes
//! the name to the file TRTLLM_ENGRAM_STOP_FILE and stops itself (SIGSTOP) at its first arrival.
#pragma once

#include <string_view>

namespace engram {

//! The one list; in the order in which a bind comes by them.
constexpr std::string_view kStopPoints[] = {
    // the sockets and the group
    "group.listen", "group.connect", "group.accepted", "group.hello", "group.met",
    "group.send_part", "group.parts", "group.close",
    // a bind's phases
    "bind.vote", "bind.plan", "allocate.create", "allocate.send", "attach.map", "attach.mapped",
    "load.begin", "load.block", "prefault.touch", "load.verify", "load.end", "bind.unchanged",
    "register.begin", "register.end", "record.write", "bind.done",
    // and their end
    "unbind.unregister", "unbind.unmap", "unbind.end",
    // a keeper, and who attaches to it
    "keeper.listen", "keeper.serving", "keeper.accepted", "keeper.send", "keeper.attach",
    "keeper.attached", "keeper.stop"};

constexpr bool is_stop_point(std::string_view name) {
  for (const std::string_view known : kStopPoints) {
    if (known == name) return true;
  }
  return false;
}

#ifdef ENGRAM_STOP_POINTS
//! Stops the process where the environment names this point.
void stop_point(std::string_view name);
//! Who this process is for "name@who": a rank, or "keeper".
void set_stop_role(std::string_view who);
#define ENGRAM_POINT(name)                                                           \
  do {                                                                               \
    static_assert(::engram::is_stop_point(name), "add the point to table/points.h"); \
    ::engram::stop_point(name);                                                      \
  } while (false)
#else
inline void set_stop_role(std::string_view) {}
#define ENGRAM_POINT(name) \
  static_assert(::engram::is_stop_point(name), "add the point to table/points.h")
#endif

}  // namespace engram
