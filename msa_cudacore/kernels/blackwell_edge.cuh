// Edge warps: what happens once an item, beside the page loop. Before its pages: q becomes a sum of NVFP4
// terms. After them: the accumulator becomes rows of out and lse, through a merge over the cluster for a
// split item.
#pragma once
#include "arithmetic.cuh"
#include "blackwell_plan.cuh"
#include "convert.cuh"
#include "convert_fp4.cuh"
#include "fence.cuh"
#include "opaque.cuh"
#include "packed_f32.cuh"

namespace blackwell {

constexpr float LN_2 = 0.693147180559945f;

// ---- q as a sum of terms ----------------------------------------------------------------------------------

constexpr u32 BLOCK = 16;  // elements that share a scale; thread = block of one head

// Exponent of the largest element of a row of q after scaling: the scales of a term, a quarter of it, stay
// below 256.
constexpr i32 TOP_EXPONENT = 9;

// A float16 in both halves.
__host__ __device__ constexpr u32 both(u32 bits) { return bits << 16 | bits; }

// Sixteen elements as float16 pairs. bfloat16 has eight significant bits. Multiples of a scale's last bit are
// subtracted, and what a term leaves is at most half a scale, which is 16 of those: every remainder fits
// float16's eleven bits exactly.
struct Block {
  u32 pairs[BLOCK / 2];

  // The largest magnitude, in both halves.
  __device__ __forceinline__ u32 largest() const {
    u32 top = ptx::abs_f16x2(pairs[0]);
#pragma unroll
    for (u32 i = 1; i < BLOCK / 2; ++i) {
      top = ptx::max_f16x2(top, ptx::abs_f16x2(pairs[i]));
    }
    return ptx::max_f16x2(top, top << 16 | top >> 16);
  }

  __device__ __forceinline__ Block times(u32 factor) const {
    Block product;
#pragma unroll
    for (u32 i = 0; i < BLOCK / 2; ++i) {
      product.pairs[i] = ptx::mul_rn_f16x2(pairs[i], factor);
    }
    return product;
  }
};

struct Term {
  uint2 codes;
  u8 scale;
};

// The next NVFP4 term, which is subtracted from the block. Its E4M3 scale is a quarter of the largest
// magnitude, truncated to four significant bits, so that the largest element gets the code 4 and leaves
// exactly its lower bits. Of an element of eight bits that dwarfs the others of its block two terms leave
// nothing, and the others keep four. Below 2^-6, where E4M3 has fewer bits, it is the nearest scale.
__device__ __forceinline__ Term take_term(Block& block) {
  const u32 quarter = ptx::mul_rn_f16x2(block.largest(), both(0x3400)) & both(0xFF80);
  const u16 bytes = ptx::cvt_rn_satfinite_e4m3x2_f16x2(quarter);
  const u32 scale = ptx::cvt_rn_f16x2_e4m3x2(bytes);
  // Where the scale is zero the codes count nothing, but must be finite: the inverse is that of E4M3's least.
  float divisor, same;
  ptx::cvt_f32_f16x2(ptx::max_f16x2(scale, both(0x1800)), divisor, same);
  const float inverse = ptx::rcp_approx_ftz_f32(divisor);
  const Block scaled = block.times(ptx::cvt_rn_f16x2_f32(inverse, inverse));
  u32 codes[2];
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const u32* x = scaled.pairs + 4 * half;
    u32* rest = block.pairs + 4 * half;
    codes[half] = ptx::cvt_rn_satfinite_e2m1x8_f16x2({x[0], x[1], x[2], x[3]});
    // The conversions fill the word's bytes in place only if nothing reads them before.
    ptx::opaque(codes[half]);
    const u32 values[4] = {
        ptx::cvt_rn_f16x2_e2m1x2<0>(codes[half]), ptx::cvt_rn_f16x2_e2m1x2<1>(codes[half]),
        ptx::cvt_rn_f16x2_e2m1x2<2>(codes[half]), ptx::cvt_rn_f16x2_e2m1x2<3>(codes[half])};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      rest[i] = ptx::fma_rn_f16x2(values[i], ptx::neg_f16x2(scale), rest[i]);
    }
  }
  return {make_uint2(codes[0], codes[1]), static_cast<u8>(bytes)};
}

