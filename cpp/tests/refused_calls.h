// SPDX-License-Identifier: Apache-2.0
//! \file refused_calls.h
//! Older kernels and poorer file systems, as far as they are known by the calls that they refuse.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace engram {

//! A system call to refuse where an argument has any of these bits.
struct RefusedCall {
  uint32_t number;
  uint32_t argument;  //!< from 0 on
  uint32_t bits;      //!< of its lower half; 0: always
  uint32_t error;
};

//! Runs a function on a thread for which, and for whose threads, these calls fail. False where the
//! kernel lets nobody refuse calls; then it did not run.
inline bool run_with_refused(const std::vector<RefusedCall>& calls,
                             const std::function<void()>& run) {
  std::vector<sock_filter> code;
  for (const RefusedCall& call : calls) {
    const auto argument = static_cast<uint32_t>(offsetof(seccomp_data, args) + 8 * call.argument);
    const uint8_t to_next = call.bits == 0 ? 1 : 3;
    code.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.number, 0, to_next));
    if (call.bits != 0) {
      code.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument));
      code.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, call.bits, 0, 1));
    }
    code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | call.error));
  }
  code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
  bool refused = false;
  std::thread([&] {
    refused = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
              prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
    if (refused) run();
  }).join();
  return refused;
}

}  // namespace engram
