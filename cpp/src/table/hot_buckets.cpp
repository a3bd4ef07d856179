// SPDX-License-Identifier: Apache-2.0
#include "table/hot_buckets.h"

#include <algorithm>

namespace engram {

int64_t num_hot_buckets(int64_t num_ids, int64_t max_slots) {
  const int64_t roomy = ceil_div(2 * num_ids, kHotWays);
  return std::min({roomy, max_slots / kHotWays, int64_t{INT32_MAX}});
}

std::vector<HotBucket> make_hot_buckets(const std::vector<int32_t>& ids, int64_t max_slots) {
  HotBucket empty;
  std::fill_n(empty.keys, kHotWays, kNoKey);
  const int64_t num_buckets = num_hot_buckets(static_cast<int64_t>(ids.size()), max_slots);
  std::vector<HotBucket> buckets(static_cast<size_t>(num_buckets), empty);
  if (num_buckets == 0) return buckets;
  for (const int32_t id : ids) {
    int32_t* const keys = buckets[static_cast<size_t>(hot_bucket(id, num_buckets))].keys;
    int32_t* const place = std::find_if(keys, keys + kHotWays,
                                        [&](int32_t key) { return key == id || key == kNoKey; });
    if (place != keys + kHotWays) *place = id;
  }
  return buckets;
}

int64_t count_hot_rows(const std::vector<HotBucket>& buckets) {
  int64_t count = 0;
  for (const HotBucket& bucket : buckets) {
    count += kHotWays - std::count(bucket.keys, bucket.keys + kHotWays, kNoKey);
  }
  return count;
}

}  // namespace engram
