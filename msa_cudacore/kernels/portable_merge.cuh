// After an item's last page: the partials of its warps are merged into one for each page slot, and those into
// the CTA's partial of the item. Sums run in a fixed order.
//
// A partial of a row is its softmax origin, its sum of P and its sums of P V. To merge partials, each is
// scaled by 2^(its origin - the largest origin) and added.
#pragma once
#include "opaque.cuh"
#include "portable_cooperative.cuh"

constexpr float kLn2 = 0.693147180559945309f;
constexpr int kMergeThreads = kPairs ? kItemThreads / 2 : kItemThreads;  // a power of two
constexpr int kPartDims =
    kHeads * kHeadDim / kMergeThreads;  // dims of one head that a thread merges: 16, 8 or 4

// ---- Results

// Where a thread's part of a head's result goes.
struct ResultPlace {
  u8 *out, *lse;
  float v_global_scale;
};

__device__ __forceinline__ ResultPlace result_place(const Arguments& args, const ItemRow& item, int head,
                                                    int dim) {
  const i64 q_head = item.kv_head * args.group + head;
  return {args.out + item.row * args.out_row + q_head * args.out_head + dim * 2,
          args.lse + item.row * args.lse_row + q_head * args.lse_head, args.v_global_scale};
}

// The same, computed here and not at its use: ahead of a wait, because this is the first read of these
// parameters.
__device__ __forceinline__ ResultPlace result_place_now(const Arguments& args, const ItemRow& item, int head,
                                                        int dim) {
  const ResultPlace place = result_place(args, item, head, dim);
  u64 out_at = reinterpret_cast<u64>(place.out), lse_at = reinterpret_cast<u64>(place.lse);
  u32 v_global_scale = __float_as_uint(place.v_global_scale);
  ptx::opaque(out_at);
  ptx::opaque(lse_at);
  ptx::opaque(v_global_scale);
  return {reinterpret_cast<u8*>(out_at), reinterpret_cast<u8*>(lse_at), __uint_as_float(v_global_scale)};
}

// Natural logarithm of the sum of exponentials, -inf without keys. lift: see RowScale. An origin beyond 2^50
// is all logit, kHeadroom being lost in its rounding.
__device__ __forceinline__ void store_lse(u8* to, float origin, float sum, float lift) {
  const float lifted = fabsf(origin) > 0x1p50f ? origin * lift : origin;
  const float lse = sum == 0.0f ? __int_as_float(0xFF800000) : (lifted + ptx::lg2_approx_ftz_f32(sum)) * kLn2;
  *reinterpret_cast<float*>(to) = lse;
}

// Divides by the row's sum and multiplies by the factors that decoding left out; zero for a row without keys.
__device__ __forceinline__ float output_factor(float v_global_scale, float sum) {
  return sum == 0.0f ? 0.0f : v_global_scale * kCodeUnit / sum;
}

__device__ __forceinline__ void store_bf16(u8* at, float x) {
  *reinterpret_cast<u16*>(at) = static_cast<u16>(ptx::cvt_rn_bf16x2_f32(0.0f, x));
}

// Stores four dims at a time; the groups of four are `stride` dims apart.
template <int n>
__device__ __forceinline__ void store_output(u8* at, float factor, const float4 (&out)[n], int stride = 4) {
  uint2* to = reinterpret_cast<uint2*>(at);
#pragma unroll
  for (int i = 0; i < n; ++i)
    to[i * (stride / 4)] = make_uint2(ptx::cvt_rn_bf16x2_f32(out[i].y * factor, out[i].x * factor),
                                      ptx::cvt_rn_bf16x2_f32(out[i].w * factor, out[i].z * factor));
}

// ---- Warps of a CTA

// A thread's share of a partial: kDims dims of a head, in groups of four that are kStride apart.
template <int kDims, int kStride = 4>
struct MergedPart {
  static constexpr int kStep = kStride;
  int head, dim;
  float origin, sum;
  float4 out[kDims / 4];
};

// Stores a thread's share as the result. scales: RowScale of the item's rows.
template <int kDims, int kStride>
__device__ __forceinline__ void store_result(const ResultPlace& to, const MergedPart<kDims, kStride>& part,
                                             SharedAddress scales) {
  store_output(to.out, output_factor(to.v_global_scale, part.sum), part.out, kStride);
  if (part.dim == 0)
    store_lse(to.lse, part.origin, part.sum, ptx::ld_shared_f32(scales + part.head * 8 + 4));
}

// Shares of kDims dims; all heads and dims take as many threads as that gives. Neighbouring threads have
// neighbouring groups of dims, so that together they store whole sectors.
template <int kDims>
using ThreadPart = MergedPart<kDims, 4 * kHeadDim / kDims>;

