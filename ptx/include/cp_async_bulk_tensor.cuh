// Copies of boxes of tensors through tensor maps (PTX ISA, "cp.async.bulk.tensor").
#pragma once
#include "types.cuh"

namespace ptx {

// A CUtensorMap, opaque to device code. As a kernel parameter it is declared `const __grid_constant__`.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// prefetch.tensormap [map];  PTX ISA 8.0, sm_90.
// Brings the descriptor into the cache; to be issued before the first copy that uses it. Generic address.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint
//   [to], [map, {c0, c1, c2, c3}], [mbarrier], policy;  PTX ISA 8.6, sm_90.
// to: 128-byte aligned, and aligned to the period of the map's swizzle (256 / 512 / 1024 bytes for 32B / 64B / 128B) if
// offsets inside the box are to follow from the box alone. c0 is innermost. Completes the bytes of the whole box.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(
  SharedAddress to, const TensorMap& map, i32 c0, i32 c1, i32 c2, i32 c3, SharedAddress mbarrier, u64 policy) {
  asm volatile(
    "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
    "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(mbarrier), "l"(policy)
    : "memory");
}

}  // namespace ptx
