// SPDX-License-Identifier: Apache-2.0
//! \file keeper_protocol.h
//! What both ends of keeper.h's messages know.
#pragma once

#include <string>

#include "table/socket.h"

namespace engram {

constexpr int kKeeperVersion = 1;
constexpr const char* kAttachType = "attach";
constexpr const char* kTablesType = "tables";
constexpr const char* kRefusedType = "refused";

//! `socket` is a path, or empty.
Address keeper_address(const std::string& name, const std::string& socket);

}  // namespace engram
