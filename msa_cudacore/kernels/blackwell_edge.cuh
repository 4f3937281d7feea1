// Edge warps: what happens once an item, beside the page loop. Before its pages: q becomes a sum of NVFP4 terms. After them:
// the accumulator becomes rows of out and lse, through a merge over the cluster for a split item.
#pragma once
#include "arithmetic.cuh"
#include "blackwell_plan.cuh"
#include "convert.cuh"
#include "convert_fp4.cuh"
#include "fence.cuh"
#include "packed_f32.cuh"

namespace blackwell {

constexpr float LN_2 = 0.693147180559945f;

// ---- q as a sum of terms -----------------------------------------------------------------------------------------------

constexpr u32 BLOCK = 16;  // elements that share a scale; thread = block of one head

// Exponent of the largest element of a row of q after scaling: the scales of a term, a quarter of it, stay below 256.
constexpr i32 TOP_EXPONENT = 9;

// E4M3 scale for a block whose largest magnitude is 4x, as its value and its byte: x truncated to E4M3's four significant
// bits, so that the largest element gets the code 4 and leaves exactly its lower bits. Of an element of eight bits that
// dwarfs the others of its block two terms leave nothing, and the others keep four. Below 2^-6 the step is 2^-9, and x is
// rounded up.
__device__ __forceinline__ float scale_e4m3(float x, u32& byte) {
  constexpr float LEAST_NORMAL = 0x1p-6f;
  const u32 normal = __float_as_uint(x) & 0xFFF00000u;
  const float steps = ceilf(x * 0x1p9f);
  const bool subnormal = x < LEAST_NORMAL;
  byte = subnormal ? static_cast<u32>(steps) : (normal >> 20) - (127 - 7) * 8;
  return subnormal ? steps * 0x1p-9f : __uint_as_float(normal);
}

// Sixteen elements as pairs, for the packed instructions.
struct Block {
  u64 pairs[BLOCK / 2];

  __device__ __forceinline__ float largest_magnitude() const {
    float top = 0.0f;
#pragma unroll
    for (u32 i = 0; i < BLOCK / 2; ++i) {
      float low, high;
      ptx::unpack_f32x2(pairs[i], low, high);
      top = fmaxf(top, fmaxf(fabsf(low), fabsf(high)));
    }
    return top;
  }

  __device__ __forceinline__ Block times(float factor) const {
    Block product;
#pragma unroll
    for (u32 i = 0; i < BLOCK / 2; ++i) {
      product.pairs[i] = ptx::mul_f32x2(pairs[i], ptx::pack_f32x2(factor, factor));
    }
    return product;
  }
};

struct Term {
  uint2 codes;
  u32 scale;
};

// Codes of eight elements, and the elements less the codes times the scale.
__device__ __forceinline__ u32 take_codes(u64* rest, const u64* scaled, float scale) {
  float elements[8];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    ptx::unpack_f32x2(scaled[i], elements[2 * i], elements[2 * i + 1]);
  }
  const u32 codes = ptx::cvt_rn_satfinite_e2m1x8_f32(elements);
  const u32 values[4] = {
      ptx::cvt_rn_f16x2_e2m1x2<0>(codes), ptx::cvt_rn_f16x2_e2m1x2<1>(codes), ptx::cvt_rn_f16x2_e2m1x2<2>(codes),
      ptx::cvt_rn_f16x2_e2m1x2<3>(codes)};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    float low, high;
    ptx::cvt_f32_f16x2(values[i], low, high);
    rest[i] = ptx::fma_f32x2(ptx::pack_f32x2(low, high), ptx::pack_f32x2(-scale, -scale), rest[i]);
  }
  return codes;
}

// The NVFP4 term nearest to the block in units of `unit`, which is subtracted from it.
__device__ __forceinline__ Term take_term(Block& block, float unit) {
  Term term;
  const float scale = scale_e4m3(block.largest_magnitude() * (0.25f / unit), term.scale) * unit;
  // An all-zero block has scale zero; the products below must still be finite.
  const float inverse = scale > 0.0f ? ptx::rcp_approx_ftz_f32(scale) : 0.0f;
  const Block scaled = block.times(inverse);
  term.codes.x = take_codes(block.pairs, scaled.pairs, scale);
  term.codes.y = take_codes(block.pairs + 4, scaled.pairs + 4, scale);
  return term;
}

