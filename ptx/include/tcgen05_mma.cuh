// Matrix multiply-add of one CTA by the tensor cores, with operands in shared and tensor memory (PTX ISA,
// "tcgen05.mma").
//
// One thread issues. Operand descriptors: msa_cudacore/ptx/descriptors.py has their fields and encoders. MMAs
// of one thread execute in order; operands must stay intact until a commit that follows has completed.
#pragma once
#include "tcgen05_memory.cuh"

namespace ptx {

// tcgen05.mma.cta_group::1.kind::f16 [d], [a], b, instruction, accumulate;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// d (+)= a * b with a in tensor memory (K-major, two elements a column), b in shared memory, d float32.
// accumulate 0: d is overwritten.
__device__ __forceinline__ void tcgen05_mma_f16_tensor_shared(
    TensorAddress d, TensorAddress a, u64 b, u32 instruction, u32 accumulate) {
  asm volatile(
      "{\n\t"
      ".reg .pred accumulate;\n\t"
      "setp.ne.u32 accumulate, %4, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, accumulate;\n\t"
      "}" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(accumulate)
      : "memory");
}

// tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X
//     [d], a, b, instruction, [a_scales], [b_scales], accumulate;
// PTX ISA 8.7, sm_100a sm_103a sm_107a sm_110a.
// d (+)= a * b for E2M1 operands in shared memory, K-major, with an E4M3 scale for every 16 elements along K.
// Scales lie in tensor memory: the word of row m in lane m % 32 of all four quarters, column m / 32, byte s
// for elements 16s to 16s + 15.
__device__ __forceinline__ void tcgen05_mma_mxf4nvf4_shared_shared(
    TensorAddress d, u64 a, u64 b, u32 instruction, TensorAddress a_scales, TensorAddress b_scales,
    u32 accumulate) {
  asm volatile(
      "{\n\t"
      ".reg .pred accumulate;\n\t"
      "setp.ne.u32 accumulate, %6, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X "
      "[%0], %1, %2, %3, [%4], [%5], accumulate;\n\t"
      "}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(accumulate)
      : "memory");
}

// tcgen05.cp.cta_group::1.32x128b.warpx4 [to], from;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// Copies 32 rows of 16 bytes from shared to tensor memory: row r to lane r of all four quarters, four
// columns. `from` is a matrix descriptor without swizzle. MMAs that the thread issues later see them; earlier
// ones must be complete.
__device__ __forceinline__ void tcgen05_cp_32x128b_warpx4(TensorAddress to, u64 from) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
}

// tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [mbarrier];
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// One arrival on the mbarrier when all earlier tcgen05.mma of this thread have completed. Implies
// fence::before_thread_sync. An address of the own CTA is a valid shared::cluster address.
__device__ __forceinline__ void tcgen05_commit(SharedAddress mbarrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(mbarrier)
               : "memory");
}

}  // namespace ptx
