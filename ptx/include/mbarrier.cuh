// mbarrier: phase-counting barriers in shared memory (PTX ISA, "mbarrier").
//
// A phase completes when its pending arrivals and its pending transaction bytes are both zero. `parity` is the low bit
// of the phase waited for: on a fresh barrier parity 0 waits and parity 1 returns at once, so that a producer starts
// with parity 1 and a consumer with parity 0.
#pragma once
#include "types.cuh"

namespace ptx {

// mbarrier.init.shared::cta.b64 [address], count;  PTX ISA 7.0, sm_80.
// address: 8-byte aligned. count: arrivals of a phase, 1 to 2^20 - 1.
__device__ __forceinline__ void mbarrier_init(SharedAddress address, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(count) : "memory");
}

// mbarrier.arrive.shared::cta.b64 _, [address];  PTX ISA 7.0, sm_80.
// One arrival, release semantics at CTA scope.
__device__ __forceinline__ void mbarrier_arrive(SharedAddress address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}

// mbarrier.arrive.expect_tx.shared::cta.b64 _, [address], bytes;  PTX ISA 8.0, sm_90.
// Adds `bytes` to the transaction count of the phase, then arrives once. To be issued before the copies it announces.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(SharedAddress address, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64 done, [address], parity;  PTX ISA 7.8, sm_90.
// True when the phase of that parity has completed (acquire, CTA scope). May suspend the thread for a while and may
// return false: callers loop.
__device__ __forceinline__ bool mbarrier_try_wait_parity(SharedAddress address, u32 parity) {
  u32 done;
  asm volatile(
    "{\n\t"
    ".reg .pred done;\n\t"
    "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
    "selp.u32 %0, 1, 0, done;\n\t"
    "}"
    : "=r"(done)
    : "r"(address), "r"(parity)
    : "memory");
  return done != 0;
}

// mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [address], parity;  PTX ISA 8.0, sm_90.
// As above, but acquires at cluster scope: for data that other CTAs of the cluster stored.
__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(SharedAddress address, u32 parity) {
  u32 done;
  asm volatile(
    "{\n\t"
    ".reg .pred done;\n\t"
    "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n\t"
    "selp.u32 %0, 1, 0, done;\n\t"
    "}"
    : "=r"(done)
    : "r"(address), "r"(parity)
    : "memory");
  return done != 0;
}

// Blocks until the phase of that parity has completed.
__device__ __forceinline__ void mbarrier_wait_parity(SharedAddress address, u32 parity) {
  while (!mbarrier_try_wait_parity(address, parity)) {
  }
}

}  // namespace ptx
