// Named CTA barriers (PTX ISA, "barrier{.cta}"). Barrier 0 is the one of __syncthreads.
#pragma once
#include "types.cuh"

namespace ptx {

// barrier.cta.sync.aligned name, threads;  PTX ISA 7.8, sm_75.
// All lanes of the participating warps execute it; threads is a multiple of 32. name: 0 to 15.
__device__ __forceinline__ void barrier_cta_sync(u32 name, u32 threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// barrier.cta.arrive.aligned name, threads;  PTX ISA 7.8, sm_75.
// Counts as barrier_cta_sync does, without waiting: what these threads wrote before is seen by those that sync there.
__device__ __forceinline__ void barrier_cta_arrive(u32 name, u32 threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// barrier.cta.red.or.aligned.pred any, name, threads, value;  PTX ISA 7.8, sm_75.
// As barrier_cta_sync, and tells every thread whether `value` held in any of them.
__device__ __forceinline__ bool barrier_cta_red_or(u32 name, u32 threads, bool value) {
  u32 any;
  asm volatile(
    "{\n\t"
    ".reg .pred value, any;\n\t"
    "setp.ne.u32 value, %3, 0;\n\t"
    "barrier.cta.red.or.aligned.pred any, %1, %2, value;\n\t"
    "selp.u32 %0, 1, 0, any;\n\t"
    "}"
    : "=r"(any)
    : "r"(name), "r"(threads), "r"(static_cast<u32>(value))
    : "memory");
  return any != 0;
}

}  // namespace ptx
