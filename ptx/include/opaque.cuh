// A value whose origin the compiler cannot see: no instruction, only an optimisation barrier.
#pragma once
#include "types.cuh"

namespace ptx {

// Keeps x in a register instead of having it recomputed at every use (cheap address arithmetic inside a hot
// loop).
__device__ __forceinline__ void opaque(i32& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void opaque(u32& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void opaque(u64& x) { asm volatile("" : "+l"(x)); }

}  // namespace ptx
