// Thread-block clusters: ranks, the cluster barrier, and stores into the shared memory of other CTAs.
//
// Shared memory of a CTA may be accessed remotely only while that CTA runs.
#pragma once
#include "types.cuh"

namespace ptx {

// mov.u32 rank, %cluster_ctarank;  PTX ISA 7.8, sm_90.
// 0 in a launch without clusters.
__device__ __forceinline__ u32 cluster_ctarank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// mapa.shared::cluster.u32 remote, address, rank;  PTX ISA 7.8, sm_90.
// The same variable in the shared memory of the CTA of that rank.
__device__ __forceinline__ u32 mapa_shared_cluster(SharedAddress address, u32 rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// barrier.cluster.arrive.release.aligned;  PTX ISA 7.8, sm_90.
// Every thread of the cluster arrives once per phase; what it wrote before is visible after the wait of the others.
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// barrier.cluster.arrive.relaxed.aligned;  PTX ISA 8.0, sm_90.
// As above without ordering any memory access: cheap, for a rendezvous whose data a fence has made visible already.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// barrier.cluster.wait.acquire.aligned;  PTX ISA 7.8, sm_90.
// Waits until all threads of the cluster have arrived or exited.
__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {a, b}, [mbarrier];  PTX ISA 8.1, sm_90.
// to: 8-byte aligned; `to` and `mbarrier` lie in the same CTA. Completes 8 bytes there. Weak: the receiver sees the data
// after it has waited on the mbarrier.
__device__ __forceinline__ void st_async_v2(SharedAddress to, float a, float b, SharedAddress mbarrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(a),
         "f"(b), "r"(mbarrier)
         : "memory");
}

// st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {a, b, c, d}, [mbarrier];
// PTX ISA 8.1, sm_90.
// As st_async_v2 with 16 bytes, 16-byte aligned.
__device__ __forceinline__ void st_async_v4(SharedAddress to, float a, float b, float c, float d, SharedAddress mbarrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
         "f"(a), "f"(b), "f"(c), "f"(d), "r"(mbarrier)
         : "memory");
}

}  // namespace ptx
