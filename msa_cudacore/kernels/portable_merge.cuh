// After an item's last page: warps, then splits, become one result. Sums run in a fixed order.
#pragma once
#include "atomic.cuh"
#include "cluster.cuh"
#include "fence.cuh"
#include "mbarrier.cuh"
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

// The same, here and now: before a wait, because these are the first reads of their parameters.
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

// Natural logarithm of the sum of exponentials, -inf without keys. Beyond 2^50 an origin is all logit.
__device__ __forceinline__ void store_lse(u8* to, float origin, float sum, float lift) {
  const float lifted = fabsf(origin) > 0x1p50f ? origin * lift : origin;
  const float lse = sum == 0.0f ? __int_as_float(0xFF800000) : (lifted + ptx::lg2_approx_ftz_f32(sum)) * kLn2;
  *reinterpret_cast<float*>(to) = lse;
}

// What divides by the sum, with the factors that decoding left out; a row without keys is exactly zero.
__device__ __forceinline__ float output_factor(float v_global_scale, float sum) {
  return sum == 0.0f ? 0.0f : v_global_scale * kCodeUnit / sum;
}

__device__ __forceinline__ void store_bf16(u8* at, float x) {
  *reinterpret_cast<u16*>(at) = static_cast<u16>(ptx::cvt_rn_bf16x2_f32(0.0f, x));
}

// Four dims at a time, `stride` apart.
template <int n>
__device__ __forceinline__ void store_output(u8* at, float factor, const float4 (&out)[n], int stride = 4) {
  uint2* to = reinterpret_cast<uint2*>(at);
#pragma unroll
  for (int i = 0; i < n; ++i)
    to[i * (stride / 4)] = make_uint2(ptx::cvt_rn_bf16x2_f32(out[i].y * factor, out[i].x * factor),
                                      ptx::cvt_rn_bf16x2_f32(out[i].w * factor, out[i].z * factor));
}

// ---- Warps of a CTA

// kDims dims of a head, four every kStride.
template <int kDims, int kStride = 4>
struct MergedPart {
  static constexpr int kStep = kStride;
  int head, dim;
  float origin, sum;
  float4 out[kDims / 4];
};

// All heads and dims over as many threads as it takes; neighbours have neighbouring dims, so that they store
// whole sectors.
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

// A warp's 16 x 128 accumulators, or eight rows of them (half 0 or 1), at `to`: rows of 4 lines (t) of 32
// dims, 16-byte chunks swizzled by lane. Its origins and sums are told with the first.
constexpr int kBothHalves = -1;

