// cvt: packed conversions between binary32, binary16, bfloat16 and E4M3.
#pragma once
#include "types.cuh"

namespace ptx {

// cvt.rn.f16x2.f32 d, a, b;  PTX ISA 7.0, sm_80. The first operand becomes the upper half.
__device__ __forceinline__ u32 cvt_rn_f16x2_f32(float upper, float lower) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(upper), "f"(lower));
  return d;
}

// cvt.rn.bf16x2.f32 d, a, b;  PTX ISA 7.0, sm_80. The first operand becomes the upper half.
__device__ __forceinline__ u32 cvt_rn_bf16x2_f32(float upper, float lower) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(upper), "f"(lower));
  return d;
}

// cvt.rn.f16x2.e4m3x2 d, a;  PTX ISA 8.1, sm_89. Exact; the lower byte becomes the lower half.
__device__ __forceinline__ u32 cvt_rn_f16x2_e4m3x2(u16 a) {
  u32 d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(a));
  return d;
}

// cvt.rn.satfinite.e4m3x2.f16x2 d, a;  PTX ISA 8.1, sm_89. The lower half becomes the lower byte.
__device__ __forceinline__ u16 cvt_rn_satfinite_e4m3x2_f16x2(u32 a) {
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(a));
  return d;
}

// cvt.f32.f16 d, a;  PTX ISA 1.0, sm_53. Both halves of a packed pair; exact.
__device__ __forceinline__ void cvt_f32_f16x2(u32 pair, float& lower, float& upper) {
  asm("{\n\t"
      ".reg .b16 lower, upper;\n\t"
      "mov.b32 {lower, upper}, %2;\n\t"
      "cvt.f32.f16 %0, lower;\n\t"
      "cvt.f32.f16 %1, upper;\n\t"
      "}"
      : "=f"(lower), "=f"(upper)
      : "r"(pair));
}

}  // namespace ptx
