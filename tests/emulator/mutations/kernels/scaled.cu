// D = sum of scaled NVFP4 products: M = 128, N = 8, K = 64 in one tcgen05.mma. Codes come by ordinary stores, the scales
// of A by tcgen05.cp and those of B by tcgen05.st.
// a: [128][8] words of eight codes, b: [8][8], a_scales: [128] words of four scales, b_scales: [8]; out: [128][8] float.
#include "fence.cuh"
#include "instructions.cuh"
#include "mbarrier.cuh"

constexpr u32 N = 8, LBO = 128, SBO = 256;
// Columns: D in 0..7, scales of A in 8..11, scales of B in 12.
constexpr u32 A_SCALES = fault == Fault::scales_overlap_result ? 4 : 8, B_SCALES = 12;

__device__ constexpr u64 descriptor_of(u32 address, u32 leading, u32 stride) {
  return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 46;
}

struct Shared {
  alignas(1024) u32 a[128 * 8];
  alignas(1024) u32 b[N * 8];
  alignas(1024) u32 scales[128];
  u64 done;
  u32 tensor;
};

// Word offset of word w of a row: K is 32 bytes, two cores of 16.
__device__ constexpr u32 place(u32 row, u32 w) { return ((row % 8) * 16 + row / 8 * SBO + w / 4 * LBO) / 4 + w % 4; }

extern "C" __global__ void __launch_bounds__(128)
    scaled(const u32* a, const u32* b, const u32* a_scales, const u32* b_scales, float* out) {
  __shared__ Shared shared;
  const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, bar = ptx::shared_address(&shared.done);
  if (warp == 0) {
    ptx::tcgen05_alloc(ptx::shared_address(&shared.tensor), 32);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  if (thread == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  for (u32 i = thread; i < 128 * 8; i += 128) shared.a[place(i / 8, i % 8)] = a[i];
  for (u32 i = thread; i < N * 8; i += 128) shared.b[place(i / 8, i % 8)] = b[i];
  // The copy engine wants the words of rows t, t + 32, t + 64, t + 96 side by side.
  shared.scales[thread % 32 * 4 + thread / 32] = a_scales[thread];
  ptx::fence_proxy_async_shared_cta();
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  const u32 tensor = shared.tensor;
  u32 words[8];
  for (u32 i = 0; i < 8; ++i) words[i] = lane < N ? b_scales[lane] : 0;
  if (fault != Fault::scales_in_one_quarter || warp == 0) {
    ptx::tcgen05_st_32x32b(tensor + (warp * 32 << 16) + B_SCALES, words);
  }
  ptx::tcgen05_wait_st();
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (thread == 0) {
    ptx::tcgen05_fence_after_thread_sync();
    constexpr u32 scale_id = fault == Fault::illegal_scale_id ? 1u << 29 : 0;
    constexpr u32 format = fault == Fault::code_of_other_kind ? 5u << 7 : 1u << 7;
    constexpr u32 m = fault == Fault::illegal_m ? 0 : 1u << 27;
    constexpr u32 major = fault == Fault::transposed_operand ? 1u << 15 : 0;
    constexpr u32 instruction = format | 1u << 10 | (N >> 3) << 17 | m | scale_id | major;
    ptx::tensor_copy_scales(tensor + A_SCALES, descriptor_of(ptx::shared_address(shared.scales), 16, 128));  // <- scales_overlap_result
    ptx::tcgen05_mma_mxf4nvf4_shared_shared(tensor, descriptor_of(ptx::shared_address(shared.a), LBO, SBO), descriptor_of(ptx::shared_address(shared.b), LBO, SBO), instruction, tensor + A_SCALES, tensor + (fault == Fault::scales_never_written ? 24 : B_SCALES), 0);  // <- scales_in_one_quarter illegal_scale_id code_of_other_kind illegal_m transposed_operand scales_never_written scales_overlap_result scales_overwritten
    ptx::tcgen05_commit(bar);
  }
  __syncwarp();
  if (fault == Fault::scales_overwritten && warp == 0) ptx::tcgen05_st_32x32b(tensor + B_SCALES, words);  // <- scales_overwritten
  ptx::mbarrier_wait_parity(bar, 0);
  ptx::tcgen05_fence_after_thread_sync();
  u32 r[16];
  ptx::tcgen05_ld_32x32b(tensor + (warp * 32 << 16), r);
  ptx::tcgen05_wait_ld(r);
  for (u32 i = 0; i < N; ++i) out[thread * N + i] = __uint_as_float(r[i]);
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (warp == 0) ptx::tcgen05_dealloc(tensor, 32);
}
