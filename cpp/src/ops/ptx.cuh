// SPDX-License-Identifier: Apache-2.0
//! \file ptx.cuh
//! The one place for inline PTX.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace engram {

//! Starts to bring what lies at a global address towards this multiprocessor.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" : : "l"(address));
}

//! Loads of read-only memory that no thread reads again: nothing stays in the L1, and the L2 evicts
//! it first.
__device__ __forceinline__ uint8_t load_once(const uint8_t* from) {
  uint32_t value;
  asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(value) : "l"(from));
  return static_cast<uint8_t>(value);
}
__device__ __forceinline__ uint32_t load_once(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}
__device__ __forceinline__ uint2 load_once(const uint2* from) {
  uint2 value;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(from));
  return value;
}
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

//! Memory of this GPU that other threads write meanwhile: nothing is torn within a word of 8 bytes,
//! and nothing stale is taken out of the L1. Order is made by load_acquire and fence_gpu.
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint8_t load_relaxed(const uint8_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u8 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return static_cast<uint8_t>(value);
}
__device__ __forceinline__ void store_relaxed(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint8_t* to, uint8_t value) {
  asm volatile("st.relaxed.gpu.global.u8 [%0], %1;"
               :
               : "l"(to), "r"(static_cast<uint32_t>(value))
               : "memory");
}
//! Two words, each as if loaded alone.
__device__ __forceinline__ void load_acquire(const uint64_t* from, uint64_t* first,
                                             uint64_t* second) {
  asm volatile("ld.acquire.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(*first), "=l"(*second)
               : "l"(from)
               : "memory");
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" : : : "memory"); }

//! Four 8x8 matrices of BF16 from shared memory: lanes 8i..8i+7 pass the 16-byte rows of matrix i.
//! Lane l receives elements 2*(l%4) and +1 of row l/4 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], const __nv_bfloat16* row) {
  load_matrices(matrices, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}

//! sums += A B for A BF16 16x16, B BF16 16x8 (given by columns), sums FP32 16x8.
//! Lane l holds sums of row l/4 and, in [2] and [3], row l/4 + 8; columns 2*(l%4) and +1.
__device__ __forceinline__ void multiply_matrices(float (&sums)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace engram