template <int kDims>
__device__ __forceinline__ ThreadPart<kDims> part_of_thread(int thread) {
  constexpr int kPartsPerHead = kHeadDim / kDims;
  ThreadPart<kDims> part;
  part.head = thread / kPartsPerHead;
  part.dim = thread % kPartsPerHead * 4;
  return part;
}

// The final origin and the sum of row g (row 0) or g + 8 (row 1) of a warp. A row with far logits has a
// reference instead of an origin, in shared memory where the origin will be stored. It is loaded here, so
// that it can be ahead of the stores of the accumulators, behind which it would be waited for.
struct WarpRow {
  int row, head;
  SharedAddress stats;
  float reference, scale;

  __device__ __forceinline__ WarpRow(const SlotAddresses& slot, int warp, int lane, int row, u32 of_item)
      : row(row),
        head((lane >> 2) + 8 * row),
        stats(slot.warp_stats(warp) + head * 8),
        reference(ptx::ld_shared_f32(stats)),
        scale(ptx::ld_shared_f32(slot.fixed + kSlotScales + of_item * kScaleBytes + head * 8)) {}
  __device__ __forceinline__ float origin(float near) const {
    return reference == kNoReference ? near : fmaf(reference, scale, kHeadroom);
  }
  __device__ __forceinline__ float origin(const WarpState& state) const {
    return origin(row ? state.origin[1] : state.origin[0]);
  }
  __device__ __forceinline__ float sum(const WarpState& state) const {
    return row ? state.sum[2] : state.sum[0];
  }
};

// Stores a warp's 16 x 128 accumulators, or eight rows of them (half 0 or 1), at `to`: rows of 4 lines (t) of
// 32 dims, 16-byte chunks swizzled by lane. The rows' origins and sums are stored with half 0.
constexpr int kBothHalves = -1;

template <int half = kBothHalves>
__device__ __forceinline__ void publish_warp(const WarpState& state, const SlotAddresses& slot,
                                             SharedAddress to, int warp, int lane, u32 of_item = 0) {
  const int g = lane >> 2, t = lane & 3;
  if (half != 1 && t == 0) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const WarpRow mine(slot, warp, lane, row, of_item);
      ptx::st_shared_v2_f32(mine.stats, mine.origin(state.origin[row]), state.sum[2 * row]);
    }
  }
  const u32 base = to + g * 512 + t * 128, swizzle = (lane & 7) * 16;
  constexpr int first = half == 1 ? 2 : 0, end = half == 0 ? 2 : 4;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int x = first; x < end; ++x)
      ptx::st_shared_v4_f32(base + (x - first >> 1) * 4096 + (swizzle ^ (i * 16 + (x & 1) * 64)),
                            state.out[4 * i][x], state.out[4 * i + 1][x], state.out[4 * i + 2][x],
                            state.out[4 * i + 3][x]);
}

// Cooperating warps of a page have nothing to merge: each holds a slice, and a lane holds 2 * kSliceCodes
// places of row g (row 0) and of row g + 8. Places are dims, except with two warps to a slice: then a slice's
// first 16 places are its even dims and the other 16 its odd ones.
constexpr bool kPlacesAreDims = !kCooperative || kSliceWarps == 1;

__device__ __forceinline__ int head_of_slice(int lane, int row) { return (lane >> 2) + 8 * row; }
__device__ __forceinline__ int dim_of_slice(u32 warp, int lane) {
  return (warp * 4 + (lane & 3)) * (2 * kSliceCodes);
}

__device__ __forceinline__ MergedPart<2 * kSliceCodes> slice_of(const SliceState& state, SharedAddress slot,
                                                                u32 warp, int lane, int row) {
  MergedPart<2 * kSliceCodes> part;
  part.head = head_of_slice(lane, row);
  part.dim = dim_of_slice(warp, lane);
  if constexpr (!kDirectSlices) {
    const float scale = ptx::ld_shared_f32(slot + kSlotScales + part.head * 8);
    part.origin = fmaf(state.reference[row], scale, kHeadroom);
    part.sum = state.sum[2 * row];
  }
  if constexpr (kSliceCodes == 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      part.out[half] = make_float4(state.out[0][2 * row + half], state.out[1][2 * row + half],
                                   state.out[2][2 * row + half], state.out[3][2 * row + half]);
  } else {
    part.out[0] = make_float4(state.out[0][2 * row], state.out[1][2 * row], state.out[0][2 * row + 1],
                              state.out[1][2 * row + 1]);
  }
  return part;
}

