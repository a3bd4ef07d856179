// SPDX-License-Identifier: Apache-2.0
//! \file filling.h
//! The part of a bind (bind.cpp) in which memory that is allocated gets its bytes, on one rank.
#pragma once

#include <functional>
#include <list>

#include "table/group.h"
#include "table/load.h"
#include "table/seat.h"
#include "table/table_build.h"

namespace engram {

//! What a long step asks whether it should go on.
std::function<bool()> cancelled(const Group::Work& work);

class Filling {
 public:
  //! Opens the files of arrays in host memory that the ranks fill; throws Error. The tables are
  //! read, and outlive this.
  Filling(std::list<TableBuild>& tables, const Seat& seat);

  // In this order; all ranks have done one before any does the next. They throw Error.
  //! Gives this rank's share of the host memory its pages and bytes, and loads what its GPU holds.
  void load(Group::Work& work);
  //! Refuses what was read from files that have changed since.
  void check_unchanged() const;

 private:
  void load_host(Group::Work& work);

  std::list<TableBuild>& tables_;
  const Seat& seat_;
  Loader loader_;
};

}  // namespace engram
