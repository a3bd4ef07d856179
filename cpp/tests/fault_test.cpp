// SPDX-License-Identifier: Apache-2.0
#include "fault.h"

#include "doctest/doctest.h"

namespace engram {
namespace {

std::string text_of(FaultCode code, int64_t index, int32_t value) {
  uint64_t word = 0;
  store_fault(&word, code, index, value);
  return fault_text(word);
}

TEST_CASE("a fault's word tells where and what") {
  CHECK(text_of(FaultCode::kTokenId, 5, -3) ==
        "token_ids[5]: expected an id inside the vocabulary, found -3");
  CHECK(text_of(FaultCode::kLookbackId, (1 << kFaultIndexBits) - 1, INT32_MAX) ==
        "lookback_ids of request 268435455: expected -1 or an id inside the vocabulary, found "
        "2147483647");
  CHECK(text_of(FaultCode::kBoundary, 0, INT32_MIN) ==
        "cu_seqlens[0]: expected boundaries that rise from 0 to at most the number of tokens, "
        "found -2147483648");
  CHECK(text_of(FaultCode::kTokenMap, 2, -2) == "token_map[2]: expected 0 or more, found -2");
  CHECK(text_of(FaultCode::kHistory, 3, 17) ==
        "history of request 3: expected the check word of position 17 in its KV cache slot, found "
        "another: a block was not copied");
  CHECK(text_of(FaultCode::kUnreadRows, 14, 0) ==
        "layer 14: rows of its table on disk could not be read, and are NaN");
  store_fault(nullptr, FaultCode::kTokenId, 0, 0);
}

}  // namespace
}  // namespace engram