__device__ __forceinline__ int dim_of_place(int place) {
  return kPlacesAreDims ? place : (place & ~31) | (place & 15) << 1 | (place >> 4 & 1);
}

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& x) {
  sum.x = fmaf(factor, x.x, sum.x);
  sum.y = fmaf(factor, x.y, sum.y);
  sum.z = fmaf(factor, x.z, sum.z);
  sum.w = fmaf(factor, x.w, sum.w);
}

// Merges a second partial, (origin, sum) and sums of values, into a thread's share of a first.
template <int kDims, int kStride>
__device__ __forceinline__ void merge_second(MergedPart<kDims, kStride>& part, float2 stats,
                                             const float4 (&out)[kDims / 4]) {
  const float origin = fmaxf(part.origin, stats.x);
  const float kept = ptx::ex2_approx_ftz_f32(part.origin - origin),
              factor = ptx::ex2_approx_ftz_f32(stats.x - origin);
  part.origin = origin;
  part.sum = fmaf(factor, stats.y, kept * part.sum);
#pragma unroll
  for (int i = 0; i < kDims / 4; ++i) {
    float4& x = part.out[i];
    x = make_float4(kept * x.x, kept * x.y, kept * x.z, kept * x.w);
    add_scaled(x, factor, out[i]);
  }
}

// Merges kPartials partials, kDims dims a thread. load_stats(p, head): origin and sum of a head in partial p.
// load(p, head, dim): four dims of it. All loads come before the arithmetic, which would delay them.
template <int kPartials, int kDims, typename LoadStats, typename Load>
__device__ __forceinline__ ThreadPart<kDims> merge_partials(int thread, const LoadStats& load_stats,
                                                            const Load& load) {
  ThreadPart<kDims> part = part_of_thread<kDims>(thread);
  float2 stats[kPartials];
  float4 partial[kPartials][kDims / 4];
#pragma unroll
  for (int p = 0; p < kPartials; ++p) stats[p] = load_stats(p, part.head);
#pragma unroll
  for (int p = 0; p < kPartials; ++p)
#pragma unroll
    for (int i = 0; i < kDims / 4; ++i) partial[p][i] = load(p, part.head, part.dim + part.kStep * i);
  part.origin = kNoOrigin;
#pragma unroll
  for (int p = 0; p < kPartials; ++p) part.origin = fmaxf(part.origin, stats[p].x);
  part.sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kDims / 4; ++i) part.out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int p = 0; p < kPartials; ++p) {
    const float factor = ptx::ex2_approx_ftz_f32(stats[p].x - part.origin);
    part.sum = fmaf(factor, stats[p].y, part.sum);
#pragma unroll
    for (int i = 0; i < kDims / 4; ++i) add_scaled(part.out[i], factor, partial[p][i]);
  }
  return part;
}

// Where publish_warp stores four dims of a head.
__device__ __forceinline__ SharedAddress place_in_warp(SharedAddress ring, int head, int dim) {
  const u32 line = dim >> 5, swizzle = ((head & 1) * 4 + line) * 16, chunk = (dim & 31) >> 2;
  return ring + head * 512 + line * 128 + (swizzle ^ (chunk * 16));
}

__device__ __forceinline__ float4 load_warp(SharedAddress ring, int head, int dim) {
  return ptx::ld_shared_v4_f32(place_in_warp(ring, head, dim));
}

// Merges the warps of a page slot; the result replaces the partial of the first one. A thread overwrites only
// what no other reads. So page slots that end first are merged while others still have pages.
__device__ __forceinline__ void merge_page(const SlotAddresses& slot, SharedAddress page_ring, u32 page_slot,
                                           int thread) {
  const u32 first = page_slot * kWarpsPerPage;
  const auto part = merge_partials<kWarpsPerPage, kHeads * kHeadDim / (32 * kWarpsPerPage)>(
      thread,
      [&](int warp, int head) { return ptx::ld_shared_v2_f32(slot.warp_stats(first + warp) + head * 8); },
      [&](int warp, int head, int dim) { return load_warp(page_ring + warp * kWarpRingBytes, head, dim); });
  __syncwarp();  // the head's threads, all of this warp, have read its origins
  if (part.dim == 0) ptx::st_shared_v2_f32(slot.warp_stats(first) + part.head * 8, part.origin, part.sum);
  int dim = part.dim;
#pragma unroll
  for (const float4& x : part.out) {
    ptx::st_shared_v4_f32(place_in_warp(page_ring, part.head, dim), x.x, x.y, x.z, x.w);
    dim += part.kStep;
  }
}

// ---- Warps of a page that divide their sums