template <int half = kBothHalves>
__device__ __forceinline__ void publish_warp(const WarpState& state, const SlotAddresses& slot,
                                             SharedAddress to, int warp, int lane, u32 of_item = 0) {
  const int g = lane >> 2, t = lane & 3;
  if (half != 1 && t == 0) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // A far row's reference lies where its origin belongs now.
      const SharedAddress stats = slot.warp_stats(warp) + (g + 8 * row) * 8;
      const float reference = ptx::ld_shared_f32(stats);
      const float scale =
          ptx::ld_shared_f32(slot.fixed + kSlotScales + of_item * kScaleBytes + (g + 8 * row) * 8);
      const float origin = reference == kNoReference ? state.origin[row] : fmaf(reference, scale, kHeadroom);
      ptx::st_shared_v2_f32(stats, origin, state.sum[2 * row]);
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

// Cooperating warps of a page have nothing to merge: each holds a slice, a lane 2 * kSliceCodes places of
// row g (row 0) and of row g + 8. Places are dims, but with two warps a slice the first has the even dims and
// then the second has the odd ones.
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

// Partials become one, kDims dims a thread. load_stats: origin and sum of a head in a partial. load: four
// dims of it. All loads come before all arithmetic, which would hold them up.
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

// Where a warp's ring has four dims of a head.
__device__ __forceinline__ SharedAddress place_in_warp(SharedAddress ring, int head, int dim) {
  const u32 line = dim >> 5, swizzle = ((head & 1) * 4 + line) * 16, chunk = (dim & 31) >> 2;
  return ring + head * 512 + line * 128 + (swizzle ^ (chunk * 16));
}

__device__ __forceinline__ float4 load_warp(SharedAddress ring, int head, int dim) {
  return ptx::ld_shared_v4_f32(place_in_warp(ring, head, dim));
}

// The warps of a page become one, which takes the place of the first: a thread overwrites what nobody else
// reads. So the page slots that end first are merged while the others work.
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

// With four page slots an item the warps of a page divide their accumulators: warp w merges out[4 * w] to
// out[4 * w + 3]. Its own stay in registers, the others it publishes as they are, [16][32 lanes][16 bytes].
// The end of an item waits for shared memory, which moves a quarter less this way. With fewer page slots it
// gained nothing.
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

// Row g (even lanes) or g + 8 of a warp: a far row's reference lies where its origin belongs in the end.
// Asked for before the sums are stored, so that it is there behind them.
struct OwnRow {
  int row, head;
  float reference, scale;

  __device__ __forceinline__ OwnRow(const SlotAddresses& slot, int warp, int lane, u32 of_item)
      : row(lane & 1),
        head((lane >> 2) + 8 * row),
        reference(ptx::ld_shared_f32(slot.warp_stats(warp) + head * 8)),
        scale(ptx::ld_shared_f32(slot.fixed + kSlotScales + of_item * kScaleBytes + head * 8)) {}
  __device__ __forceinline__ float origin(const WarpState& state) const {
    const float near = row ? state.origin[1] : state.origin[0];
    return reference == kNoReference ? near : fmaf(reference, scale, kHeadroom);
  }
  __device__ __forceinline__ float sum(const WarpState& state) const {
    return row ? state.sum[2] : state.sum[0];
  }
};

__device__ __forceinline__ OwnSums publish_others(const WarpState& state, const SlotAddresses& slot,
                                                  SharedAddress ring, int warp, u32 part, int lane,
                                                  u32 of_item = 0) {
  const OwnRow mine(slot, warp, lane, of_item);
  OwnSums own;
  const SharedAddress at = ring + lane * 16;
  if (part == 0) publish_all_but<0>(state, at, own);
  if (part == 1) publish_all_but<1>(state, at, own);
  if (part == 2) publish_all_but<2>(state, at, own);
  if (part == 3) publish_all_but<3>(state, at, own);
  const float origin = mine.origin(state);
  __syncwarp();  // all lanes have their references
  if ((lane & 2) == 0)
    ptx::st_shared_v2_f32(slot.warp_stats(warp) + mine.head * 8, origin, mine.sum(state));
  return own;
}

// Four dims of a head out of the merged sums of a page slot, in the ring of its first warp: what a warp has
// merged where nobody else reads or writes, [4 warps][16 heads][8 chunks], swizzled by warp and head. Behind
// that are the (origin, sum) of the heads.
__device__ __forceinline__ SharedAddress place_in_page(SharedAddress page_ring, int head, int dim) {
  const u32 part = dim >> 2 & 3, half = dim >> 4 & 1, t = dim >> 5;
  return page_ring + part * 2048 + head * 128 + (t ^ part) * 32 + ((half ^ head) & 1) * 16;
}
constexpr u32 kPageStats = kHeads * kHeadDim * 4;
static_assert(!kDividedSums || kWarpRingBytes >= kPageStats + kHeads * 8);

// Row g or g + 8 out of a lane's four accumulators of a share: dims 32 * t + 4 * part and 16 more.
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
  __syncwarp();  // what the lanes of this warp have read, they overwrite
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

// A warp's slice replaces the first stage of its ring, and the page's first warp tells origins and sums.
// Chunks of 16 bytes are swizzled by row where a row fills all banks.
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

// A row's sum, of which each warp of the page has that of its tokens.
__device__ __forceinline__ float sum_of_warps(SharedAddress sums) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarpsPerPage; w += 4) {
    const float4 x = ptx::ld_shared_v4_f32(sums + w * 4);
    sum += (x.x + x.y) + (x.z + x.w);
  }
  return sum;
}

// What has been published, warps of the only page slot or page slots, becomes one.
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

// ---- Splits of an item

