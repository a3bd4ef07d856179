// SPDX-License-Identifier: Apache-2.0
//! \file multiversion.h
//! One loop compiled for several instruction sets. Plain functions and a run-time choice: an ifunc
//! resolver runs before AddressSanitizer is set up.
#pragma once

namespace engram {

#if defined(__x86_64__)
#define ENGRAM_TARGET_AVX2 __attribute__((target("avx2,fma")))
#if defined(__clang__)
#define ENGRAM_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#else
#define ENGRAM_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#endif

#define ENGRAM_TARGET_GFNI \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,gfni")))
#define ENGRAM_INLINE_GFNI ENGRAM_TARGET_GFNI inline __attribute__((always_inline))

inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("fma");
}
inline bool has_avx512_gfni() {  // since Ice Lake and Zen 4
  return has_avx512() && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("gfni");
}
inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

template <typename Body, typename... Args>
ENGRAM_TARGET_AVX512 void run_avx512(const Args&... args) {
  Body::run(args...);
}

template <typename Body, typename... Args>
ENGRAM_TARGET_AVX2 void run_avx2(const Args&... args) {
  Body::run(args...);
}
#endif

//! Body::run(args...), compiled for the widest vectors of this CPU. Body::run and what it calls in
//! its loops must be always_inline, for only what is inlined gets the instruction set.
template <typename Body, typename... Args>
void run_widest(const Args&... args) {
#if defined(__x86_64__)
  if (has_avx512()) return run_avx512<Body>(args...);
  if (has_avx2()) return run_avx2<Body>(args...);
#endif
  Body::run(args...);
}

}  // namespace engram
