// ldmatrix: 8x8 tiles of 16-bit elements from shared memory into fragments (PTX ISA, "ldmatrix").
#pragma once
#include "types.cuh"

namespace ptx {

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 r, [address];  PTX ISA 6.5, sm_75.
// Lane l gives the address of row l % 8 of matrix l / 8: 16 bytes, 16-byte aligned. r[m] of thread t holds, of matrix m,
// the elements of column t / 4 in rows 2 * (t % 4) (lower half) and 2 * (t % 4) + 1 (upper half).
__device__ __forceinline__ void ldmatrix_x4_trans_b16(SharedAddress address, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace ptx