// Announces what this CTA will receive, before the first load: the fence would hold up what waits for it. The
// CTA arrives at the cluster's barrier later, while its first page is on its way.
__device__ __forceinline__ void open_inbox(SharedAddress slot, bool opens) {
  if (opens) {
    ptx::mbarrier_init(slot + kSlotArrival, 1);
    if constexpr (kDirectSlices) ptx::mbarrier_init(slot + kSlotStatsArrival, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  // ptxas initialises the barrier for the whole warp at once, which compute-sanitizer takes for another lane.
  __syncwarp();
  if (!opens) return;
  constexpr int kReceived = kHalves ? kHeads / 2 : kHeads;
  ptx::mbarrier_arrive_expect_tx(slot + kSlotArrival, kReceived * (kHeadDim * 4 + (kDirectSlices ? 0 : 8)));
  if constexpr (kDirectSlices) ptx::mbarrier_arrive_expect_tx(slot + kSlotStatsArrival, kHeads * 8);
}

// Each CTA of the cluster owns kHeads / kSplits heads and receives their partials from all, itself included.
constexpr int kOwned = kHeads / kSplits;

// Where the owner of a head receives a part of it.
struct Inbox {
  SharedAddress arrival, part;
};

__device__ __forceinline__ Inbox inbox_of(SharedAddress slot, u32 split, u32 head, u32 dim) {
  const u32 owner = head / kOwned, index = split * kOwned + head % kOwned;
  return {ptx::mapa_shared_cluster(slot + kSlotArrival, owner),
          ptx::mapa_shared_cluster(slot + kSlotInbox + index * (kHeadDim * 4) + dim * 4, owner)};
}

// Of a warp's slice. Kept in registers from before the pages on: one wait less at the end.
__device__ __forceinline__ Inbox inbox_of_slice(SharedAddress slot, u32 split, u32 warp, int lane, int row) {
  Inbox inbox = inbox_of(slot, split, head_of_slice(lane, row), dim_of_slice(warp, lane));
  ptx::opaque(inbox.arrival);
  ptx::opaque(inbox.part);
  return inbox;
}

template <int kDims, int kStride>
__device__ __forceinline__ void push_values(const MergedPart<kDims, kStride>& part, const Inbox& to) {
#pragma unroll
  for (int i = 0; i < kDims / 4; ++i)
    ptx::st_async_v4(to.part + i * (kStride * 4), part.out[i].x, part.out[i].y, part.out[i].z, part.out[i].w,
                     to.arrival);
}

template <int kDims, int kStride>
__device__ __forceinline__ void push_partial(const MergedPart<kDims, kStride>& part, SharedAddress slot,
                                             u32 split) {
  const Inbox to = inbox_of(slot, split, part.head, part.dim);
  push_values(part, to);
  const u32 owner = part.head / kOwned, index = split * kOwned + part.head % kOwned;
  if (part.dim == 0)
    ptx::st_async_v2(ptx::mapa_shared_cluster(slot + kSlotInboxStats + index * 8, owner), part.origin,
                     part.sum, to.arrival);
}

// The first warp tells the owners of all heads this CTA's origins and sums, which no value has to be
// multiplied for. any: a page came, and kSlotSums has its warps' sums.
__device__ __forceinline__ void tell_stats(const SliceState& state, SharedAddress slot, int lane, u32 split,
                                           bool any) {
  const u32 g = lane >> 2, t = lane & 3, head = g + 8 * t;
  if (t >= 2) return;
  float sum = 0.0f;
  if (any) sum = sum_of_warps(slot + kSlotSums + head * (kWarpsPerPage * 4));
  const float scale = ptx::ld_shared_f32(slot + kSlotScales + head * 8);
  const float origin = fmaf(t == 0 ? state.reference[0] : state.reference[1], scale, kHeadroom);
  const u32 owner = head / kOwned, index = split * kOwned + head % kOwned;
  ptx::st_async_v2(ptx::mapa_shared_cluster(slot + kSlotInboxStats + index * 8, owner), origin, sum,
                   ptx::mapa_shared_cluster(slot + kSlotStatsArrival, owner));
}

// Waits for what the cluster sends.
__device__ __forceinline__ void wait_for_inbox(SharedAddress arrival) {
  while (!ptx::mbarrier_try_wait_parity_cluster(arrival, 0)) {
  }
}

__device__ __forceinline__ void collect_partials(const Arguments& args, const ItemRow& item,
                                                 SharedAddress slot, u32 split, int thread) {
  // Places of a head for a thread: all threads together take what the CTA owns.
  constexpr int kShare = kOwned * kHeadDim / kItemThreads;
  constexpr int kDims = !kDirectSlices || (kPlacesAreDims && kShare >= 4) ? 4 : kShare >= 2 ? 2 : 1;
  constexpr int kLanes = kHeadDim / kDims;
  const int place = thread % kLanes * kDims;
  const ResultPlace result =
      result_place_now(args, item, split * kOwned + thread / kLanes, dim_of_place(place));
  wait_for_inbox(slot + (kDirectSlices ? kSlotStatsArrival : kSlotArrival));
#pragma unroll
  for (int first = 0; first < kOwned; first += kItemThreads / kLanes) {
    const int owned = first + thread / kLanes, head = split * kOwned + owned;
    if (owned >= kOwned || head >= args.group) continue;
    float2 stats[kSplits];
    float factor[kSplits], origin = kNoOrigin, sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      stats[s] = ptx::ld_shared_v2_f32(slot + kSlotInboxStats + (s * kOwned + owned) * 8);
      origin = fmaxf(origin, stats[s].x);
    }
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      factor[s] = ptx::ex2_approx_ftz_f32(stats[s].x - origin);
      sum = fmaf(factor[s], stats[s].y, sum);
    }
    if (place == 0)
      store_lse(result.lse + first * args.lse_head, origin, sum,
                ptx::ld_shared_f32(slot + kSlotScales + head * 8 + 4));
    u8* const to = result.out + first * args.out_head;
    const float whole = output_factor(result.v_global_scale, sum);
    if constexpr (kDirectSlices) wait_for_inbox(slot + kSlotArrival);
    const SharedAddress partials = slot + kSlotInbox + owned * (kHeadDim * 4) + place * 4;
    if constexpr (kDims == 1) {
      float x[2] = {};
#pragma unroll
      for (int s = 0; s < kSplits; ++s)
        x[s % 2] = fmaf(factor[s], ptx::ld_shared_f32(partials + s * (kOwned * kHeadDim * 4)), x[s % 2]);
      store_bf16(to, (x[0] + x[1]) * whole);
    } else if constexpr (kDims == 2) {
      float2 out = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int s = 0; s < kSplits; ++s) {
        const float2 x = ptx::ld_shared_v2_f32(partials + s * (kOwned * kHeadDim * 4));
        out.x = fmaf(factor[s], x.x, out.x);
        out.y = fmaf(factor[s], x.y, out.y);
      }
      store_bf16(to, out.x * whole);
      store_bf16(to + (kPlacesAreDims ? 2 : 4), out.y * whole);
    } else {
      float4 out[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
      for (int s = 0; s < kSplits; ++s)
        add_scaled(out[0], factor[s], ptx::ld_shared_v4_f32(partials + s * (kOwned * kHeadDim * 4)));
      store_output(to, whole, out);
    }
  }
  // Heads beyond the group arrive too, and this CTA must be there.
  if constexpr (kDirectSlices) wait_for_inbox(slot + kSlotArrival);
}

