// Bulk copies of contiguous bytes by the async proxy (PTX ISA, "cp.async.bulk").
#pragma once
#include "types.cuh"

namespace ptx {

// cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [to], [from], bytes, [mbarrier], policy;
// PTX ISA 8.6, sm_90.
// to, from and bytes: multiples of 16. Completes `bytes` on the mbarrier, which must expect them.
__device__ __forceinline__ void cp_async_bulk_shared_global(SharedAddress to, const void* from, u32 bytes, SharedAddress mbarrier, u64 policy) {
  asm volatile(
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
    "l"(from), "r"(bytes), "r"(mbarrier), "l"(policy)
    : "memory");
}

}  // namespace ptx
