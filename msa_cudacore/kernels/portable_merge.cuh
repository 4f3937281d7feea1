// After an item's last page: warps, then splits, become one result. Sums run in a fixed order.
#pragma once
#include "cluster.cuh"
#include "fence.cuh"
#include "mbarrier.cuh"
#include "portable_cooperative.cuh"

constexpr float kLn2 = 0.693147180559945309f;
constexpr int kPartDims =
    kHeads * kHeadDim / kItemThreads;  // dims of one head that a thread merges: 16, 8 or 4
constexpr int kPartsPerHead = kHeadDim / kPartDims;

// ---- Results
// -------------------------------------------------------------------------------------------------------

// Natural logarithm of the sum of exponentials, -inf without keys. Beyond 2^50 an origin is all logit.
__device__ __forceinline__ void store_lse(const Arguments& args, const ItemRow& item, int head, float origin,
                                          float sum, float lift) {
  const float lifted = fabsf(origin) > 0x1p50f ? origin * lift : origin;
  const float lse = sum == 0.0f ? __int_as_float(0xFF800000) : (lifted + ptx::lg2_approx_ftz_f32(sum)) * kLn2;
  *reinterpret_cast<float*>(args.lse + item.row * args.lse_row +
                            (item.kv_head * args.group + head) * args.lse_head) = lse;
}

// Four dims at a time, divided by the sum, with the factors that decoding left out; a row without keys is
// exactly zero.
template <int n>
__device__ __forceinline__ void store_output(const Arguments& args, const ItemRow& item, int head, int dim,
                                             float sum, const float4 (&out)[n]) {
  const float factor = sum == 0.0f ? 0.0f : args.v_global_scale * kCodeUnit / sum;
  u8* row = args.out + item.row * args.out_row + (item.kv_head * args.group + head) * args.out_head;
  uint2* to = reinterpret_cast<uint2*>(row + dim * 2);
#pragma unroll
  for (int i = 0; i < n; ++i)
    to[i] = make_uint2(ptx::cvt_rn_bf16x2_f32(out[i].y * factor, out[i].x * factor),
                       ptx::cvt_rn_bf16x2_f32(out[i].w * factor, out[i].z * factor));
}

// ---- Warps of a CTA
// ------------------------------------------------------------------------------------------------

template <int kDims>
struct MergedPart {
  int head, dim;  // first of kDims
  float origin, sum;
  float4 out[kDims / 4];
};

// A warp's 16 x 128 accumulators replace its ring: rows of 4 lines (t) of 32 dims, 16-byte chunks swizzled by
// lane.
__device__ __forceinline__ void publish_warp(const WarpState& state, const SlotAddresses& slot,
                                             SharedAddress ring, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  if (t == 0) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // A far row's reference lies where its origin belongs now.
      const SharedAddress stats = slot.warp_stats(warp) + (g + 8 * row) * 8;
      const float reference = ptx::ld_shared_f32(stats);
      const float scale = ptx::ld_shared_f32(slot.fixed + kSlotScales + (g + 8 * row) * 8);
      const float origin = reference == kNoReference ? state.origin[row] : fmaf(reference, scale, kHeadroom);
      ptx::st_shared_v2_f32(stats, origin, state.sum[2 * row]);
    }
  }
  const u32 base = ring + g * 512 + t * 128, swizzle = (lane & 7) * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int x = 0; x < 4; ++x)
      ptx::st_shared_v4_f32(base + (x >> 1) * 4096 + (swizzle ^ (i * 16 + (x & 1) * 64)), state.out[4 * i][x],
                            state.out[4 * i + 1][x], state.out[4 * i + 2][x], state.out[4 * i + 3][x]);
}

