// SPDX-License-Identifier: Apache-2.0
#include "bench/read_pages.h"

#include <atomic>
#include <vector>

#include "engram/error.h"
#include "engram/row.h"
#include "ops/lookup_disk.h"
#include "parallel.h"
#include "table/disk_queue.h"
#include "table/files.h"
#include "table/store_file.h"

namespace engram {

void read_pages(const std::string& path, const int64_t* page_ids, int64_t num_pages,
                int num_threads) {
  // Kept, as a table's are: never destroyed, for a thread may read while the process ends.
  static auto* const queues = new DiskQueues();
  const StoreFile file(path, 0, stat_regular(path).st_size);
  std::atomic<int64_t> num_short{0};
  parallel_for(
      num_pages, kRowsPerDiskRead, disk_threads(num_threads), [&](int64_t begin, int64_t end) {
        std::vector<DiskRead> reads;
        for (int64_t i = begin; i < end; ++i) {
          reads.push_back({file.page_handle(), row_offset(page_ids[i], DiskQueue::kPageBytes),
                           DiskQueue::kPageBytes});
        }
        queues->run(reads, [&](size_t, const uint8_t*, int64_t count) {
          num_short += count < DiskQueue::kPageBytes;
        });
      });
  ENGRAM_CHECK(num_short == 0, path, ": expected pages inside the file, found ", num_short,
               " reads that failed");
}

}  // namespace engram
