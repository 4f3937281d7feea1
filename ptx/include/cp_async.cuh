// cp.async: asynchronous copies from global to shared memory by the issuing thread (no bulk copies).
#pragma once
#include "types.cuh"

namespace ptx {

// cp.async.cg.shared.global.L2::128B [dst], [src], 16;  PTX ISA 7.4, sm_80. Both 16-byte aligned; L1 is bypassed.
__device__ __forceinline__ void cp_async_cg_16(SharedAddress dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// cp.async.ca.shared.global [dst], [src], 4;  PTX ISA 7.0, sm_80. Both 4-byte aligned; the sector stays in L1.
__device__ __forceinline__ void cp_async_ca_4(SharedAddress dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

// cp.async.commit_group;  PTX ISA 7.0, sm_80.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group n;  PTX ISA 7.0, sm_80. At most n of this thread's groups stay pending; its own copies only.
template <int n>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

}  // namespace ptx