// The block of this thread, of the row of one query head that eight threads hold; heads beyond the group are
// zero. The row is scaled by a power of two that puts its largest element between 2^TOP_EXPONENT and twice
// that, and `unit` undoes it. Rows below 2^-116 are scaled as far as a float can: their scores are zero all
// the same. A row with an infinity or NaN becomes zero with the unit NaN, and so its scores NaN.
__device__ __forceinline__ Block load_query_block(const Arguments& arguments, const Item& item, float& unit) {
  const u32 thread = threadIdx.x % ROLE_THREADS;
  const u32 head = thread / 8;
  uint4 halves[2] = {};
  if (head < arguments.group) {
    const u8* row =
        arguments.q + item.row * arguments.q_row + (item.kv_head * arguments.group + head) * arguments.q_head;
    const uint4* source = reinterpret_cast<const uint4*>(row + thread % 8 * BLOCK * 2);
    halves[0] = source[0];
    halves[1] = source[1];
  }
  const u32 words[BLOCK / 2] = {halves[0].x, halves[0].y, halves[0].z, halves[0].w,
                                halves[1].x, halves[1].y, halves[1].z, halves[1].w};
  // As integers magnitudes are in order, with NaN above infinity, where a maximum of floats would lose it.
  u32 top = 0;
#pragma unroll
  for (const u32 word : words) {
    top = ptx::max_u16x2(top, word & both(0x7FFF));
  }
  top = ptx::max_u16x2(top, top << 16 | top >> 16);
#pragma unroll
  for (u32 distance = 1; distance < 8; distance *= 2) {
    top = ptx::max_u16x2(top, __shfl_xor_sync(~0u, top, distance));
  }
  Block block = {};
  const i32 exponent = static_cast<i32>(top >> 23) - 127;
  if (exponent == 128) {
    unit = not_a_number();
    return block;
  }
  const i32 shift = min(TOP_EXPONENT - exponent, 126);
  unit = __uint_as_float(static_cast<u32>(127 - shift) << 23);
  const float factor = __uint_as_float(static_cast<u32>(127 + shift) << 23);
#pragma unroll
  for (u32 i = 0; i < BLOCK / 2; ++i) {
    float low, high;
    ptx::unpack_f32x2(
        ptx::mul_f32x2(
            ptx::pack_f32x2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xFFFF0000u)),
            ptx::pack_f32x2(factor, factor)),
        low, high);
    block.pairs[i] = ptx::cvt_rn_f16x2_f32(high, low);
  }
  return block;
}

// Query terms and their scales to shared memory for the MMA warp, the units of the scores for the softmax
// warps. The buffer is free: these warps have finished the item before last, whose MMAs were the last to read
// it.
__device__ __forceinline__ void prepare_query(
    Shared& shared, const Arguments& arguments, const Item& item, u32 item_buffer) {
  const u32 thread = threadIdx.x % ROLE_THREADS;
  const u32 head = thread / 8;
  const u32 group = thread % 8;
  float unit;
  Block block = load_query_block(arguments, item, unit);
  if (group == 0) {
    shared.query_unit[item_buffer][head] = unit * arguments.score_scale;
  }
#pragma unroll
  for (u32 index = 0; index < PASSES * COLUMN_GROUPS; ++index) {
    if (index > 0 && index % PASSES == 0) {
      block = block.times(both(GROUP_STEP_INVERSE));
    }
    const Term term = take_term(block);
    const u32 row = index / PASSES * HEADS + head;
    // 64B swizzle: address bits 5:4 take bits 8:7, which are bits 2:1 of the row.
    u8* codes = shared.query_terms[item_buffer][index % PASSES] + row * (HEAD_DIM / 2);
    *reinterpret_cast<uint2*>(codes + (group * 8 ^ (head >> 1 & 3) << 4)) = term.codes;
    // Row n of B takes the word of its scales from lane n % 32, column n / 32.
    shared.query_scales[item_buffer][index % PASSES]
                       [row % 32 * 16 + group / 4 * 8 + row / 32 * 4 + group % 4] = term.scale;
  }
  ptx::fence_proxy_async_shared_cta();
  arrive_warp(shared.query_full[item_buffer], threadIdx.x % 32 == 0);
}

// The scales of rows 48 to 63, which B does not have, and which come along in tcgen05.cp: a word for each
// thread.
__device__ __forceinline__ void clear_padding_scales(Shared& shared) {
  static_assert(BUFFERS * PASSES * 32 == ROLE_THREADS, "sixteen lanes have two such words");
  const u32 thread = threadIdx.x % ROLE_THREADS;
  u32* words = reinterpret_cast<u32*>(shared.query_scales[thread / 64][thread / 32 % 2]);
  words[(16 + thread % 32 / 2) * 4 + thread % 2 * 2 + 1] = 0;
}

// ---- output -----------------------------------------------------------------------------------------------