// Eight threads hold a row of q, of one query head; heads beyond the group are zero.
__device__ __forceinline__ Block load_query_block(const Arguments& arguments, const Item& item) {
  const u32 thread = threadIdx.x % ROLE_THREADS;
  const u32 head = thread / 8;
  uint4 halves[2] = {};
  if (head < arguments.group) {
    const u8* row = arguments.q + item.row * arguments.q_row + (item.kv_head * arguments.group + head) * arguments.q_head;
    const uint4* source = reinterpret_cast<const uint4*>(row + thread % 8 * BLOCK * 2);
    halves[0] = source[0];
    halves[1] = source[1];
  }
  Block block;
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const u32 words[4] = {halves[half].x, halves[half].y, halves[half].z, halves[half].w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      block.pairs[4 * half + i] =
          ptx::pack_f32x2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xFFFF0000u));
    }
  }
  return block;
}

// Scales the row by a power of two that puts its largest element between 2^TOP_EXPONENT and twice that, and returns the
// factor that undoes it. Rows below 2^-116 are scaled as far as a float can: their scores are zero all the same. A row with
// an infinity or NaN becomes zero with the factor NaN, and so its scores NaN.
__device__ __forceinline__ float normalise(Block& block) {
  // NaN is larger than infinity as an integer, where fmaxf would lose it.
  u32 top = 0;
#pragma unroll
  for (u32 i = 0; i < BLOCK / 2; ++i) {
    top = max(top, static_cast<u32>(block.pairs[i]) & 0x7FFFFFFFu);
    top = max(top, static_cast<u32>(block.pairs[i] >> 32) & 0x7FFFFFFFu);
  }
#pragma unroll
  for (u32 distance = 1; distance < 8; distance *= 2) {
    top = max(top, __shfl_xor_sync(~0u, top, distance));
  }
  if (top >= 0x7F800000u) {
    block = {};
    return not_a_number();
  }
  const i32 exponent = static_cast<i32>(top >> 23) - 127;
  const i32 shift = min(TOP_EXPONENT - exponent, 126);
  block = block.times(__uint_as_float(static_cast<u32>(127 + shift) << 23));
  return __uint_as_float(static_cast<u32>(127 - shift) << 23);
}

// Query terms to shared memory, their scales to tensor memory, the units of the scores to shared memory. The buffer is
// free: these warps have finished the item before last, whose MMAs were the last to read it.
__device__ __forceinline__ void prepare_query(
    Shared& shared, const Arguments& arguments, const Item& item, u32 item_buffer, u32 tensor) {
  const u32 thread = threadIdx.x % ROLE_THREADS;
  const u32 warp = thread / 32;
  const u32 lane = thread % 32;
  const u32 head = thread / 8;
  const u32 group = thread % 8;
  Block block = load_query_block(arguments, item);
  const float unit = normalise(block);
  if (group == 0) {
    shared.query_unit[item_buffer][head] = unit * arguments.score_scale;
  }
#pragma unroll
  for (u32 index = 0; index < PASSES * COLUMN_GROUPS; ++index) {
    const u32 column_group = index / PASSES;
    constexpr float UNITS[COLUMN_GROUPS] = {1.0f, GROUP_STEP, GROUP_STEP * GROUP_STEP};
    const Term term = take_term(block, UNITS[column_group]);
    const u32 row = column_group * HEADS + head;
    // 64B swizzle: address bits 5:4 take bits 8:7, which are bits 2:1 of the row.
    u8* codes = shared.query_terms[item_buffer][index % PASSES] + row * (HEAD_DIM / 2);
    *reinterpret_cast<uint2*>(codes + (group * 8 ^ (row >> 1 & 3) << 4)) = term.codes;
    shared.query_scales[item_buffer][index % PASSES][row * 8 + group] = static_cast<u8>(term.scale);
  }
  ptx::fence_proxy_async_shared_cta();
  ptx::barrier_cta_sync(EDGE_BARRIER, ROLE_THREADS);

  // Row n of B takes its scales from lane n % 32 of any quarter, column n / 32.
  u32 words[8];
#pragma unroll
  for (u32 pass = 0; pass < PASSES; ++pass) {
    const uint2* scales = reinterpret_cast<const uint2*>(shared.query_scales[item_buffer][pass]);
    const uint2 low = scales[lane];
    const uint2 high = lane + 32 < SCORE_COLUMNS ? scales[lane + 32] : make_uint2(0, 0);
    words[4 * pass] = low.x;
    words[4 * pass + 1] = high.x;
    words[4 * pass + 2] = low.y;
    words[4 * pass + 3] = high.y;
  }
  ptx::tcgen05_st_32x32b(tensor + lanes_of_warp(warp) + TENSOR_QUERY_SCALES + item_buffer * TENSOR_ITEM, words);
  ptx::tcgen05_wait_st();
  ptx::tcgen05_fence_before_thread_sync();
  arrive_warp(shared.query_full[item_buffer]);
}

