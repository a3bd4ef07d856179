// SPDX-License-Identifier: Apache-2.0
//! \file fault.h
//! Bad input that a kernel meets cannot be an error of its own call. The kernel stores one packed
//! word in mapped host memory, where it stays until the next call (or engram_device_fault) reads,
//! clears and reports it.
#pragma once

#include <cstdint>
#include <string>

#include "engram/row.h"

namespace engram {

//! What went wrong, and what index and value of the word mean.
enum class FaultCode : uint32_t {
  kNone = 0,
  kTokenId = 1,     //!< index: token, value: its raw id
  kLookbackId = 2,  //!< index: request, value: the raw id in its window
  kBoundary = 3,    //!< index: position in cu_seqlens, value: the boundary
  kTokenMap = 4,    //!< index: raw id, value: its compressed id
  kHistory = 5,     //!< index: request, value: the position whose slot does not hold
  kUnreadRows = 6,  //!< index: the layer whose table on disk has them, value: 0
};

constexpr int kFaultValueBits = 32;
constexpr int kFaultIndexBits = 28;

//! Code (4 bits), index (28 bits, wrapped) and value (32 bits) as one word, so that one plain store
//! reports all.
ENGRAM_HOST_DEVICE constexpr uint64_t pack_fault(FaultCode code, int64_t index, int32_t value) {
  const uint64_t kept_index = static_cast<uint64_t>(index) & ((uint64_t{1} << kFaultIndexBits) - 1);
  return static_cast<uint64_t>(code) << (kFaultValueBits + kFaultIndexBits) |
         kept_index << kFaultValueBits | static_cast<uint32_t>(value);
}

//! Reports a fault to fault_word() of the device; null reports nothing. Of faults at once any one
//! is kept.
ENGRAM_HOST_DEVICE void store_fault(uint64_t* fault, FaultCode code, int64_t index, int32_t value) {
  if (fault != nullptr) *static_cast<volatile uint64_t*>(fault) = pack_fault(code, index, value);
}

//! One line for users: where, what was expected, what was found.
std::string fault_text(uint64_t packed);

#if ENGRAM_CUDA
//! Device pointer of the device's fault word: 8 bytes of pinned, mapped host memory, made by the
//! first call and kept. Thread-safe, and allowed while this or another thread captures a graph.
//! Throws Error.
uint64_t* fault_word(int device);

//! The same word for this CPU.
uint64_t* fault_word_on_host(int device);

//! Clears this very fault wherever it is pending: somebody has told it with more words.
void forget_fault(uint64_t packed);

//! Throws Error (ENGRAM_DEVICE_FAULT) where an earlier call left a fault, and clears it.
//! Synchronises nothing.
void throw_pending_fault(int device);
#endif

}  // namespace engram
