// SPDX-License-Identifier: Apache-2.0
//! \file sealed_file.h
//! Small files that processes of one user show or hand to each other.
#pragma once

#include <string>
#include <string_view>

#include "table/descriptor.h"

namespace engram {

//! A memfd with these bytes that nobody can change and no other user can read. Throws Error, which
//! begins with `label`.
FileDescriptor make_sealed_file(const char* name, std::string_view bytes, const std::string& label);

}  // namespace engram
