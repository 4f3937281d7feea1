// Two float32 lanes in one 64-bit register (PTX ISA, "add/mul/fma .f32x2"): one issue slot for two results.
#pragma once
#include "types.cuh"

namespace ptx {

// mov.b64 pair, {low, high};  PTX ISA 1.0, sm_75.
__device__ __forceinline__ u64 pack_f32x2(float low, float high) {
  u64 pair;
  asm("mov.b64 %0, {%1, %2};" : "=l"(pair) : "f"(low), "f"(high));
  return pair;
}

// mov.b64 {low, high}, pair;  PTX ISA 1.0, sm_75.
__device__ __forceinline__ void unpack_f32x2(u64 pair, float& low, float& high) {
  asm("mov.b64 {%0, %1}, %2;" : "=f"(low), "=f"(high) : "l"(pair));
}

// add.rn.f32x2 d, a, b;  PTX ISA 8.6, sm_100.
__device__ __forceinline__ u64 add_f32x2(u64 a, u64 b) {
  u64 d;
  asm("add.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
  return d;
}

// mul.rn.f32x2 d, a, b;  PTX ISA 8.6, sm_100.
__device__ __forceinline__ u64 mul_f32x2(u64 a, u64 b) {
  u64 d;
  asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
  return d;
}

// fma.rn.f32x2 d, a, b, c;  PTX ISA 8.6, sm_100.
__device__ __forceinline__ u64 fma_f32x2(u64 a, u64 b, u64 c) {
  u64 d;
  asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(d) : "l"(a), "l"(b), "l"(c));
  return d;
}

}  // namespace ptx
