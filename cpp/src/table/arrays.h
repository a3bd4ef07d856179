// SPDX-License-Identifier: Apache-2.0
//! \file arrays.h
//! Memory that is filled from a file once, and freed with its object.
#pragma once

#include <memory>

#include "engram/table.h"

namespace engram {

//! Loads a range into host memory at once, or gets ready to load it into the memory of GPUs. Throws
//! Error.
std::unique_ptr<TableArray> load_array(const FileRange& range, Placement placement);

}  // namespace engram