// ---- output ------------------------------------------------------------------------------------------------------------

// Writes COUNT heads of this thread's dim, times the factors of the heads: factor of head `first` + h is in lane h. Lanes
// l and l + 16 hold neighbouring dims, so each takes half of the heads and writes both dims of them.
template <u32 COUNT>
__device__ __forceinline__ void store_heads(
    const Arguments& arguments, const Item& item, u32 first, const float (&output)[COUNT], float factor) {
  const u32 warp = threadIdx.x / 32 % 4;
  const u32 lane = threadIdx.x % 32;
  const bool upper = lane >= 16;
  const u32 dim = 32 * warp + dim_of_lane(lane % 16);
  u8* row = arguments.out + item.row * arguments.out_row + dim * 2;
#pragma unroll
  for (u32 i = 0; i < COUNT / 2; ++i) {
    const float own = upper ? output[COUNT / 2 + i] : output[i];
    const float other = __shfl_xor_sync(~0u, upper ? output[i] : output[COUNT / 2 + i], 16);
    const u32 position = upper ? COUNT / 2 + i : i;
    const float scale = __shfl_sync(~0u, factor, position);
    const u32 pair = upper ? ptx::cvt_rn_bf16x2_f32(own * scale, other * scale)
                           : ptx::cvt_rn_bf16x2_f32(other * scale, own * scale);
    const u32 head = first + position;
    if (head < arguments.group) {
      *reinterpret_cast<u32*>(row + (item.kv_head * arguments.group + head) * arguments.out_head) = pair;
    }
  }
}

// lse of one head, by one lane; total is zero for a row that sees no key.
__device__ __forceinline__ void store_lse(
    const Arguments& arguments, const Item& item, u32 head, float origin, float total) {
  if (head < arguments.group) {
    const float lse = total == 0.0f ? minus_infinity() : (origin + ptx::lg2_approx_ftz_f32(total)) * LN_2;
    u8* address = arguments.lse + item.row * arguments.lse_row + (item.kv_head * arguments.group + head) * arguments.lse_head;
    *reinterpret_cast<float*>(address) = lse;
  }
}

// Factor from the accumulator to out; exact zero for a row that sees no key.
__device__ __forceinline__ float output_factor(const Arguments& arguments, float total) {
  return total == 0.0f ? 0.0f : arguments.v_global_scale / total;
}

// Sends this CTA's part of each head to the CTA that merges the head. Completes MERGE_BYTES / SPLITS at every CTA.
__device__ __forceinline__ void send_part(Shared& shared, u32 rank, const float (&output)[HEADS], const HeadSum& sum) {
  const u32 thread = threadIdx.x % ROLE_THREADS;
#pragma unroll
  for (u32 owner = 0; owner < SPLITS; ++owner) {
    const ptx::SharedAddress full = ptx::mapa_shared_cluster(ptx::shared_address(&shared.merge_full), owner);
    const ptx::SharedAddress to = ptx::mapa_shared_cluster(ptx::shared_address(shared.merge_outputs[rank][thread]), owner);
    const float* part = output + owner * MERGE_HEADS;
    if constexpr (MERGE_HEADS == 2) {
      ptx::st_async_v2(to, part[0], part[1], full);
    } else {
#pragma unroll
      for (u32 head = 0; head < MERGE_HEADS; head += 4) {
        ptx::st_async_v4(to + head * 4, part[head], part[head + 1], part[head + 2], part[head + 3], full);
      }
    }
  }
  if (thread < HEADS) {
    const u32 owner = thread / MERGE_HEADS;
    const ptx::SharedAddress full = ptx::mapa_shared_cluster(ptx::shared_address(&shared.merge_full), owner);
    const ptx::SharedAddress to =
        ptx::mapa_shared_cluster(ptx::shared_address(&shared.merge_sums[rank][thread % MERGE_HEADS]), owner);
    ptx::st_async_v2(to, sum.origin, sum.total, full);
  }
}

