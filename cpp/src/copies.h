// SPDX-License-Identifier: Apache-2.0
//! \file copies.h
//! Two copies of this library in one process would have two table registries. The first loaded
//! counts, the others refuse.
#pragma once

#include <string>

namespace engram {

//! File of this copy.
const std::string& own_path();

//! File of the copy that this process loaded before this one; empty where this is the first.
const std::string& earlier_copy();

//! Throws Error, naming both files, where this is not the first.
void require_first_copy();

}  // namespace engram
