// cvt between E2M1 pairs and wider types (PTX ISA, "cvt"). A byte holds two codes, the first element in its
// low nibble.
#pragma once
#include "types.cuh"

namespace ptx {

// cvt.rn.f16x2.e2m1x2 d, a;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a sm_120a sm_121a.
// Exact. a is byte BYTE of the word; its low nibble becomes the lower half. Choosing the byte costs no
// instruction.
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

// cvt.rn.satfinite.e2m1x2.f16x2 d, a;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a sm_120a sm_121a.
// Four conversions: four consecutive pairs to nearest even, saturating at 6, as the codes of one word; the
// lower half of the first pair lies in the lowest nibble.
__device__ __forceinline__ u32 cvt_rn_satfinite_e2m1x8_f16x2(const u32 (&x)[4]) {
  u32 d;
  asm("{\n\t"
      ".reg .b8 a, b, c, d;\n\t"
      "cvt.rn.satfinite.e2m1x2.f16x2 a, %1;\n\t"
      "cvt.rn.satfinite.e2m1x2.f16x2 b, %2;\n\t"
      "cvt.rn.satfinite.e2m1x2.f16x2 c, %3;\n\t"
      "cvt.rn.satfinite.e2m1x2.f16x2 d, %4;\n\t"
      "mov.b32 %0, {a, b, c, d};\n\t"
      "}"
      : "=r"(d)
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
  return d;
}

}  // namespace ptx
