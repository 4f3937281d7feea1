// D = A B.T by tcgen05.mma on one CTA: M = 128, N = 16, K = 32, float16 operands written by ordinary stores in the
// unswizzled K-major layout (8-row by 16-byte cores: LBO = 128 between cores along K, SBO = 512 between groups of rows).
// a: [128][32], b: [16][32] as 16-bit words; out: [128][16] float.
#include "fence.cuh"
#include "instructions.cuh"
#include "mbarrier.cuh"

constexpr u32 N = 16, K = 32, LBO = 128, SBO = 512;
constexpr u32 COLUMNS = fault == Fault::columns_not_a_power_of_two ? 48 : fault == Fault::too_many_columns ? 1024 : 32;

__device__ constexpr u64 descriptor_of(u32 address) {
  const u64 version = fault == Fault::descriptor_without_version ? 0 : 1;
  const u64 stride = fault == Fault::wrong_stride ? 0x3000 : SBO;
  const u64 swizzle = fault == Fault::illegal_swizzle ? 3 : 0;
  return u64((address & 0x3ffff) >> 4) | u64(LBO >> 4) << 16 | u64(stride >> 4) << 32 | version << 46 | swizzle << 61;
}

struct Shared {
  alignas(1024) u16 a[128 * K];
  alignas(1024) u16 b[N * K];
  u64 done;
  u32 tensor;
};

// Element offset of (row, k) in units of 16-bit words.
__device__ constexpr u32 place(u32 row, u32 k) { return ((row % 8) * 16 + row / 8 * SBO + k / 8 * LBO) / 2 + k % 8; }

extern "C" __global__ void __launch_bounds__(128) product(const u16* a, const u16* b, float* out) {
  __shared__ Shared shared;
  const u32 thread = threadIdx.x, warp = thread / 32;
  const u32 bar = ptx::shared_address(&shared.done);
  if (warp == 0) {
    if (fault == Fault::alloc_by_one_lane) {
      if (thread == 0) ptx::tcgen05_alloc(ptx::shared_address(&shared.tensor), COLUMNS);  // <- alloc_by_one_lane
    } else {
      ptx::tcgen05_alloc(ptx::shared_address(&shared.tensor), COLUMNS);  // <- columns_not_a_power_of_two too_many_columns missing_dealloc
    }
    ptx::tcgen05_relinquish_alloc_permit();
    if (fault == Fault::alloc_after_relinquish) ptx::tcgen05_alloc(ptx::shared_address(&shared.tensor), COLUMNS);  // <- alloc_after_relinquish
  }
  if (thread == 0) {
    ptx::mbarrier_init(bar, fault == Fault::commit_count ? 2 : 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  for (u32 i = thread; i < 128 * K; i += 128) {
    if (fault == Fault::hole_in_operand && i == 1234) continue;
    shared.a[place(i / K, i % K)] = a[i];  // <- missing_barrier_before_mma
  }
  for (u32 i = thread; i < N * K; i += 128) shared.b[place(i / K, i % K)] = b[i];  // <- missing_barrier_before_mma
  if (fault != Fault::missing_proxy_fence) ptx::fence_proxy_async_shared_cta();
  ptx::tcgen05_fence_before_thread_sync();
  if (fault != Fault::missing_barrier_before_mma) __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  const u32 tensor = shared.tensor;  // <- missing_barrier_before_mma
  if (thread == 0) {
    constexpr u32 n = fault == Fault::illegal_n ? 264 : fault == Fault::n_past_the_allocation ? 64 : N;
    constexpr u32 reserved = fault == Fault::reserved_bit ? 1u << 29 : 0;
    constexpr u32 m = fault == Fault::illegal_m ? 112 : 128;
    constexpr u32 format = fault == Fault::illegal_format ? 3u << 7 : 0;
    constexpr u32 instruction = 1u << 4 | (n >> 3) << 17 | (m >> 4) << 24 | reserved | format;
    const u64 da = descriptor_of(ptx::shared_address(shared.a)), db = descriptor_of(ptx::shared_address(shared.b));
    const u32 first = fault == Fault::accumulates_onto_nothing ? 1 : 0;
    const u32 d = tensor + (fault == Fault::accumulator_past_the_allocation ? 24 : 0);
    ptx::mma_f16_shared(d, da, db, instruction, first);  // <- missing_proxy_fence missing_barrier_before_mma descriptor_without_version illegal_swizzle illegal_n illegal_m illegal_format reserved_bit accumulates_onto_nothing accumulator_past_the_allocation wrong_stride hole_in_operand n_past_the_allocation operand_overwritten
    ptx::mma_f16_shared(d, da + (2 * LBO >> 4), db + (2 * LBO >> 4), instruction, 1);  // <- operand_overwritten missing_wait missing_fence_after hole_in_operand missing_barrier_before_mma
    if (fault != Fault::missing_commit) ptx::tcgen05_commit(bar);
    if (fault == Fault::operand_overwritten) shared.a[place(0, 31)] = 0;  // <- operand_overwritten
  }
  __syncwarp();
  if (fault != Fault::missing_wait) ptx::mbarrier_wait_parity(bar, 0);  // <- missing_commit commit_count
  if (fault != Fault::missing_fence_after) ptx::tcgen05_fence_after_thread_sync();
  u32 r[16];
  const u32 window = fault == Fault::wrong_lane_window ? (warp + 1) % 4 : warp;
  const u32 column = fault == Fault::column_past_the_allocation ? 24 : fault == Fault::columns_never_written ? 8 : 0;
  ptx::tcgen05_ld_32x32b(tensor + (window * 32 << 16) + column, r);  // <- missing_wait missing_fence_after wrong_lane_window column_past_the_allocation columns_never_written missing_barrier_before_dealloc
  ptx::tcgen05_wait_ld(r);
  for (u32 i = 0; i < N; ++i) out[thread * N + i] = __uint_as_float(r[i]);
  ptx::tcgen05_fence_before_thread_sync();
  if (fault != Fault::missing_barrier_before_dealloc) __syncthreads();
  if (warp == 0 && fault != Fault::missing_dealloc) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc(tensor, fault == Fault::dealloc_of_other_size ? 2 * COLUMNS : COLUMNS);  // <- dealloc_of_other_size missing_barrier_before_dealloc
  }
}
