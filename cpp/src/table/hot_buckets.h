// SPDX-License-Identifier: Apache-2.0
//! \file hot_buckets.h
//! Which rows a GPU's memory holds too: the index that lookups find them by.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/hot_index.h"

namespace engram {

//! Of so many rows; half of the places stay free where max_slots lets them.
int64_t num_hot_buckets(int64_t num_ids, int64_t max_slots);

//! Buckets for at most max_slots rows, with those of `ids` that found a place in theirs: the first
//! ones before the later ones, each once.
std::vector<HotBucket> make_hot_buckets(const std::vector<int32_t>& ids, int64_t max_slots);

//! Rows in buckets.
int64_t count_hot_rows(const std::vector<HotBucket>& buckets);

}  // namespace engram