// The result of a thread's part of a head; scales: of the item's rows.
template <int kDims, int kStride>
__device__ __forceinline__ void store_result(const ResultPlace& to, const MergedPart<kDims, kStride>& part,
                                             SharedAddress scales) {
  store_output(to.out, output_factor(to.v_global_scale, part.sum), part.out, kStride);
  if (part.dim == 0)
    store_lse(to.lse, part.origin, part.sum, ptx::ld_shared_f32(scales + part.head * 8 + 4));
}

// A half: a thread's part becomes the result with what the other CTA has sent.
template <int kDims, int kStride>
__device__ __forceinline__ void collect_half(const Arguments& args, const ResultPlace& to,
                                             MergedPart<kDims, kStride> part, SharedAddress slot, u32 split) {
  if (part.head / kOwned != static_cast<int>(split)) return;
  wait_for_inbox(slot + kSlotArrival);
  if (part.head >= args.group) return;
  const u32 index = (split ^ 1) * kOwned + part.head % kOwned;
  const SharedAddress from = slot + kSlotInbox + index * (kHeadDim * 4) + part.dim * 4;
  const float2 stats = ptx::ld_shared_v2_f32(slot + kSlotInboxStats + index * 8);
  float4 sent[kDims / 4];
#pragma unroll
  for (int i = 0; i < kDims / 4; ++i) sent[i] = ptx::ld_shared_v4_f32(from + i * (kStride * 4));
  const float origin = fmaxf(part.origin, stats.x);
  const float kept = ptx::ex2_approx_ftz_f32(part.origin - origin),
              factor = ptx::ex2_approx_ftz_f32(stats.x - origin);
  part.origin = origin;
  part.sum = fmaf(factor, stats.y, kept * part.sum);
#pragma unroll
  for (int i = 0; i < kDims / 4; ++i) {
    float4& x = part.out[i];
    x = make_float4(kept * x.x, kept * x.y, kept * x.z, kept * x.w);
    add_scaled(x, factor, sent[i]);
  }
  store_result(to, part, slot + kSlotScales);
}

