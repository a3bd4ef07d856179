// SPDX-License-Identifier: Apache-2.0
//! \file peer.h
//! What socket.cpp and listener.cpp share.
#pragma once

#include "table/socket.h"

namespace engram {

//! Who is at the other end of a socket.
struct PeerUser {
  uid_t uid = static_cast<uid_t>(-1);  //!< this one: nobody can be told
  pid_t pid = 0;
  std::string text() const;
};
PeerUser peer_user(int socket);

//! For poll(): 0 where it has passed.
int milliseconds_until(Deadline deadline);

}  // namespace engram
