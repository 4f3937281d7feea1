// mma.sync: warp-wide matrix products with fragments in registers.
#pragma once
#include "types.cuh"

namespace ptx {

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 d, a, b, c;  PTX ISA 7.0, sm_80. d and c are the same registers.
// Lane 4*g + t holds: a[0] row g, a[1] row g+8 (columns 2t, 2t+1), a[2], a[3] the same rows (columns 2t+8, 2t+9);
// b[0] column g, rows 2t, 2t+1; b[1] rows 2t+8, 2t+9; c[0], c[1] row g, columns 2t, 2t+1; c[2], c[3] row g+8.
__device__ __forceinline__ void mma_sync_m16n8k16_f32_f16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

}  // namespace ptx
