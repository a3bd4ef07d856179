// SPDX-License-Identifier: Apache-2.0
//! \file fake_work.h
//! Between the two parts of the run time.
#pragma once

#include <cuda_runtime_api.h>

namespace engram::fake {

//! What a call answers that has done its work.
cudaError_t answer();
//! Counts a call that may not be.
void note_call();

}  // namespace engram::fake