// Cooperating warps have nothing to merge: each holds a slice of 32 dims, a lane eight dims of row g (row 0)
// and g + 8.
__device__ __forceinline__ MergedPart<8> slice_of(const SliceState& state, SharedAddress slot, u32 slice,
                                                  int lane, int row) {
  MergedPart<8> part;
  part.head = (lane >> 2) + 8 * row;
  part.dim = slice * 32 + (lane & 3) * 8;
  part.origin = fmaf(state.reference[row], ptx::ld_shared_f32(slot + kSlotScales + part.head * 8), kHeadroom);
  part.sum = state.sum[2 * row];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    part.out[half] = make_float4(state.out[0][2 * row + half], state.out[1][2 * row + half],
                                 state.out[2][2 * row + half], state.out[3][2 * row + half]);
  return part;
}

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& x) {
  sum.x = fmaf(factor, x.x, sum.x);
  sum.y = fmaf(factor, x.y, sum.y);
  sum.z = fmaf(factor, x.z, sum.z);
  sum.w = fmaf(factor, x.w, sum.w);
}

// The item's warps become one, kPartDims dims a thread.
__device__ __forceinline__ MergedPart<kPartDims> merge_warps(const SlotAddresses& slot,
                                                             SharedAddress item_ring, int thread) {
  MergedPart<kPartDims> part;
  part.head = thread / kPartsPerHead;
  part.dim = thread % kPartsPerHead * kPartDims;
  float2 stats[kItemWarps];
  part.origin = kNoOrigin;
#pragma unroll
  for (int w = 0; w < kItemWarps; ++w) {
    stats[w] = ptx::ld_shared_v2_f32(slot.warp_stats(w) + part.head * 8);
    part.origin = fmaxf(part.origin, stats[w].x);
  }
  part.sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPartDims / 4; ++i) part.out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const u32 line = part.dim >> 5, swizzle = ((part.head & 1) * 4 + line) * 16;
#pragma unroll
  for (int w = 0; w < kItemWarps; ++w) {
    const float factor = ptx::ex2_approx_ftz_f32(stats[w].x - part.origin);
    part.sum = fmaf(factor, stats[w].y, part.sum);
#pragma unroll
    for (int i = 0; i < kPartDims / 4; ++i) {
      const u32 chunk = ((part.dim & 31) >> 2) + i;
      add_scaled(part.out[i], factor,
                 ptx::ld_shared_v4_f32(item_ring + w * kWarpRingBytes + part.head * 512 + line * 128 +
                                       (swizzle ^ (chunk * 16))));
    }
  }
  return part;
}

// ---- Splits of an item
// ---------------------------------------------------------------------------------------------

