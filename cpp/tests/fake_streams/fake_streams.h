// SPDX-License-Identifier: Apache-2.0
//! \file fake_streams.h
//! A CUDA run time of one GPU that runs host nodes and copies to them alone, but knows what runs
//! after what; and tables that the registry binds from no store, without rows but for those on
//! disk. So plugins can be attached and enqueued on any machine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace engram {
class MadeDiskTable;
}

namespace engram::fake {

//! Of all tables on disk.
MadeDiskTable& disk_table();

//! A gather that was launched.
struct Gather {
  int number;  //!< among all, from 1 on
  const uint8_t* values;
};
Gather last_gather();

//! Whether what comes next on the stream runs after a gather has ended.
bool runs_after(cudaStream_t stream, const Gather& gather);

//! One capture at a time. Nothing of it ever runs; end_capture drops the graph, whoever joined, and
//! what it keeps.
void begin_capture(cudaStream_t stream);
void end_capture();

}  // namespace engram::fake