// Workspace of splits that are no cluster, and of leftovers: float [items, kStored, group, 128], then
// (origin, sum) [items, kStored, group].
struct Workspace {
  float4* out;
  float2* stats;
};

__device__ __forceinline__ Workspace workspace_of(const Arguments& args, u32 item, int split, int head) {
  const i64 row = (static_cast<i64>(item) * kStored + split) * args.group + head;
  const i64 rows = static_cast<i64>(item_count(args) - first_leftover()) * kStored * args.group;
  return {reinterpret_cast<float4*>(args.workspace + row * kHeadDim * 4),
          reinterpret_cast<float2*>(args.workspace + rows * kHeadDim * 4) + row};
}

template <int kDims, int kStride>
__device__ __forceinline__ void store_partial(const Arguments& args, const MergedPart<kDims, kStride>& part,
                                              u32 item, int split) {
  const Workspace to = workspace_of(args, item, split, part.head);
#pragma unroll
  for (int i = 0; i < kDims / 4; ++i) to.out[(part.dim + kStride * i) / 4] = part.out[i];
  if (part.dim == 0) *to.stats = make_float2(part.origin, part.sum);
}

// The partials of an item become its result, kDims dims a thread.
template <int kDims>
__device__ __forceinline__ void merge_stored(const Arguments& args, const ItemRow& item, u32 index,
                                             int thread, SharedAddress scales) {
  const auto mine = part_of_thread<kDims>(thread);
  if (mine.head >= args.group) return;
  const auto part = merge_partials<kStored, kDims>(
      thread,
      [&](int p, int head) { return *workspace_of(args, index, p, head).stats; },
      [&](int p, int head, int dim) { return workspace_of(args, index, p, head).out[dim / 4]; });
  store_result(result_place(args, item, part.head, part.dim), part, scales);
}

// Tells that this warp has stored its share of a partial; gives how many of its fellows have before it.
// Nobody waits for another CTA, which need not be resident. The last of kStored leaves the counter at zero
// for the next launch, and may read what all have stored.
__device__ __forceinline__ u32 arrive(u8* counter, int lane) {
  __syncwarp();  // stores of all lanes come before the release
  u32 before = 0;
  if (lane == 0) before = ptx::atom_inc_acq_rel_gpu_u32(counter, kStored - 1);
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();  // and loads of all lanes after the acquire
  return before;
}

// Equal warps of an item's CTAs hold equal places, so each lot merges on its own: the last to arrive does.
__device__ __forceinline__ void merge_if_last(const Arguments& args, const ItemRow& item, SharedAddress slot,
                                              u32 index, int thread) {
  u8* counter = args.arrivals + (static_cast<u64>(index) * kItemWarps + thread / 32) * 4;
  if (arrive(counter, thread & 31) == kStored - 1)
    merge_stored<kPartDims>(args, item, index, thread, slot + kSlotScales);
}

// What a thread holds of the CTA's result goes where it belongs; `to` is its place if that is the result.
template <int kDims, int kStride>
__device__ __forceinline__ void hand_over(const Arguments& args, const ResultPlace& to,
                                          const MergedPart<kDims, kStride>& part, SharedAddress slot,
                                          u32 split) {
  if constexpr (kClusterMerge) {
    if (!kHalves || part.head / kOwned != static_cast<int>(split)) push_partial(part, slot, split);
  } else if (part.head < args.group) {
    if constexpr (kSplit)
      store_partial(args, part, blockIdx.x / kSplits, split);
    else
      store_result(to, part, slot + kSlotScales);
  }
}