// Announces what this CTA will receive, before anything else: the cluster meets while the first loads are on
// their way.
__device__ __forceinline__ void open_inbox(SharedAddress slot, int thread) {
  if (thread == 0) {
    ptx::mbarrier_init(slot + kSlotArrival, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  // ptxas initialises the barrier for the whole warp at once, which compute-sanitizer takes for another lane.
  __syncwarp();
  if (thread == 0) ptx::mbarrier_arrive_expect_tx(slot + kSlotArrival, kHeads * (kHeadDim * 4 + 8));
  __syncwarp();
  ptx::barrier_cluster_arrive_relaxed();
}

// Each CTA of the cluster owns kHeads / kSplits heads and receives their partials from all, itself included.
constexpr int kOwned = kHeads / kSplits;

template <int kDims>
__device__ __forceinline__ void push_partial(const MergedPart<kDims>& part, SharedAddress slot, u32 split) {
  const u32 owner = part.head / kOwned, index = split * kOwned + part.head % kOwned;
  const SharedAddress arrival = ptx::mapa_shared_cluster(slot + kSlotArrival, owner);
  const SharedAddress there =
      ptx::mapa_shared_cluster(slot + kSlotInbox + index * (kHeadDim * 4) + part.dim * 4, owner);
#pragma unroll
  for (int i = 0; i < kDims / 4; ++i)
    ptx::st_async_v4(there + i * 16, part.out[i].x, part.out[i].y, part.out[i].z, part.out[i].w, arrival);
  if (part.dim == 0)
    ptx::st_async_v2(ptx::mapa_shared_cluster(slot + kSlotInboxStats + index * 8, owner), part.origin,
                     part.sum, arrival);
}

__device__ __forceinline__ void collect_partials(const Arguments& args, const ItemRow& item,
                                                 SharedAddress slot, u32 split, int thread) {
  constexpr int kLanes = kHeadDim / 4;  // threads for a head's result
  while (!ptx::mbarrier_try_wait_parity_cluster(slot + kSlotArrival, 0)) {
  }
  const int dim = thread % kLanes * 4;
#pragma unroll
  for (int first = 0; first < kOwned; first += kItemThreads / kLanes) {
    const int owned = first + thread / kLanes, head = split * kOwned + owned;
    if (owned >= kOwned || head >= args.group) continue;
    float2 stats[kSplits];
    float origin = kNoOrigin, sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      stats[s] = ptx::ld_shared_v2_f32(slot + kSlotInboxStats + (s * kOwned + owned) * 8);
      origin = fmaxf(origin, stats[s].x);
    }
    float4 out[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      const float factor = ptx::ex2_approx_ftz_f32(stats[s].x - origin);
      sum = fmaf(factor, stats[s].y, sum);
      add_scaled(out[0], factor,
                 ptx::ld_shared_v4_f32(slot + kSlotInbox + ((s * kOwned + owned) * kHeadDim + dim) * 4));
    }
    store_output(args, item, head, dim, sum, out);
    if (dim == 0)
      store_lse(args, item, head, origin, sum, ptx::ld_shared_f32(slot + kSlotScales + head * 8 + 4));
  }
}

// Workspace of the split without clusters: float [items, kSplits, group, 128], then (origin, sum) [items,
// kSplits, group].
struct Workspace {
  float4* out;
  float2* stats;
};

__device__ __forceinline__ Workspace workspace_of(const Arguments& args, u32 item, int split, int head) {
  const i64 row = (static_cast<i64>(item) * kSplits + split) * args.group + head;
  const i64 rows = static_cast<i64>(item_count(args)) * kSplits * args.group;
  return {reinterpret_cast<float4*>(args.workspace + row * kHeadDim * 4),
          reinterpret_cast<float2*>(args.workspace + rows * kHeadDim * 4) + row};
}

template <int kDims>
__device__ __forceinline__ void store_partial(const Arguments& args, const MergedPart<kDims>& part, u32 item,
                                              int split) {
  const Workspace to = workspace_of(args, item, split, part.head);
#pragma unroll
  for (int i = 0; i < kDims / 4; ++i) to.out[part.dim / 4 + i] = part.out[i];
  if (part.dim == 0) *to.stats = make_float2(part.origin, part.sum);
}

// An item out of the workspace, by 128 threads: a warp merges a head, a lane four dims.
__device__ __forceinline__ void merge_workspace(const Arguments& args) {
  const Item whole = item_of(args, blockIdx.x);
  const ItemRow item = {whole.row, whole.kv_head};
  const int lane = threadIdx.x & 31;
  for (int first = 0; first < args.group; first += 4) {
    const int head = first + threadIdx.x / 32;
    // The scale again, from the row: eight lanes hold it as in decoding, four times over.
    const RowScale row =
        bounded_scale(args.score_scale, row_exponent(load_query(args, whole, head, lane & 7)));
    if (head >= args.group) continue;
    float2 stats[kSplits];
    float origin = kNoOrigin, sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      stats[s] = *workspace_of(args, blockIdx.x, s, head).stats;
      origin = fmaxf(origin, stats[s].x);
    }
    float4 out[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      const float factor = ptx::ex2_approx_ftz_f32(stats[s].x - origin);
      sum = fmaf(factor, stats[s].y, sum);
      add_scaled(out[0], factor, workspace_of(args, blockIdx.x, s, head).out[lane]);
    }
    store_output(args, item, head, lane * 4, sum, out);
    if (lane == 0) store_lse(args, item, head, origin, sum, row.lift);
  }
}

// What a thread holds of the CTA's result goes where it belongs.
template <int kDims>
__device__ __forceinline__ void hand_over(const Arguments& args, const ItemRow& item,
                                          const MergedPart<kDims>& part, SharedAddress slot, u32 split) {
  if constexpr (kClusterMerge) {
    push_partial(part, slot, split);
  } else if (part.head < args.group) {
    if constexpr (kSplit) {
      store_partial(args, part, blockIdx.x / kSplits, split);
    } else {
      store_output(args, item, part.head, part.dim, part.sum, part.out);
      if (part.dim == 0)
        store_lse(args, item, part.head, part.origin, part.sum,
                  ptx::ld_shared_f32(slot + kSlotScales + part.head * 8 + 4));
    }
  }
}
