// Value warps: V to float16 in tensor memory, as the A operand of the output MMA.
#pragma once
#include "arithmetic.cuh"
#include "blackwell_plan.cuh"
#include "convert.cuh"
#include "convert_fp4.cuh"
#include "fence.cuh"
#include "ldmatrix.cuh"
#include "logic.cuh"
#include "opaque.cuh"

namespace blackwell {

// What a thread reads of every page, as offsets into the stage.
struct ValueLane {
  u32 codes;   // its row of the first two pairs of 8x8 matrices
  u32 scales;  // the scales of its four tokens, of the first 16
};

__device__ __forceinline__ ValueLane value_lane(u32 warp, u32 lane) {
  // Matrix lane / 8: even tokens, odd tokens of 16 tokens, then of the next 16. The tile is seen as 64 rows
  // of two tokens; the 128B swizzle moves 16-byte chunk c of row r to c ^ (r % 8).
  const u32 row = lane % 8;
  const u32 odd = lane / 8 % 2;
  const u32 block = lane / 16;
  const u32 chunk = 4 * odd + warp;
  return {block * 1024 + row * 128 + ((chunk ^ row) << 4), lane % 4 * 32 + (2 * warp + lane / 16) * 4};
}

// A stale scale may be NaN, which the MMA would carry into every head through 0 * NaN: the scales of the
// tokens that the row does not see become zero. Codes are always finite.
__device__ __forceinline__ void clear_stale_scales(Stage& stage, u32 live) {
  const u32 thread = threadIdx.x % ROLE_THREADS;
  // Two words of one quad of tokens: byte t of a word belongs to token t of the quad.
  const u32 quad = thread / 4 * 4;
  const u32 keep = live > quad ? min(live - quad, 4u) : 0;
  const u32 mask = keep == 4 ? ~0u : (1u << 8 * keep) - 1;
  uint2* words = reinterpret_cast<uint2*>(stage.value_scales) + thread;
  *words = make_uint2(words->x & mask, words->y & mask);
  // The next bytes written here come from a bulk copy.
  ptx::fence_proxy_async_shared_cta();
  ptx::barrier_cta_sync(VALUE_BARRIER, ROLE_THREADS);
}

// a where the mask has ones, b elsewhere.
__device__ __forceinline__ u32 select(u32 a, u32 b, u32 mask) { return ptx::lop3_b32<0xE4>(a, b, mask); }

// Eight token pairs of one dim parity: E2M1 codes of two tokens in each byte, times the two scales of the
// pair. Exact: a product of a 2-bit and a 4-bit significand, between 2^-10 and 2688.
__device__ __forceinline__ void widen(u32 codes, u32 scales_01, u32 scales_23, u32* values) {
  values[0] = ptx::mul_rn_f16x2(ptx::cvt_rn_f16x2_e2m1x2<0>(codes), scales_01);
  values[1] = ptx::mul_rn_f16x2(ptx::cvt_rn_f16x2_e2m1x2<2>(codes), scales_23);
  values[2] = ptx::mul_rn_f16x2(ptx::cvt_rn_f16x2_e2m1x2<1>(codes), scales_01);
  values[3] = ptx::mul_rn_f16x2(ptx::cvt_rn_f16x2_e2m1x2<3>(codes), scales_23);
}

// Warp w turns dims 32w to 32w + 31 of all tokens: chunk w of every row.
__device__ __forceinline__ void transpose_values(
    const Stage& stage, u32 destination, const ValueLane& where) {
  const ptx::SharedAddress codes = ptx::shared_address(stage.values) + where.codes;
  const u8* scales = stage.value_scales + where.scales;
  constexpr u32 BLOCKS = 4;  // of 16 tokens in a store
#pragma unroll
  for (u32 first = 0; first < PAGE_TOKENS / 16; first += BLOCKS) {
    u32 even_dims[4 * BLOCKS];
    u32 odd_dims[4 * BLOCKS];
#pragma unroll
    for (u32 pair = 0; pair < BLOCKS; pair += 2) {
      u32 words[4];
      ptx::ldmatrix_x4_trans_b16(codes + (first + pair) * 1024, words);
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 block = pair + i;
        const u32 scale = *reinterpret_cast<const u32*>(scales + (first + block) * 128);
        const u32 scales_01 = ptx::cvt_rn_f16x2_e4m3x2(static_cast<u16>(scale));
        const u32 scales_23 = ptx::cvt_rn_f16x2_e4m3x2(static_cast<u16>(scale >> 16));
        // Even and odd token of four bytes of two dims each; a byte is to hold one dim of both tokens.
        const u32 even = words[2 * i];
        const u32 odd = words[2 * i + 1];
        widen(select(even, odd << 4, 0x0F0F0F0F), scales_01, scales_23, even_dims + 4 * block);
        widen(select(even >> 4, odd, 0x0F0F0F0F), scales_01, scales_23, odd_dims + 4 * block);
      }
    }
    ptx::tcgen05_st_16x256b(destination + first * 8, even_dims);
    ptx::tcgen05_st_16x256b(destination + first * 8 + (16u << 16), odd_dims);
  }
}

__device__ __forceinline__ void value_role(Shared& shared, const Schedule& schedule, u32 tensor, u32 warp) {
  const u32 lane = threadIdx.x % 32;
  const bool leader = ptx::elect_sync();
  ValueLane where = value_lane(warp, lane);
  ptx::opaque(where.codes);
  ptx::opaque(where.scales);
  const u32 quarter = tensor + lanes_of_warp(warp);
  Ring<SELECTIONS> slot;
  PageSequence sequence;
  for (u32 round = 0; round < schedule.count; ++round, slot.advance()) {
    wait(shared.selection_full[slot.index], slot.parity);
    const Selection& selection = shared.selections[slot.index];
    for_each_page(shared, sequence, selection.count, selection.whole, [&](const auto& page, u32 i) {
      Stage& stage = page.stage();
      wait(page.stage_barriers().full, sequence.stage_parity);
      if (!page.IN_PAIR) {
        if (const u32 live = selection.pages[i].live; live < PAGE_TOKENS) {
          clear_stale_scales(stage, live);
        }
      }
      // The page that had the buffer before is through both MMAs, which execute in the order of their issue.
      wait(page.barriers().output_done, sequence.parity ^ 1);
      ptx::tcgen05_fence_after_thread_sync();
      transpose_values(stage, quarter + page.tensor(TENSOR_VALUES), where);
      ptx::tcgen05_wait_st();
      ptx::tcgen05_fence_before_thread_sync();
      __syncwarp();
      if (leader) {
        ptx::mbarrier_arrive(ptx::shared_address(&page.barriers().values_full));
        ptx::mbarrier_arrive(ptx::shared_address(&page.stage_barriers().free));
      }
    });
    arrive_warp(shared.selection_free[slot.index], leader);
  }
}

}  // namespace blackwell
