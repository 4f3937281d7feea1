// L2 eviction policies for the cache-hint operand of copies (PTX ISA, "createpolicy").
#pragma once
#include "types.cuh"

namespace ptx {

// createpolicy.fractional.L2::evict_first.b64 policy, 1.0;  PTX ISA 7.4, sm_80.
// For bytes that are read once: they leave L2 before anything else does.
__device__ __forceinline__ u64 createpolicy_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// createpolicy.fractional.L2::evict_last.b64 policy, 1.0;  PTX ISA 7.4, sm_80.
// For bytes that others will read again soon.
__device__ __forceinline__ u64 createpolicy_evict_last() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace ptx
