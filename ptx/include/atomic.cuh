// Atomic operations on global memory (PTX ISA, "atom").
#pragma once
#include "types.cuh"

namespace ptx {

// atom.acq_rel.gpu.global.inc.u32 d, [a], b;  PTX ISA 6.0, sm_70.
// Gives the old word; the new one is 0 where the old one was b or more, else one more. 4-byte aligned.
// Releases what this thread has done or seen (stores of its CTA before a barrier, too) to whoever acquires
// the word on this device, and acquires what was released to it. Waits for nobody.
__device__ __forceinline__ u32 atom_inc_acq_rel_gpu_u32(void* a, u32 b) {
  u32 d;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(d) : "l"(a), "r"(b) : "memory");
  return d;
}

}  // namespace ptx
