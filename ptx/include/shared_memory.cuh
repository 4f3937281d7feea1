// ld.shared and st.shared by window address, for code that computes its addresses itself.
#pragma once
#include "types.cuh"

namespace ptx {

// ld.shared.u16 d, [a];  PTX ISA 1.0. 2-byte aligned.
__device__ __forceinline__ u16 ld_shared_u16(SharedAddress a) {
  u16 d;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(d) : "r"(a) : "memory");
  return d;
}

// ld.shared.u32 d, [a];  PTX ISA 1.0. 4-byte aligned.
__device__ __forceinline__ u32 ld_shared_u32(SharedAddress a) {
  u32 d;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(a) : "memory");
  return d;
}

// ld.shared.f32 d, [a];  PTX ISA 1.0. 4-byte aligned.
__device__ __forceinline__ float ld_shared_f32(SharedAddress a) {
  float d;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(d) : "r"(a) : "memory");
  return d;
}

// ld.shared.v2.u32 d, [a];  PTX ISA 1.0. 8-byte aligned.
__device__ __forceinline__ uint2 ld_shared_v2_u32(SharedAddress a) {
  uint2 d;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : "r"(a) : "memory");
  return d;
}

// ld.shared.v2.f32 d, [a];  PTX ISA 1.0. 8-byte aligned.
__device__ __forceinline__ float2 ld_shared_v2_f32(SharedAddress a) {
  float2 d;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(d.x), "=f"(d.y) : "r"(a) : "memory");
  return d;
}

// ld.shared.v4.u32 d, [a];  PTX ISA 1.0. 16-byte aligned.
__device__ __forceinline__ uint4 ld_shared_v4_u32(SharedAddress a) {
  uint4 d;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "r"(a)
               : "memory");
  return d;
}

// ld.shared.v4.f32 d, [a];  PTX ISA 1.0. 16-byte aligned.
__device__ __forceinline__ float4 ld_shared_v4_f32(SharedAddress a) {
  float4 d;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w)
               : "r"(a)
               : "memory");
  return d;
}

// ld.shared.v2.u64 d, [a];  PTX ISA 1.0. 16-byte aligned.
__device__ __forceinline__ ulonglong2 ld_shared_v2_u64(SharedAddress a) {
  ulonglong2 d;
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(d.x), "=l"(d.y) : "r"(a) : "memory");
  return d;
}

// ld.shared.u64 d, [a];  PTX ISA 1.0. 8-byte aligned.
__device__ __forceinline__ u64 ld_shared_u64(SharedAddress a) {
  u64 d;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(d) : "r"(a) : "memory");
  return d;
}

// st.shared.u32 [a], x;  PTX ISA 1.0. 4-byte aligned.
__device__ __forceinline__ void st_shared_u32(SharedAddress a, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory");
}

// st.shared.f32 [a], x;  PTX ISA 1.0. 4-byte aligned.
__device__ __forceinline__ void st_shared_f32(SharedAddress a, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory");
}

// st.shared.v2.f32 [a], {x, y};  PTX ISA 1.0. 8-byte aligned.
__device__ __forceinline__ void st_shared_v2_f32(SharedAddress a, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}

// st.shared.v2.u32 [a], {x, y};  PTX ISA 1.0. 8-byte aligned.
__device__ __forceinline__ void st_shared_v2_u32(SharedAddress a, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}

// st.shared.v4.f32 [a], {x, y, z, w};  PTX ISA 1.0. 16-byte aligned.
__device__ __forceinline__ void st_shared_v4_f32(SharedAddress a, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// st.shared.v4.u32 [a], {x, y, z, w};  PTX ISA 1.0. 16-byte aligned.
__device__ __forceinline__ void st_shared_v4_u32(SharedAddress a, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// st.shared.v2.u64 [a], {x, y};  PTX ISA 1.0. 16-byte aligned.
__device__ __forceinline__ void st_shared_v2_u64(SharedAddress a, u64 x, u64 y) {
  asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(a), "l"(x), "l"(y) : "memory");
}

}  // namespace ptx
