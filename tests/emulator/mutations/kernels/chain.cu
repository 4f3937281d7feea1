// Two rounds through the same tensor memory: A goes in by tcgen05.st, D = A B.T comes out by tcgen05.ld and is
// overwritten by the next round. a: [2][128][16] 16-bit words, b: [16][16]; out: [2][128][16] float.
#include "fence.cuh"
#include "instructions.cuh"
#include "mbarrier.cuh"

constexpr u32 N = 16, LBO = 128, SBO = 256;
// Columns of tensor memory: D in 0..15, A (two elements a column) in 16..23.
constexpr u32 A_COLUMN = fault == Fault::operand_overlaps_result ? 8 : 16;
constexpr u32 INSTRUCTION = 1u << 4 | (N >> 3) << 17 | (128 >> 4) << 24;

__device__ constexpr u32 place(u32 row, u32 k) { return ((row % 8) * 16 + row / 8 * SBO + k / 8 * LBO) / 2 + k % 8; }

extern "C" __global__ void __launch_bounds__(128) chain(const u32* a, const u16* b, float* out) {
  __shared__ alignas(1024) u16 operand[N * 16];
  __shared__ u64 done;
  __shared__ u32 holder;
  const u32 thread = threadIdx.x, warp = thread / 32, bar = ptx::shared_address(&done);
  if (warp == 0) {
    ptx::tcgen05_alloc(ptx::shared_address(&holder), 32);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  if (thread == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  for (u32 i = thread; i < N * 16; i += 128) operand[place(i / 16, i % 16)] = b[i];
  ptx::fence_proxy_async_shared_cta();
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  const u32 tensor = holder, window = warp * 32 << 16;
  for (u32 round = 0; round < 2; ++round) {
    u32 words[8];
    for (u32 i = 0; i < 8; ++i) words[i] = a[(round * 128 + thread) * 8 + i];
    const u32 stored = fault == Fault::store_in_wrong_window ? window ^ (32 << 16) : window;
    ptx::tcgen05_st_32x32b(tensor + stored + A_COLUMN, words);  // <- store_in_wrong_window missing_wait_st operand_overlaps_result missing_wait_for_mma
    if (fault != Fault::missing_wait_st) ptx::tcgen05_wait_st();
    if (fault != Fault::missing_fence_before) ptx::tcgen05_fence_before_thread_sync();
    if (fault != Fault::missing_barrier) __syncthreads();
    if (thread == 0) {
      if (fault != Fault::missing_fence_after) ptx::tcgen05_fence_after_thread_sync();
      const u64 descriptor = u64((ptx::shared_address(operand) & 0x3ffff) >> 4) | u64(LBO >> 4) << 16 | u64(SBO >> 4) << 32 | 1ull << 46;
      ptx::tcgen05_mma_f16_tensor_shared(tensor, tensor + A_COLUMN, descriptor, INSTRUCTION, 0);  // <- missing_wait_st missing_fence_before missing_barrier missing_fence_after operand_overlaps_result missing_wait_ld missing_wait_for_mma same_phase_twice
      ptx::tcgen05_commit(bar);
    }
    __syncwarp();
    if (fault != Fault::missing_wait_for_mma) {
      const u32 parity = fault == Fault::same_phase_twice ? 0 : round;
      ptx::mbarrier_wait_parity(bar, parity);
    }
    ptx::tcgen05_fence_after_thread_sync();
    u32 r[16];
    ptx::tcgen05_ld_32x32b(tensor + window, r);  // <- missing_wait_for_mma same_phase_twice missing_wait_ld
    if (fault != Fault::missing_wait_ld) ptx::tcgen05_wait_ld(r);
    if (fault == Fault::missing_wait_ld && round == 0) continue;
    for (u32 i = 0; i < N; ++i) out[(round * 128 + thread) * N + i] = __uint_as_float(r[i]);
  }
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (warp == 0) ptx::tcgen05_dealloc(tensor, 32);
}
