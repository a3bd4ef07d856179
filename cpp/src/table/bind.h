// SPDX-License-Identifier: Apache-2.0
//! \file bind.h
//! One bind call: the ranks meet, agree, allocate, map, load and register, or all raise.
#pragma once

#include <atomic>
#include <functional>

#include "engram/table.h"
#include "table/group.h"

namespace engram {

//! Between a bind call that runs and other threads. Those of the C ABI may be signal handlers.
struct BindState {
  Progress progress;
  std::atomic<bool> cancelled{false};
  std::atomic<bool> stop_serving{false};
};

//! All tables, or an Error and nothing left of any. `check` runs first of all, once the ranks have
//! met: what it throws is every rank's Error, too.
TablesByName bind_tables(const Bindings& bindings, const GroupOptions& group, BindState& state,
                         const std::function<void()>& check);

//! Throws the Error that bind_tables would meet in the text, in a store's manifest or in the sizes
//! of its files, of the first that has one. Allocates, loads and meets nothing.
void check_tables(const Bindings& bindings);

}  // namespace engram
