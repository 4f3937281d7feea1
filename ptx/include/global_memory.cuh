// ld.global through the read-only path, for data that a kernel reads once and nobody writes meanwhile.
#pragma once
#include "types.cuh"

namespace ptx {

// ld.global.nc.L1::no_allocate.L2::128B.v4.u32 d, [a];  PTX ISA 7.4, sm_75.
// 16-byte aligned. Leaves L1 alone and asks L2 to fetch 128 bytes. The bytes must not change while the kernel runs.
__device__ __forceinline__ uint4 ld_global_nc_v4_u32(const void* a) {
  uint4 d;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "l"(a)
               : "memory");
  return d;
}

// ld.global.nc.u32 d, [a];  PTX ISA 3.1, sm_32.
// 4-byte aligned. The word must not change while the kernel runs.
__device__ __forceinline__ u32 ld_global_nc_u32(const void* a) {
  u32 d;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(d) : "l"(a) : "memory");
  return d;
}

}  // namespace ptx
