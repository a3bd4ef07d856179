// SPDX-License-Identifier: Apache-2.0
#include "fault.h"

#include "engram/error.h"

#if ENGRAM_CUDA
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "cuda_support.h"
#endif

namespace engram {

std::string fault_text(uint64_t packed) {
  const auto code = static_cast<FaultCode>(packed >> (kFaultValueBits + kFaultIndexBits));
  const uint64_t index = packed >> kFaultValueBits & ((uint64_t{1} << kFaultIndexBits) - 1);
  const auto value = static_cast<int32_t>(packed);
  switch (code) {
    case FaultCode::kNone:
      break;
    case FaultCode::kTokenId:
      return concat("token_ids[", index, "]: expected an id inside the vocabulary, found ", value);
    case FaultCode::kLookbackId:
      return concat("lookback_ids of request ", index,
                    ": expected -1 or an id inside the vocabulary, found ", value);
    case FaultCode::kBoundary:
      return concat(
          "cu_seqlens[", index,
          "]: expected boundaries that rise from 0 to at most the number of tokens, found ", value);
    case FaultCode::kTokenMap:
      return concat("token_map[", index, "]: expected 0 or more, found ", value);
    case FaultCode::kHistory:
      return concat("history of request ", index, ": expected the check word of position ", value,
                    " in its KV cache slot, found another: a block was not copied");
    case FaultCode::kUnreadRows:
      return concat("layer ", index, ": rows of its table on disk could not be read, and are NaN");
  }
  return concat("unknown fault ", packed);
}

#if ENGRAM_CUDA
namespace {

//! A fault word seen from both sides.
struct FaultWord {
  uint64_t* host;
  uint64_t* device;
};

std::mutex fault_words_mutex;
std::map<int, FaultWord> fault_words;  // freed by the driver when the process ends

FaultWord make_fault_word(int device) {
  const DeviceGuard guard(device);
  const RelaxedCapture relaxed;
  void* host = nullptr;
  void* mapped = nullptr;
  check_cuda(cudaHostAlloc(&host, sizeof(uint64_t), cudaHostAllocMapped | cudaHostAllocPortable),
             "fault word");
  *static_cast<uint64_t*>(host) = 0;
  check_cuda(cudaHostGetDevicePointer(&mapped, host, 0), "fault word");
  return {static_cast<uint64_t*>(host), static_cast<uint64_t*>(mapped)};
}

FaultWord find_fault_word(int device) {
  const std::lock_guard lock(fault_words_mutex);
  const auto found = fault_words.find(device);
  if (found != fault_words.end()) return found->second;
  return fault_words.emplace(device, make_fault_word(device)).first->second;
}

}  // namespace

uint64_t* fault_word(int device) { return find_fault_word(device).device; }

uint64_t* fault_word_on_host(int device) { return find_fault_word(device).host; }

void forget_fault(uint64_t packed) {
  const std::lock_guard lock(fault_words_mutex);
  for (const auto& [device, word] : fault_words) {
    uint64_t expected = packed;
    __atomic_compare_exchange_n(word.host, &expected, uint64_t{0}, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
  }
}

void throw_pending_fault(int device) {
  uint64_t packed = 0;
  {
    const std::lock_guard lock(fault_words_mutex);
    const auto found = fault_words.find(device);
    if (found == fault_words.end()) return;
    packed = __atomic_exchange_n(found->second.host, uint64_t{0}, __ATOMIC_RELAXED);
  }
  if (packed == 0) return;
  throw Error(ENGRAM_DEVICE_FAULT,
              concat("an earlier call on CUDA device ", device, ": ", fault_text(packed)));
}
#endif

}  // namespace engram
