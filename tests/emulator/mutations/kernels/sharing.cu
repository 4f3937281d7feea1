// Two warps turn 64 words round through shared memory and the block adds its sum to one word of global memory.
#include "barrier.cuh"
#include "instructions.cuh"

__constant__ u32 weights[4] = {1, 2, 3, 4};

extern "C" __global__ void __launch_bounds__(64) sharing(const u32* in, u32* out, u32* total) {
  __shared__ u32 words[64];
  __shared__ u32 unused[64];
  const u32 thread = threadIdx.x, n = 64 * gridDim.x;
  const u32 i = 64 * blockIdx.x + thread;
  // volatile keeps the table in local memory.
  volatile u32 table[4];
#pragma unroll
  for (u32 k = 0; k < 4; ++k) table[k] = thread * k;
  const u32 source = fault == Fault::global_load_past_the_end ? i + n : fault == Fault::global_load_before_the_start ? i - n : i;
  words[thread] = in[source];  // <- global_load_past_the_end global_load_before_the_start missing_barrier
  if (fault == Fault::barrier_in_divergent_code) {
    if (thread % 2 == 0) __syncthreads();  // <- barrier_in_divergent_code
    if (thread % 2 == 1) __syncthreads();  // <- barrier_in_divergent_code
  } else if (fault == Fault::one_warp_skips_barrier) {
    if (thread < 32) ptx::barrier_cta_sync(1, 64);  // <- one_warp_skips_barrier
  } else if (fault == Fault::barriers_of_different_names) {
    ptx::barrier_cta_sync(1 + thread / 32, 64);  // <- barriers_of_different_names
  } else if (fault == Fault::barrier_of_no_warp_multiple) {
    ptx::barrier_cta_sync(1, 48);  // <- barrier_of_no_warp_multiple
  } else if (fault == Fault::barrier_waits_for_too_many) {
    ptx::barrier_cta_sync(1, 96);  // <- barrier_waits_for_too_many
  } else if (fault == Fault::warp_barrier_only) {
    __syncwarp();
  } else if (fault != Fault::missing_barrier) {
    __syncthreads();
  }
  const u32 shift = fault == Fault::shared_load_past_the_end ? 0x40000 : fault == Fault::misaligned_shared_load ? 2 : 0;
  u32 turned = ptx::ld_shared(ptx::shared_address(&words[63 - thread]) + shift);  // <- missing_barrier one_warp_skips_barrier warp_barrier_only shared_load_past_the_end misaligned_shared_load
  if (fault == Fault::uninitialised_shared) turned += unused[thread];  // <- uninitialised_shared
  const u32 k = turned % 4;
  if (fault == Fault::local_past_the_end) {
    turned += table[k + 0x100000];  // <- local_past_the_end
  } else {
    turned += table[k];
  }
  turned += weights[fault == Fault::constant_past_the_end ? k + 0x100000 : k];  // <- constant_past_the_end
  if (fault == Fault::misaligned_global_store) {
    *reinterpret_cast<uint2*>(out + i) = make_uint2(turned, turned);  // <- misaligned_global_store
  } else {
    out[fault == Fault::two_blocks_one_word ? thread : i] = turned;  // <- two_blocks_one_word
  }
  if (fault == Fault::plain_add) {
    total[0] += turned;  // <- plain_add
  } else {
    atomicAdd(total, turned);
  }
  if (fault == Fault::shuffle_from_absent_lane && thread % 32 < 16) {
    out[i] = __shfl_sync(0xffffffffu, turned, 20);  // <- shuffle_from_absent_lane
  }
  if (fault == Fault::membermask_without_itself) ptx::bar_warp_sync(0x7fffffffu);  // <- membermask_without_itself
}
