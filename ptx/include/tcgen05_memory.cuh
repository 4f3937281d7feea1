// Tensor memory: allocation, loads, stores and their ordering (PTX ISA, "tcgen05").
//
// 128 lanes of 512 columns of 32 bits, private to a CTA. An address is lane << 16 | column. Warp w of a CTA reaches lanes
// 32 * (w % 4) to 32 * (w % 4) + 31 alone. Loads, stores and MMAs are asynchronous: a store is visible to an MMA of another
// thread after wait::st, fence::before_thread_sync, a barrier, and fence::after_thread_sync in the issuer.
#pragma once
#include "types.cuh"

namespace ptx {

using TensorAddress = u32;

// tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [result], columns;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// One whole warp executes it. columns: a power of two, 32 to 512. Blocks until they are free on the SM; writes the address
// of the first column to shared memory.
__device__ __forceinline__ void tcgen05_alloc(SharedAddress result, u32 columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(result), "r"(columns)
               : "memory");
}

// tcgen05.dealloc.cta_group::1.sync.aligned.b32 address, columns;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// The address and count of an earlier allocation; nobody may access the columns any more. Required before exit.
__device__ __forceinline__ void tcgen05_dealloc(TensorAddress address, u32 columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
}

// tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// This CTA will not allocate again.
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// tcgen05.fence::before_thread_sync;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// Orders earlier tcgen05 operations of this thread before a following barrier arrival.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// tcgen05.fence::after_thread_sync;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// Orders a preceding barrier wait before later tcgen05 operations of this thread.
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// tcgen05.wait::st.sync.aligned;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// Waits for all earlier tcgen05.st of the thread.
__device__ __forceinline__ void tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// tcgen05.wait::ld.sync.aligned;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// Waits for all earlier tcgen05.ld of the thread, among them those that fill the arrays: the empty statements keep the
// compiler from moving a use of an element up across the wait.
// example: u32 r[2] = {word, word}; tcgen05_wait_ld(r); sink[0] = r[0] + r[1];
template <u32... N>
__device__ __forceinline__ void tcgen05_wait_ld(u32 (&... r)[N]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  const auto pin = [](auto& registers) {
#pragma unroll
    for (u32& element : registers) {
      asm volatile("" : "+r"(element));
    }
  };
  (pin(r), ...);
}

// tcgen05.ld.sync.aligned.32x32b.x16.b32 r, [address];
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// All lanes of the warp: thread t receives lane t of its quarter, r[i] from column i.
__device__ __forceinline__ void tcgen05_ld_32x32b(TensorAddress address, u32 (&r)[16]) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, [%16];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]),
        "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
      : "r"(address)
      : "memory");
}

// tcgen05.ld.sync.aligned.32x32b.x32.b32 r, [address];
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// As the form of 16 columns.
__device__ __forceinline__ void tcgen05_ld_32x32b(TensorAddress address, u32 (&r)[32]) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "[%32];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]),
        "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15]),
        "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]), "=r"(r[21]), "=r"(r[22]),
        "=r"(r[23]), "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]), "=r"(r[28]), "=r"(r[29]),
        "=r"(r[30]), "=r"(r[31])
      : "r"(address)
      : "memory");
}

// tcgen05.st.sync.aligned.32x32b.x16.b32 [address], r;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// All lanes of the warp: thread t writes lane t of its quarter, r[i] to column i.
__device__ __forceinline__ void tcgen05_st_32x32b(TensorAddress address, const u32 (&r)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16};"
      ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]), "r"(r[8]),
        "r"(r[9]), "r"(r[10]), "r"(r[11]), "r"(r[12]), "r"(r[13]), "r"(r[14]), "r"(r[15])
      : "memory");
}

// tcgen05.st.sync.aligned.16x256b.x4.b32 [address], r;
// PTX ISA 8.6, sm_100a sm_103a sm_107a sm_110a.
// Thread t writes r[i] to lane t / 4 + 8 * (i / 2 % 2) and column 8 * (i / 4) + 2 * (t % 4) + i % 2, relative to the
// address, whose lane is the first or the seventeenth of the warp's quarter.
__device__ __forceinline__ void tcgen05_st_16x256b(TensorAddress address, const u32 (&r)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.16x256b.x4.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16};"
      ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]), "r"(r[8]),
        "r"(r[9]), "r"(r[10]), "r"(r[11]), "r"(r[12]), "r"(r[13]), "r"(r[14]), "r"(r[15])
      : "memory");
}

}  // namespace ptx