// Writes COUNT heads of this thread's dim, times the factors of the heads: factor of head `first` + h is in
// lane h. Lanes l and l + 16 hold neighbouring dims: of two heads the lower lane writes both dims of one, the
// upper lane those of the other.
template <u32 COUNT>
__device__ __forceinline__ void store_heads(
    Shared& shared, const Arguments& arguments, const Item& item, u32 first, const float (&output)[COUNT],
    float factor) {
  const u32 warp = threadIdx.x / 32 % 4;
  const u32 lane = threadIdx.x % 32;
  const u32 upper = lane / 16;
  // Every lane needs all factors: shared memory gives four a load, a shuffle one.
  float* factors = shared.factors[warp];
  if (lane < COUNT) {
    factors[lane] = factor;
  }
  __syncwarp();
  const u32 order = upper ? 0x3276 : 0x5410;
  const u32 dim = 32 * warp + dim_of_lane(lane % 16);
  u8* row = arguments.out + item.row * arguments.out_row + dim * 2 +
            (item.kv_head * arguments.group + first + upper) * arguments.out_head;
#pragma unroll
  for (u32 head = 0; head < COUNT; head += 2) {
    float low, high;
    ptx::unpack_f32x2(
        ptx::mul_f32x2(
            ptx::pack_f32x2(output[head], output[head + 1]), reinterpret_cast<const u64*>(factors)[head / 2]),
        low, high);
    const u32 own = ptx::cvt_rn_bf16x2_f32(high, low);
    const u32 other = __shfl_xor_sync(~0u, own, 16);
    if (first + head + upper < arguments.group) {
      *reinterpret_cast<u32*>(row) = __byte_perm(own, other, order);
    }
    row += 2 * arguments.out_head;
  }
  // The next item's factors wait for these loads.
  __syncwarp();
}

// lse of one head, by one lane; total is zero for a row that sees no key.
__device__ __forceinline__ void store_lse(
    const Arguments& arguments, const Item& item, u32 head, float origin, float total) {
  if (head < arguments.group) {
    const float lse = total == 0.0f ? minus_infinity() : (origin + ptx::lg2_approx_ftz_f32(total)) * LN_2;
    u8* address = arguments.lse + item.row * arguments.lse_row +
                  (item.kv_head * arguments.group + head) * arguments.lse_head;
    *reinterpret_cast<float*>(address) = lse;
  }
}

// Factor from the accumulator to out; exact zero for a row that sees no key.
__device__ __forceinline__ float output_factor(const Arguments& arguments, float total) {
  return total == 0.0f ? 0.0f : arguments.v_global_scale * ptx::rcp_approx_ftz_f32(total);
}

// Sends this CTA's part of each head to the CTA that merges the head. Completes MERGE_BYTES / SPLITS at every
// CTA.
__device__ __forceinline__ void send_part(
    Shared& shared, u32 rank, const float (&output)[HEADS], const HeadSum& sum) {
  const u32 thread = threadIdx.x % ROLE_THREADS;
#pragma unroll
  for (u32 owner = 0; owner < SPLITS; ++owner) {
    const ptx::SharedAddress full = ptx::mapa_shared_cluster(ptx::shared_address(&shared.merge_full), owner);
    const ptx::SharedAddress to =
        ptx::mapa_shared_cluster(ptx::shared_address(shared.merge_outputs[rank][thread]), owner);
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

// Merges the parts of MERGE_HEADS heads that the CTAs of the cluster have sent here, in the order of their
// ranks.
__device__ __forceinline__ void merge_parts(
    Shared& shared, const Arguments& arguments, const Item& item, u32 rank) {
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
  store_heads<MERGE_HEADS>(shared, arguments, item, rank * MERGE_HEADS, merged, factor);
}

__device__ __forceinline__ void finish_item(
    Shared& shared, const Arguments& arguments, const Item& item, const Ring<BUFFERS>& item_buffer,
    u32 tensor, u32 rank) {
  const u32 warp = threadIdx.x / 32 % 4;
  const u32 lane = threadIdx.x % 32;
  wait(shared.item_done[item_buffer.index], item_buffer.parity);
  ptx::tcgen05_fence_after_thread_sync();
  const bool empty = shared.item_pages[item_buffer.index] == 0;
  float output[HEADS];
  HeadSum sum = {minus_infinity(), 0.0f};
  if (empty) {
#pragma unroll
    for (float& value : output) {
      value = 0.0f;
    }
  } else {
    u32 registers[HEADS];
    ptx::tcgen05_ld_32x32b(
        tensor + lanes_of_warp(warp) + TENSOR_OUTPUT + item_buffer.index * TENSOR_ITEM, registers);
    ptx::tcgen05_wait_ld(registers);
    ptx::tcgen05_fence_before_thread_sync();
#pragma unroll
    for (u32 head = 0; head < HEADS; ++head) {
      output[head] = __uint_as_float(registers[head]);
    }
    sum.origin = -shared.minus_origin[item_buffer.index][lane % HEADS];
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
  store_heads<HEADS>(shared, arguments, item, 0, output, output_factor(arguments, sum.total));
}

// The query of the next item goes ahead of the output of this one: the MMA warp overlaps the two.
__device__ __forceinline__ void edge_role(
    Shared& shared, const Arguments& arguments, const Schedule& schedule, u32 tensor, u32 rank) {
  Ring<BUFFERS> item_buffer;
  bool met = false;
  Items items(schedule);
  clear_padding_scales(shared);
  if (schedule.count > 0) {
    prepare_query(shared, arguments, items.item, 0);
  }
  for (u32 round = 0; round < schedule.count; ++round, item_buffer.advance()) {
    const Item item = items.item;
    items.advance();
    if (round + 1 < schedule.count) {
      prepare_query(shared, arguments, items.item, (round + 1) % BUFFERS);
    }
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
