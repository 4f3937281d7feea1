// cvt between E2M1 pairs and wider types (PTX ISA, "cvt"). A byte holds two codes, the first element in its low nibble.
#pragma once
#include "types.cuh"

namespace ptx {

// cvt.rn.f16x2.e2m1x2 d, a;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a sm_120a sm_121a.
// Exact. a is byte BYTE of the word; its low nibble becomes the lower half. Choosing the byte costs no instruction.
// example: sink[0] = cvt_rn_f16x2_e2m1x2<1>(word);
template <u32 BYTE>
__device__ __forceinline__ u32 cvt_rn_f16x2_e2m1x2(u32 word) {
  static_assert(BYTE < 4, "a word has four bytes");
  u32 d;
  if constexpr (BYTE == 0) {
    asm("{.reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, %1; cvt.rn.f16x2.e2m1x2 %0, a;}" : "=r"(d) : "r"(word));
  } else if constexpr (BYTE == 1) {
    asm("{.reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, %1; cvt.rn.f16x2.e2m1x2 %0, b;}" : "=r"(d) : "r"(word));
  } else if constexpr (BYTE == 2) {
    asm("{.reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, %1; cvt.rn.f16x2.e2m1x2 %0, c;}" : "=r"(d) : "r"(word));
  } else {
    asm("{.reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, %1; cvt.rn.f16x2.e2m1x2 %0, d;}" : "=r"(d) : "r"(word));
  }
  return d;
}

// cvt.rn.satfinite.e2m1x2.f32 d, a, b;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a sm_120a sm_121a.
// Four conversions: eight consecutive elements to nearest even, saturating at 6, as the codes of one word; element 0 lies
// in the lowest nibble.
__device__ __forceinline__ u32 cvt_rn_satfinite_e2m1x8_f32(const float (&x)[8]) {
  u32 d;
  asm("{\n\t"
      ".reg .b8 a, b, c, d;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n\t"
      "mov.b32 %0, {a, b, c, d};\n\t"
      "}"
      : "=r"(d)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return d;
}

}  // namespace ptx
