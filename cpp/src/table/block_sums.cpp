// SPDX-License-Identifier: Apache-2.0
#include "table/block_sums.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace engram {

struct BlockSum::State {
  XXH3_state_t xxh3;
};

BlockSum::BlockSum() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh3); }

BlockSum::~BlockSum() = default;

void BlockSum::add(const uint8_t* bytes, int64_t num_bytes) {
  XXH3_128bits_update(&state_->xxh3, bytes, static_cast<size_t>(num_bytes));
}

std::string BlockSum::hex() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_->xxh3));
  std::string text;
  for (const unsigned char byte : canonical.digest) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

std::string block_sum(const uint8_t* bytes, int64_t num_bytes) {
  BlockSum sum;
  sum.add(bytes, num_bytes);
  return sum.hex();
}

}  // namespace engram
