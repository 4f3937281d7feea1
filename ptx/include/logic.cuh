// Bitwise logic on three operands (PTX ISA, "lop3").
#pragma once
#include "types.cuh"

namespace ptx {

// lop3.b32 d, a, b, c, TABLE;  PTX ISA 4.3, sm_50.
// TABLE is the function applied to 0xF0, 0xCC and 0xAA for a, b and c. Written out, because from C++ operators with a
// constant mask the compiler makes two instructions of a bitwise select.
// example: sink[0] = lop3_b32<0xE4>(word, word >> 1, word >> 2);
template <u32 TABLE>
__device__ __forceinline__ u32 lop3_b32(u32 a, u32 b, u32 c) {
  static_assert(TABLE < 256, "one bit for each combination of three");
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return d;
}

}  // namespace ptx