// With four page slots an item the warps of a page divide the merge: warp w merges out[4 * w] to
// out[4 * w + 3] of all warps. It keeps its own of these in registers and publishes the others as its lanes
// hold them, [16][32 lanes][16 bytes]. The end of an item waits for shared memory, which moves a quarter less
// this way. With fewer page slots it gained nothing.
constexpr bool kDividedSums = !kCooperative && kPageSlots == 4;

struct OwnSums {
  float4 out[4];
};

template <int part>
__device__ __forceinline__ void publish_all_but(const WarpState& state, SharedAddress at, OwnSums& own) {
#pragma unroll
  for (int o = 0; o < 16; ++o) {
    const float (&x)[4] = state.out[o];
    if (o / 4 == part)
      own.out[o % 4] = make_float4(x[0], x[1], x[2], x[3]);
    else
      ptx::st_shared_v4_f32(at + o * 512, x[0], x[1], x[2], x[3]);
  }
}

__device__ __forceinline__ OwnSums publish_others(const WarpState& state, const SlotAddresses& slot,
                                                  SharedAddress ring, int warp, u32 part, int lane,
                                                  u32 of_item = 0) {
  const WarpRow mine(slot, warp, lane, lane & 1, of_item);
  OwnSums own;
  const SharedAddress at = ring + lane * 16;
  if (part == 0) publish_all_but<0>(state, at, own);
  if (part == 1) publish_all_but<1>(state, at, own);
  if (part == 2) publish_all_but<2>(state, at, own);
  if (part == 3) publish_all_but<3>(state, at, own);
  const float origin = mine.origin(state);
  __syncwarp();  // all lanes have read their references
  if ((lane & 2) == 0) ptx::st_shared_v2_f32(mine.stats, origin, mine.sum(state));
  return own;
}

// Where the merged sums of a page slot have four dims of a head, in the ring of its first warp:
// [4 warps][16 heads][8 chunks], swizzled by warp and head. A warp's part replaces published sums that only
// this warp reads. Behind all of it are the heads' (origin, sum).
__device__ __forceinline__ SharedAddress place_in_page(SharedAddress page_ring, int head, int dim) {
  const u32 part = dim >> 2 & 3, half = dim >> 4 & 1, t = dim >> 5;
  return page_ring + part * 2048 + head * 128 + (t ^ part) * 32 + ((half ^ head) & 1) * 16;
}
constexpr u32 kPageStats = kHeads * kHeadDim * 4;
static_assert(!kDividedSums || kWarpRingBytes >= kPageStats + kHeads * 8);

// Adds row g or g + 8 of the lane's four accumulators out[4 * part] to out[4 * part + 3] of a warp: four dims
// from 32 * t + 4 * part, and four from 16 behind that.
__device__ __forceinline__ void add_row(float4 (&merged)[2], float factor, const float4 (&x)[4], u32 row) {
  add_scaled(merged[0], factor, row == 0 ? make_float4(x[0].x, x[1].x, x[2].x, x[3].x)
                                         : make_float4(x[0].z, x[1].z, x[2].z, x[3].z));
  add_scaled(merged[1], factor, row == 0 ? make_float4(x[0].y, x[1].y, x[2].y, x[3].y)
                                         : make_float4(x[0].w, x[1].w, x[2].w, x[3].w));
}

