// SPDX-License-Identifier: Apache-2.0
//! \file sockets.h
//! Connections for tests, which wait for what the product watches.
#pragma once

#include <poll.h>

#include "ranks.h"
#include "table/socket.h"

namespace engram {

//! Waits for a listener that is not there yet. `word`: as in try_connect.
inline Connection connect(const Address& address, const std::string& word = "") {
  std::optional<Connection> made;
  REQUIRE(comes_true([&] {
    made = try_connect(address, nullptr, word);
    return made.has_value();
  }));
  return std::move(*made);
}

//! Waits for a whole message. Throws what Connection::take does.
inline Message receive(Connection& connection) {
  for (;;) {
    if (std::optional<Message> message = connection.take()) return std::move(*message);
    pollfd entry{.fd = connection.fd(), .events = POLLIN};
    REQUIRE(poll(&entry, 1, static_cast<int>(kPatience * 1000)) > 0);
  }
}

}  // namespace engram