// Merges the parts of MERGE_HEADS heads that the CTAs of the cluster have sent here, in the order of their ranks.
__device__ __forceinline__ void merge_parts(Shared& shared, const Arguments& arguments, const Item& item, u32 rank) {
  const u32 thread = threadIdx.x % ROLE_THREADS;
  const u32 lane = threadIdx.x % 32;
  wait(shared.merge_full, 0);
  float merged[MERGE_HEADS];
  float factor = 0.0f;
#pragma unroll
  for (u32 head = 0; head < MERGE_HEADS; ++head) {
    float origin = minus_infinity();
#pragma unroll
    for (u32 part = 0; part < SPLITS; ++part) {
      origin = fmaxf(origin, shared.merge_sums[part][head].origin);
    }
    float total = 0.0f;
    merged[head] = 0.0f;
#pragma unroll
    for (u32 part = 0; part < SPLITS; ++part) {
      const HeadSum sum = shared.merge_sums[part][head];
      // A part without keys has the origin -inf, which must not meet another -inf.
      const float weight = sum.total == 0.0f ? 0.0f : ptx::ex2_approx_ftz_f32(sum.origin - origin);
      total = fmaf(sum.total, weight, total);
      merged[head] = fmaf(shared.merge_outputs[part][thread][head], weight, merged[head]);
    }
    if (thread == 0) {
      store_lse(arguments, item, rank * MERGE_HEADS + head, origin, total);
    }
    factor = lane == head ? output_factor(arguments, total) : factor;
  }
  store_heads<MERGE_HEADS>(arguments, item, rank * MERGE_HEADS, merged, factor);
}

__device__ __forceinline__ void finish_item(
    Shared& shared, const Arguments& arguments, const Item& item, const Ring<BUFFERS>& item_buffer, u32 tensor, u32 rank) {
  const u32 warp = threadIdx.x / 32 % 4;
  const u32 lane = threadIdx.x % 32;
  wait(shared.item_done[item_buffer.index], item_buffer.parity);
  ptx::tcgen05_fence_after_thread_sync();
  const bool empty = shared.item_pages[item_buffer.index] == 0;
  float output[HEADS] = {};
  HeadSum sum = {minus_infinity(), 0.0f};
  if (!empty) {
    u32 registers[HEADS];
    ptx::tcgen05_ld_32x32b(tensor + lanes_of_warp(warp) + TENSOR_OUTPUT + item_buffer.index * TENSOR_ITEM, registers);
    ptx::tcgen05_wait_ld(registers);
    ptx::tcgen05_fence_before_thread_sync();
#pragma unroll
    for (u32 head = 0; head < HEADS; ++head) {
      output[head] = __uint_as_float(registers[head]);
    }
    sum.origin = shared.origin[item_buffer.index][lane % HEADS];
#pragma unroll
    for (u32 part = 0; part < ROLE_WARPS; ++part) {
      sum.total += shared.totals[item_buffer.index][part][lane % HEADS];
    }
  }
  if constexpr (SPLITS > 1) {
    if (item.split) {
      // The other CTAs have initialised their barriers once the cluster has met.
      ptx::barrier_cluster_wait();
      send_part(shared, rank, output, sum);
      merge_parts(shared, arguments, item, rank);
      return;
    }
  }
  if (warp == 0 && lane < HEADS) {
    store_lse(arguments, item, lane, sum.origin, sum.total);
  }
  store_heads<HEADS>(arguments, item, 0, output, output_factor(arguments, sum.total));
}

// The query of the next item goes ahead of the output of this one: the MMA warp overlaps the two.
__device__ __forceinline__ void edge_role(
    Shared& shared, const Arguments& arguments, const Schedule& schedule, u32 tensor, u32 rank) {
  Ring<BUFFERS> item_buffer;
  bool met = false;
  if (schedule.count > 0) {
    prepare_query(shared, arguments, schedule.item(0), 0, tensor);
  }
  for (u32 round = 0; round < schedule.count; ++round, item_buffer.advance()) {
    if (round + 1 < schedule.count) {
      prepare_query(shared, arguments, schedule.item(round + 1), (round + 1) % BUFFERS, tensor);
    }
    const Item item = schedule.item(round);
    finish_item(shared, arguments, item, item_buffer, tensor, rank);
    met = met || item.split;
  }
  if constexpr (SPLITS > 1) {
    if (!met) {
      ptx::barrier_cluster_wait();
    }
  }
}

}  // namespace blackwell
