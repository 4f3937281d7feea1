// Scalar types of the device code, which is freestanding: no toolkit header is at hand at run time.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "widths of PTX registers");

namespace ptx {

// An address inside the shared window: what PTX operands in the shared state space take.
using SharedAddress = u32;

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

}  // namespace ptx
