// Election of one lane (PTX ISA, "elect.sync").
#pragma once
#include "types.cuh"

namespace ptx {

// elect.sync _|chosen, 0xffffffff;  PTX ISA 8.0, sm_90.
// True in one lane of a converged warp, the same one each time. Which one is not specified.
__device__ __forceinline__ bool elect_sync() {
  u32 chosen;
  asm volatile(
    "{\n\t"
    ".reg .pred chosen;\n\t"
    "elect.sync _|chosen, 0xffffffff;\n\t"
    "selp.u32 %0, 1, 0, chosen;\n\t"
    "}"
    : "=r"(chosen));
  return chosen != 0;
}

}  // namespace ptx
