// Fences between proxies (PTX ISA, "membar, fence").
#pragma once
#include "types.cuh"

namespace ptx {

// fence.proxy.async.shared::cta;  PTX ISA 8.0, sm_90.
// Orders this thread's generic accesses to its CTA's shared memory before later accesses by the async proxy (tcgen05.mma
// operands, bulk copies). The writing thread executes it, before it tells anybody.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.mbarrier_init.release.cluster;  PTX ISA 8.0, sm_90.
// Makes the thread's mbarrier.init visible to the cluster and to the async proxy; followed by a cluster or CTA barrier.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace ptx
