// NVFP4 to binary16 in registers: eight E2M1 codes, and pairs of E4M3 block scales.
//
// An E2M1 code s|e1 e0 m put into bits 15 and 11..9 of a binary16 word is the code's value times 2^-14,
// exactly: the two exponent bits are binary16's lowest two, and E2M1's subnormal 0.5 is a binary16 subnormal.
// The product with an E4M3 scale has at most 6 significant bits and is a multiple of 2^-24, so it is exact in
// binary16 too.
#pragma once
#include "arithmetic.cuh"
#include "convert.cuh"
#include "logic.cuh"
#include "types.cuh"

constexpr float kCodeUnit = 16384.0f;  // 2^14: a code's value is its decoded value times this

// The eight codes of a word as four pairs: pairs[0] low nibbles of bytes 0 and 1; pairs[1] low nibbles of
// bytes 2 and 3; pairs[2], pairs[3] the high nibbles of the same bytes.
__device__ __forceinline__ void decode_e2m1(u32 codes, u32 (&pairs)[4]) {
  const u32 high = (codes & 0x80808080u) | ((codes >> 3) & 0x0E0E0E0Eu);
  const u32 low = ((codes << 4) & 0x80808080u) | ((codes << 1) & 0x0E0E0E0Eu);
  pairs[0] = __byte_perm(low, 0, 0x1404);
  pairs[1] = __byte_perm(low, 0, 0x3424);
  pairs[2] = __byte_perm(high, 0, 0x1404);
  pairs[3] = __byte_perm(high, 0, 0x3424);
}

// The sign of `signed_word` and the other bits of `other` in each byte.
__device__ __forceinline__ u32 with_signs(u32 other, u32 signed_word) {
  return ptx::lop3_b32<0xD8>(other, signed_word, 0x80808080u);  // b where c is set, else a
}
constexpr u32 kOddBytes = 0x8E008E00u;  // codes in the upper bytes of both halves

// The same eight codes, with codes i and i + 4 in pairs[i]: pairs of tokens where a word has four codes of
// each of two tokens. Shifts instead of byte permutations: left shifts go to the multiplier's pipe, which has
// time to spare.
__device__ __forceinline__ void decode_e2m1_halves(u32 codes, u32 (&pairs)[4]) {
  const u32 even = with_signs(codes << 1, codes << 4), odd = with_signs(codes >> 3, codes);
  pairs[0] = (even << 8) & kOddBytes;
  pairs[1] = (odd << 8) & kOddBytes;
  pairs[2] = even & kOddBytes;
  pairs[3] = odd & kOddBytes;
}

// The high nibbles only, of such a word of two tokens: pairs[i] has code 2 * i + 1 of both tokens, or code
// 2 * i if the word was shifted left by four before.
__device__ __forceinline__ void decode_e2m1_high_columns(u32 codes, u32 (&pairs)[4]) {
  const u32 high = with_signs(codes >> 3, codes);
  pairs[0] = (high << 8) & kOddBytes;
  pairs[1] = high & kOddBytes;
}

// Two E4M3 scales (lower byte first) as a binary16 pair, exactly. Without the conversion instruction (before
// compute capability 8.9) a NaN scale becomes 480: visible tokens have none, and hidden ones never reach a
// result.
__device__ __forceinline__ u32 decode_scales(u32 two_bytes) {
#if __CUDA_ARCH__ >= 890
  return ptx::cvt_rn_f16x2_e4m3x2(static_cast<u16>(two_bytes));
#else
  const u32 spread = __byte_perm(two_bytes, 0, 0x1404);
  const u32 scaled =
      (spread & 0x80008000u) | ((spread >> 1) & 0x3F803F80u);  // exponent bias 15 instead of 7: times 2^-8
  return ptx::mul_rn_f16x2(scaled, 0x5C005C00u);               // times 256
#endif
}

// One half of a pair, twice. As a move of halves, which ptxas folds into the operand of HMUL2; a byte
// permutation it would not.
__device__ __forceinline__ u32 lower_twice(u32 pair) { return ptx::mov_b32_lower_twice(pair); }
__device__ __forceinline__ u32 upper_twice(u32 pair) { return ptx::mov_b32_upper_twice(pair); }
