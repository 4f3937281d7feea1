// Wrappers of the instructions that these kernels need and the library's headers do not have.
#pragma once
#include "cp_async_bulk_tensor.cuh"
#include "tcgen05_memory.cuh"
#include "tcgen05_mma.cuh"
#include "types.cuh"

namespace ptx {

// cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [to], [map, {c0, c1}], [mbarrier];
// PTX ISA 8.6, sm_90.
__device__ __forceinline__ void tensor_load_2d(SharedAddress to, const TensorMap& map, i32 c0, i32 c1, SharedAddress mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(c0), "r"(c1), "r"(mbarrier)
      : "memory");
}

// cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [map, {c0, c1}], [from];  PTX ISA 8.0, sm_90.
__device__ __forceinline__ void tensor_store_2d(const TensorMap& map, i32 c0, i32 c1, SharedAddress from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(c0),
               "r"(c1), "r"(from)
               : "memory");
}

// cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [to], [from], bytes, [mbarrier];  PTX ISA 8.6, sm_90.
__device__ __forceinline__ void bulk_load(SharedAddress to, const void* from, u32 bytes, SharedAddress mbarrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(mbarrier)
               : "memory");
}

// cp.async.bulk.global.shared::cta.bulk_group [to], [from], bytes;  PTX ISA 8.0, sm_90.
__device__ __forceinline__ void bulk_store(void* to, SharedAddress from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// cp.async.bulk.commit_group;  PTX ISA 8.0, sm_90.
__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read 0;  PTX ISA 8.0, sm_90. The sources may be overwritten.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// cp.async.bulk.wait_group 0;  PTX ISA 8.0, sm_90. The writes are visible to this thread.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// mbarrier.inval.shared::cta.b64 [address];  PTX ISA 7.0, sm_80.
__device__ __forceinline__ void mbarrier_inval(SharedAddress address) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(address) : "memory");
}

// mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64;  PTX ISA 8.0, sm_90.
__device__ __forceinline__ void mbarrier_wait_parity_cluster(SharedAddress address, u32 parity) {
  u32 done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t"
        "}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
}

// ld.shared::cluster.u32 d, [remote];  PTX ISA 7.8, sm_90.
__device__ __forceinline__ u32 ld_shared_cluster(u32 remote) {
  u32 d;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(d) : "r"(remote) : "memory");
  return d;
}

// ld.shared.u32 d, [address];  PTX ISA 1.0. The address is one the kernel has computed.
__device__ __forceinline__ u32 ld_shared(SharedAddress address) {
  u32 d;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(address) : "memory");
  return d;
}

// tcgen05.mma.cta_group::1.kind::f16 [d], a, b, instruction, accumulate;  PTX ISA 8.6, sm_100a. Both operands in shared
// memory.
__device__ __forceinline__ void mma_f16_shared(TensorAddress d, u64 a, u64 b, u32 instruction, u32 accumulate) {
  asm volatile(
      "{\n\t"
      ".reg .pred accumulate;\n\t"
      "setp.ne.u32 accumulate, %4, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, accumulate;\n\t"
      "}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(accumulate)
      : "memory");
}

// tcgen05.cp.cta_group::1.32x128b.warpx4 [d], descriptor;  PTX ISA 8.6, sm_100a.
__device__ __forceinline__ void tensor_copy_scales(TensorAddress d, u64 descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(d), "l"(descriptor) : "memory");
}

// bar.warp.sync mask;  PTX ISA 6.0.
__device__ __forceinline__ void bar_warp_sync(u32 mask) { asm volatile("bar.warp.sync %0;" ::"r"(mask) : "memory"); }

// tcgen05.st.sync.aligned.32x32b.x8.b32 [address], r;  PTX ISA 8.6, sm_100a.
// All lanes of the warp: thread t writes lane t of its quarter, r[i] to column i.
__device__ __forceinline__ void tcgen05_st_32x32b(TensorAddress address, const u32 (&r)[8]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7])
               : "memory");
}

}  // namespace ptx
