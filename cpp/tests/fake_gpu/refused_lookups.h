// SPDX-License-Identifier: Apache-2.0
//! \file refused_lookups.h
//! Lookups by lanes while one call of CUDA after the other is refused.
#pragma once

#include <string>

#include "../texts.h"
#include "doctest/doctest.h"
#include "fake_gpus.h"
#include "table/lane.h"

namespace engram {

//! Refuses each call that a lookup makes, outside of graphs and in one: it has an error of one line
//! or none, and the next lookup is right. `prepare(seed)` makes a table and a call, `look(call)`
//! looks up on `stream`, and `is_next_right()` looks up once more.
template <typename Prepare, typename Look, typename IsNextRight>
void check_refused_lookups(cudaStream_t stream, const Prepare& prepare, const Look& look,
                           const IsNextRight& is_next_right) {
  for (const bool captured : {false, true}) {
    int num_errors = 0;
    bool was_refused = true;
    for (int64_t refused = 0; was_refused; ++refused) {
      CAPTURE(refused);
      auto call = prepare(static_cast<uint32_t>(refused));
      const cudaGraph_t graph = captured ? fake::begin_capture(stream) : nullptr;
      fake::machine().num_calls = 0;
      fake::machine().refuse_at = refused;
      const std::string text = message_of([&] { look(call); });
      was_refused = fake::machine().num_calls > refused;
      fake::machine().refuse_at = -1;
      num_errors += text != "no error";
      CHECK(text.find('\n') == std::string::npos);
      fake::end_capture();
      CHECK(is_next_right());
      if (captured) fake::end(graph);
      free_left_lanes();
    }
    CHECK(num_errors > 5);
  }
}

}  // namespace engram
