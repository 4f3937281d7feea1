// Arithmetic without a CUDA C++ operator: packed binary16, base-2 exponential and logarithm.
#pragma once
#include "types.cuh"

namespace ptx {

// mul.rn.f16x2 d, a, b;  PTX ISA 4.2, sm_53. Subnormals are kept.
__device__ __forceinline__ u32 mul_rn_f16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// fma.rn.f16x2 d, a, b, c;  PTX ISA 4.2, sm_53. Subnormals are kept.
__device__ __forceinline__ u32 fma_rn_f16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// abs.f16x2 d, a;  PTX ISA 6.5, sm_53. Free in front of most binary16 instructions.
__device__ __forceinline__ u32 abs_f16x2(u32 a) {
  u32 d;
  asm("abs.f16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// neg.f16x2 d, a;  PTX ISA 6.0, sm_53. Free in front of most binary16 instructions.
__device__ __forceinline__ u32 neg_f16x2(u32 a) {
  u32 d;
  asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// max.u16x2 d, a, b;  PTX ISA 8.0, sm_90. Two unsigned 16-bit integers.
__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b) {
  u32 d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// mov.b32 d, {h, h};  PTX ISA 1.0. Twice the lower half of a pair.
__device__ __forceinline__ u32 mov_b32_lower_twice(u32 pair) {
  u32 d;
  asm("{\n\t"
      ".reg .b16 lower, upper;\n\t"
      "mov.b32 {lower, upper}, %1;\n\t"
      "mov.b32 %0, {lower, lower};\n\t"
      "}"
      : "=r"(d)
      : "r"(pair));
  return d;
}

// mov.b32 d, {h, h};  PTX ISA 1.0. Twice the upper half of a pair.
__device__ __forceinline__ u32 mov_b32_upper_twice(u32 pair) {
  u32 d;
  asm("{\n\t"
      ".reg .b16 lower, upper;\n\t"
      "mov.b32 {lower, upper}, %1;\n\t"
      "mov.b32 %0, {upper, upper};\n\t"
      "}"
      : "=r"(d)
      : "r"(pair));
  return d;
}

// max.f16x2 d, a, b;  PTX ISA 7.0, sm_80. The other operand where one is NaN.
__device__ __forceinline__ u32 max_f16x2(u32 a, u32 b) {
  u32 d;
  asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// ex2.approx.ftz.f32 d, a;  PTX ISA 1.4. Relative error below 2^-22; exact for integers, 0 for -inf, +inf for large a.
__device__ __forceinline__ float ex2_approx_ftz_f32(float a) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

// lg2.approx.ftz.f32 d, a;  PTX ISA 1.4. Absolute error below 2^-22 near one, relative error below 2^-22 elsewhere.
__device__ __forceinline__ float lg2_approx_ftz_f32(float a) {
  float d;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

// rcp.approx.ftz.f32 d, a;  PTX ISA 1.4. Relative error at most 2^-23; 1/0 is +inf.
__device__ __forceinline__ float rcp_approx_ftz_f32(float a) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

}  // namespace ptx
