// SPDX-License-Identifier: Apache-2.0
//! \file ptx_sm90.cuh
//! Inline PTX that only sm_90a has: barriers in shared memory, the copy engine, clusters and
//! matrix products of a warpgroup. Addresses are 32-bit ones of shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace engram {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

//! Both blocks of a cluster meet here.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals)
               : "memory");
}

//! Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

//! Arrives, and lets the phase also wait for `bytes` bytes of the copy engine.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

//! Arrives at the barrier that block `rank` of the cluster has at this address, once this thread's
//! reads are done. (With .release.cluster, writes too would have to reach the cluster: a fence that
//! costs more than the copy.)
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

//! Waits until the phase of this parity is complete.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

//! Copies a box of a 2-D tensor to shared memory; what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, int column, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

//! load_box to the same address of both blocks of the cluster, each with its own barrier.
__device__ __forceinline__ void load_box_to_both(uint32_t to, const CUtensorMap& map, int column,
                                                 int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}

__device__ __forceinline__ uint16_t load_shared_u16(uint32_t address) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_shared_u128(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void load_shared(uint32_t address, uint32_t (&words)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

//! Two BF16 pairs' 8x8 matrices and two more, as multiply_matrices holds sums, each stored
//! transposed: lanes 8i..8i+7 pass the 16-byte rows of matrix i.
__device__ __forceinline__ void store_matrices_transposed(uint32_t row,
                                                          const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

//! Registers of each thread of a warpgroup from here on.
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

//! Before a warpgroup's product reads registers that were written since the last one.
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

//! Waits until at most kPending of the groups committed are still running.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

//! Matrix of BF16 in shared memory with 64 inner values (128 bytes) a row and 128-byte swizzle.
__device__ __forceinline__ uint64_t swizzled_matrix(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * 128 / 16} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | (address & 0x3FFFF) >> 4;
}

// sums += A B for A BF16 64x16 in registers, B BF16 16xN given by columns, sums FP32 64xN: started
// only. Warp w of the group has rows 16w..16w+15, eight columns after another, each as
// multiply_matrices has them.
#define ENGRAM_SUMS8(s)                                                               \
  "+f"((s)[0]), "+f"((s)[1]), "+f"((s)[2]), "+f"((s)[3]), "+f"((s)[4]), "+f"((s)[5]), \
      "+f"((s)[6]), "+f"((s)[7])
#define ENGRAM_SUMS32(s) \
  ENGRAM_SUMS8(s), ENGRAM_SUMS8((s) + 8), ENGRAM_SUMS8((s) + 16), ENGRAM_SUMS8((s) + 24)
#define ENGRAM_SUMS64(s) ENGRAM_SUMS32(s), ENGRAM_SUMS32((s) + 32)
#define ENGRAM_SUMS128(s) ENGRAM_SUMS64(s), ENGRAM_SUMS64((s) + 64)
#define ENGRAM_A_AND_B(a, b) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b)

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[8], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
      : ENGRAM_SUMS8(sums)
      : ENGRAM_A_AND_B(a, b));
}

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[16], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : ENGRAM_SUMS8(sums), ENGRAM_SUMS8(sums + 8)
      : ENGRAM_A_AND_B(a, b));
}

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[32], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : ENGRAM_SUMS32(sums)
      : ENGRAM_A_AND_B(a, b));
}

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[64], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
      : ENGRAM_SUMS64(sums)
      : ENGRAM_A_AND_B(a, b));
}

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[96], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "
      "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "
      "%92, %93, %94, %95}, "
      "{%96, %97, %98, %99}, %100, 1, 1, 1, 0;"
      : ENGRAM_SUMS64(sums), ENGRAM_SUMS32(sums + 64)
      : ENGRAM_A_AND_B(a, b));
}

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[128], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "{%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
      : ENGRAM_SUMS128(sums)
      : ENGRAM_A_AND_B(a, b));
}

#undef ENGRAM_SUMS8
#undef ENGRAM_SUMS32
#undef ENGRAM_SUMS64
#undef ENGRAM_SUMS128
#undef ENGRAM_A_AND_B

}  // namespace engram
