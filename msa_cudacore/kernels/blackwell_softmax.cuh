// Softmax warps: scores out of tensor memory, weights P^T as float16 into shared memory.
//
// Thread = token of the page. All 128 threads keep one origin for each head, set by the largest score of the
// item's first page; weights are 2^(score - origin). The origin moves, and the accumulator with it, only when
// a score passes it by more than float16 can hold, so the accumulator is hardly ever touched. A common origin
// costs one barrier a page, and lets one accumulator of 16 columns serve the item.
#pragma once
#include "arithmetic.cuh"
#include "blackwell_plan.cuh"
#include "convert.cuh"
#include "fence.cuh"
#include "opaque.cuh"
#include "packed_f32.cuh"
#include "shared_memory.cuh"

namespace blackwell {

// The largest score of a page at which origins are set gets the weight 2^11, and weights may grow to 2^15,
// half of what float16 holds, before origins move. Below the largest score lie 25 binades of full precision:
// the keys beside an attention sink, whose weights are small and whose values are what counts, keep theirs.
constexpr float LARGEST_SCORE = 11.0f;
constexpr float ORIGIN_MARGIN = 15.0f;

// Heads as eight pairs, for the packed instructions. origin is kept negated.
struct SoftmaxState {
  u64 unit[HEADS / 2];
  u64 minus_origin[HEADS / 2];
  u64 sum[HEADS / 2];
  float limit;  // a score beyond it moves the origins; -inf before the item's first page
};

// Scores of this thread's token relative to the origins, in base-2 logarithm units.
__device__ __forceinline__ void load_scores(u32 source, const SoftmaxState& state, float (&y)[HEADS]) {
  u32 large[2 * HEADS];  // column groups 0 and 1
  u32 small[HEADS];      // column group 2
  ptx::tcgen05_ld_32x32b(source, large);
  ptx::tcgen05_ld_32x32b(source + 2 * HEADS, small);
  ptx::tcgen05_wait_ld(large, small);
  const u64 step = ptx::pack_f32x2(GROUP_STEP, GROUP_STEP);
  const u64 step_squared = ptx::pack_f32x2(GROUP_STEP * GROUP_STEP, GROUP_STEP * GROUP_STEP);
#pragma unroll
  for (u32 pair = 0; pair < HEADS / 2; ++pair) {
    const auto group = [pair](const u32* registers) {
      return ptx::pack_f32x2(__uint_as_float(registers[2 * pair]), __uint_as_float(registers[2 * pair + 1]));
    };
    u64 score = ptx::fma_f32x2(group(small), step_squared, group(large));
    score = ptx::fma_f32x2(group(large + HEADS), step, score);
    ptx::unpack_f32x2(
        ptx::fma_f32x2(score, state.unit[pair], state.minus_origin[pair]), y[2 * pair], y[2 * pair + 1]);
  }
}

__device__ __forceinline__ float largest(const float (&y)[HEADS]) {
  float top = fmaxf(y[0], y[1]);
#pragma unroll
  for (u32 head = 2; head < HEADS; head += 2) {
    top = fmaxf(top, fmaxf(y[head], y[head + 1]));
  }
  return top;
}

// Reduces each of 16 values over the lanes: lane l ends up with value l / 2. Each step halves the values a
// lane carries.
template <class Operation>
__device__ __forceinline__ float reduce_over_lanes(float (&values)[HEADS], u32 lane, Operation combine) {
#pragma unroll
  for (u32 width = HEADS / 2; width >= 1; width /= 2) {
    const bool upper = lane & 2 * width;
#pragma unroll
    for (u32 i = 0; i < width; ++i) {
      const float sent = upper ? values[i] : values[i + width];
      const float kept = upper ? values[i + width] : values[i];
      values[i] = combine(kept, __shfl_xor_sync(~0u, sent, 2 * width));
    }
  }
  return combine(values[0], __shfl_xor_sync(~0u, values[0], 1));
}

// The accumulator of the item, in this warp's quarter, times `factor` of its column's head.
__device__ __forceinline__ void rescale_output(u32 output, const float (&factor)[HEADS]) {
  u32 values[HEADS];
  ptx::tcgen05_ld_32x32b(output, values);
  ptx::tcgen05_wait_ld(values);
#pragma unroll
  for (u32 head = 0; head < HEADS; ++head) {
    values[head] = __float_as_uint(__uint_as_float(values[head]) * factor[head]);
  }
  ptx::tcgen05_st_32x32b(output, values);
  ptx::tcgen05_wait_st();
}

// Moves the origins up after the largest scores of this page, over all four warps, and y, sums and
// accumulator with them. The output MMA of the page before must be done before the accumulator is touched.
__device__ __forceinline__ void move_origins(
    Shared& shared, u32 warp, u32 lane, u32 output, PageBarriers& before, u32 parity_before,
    SoftmaxState& state, float (&y)[HEADS]) {
  const bool first = state.limit < ORIGIN_MARGIN;
  state.limit = ORIGIN_MARGIN;
  float values[HEADS];
#pragma unroll
  for (u32 head = 0; head < HEADS; ++head) {
    values[head] = y[head];
  }
  const float top_of_warp = reduce_over_lanes(values, lane, [](float a, float b) { return fmaxf(a, b); });
  if (lane % 2 == 0) {
    shared.exchange[warp][lane / 2] = top_of_warp;
  }
  ptx::barrier_cta_sync(SOFTMAX_BARRIER, ROLE_THREADS);
  float top = shared.exchange[0][lane % HEADS];
#pragma unroll
  for (u32 other = 1; other < ROLE_WARPS; ++other) {
    top = fmaxf(top, shared.exchange[other][lane % HEADS]);
  }
  const float shift = first ? top - LARGEST_SCORE : fmaxf(top - LARGEST_SCORE, 0.0f);
  float factor[HEADS];
#pragma unroll
  for (u32 pair = 0; pair < HEADS / 2; ++pair) {
    const float low = __shfl_sync(~0u, shift, 2 * pair);
    const float high = __shfl_sync(~0u, shift, 2 * pair + 1);
    y[2 * pair] -= low;
    y[2 * pair + 1] -= high;
    state.minus_origin[pair] = ptx::add_f32x2(state.minus_origin[pair], ptx::pack_f32x2(-low, -high));
    factor[2 * pair] = ptx::ex2_approx_ftz_f32(-low);
    factor[2 * pair + 1] = ptx::ex2_approx_ftz_f32(-high);
    if (!first) {
      state.sum[pair] =
          ptx::mul_f32x2(state.sum[pair], ptx::pack_f32x2(factor[2 * pair], factor[2 * pair + 1]));
    }
  }
  if (!first) {
    wait(before.output_done, parity_before);
    ptx::tcgen05_fence_after_thread_sync();
    rescale_output(output, factor);
  }
}

// Row of a token in P^T: 32 bytes, whose two halves swap places in every second group of four rows (32B
// swizzle).
__device__ __forceinline__ ptx::SharedAddress weights_row(const u8* weights, u32 token, u32 half) {
  return ptx::shared_address(weights) + token * 32 + ((token >> 2 & 1 ^ half) << 4);
}

// Eight heads of a token.
__device__ __forceinline__ void store_weights(ptx::SharedAddress to, const float* p) {
  ptx::st_shared_v4_u32(
      to, ptx::cvt_rn_f16x2_f32(p[1], p[0]), ptx::cvt_rn_f16x2_f32(p[3], p[2]),
      ptx::cvt_rn_f16x2_f32(p[5], p[4]), ptx::cvt_rn_f16x2_f32(p[7], p[6]));
}

// What the edge warps need to finish the item.
__device__ __forceinline__ void publish_sums(
    Shared& shared, u32 warp, u32 lane, u32 item_buffer, u32 pages, SoftmaxState& state, bool leader) {
  float sums[HEADS];
#pragma unroll
  for (u32 pair = 0; pair < HEADS / 2; ++pair) {
    ptx::unpack_f32x2(state.sum[pair], sums[2 * pair], sums[2 * pair + 1]);
  }
  const float total = reduce_over_lanes(sums, lane, [](float a, float b) { return a + b; });
  if (lane % 2 == 0) {
    shared.totals[item_buffer][warp][lane / 2] = total;
  }
  if (warp == 0 && lane == 0) {
#pragma unroll
    for (u32 pair = 0; pair < HEADS / 2; ++pair) {
      reinterpret_cast<u64*>(shared.minus_origin[item_buffer])[pair] = state.minus_origin[pair];
    }
    shared.item_pages[item_buffer] = pages;
  }
  arrive_warp(shared.item_done[item_buffer], leader);
}

__device__ __forceinline__ void softmax_role(Shared& shared, const Schedule& schedule, u32 tensor, u32 warp) {
  const u32 lane = threadIdx.x % 32;
  const bool leader = ptx::elect_sync();
  const u32 quarter = tensor + lanes_of_warp(warp);
  u32 token = threadIdx.x % ROLE_THREADS;
  ptx::SharedAddress low_heads = weights_row(shared.weights[0], token, 0);
  ptx::SharedAddress high_heads = weights_row(shared.weights[0], token, 1);
  ptx::opaque(token);
  ptx::opaque(low_heads);
  ptx::opaque(high_heads);
  Ring<SELECTIONS> slot;
  Ring<BUFFERS> item_buffer;
  PageSequence sequence;
  for (u32 round = 0; round < schedule.count; ++round, slot.advance(), item_buffer.advance()) {
    wait(shared.query_full[item_buffer.index], item_buffer.parity);
    SoftmaxState state;
    const u64* unit = reinterpret_cast<const u64*>(shared.query_unit[item_buffer.index]);
#pragma unroll
    for (u32 pair = 0; pair < HEADS / 2; ++pair) {
      state.unit[pair] = unit[pair];
      state.minus_origin[pair] = 0;
      state.sum[pair] = 0;
    }
    state.limit = minus_infinity();
    const u32 output = quarter + TENSOR_OUTPUT + item_buffer.index * TENSOR_ITEM;
    wait(shared.selection_full[slot.index], slot.parity);
    const Selection& selection = shared.selections[slot.index];
    const u32 count = selection.count;
    for_each_page(shared, sequence, count, selection.whole, [&](const auto& page, u32 i) {
      wait(page.barriers().scores_full, sequence.parity);
      ptx::tcgen05_fence_after_thread_sync();
      float y[HEADS];
      load_scores(quarter + page.tensor(TENSOR_SCORES), state, y);
      if (!page.IN_PAIR) {
        // A select, never a product: what a stale token's NaN scale made of its scores goes no further.
        const u32 live = selection.pages[i].live;
#pragma unroll
        for (u32 head = 0; head < HEADS; ++head) {
          y[head] = token < live ? y[head] : minus_infinity();
        }
      }
      // Not "greater": a NaN counts, which is how the first page of a query of NaNs gets its origins.
      const bool too_large = !(largest(y) <= state.limit);
      // The vote tells the compiler that the warps stay whole.
      if (__any_sync(~0u, ptx::barrier_cta_red_or(SOFTMAX_BARRIER, ROLE_THREADS, too_large))) {
        move_origins(shared, warp, lane, output, page.barriers_before(), page.parity_before(), state, y);
      }
#pragma unroll
      for (u32 head = 0; head < HEADS; ++head) {
        y[head] = ptx::ex2_approx_ftz_f32(y[head]);
      }
#pragma unroll
      for (u32 pair = 0; pair < HEADS / 2; ++pair) {
        state.sum[pair] = ptx::add_f32x2(state.sum[pair], ptx::pack_f32x2(y[2 * pair], y[2 * pair + 1]));
      }
      // The buffer is free: these scores were complete after the output of two pages before, whose MMAs went
      // out earlier.
      store_weights(low_heads + page.buffer * WEIGHTS_BYTES, y);
      store_weights(high_heads + page.buffer * WEIGHTS_BYTES, y + HEADS / 2);
      ptx::fence_proxy_async_shared_cta();
      // Also says that this page's scores have been read and that a moved accumulator is back.
      ptx::tcgen05_fence_before_thread_sync();
      arrive_warp(page.barriers().weights_full, leader);
    });
    arrive_warp(shared.selection_free[slot.index], leader);
    publish_sums(shared, warp, lane, item_buffer.index, count, state, leader);
  }
}

}  // namespace blackwell
