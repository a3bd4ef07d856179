// SPDX-License-Identifier: Apache-2.0
//! \file sayings.h
//! What the ranks of a group say, for one line of text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "engram/error.h"

namespace engram {

//! Each text once, under all ranks that say it: "rank 2: TEXT; ranks 0, 5: TEXT".
class Sayings {
 public:
  void add(int64_t rank, const std::string& text) {
    const auto same = std::find_if(all_.begin(), all_.end(),
                                   [&](const Saying& each) { return each.text == text; });
    if (same == all_.end()) {
      all_.push_back({text, concat("rank ", rank)});
    } else {
      const std::string others = same->who.substr(same->who.find(' '));
      same->who = concat("ranks", others, ", ", rank);
    }
  }

  //! In the order in which they came.
  std::string text() const {
    std::string joined;
    for (const Saying& each : all_) {
      joined += concat(joined.empty() ? "" : "; ", each.who, ": ", each.text);
    }
    return joined;
  }

 private:
  struct Saying {
    std::string text;
    std::string who;
  };
  std::vector<Saying> all_;
};

}  // namespace engram
