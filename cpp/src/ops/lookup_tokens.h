// SPDX-License-Identifier: Apache-2.0
//! \file lookup_tokens.h
//! A part of a lookup's tokens.
#pragma once

#include <cstdint>

#include "engram/engram.h"

namespace engram {

//! The lookup of args' tokens [begin, end). In F8_128x4 order begin is a multiple of
//! kStageTileRows.
engram_lookup_args lookup_of_tokens(const engram_lookup_args& args, int64_t begin, int64_t end);

}  // namespace engram