__device__ __forceinline__ void merge_divided(const OwnSums& own, const SlotAddresses& slot,
                                              SharedAddress page_ring, u32 page_slot, u32 part, int lane) {
  const u32 first = page_slot * kWarpsPerPage, g = lane >> 2, t = lane & 3;
  const auto other = [&](u32 k) { return part ^ k; };  // k 0: this warp
  const SharedAddress to = place_in_page(page_ring, g, 32 * t + 4 * part),
                      from = page_ring + part * 2048 + lane * 16;
  float2 stats[2][kWarpsPerPage];
  float4 sums[kWarpsPerPage][4];
#pragma unroll
  for (u32 k = 0; k < kWarpsPerPage; ++k)
#pragma unroll
    for (u32 row = 0; row < 2; ++row)
      stats[row][k] = ptx::ld_shared_v2_f32(slot.warp_stats(first + other(k)) + (g + 8 * row) * 8);
#pragma unroll
  for (u32 k = 0; k < kWarpsPerPage; ++k)
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      sums[k][i] = k == 0 ? own.out[i] : ptx::ld_shared_v4_f32(from + other(k) * kWarpRingBytes + i * 512);
  __syncwarp();  // what the lanes of this warp have read is overwritten
#pragma unroll
  for (u32 row = 0; row < 2; ++row) {
    float origin = kNoOrigin, sum = 0.0f;
    float4 merged[2] = {};
#pragma unroll
    for (const float2& of_warp : stats[row]) origin = fmaxf(origin, of_warp.x);
#pragma unroll
    for (u32 k = 0; k < kWarpsPerPage; ++k) {
      const float factor = ptx::ex2_approx_ftz_f32(stats[row][k].x - origin);
      sum = fmaf(factor, stats[row][k].y, sum);
      add_row(merged, factor, sums[k], row);
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
      ptx::st_shared_v4_f32((to ^ (half * 16)) + row * 1024, merged[half].x, merged[half].y, merged[half].z,
                            merged[half].w);
    if (part == 0 && t == 0) ptx::st_shared_v2_f32(page_ring + kPageStats + (g + 8 * row) * 8, origin, sum);
  }
}

// ---- Page slots of a CTA whose warps cooperate

// Stores a warp's slice over the first stage of its ring and its tokens' sums; the page's first warp stores
// the origins. Chunks of 16 bytes are swizzled by row where a row fills all banks.
__device__ __forceinline__ void publish_slice(const SliceState& state, const SlotAddresses& slot,
                                              SharedAddress ring, u32 page_slot, u32 warp, int lane) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const auto part = slice_of(state, slot.fixed, warp, lane, row);
    if ((lane & 3) == 0) {
      ptx::st_shared_f32(slot.sums(page_slot, part.head) + warp * 4, part.sum);
      if (warp == 0) ptx::st_shared_f32(slot.warp_stats(page_slot) + part.head * 4, part.origin);
    }
#pragma unroll
    for (int i = 0; i < kSliceCodes / 2; ++i) {
      const u32 chunk = (lane & 3) * (kSliceCodes / 2) + i, swizzle = kPlacesAreDims ? part.head & 7 : 0;
      const float4& x = part.out[i];
      ptx::st_shared_v4_f32(ring + part.head * kSliceRowBytes + (chunk ^ swizzle) * 16, x.x, x.y, x.z, x.w);
    }
  }
}

// Four dims of a head out of the slices of a page slot.
__device__ __forceinline__ float4 load_slices(SharedAddress page_ring, int head, int dim) {
  const SharedAddress row = page_ring + dim / 32 * kSliceWarps * kWarpRingBytes + head * kSliceRowBytes;
  if constexpr (kPlacesAreDims) {
    return ptx::ld_shared_v4_f32(row + (((dim & 31) >> 2) ^ (head & 7)) * 16);
  } else {
    const float2 even = ptx::ld_shared_v2_f32(row + (dim & 31) * 2),
                 odd = ptx::ld_shared_v2_f32(row + (dim & 31) * 2 + kWarpRingBytes);
    return make_float4(even.x, odd.x, even.y, odd.y);
  }
}

// ---- An item in a CTA

// A row's sum out of those of the page's warps, each of its own tokens.
__device__ __forceinline__ float sum_of_warps(SharedAddress sums) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarpsPerPage; w += 4) {
    const float4 x = ptx::ld_shared_v4_f32(sums + w * 4);
    sum += (x.x + x.y) + (x.z + x.w);
  }
  return sum;
}

// Merges what has been published into the CTA's partial: the page slots, or the warps of the only one.
__device__ __forceinline__ ThreadPart<kPartDims> merge_item(const SlotAddresses& slot,
                                                            SharedAddress item_ring, int thread) {
  constexpr int kPartials = !kCooperative && kPageSlots == 1 ? kWarpsPerPage : kOwnSlots;
  constexpr int kWarpsEach = kPageSlots == 1 ? kItemWarps / kPartials : kWarpsPerPage;
  const auto ring_of = [&](int partial) { return item_ring + partial * kWarpsEach * kWarpRingBytes; };
  return merge_partials<kPartials, kPartDims>(
      thread,
      [&](int partial, int head) {
        if constexpr (kCooperative)
          return make_float2(ptx::ld_shared_f32(slot.warp_stats(partial) + head * 4),
                             sum_of_warps(slot.sums(partial, head)));
        else if constexpr (kDividedSums)
          return ptx::ld_shared_v2_f32(ring_of(partial) + kPageStats + head * 8);
        else
          return ptx::ld_shared_v2_f32(slot.warp_stats(partial * kWarpsEach) + head * 8);
      },
      [&](int partial, int head, int dim) {
        if constexpr (kCooperative)
          return load_slices(ring_of(partial), head, dim);
        else if constexpr (kDividedSums)
          return ptx::ld_shared_v4_f32(place_in_page(ring_of(partial), head, dim));
        else
          return load_warp(ring_of(partial), head, dim);
      });
}
