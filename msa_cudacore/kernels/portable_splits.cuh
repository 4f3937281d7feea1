// The CTAs' partials of an item become its result: in a cluster by st.async into distributed shared memory,
// or through a workspace, where the last CTA to arrive merges them. Sums run in a fixed order.
#pragma once
#include "atomic.cuh"
#include "cluster.cuh"
#include "fence.cuh"
#include "mbarrier.cuh"
#include "portable_merge.cuh"

// ---- Clusters

// Initialises the mbarriers of the inbox and announces the bytes that this CTA will receive. Ahead of the
// first load, because behind it the fence would delay what waits for the load. The CTA arrives at the
// cluster's barrier later, while its first page is on its way.
__device__ __forceinline__ void open_inbox(SharedAddress slot, bool opens) {
  if (opens) {
    ptx::mbarrier_init(slot + kSlotArrival, 1);
    if constexpr (kDirectSlices) ptx::mbarrier_init(slot + kSlotStatsArrival, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  // ptxas issues the initialisation once for the warp; compute-sanitizer takes that for another lane's.
  __syncwarp();
  if (!opens) return;
  constexpr int kReceived = kHalves ? kHeads / 2 : kHeads;
  ptx::mbarrier_arrive_expect_tx(slot + kSlotArrival, kReceived * (kHeadDim * 4 + (kDirectSlices ? 0 : 8)));
  if constexpr (kDirectSlices) ptx::mbarrier_arrive_expect_tx(slot + kSlotStatsArrival, kHeads * 8);
}

// Each CTA of the cluster owns kHeads / kSplits heads and receives their partials from all, itself included
// unless it keeps its half.
constexpr int kOwned = kHeads / kSplits;

// Where the owner of a head receives a part of it from this CTA: its mbarrier and its memory.
struct Inbox {
  SharedAddress arrival, part;
};

__device__ __forceinline__ Inbox inbox_of(SharedAddress slot, u32 split, u32 head, u32 dim) {
  const u32 owner = head / kOwned, index = split * kOwned + head % kOwned;
  return {ptx::mapa_shared_cluster(slot + kSlotArrival, owner),
          ptx::mapa_shared_cluster(slot + kSlotInbox + index * (kHeadDim * 4) + dim * 4, owner)};
}

// The inbox of a warp's slice, kept in registers from the start of the item on: one wait less at its end.
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

// The page's first warp sends the owners of all heads this CTA's origins and sums, ahead of the sums of
// values. any: the CTA had a page, and kSlotSums has the sums of its warps' tokens.
__device__ __forceinline__ void push_stats(const SliceState& state, SharedAddress slot, int lane, u32 split,
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

// Waits for all bytes that have been announced.
__device__ __forceinline__ void wait_for_inbox(SharedAddress arrival) {
  while (!ptx::mbarrier_try_wait_parity_cluster(arrival, 0)) {
  }
}

__device__ __forceinline__ void collect_partials(const Arguments& args, const ItemRow& item,
                                                 SharedAddress slot, u32 split, int thread) {
  // Each thread merges kDims places of a head; together they cover the heads that the CTA owns.
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
  // Heads beyond the group are sent, too, and the CTA's shared memory must exist until they have arrived.
  if constexpr (kDirectSlices) wait_for_inbox(slot + kSlotArrival);
}

// With kHalves: a thread's part of its own half, merged with what the other CTA has sent, becomes the result.
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
  merge_second(part, stats, sent);
  store_result(to, part, slot + kSlotScales);
}

// ---- Workspace

// Of splits that are no cluster, of leftovers and of shared items: float [items, kStored, group, 128], then
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

// Merges an item's partials in the workspace into its result, kDims dims a thread.
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

// Counts that this warp has stored its share of a partial; returns how many warps had been counted before. No
// CTA waits for another one, which need not be resident. The last of kStored leaves the counter at zero for
// the next launch, and may read what all have stored.
__device__ __forceinline__ u32 arrive(u8* counter, int lane) {
  __syncwarp();  // the stores of all lanes come before the release
  u32 before = 0;
  if (lane == 0) before = ptx::atom_inc_acq_rel_gpu_u32(counter, kStored - 1);
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();  // and the loads of all lanes after the acquire
  return before;
}

// Warps of the same index in an item's CTAs hold the same heads and dims, so each such set of warps has a
// counter of its own, and its last warp to arrive merges its share, kDims dims a thread at a time.
template <int kDims = kPartDims>
__device__ __forceinline__ void merge_if_last(const Arguments& args, const ItemRow& item, SharedAddress slot,
                                              u32 index, int thread) {
  u8* counter = args.arrivals + (static_cast<u64>(index) * kItemWarps + thread / 32) * 4;
  if (arrive(counter, thread & 31) != kStored - 1) return;
  constexpr int kTimes = kPartDims / kDims;
  const int first = thread + thread / 32 * (32 * (kTimes - 1));  // of the warp
#pragma unroll
  for (int i = 0; i < kTimes; ++i)
    merge_stored<kDims>(args, item, index, first + i * 32, slot + kSlotScales);
}

// ---- Splits in the last item slots

// With few more items than three quarters of the item slots, each of the last quarter of a CTA's slots has a
// split of an item instead of a whole one. With four slots, the fullest multiprocessor then has 50 to 56
// pages instead of 64. The slots with splits finish long before those with whole items, so it costs no time
// to merge the splits through the workspace.
__device__ __forceinline__ bool has_last_split(u32 item_slot) {
  return kLastSplit && item_slot >= kWholeSlots;
}

// Number of the slot's split, counted over the last slots of all CTAs: an item has kLastSplits in a row.
__device__ __forceinline__ u32 last_split(u32 item_slot) {
  return blockIdx.x + gridDim.x * (item_slot - kWholeSlots);
}

// Index of the slot's only item or, with kManyItems, of its first one. Slots with splits have no branch here:
// with an `if`, ptxas' schedule of the page loop would be 40 cycles longer.
__device__ __forceinline__ u32 first_item_of_slot(u32 item_slot) {
  const u32 whole_slots = min(item_slot, static_cast<u32>(kWholeSlots));  // before it
  const u32 sharers = has_last_split(item_slot) ? kLastSplits : kSplits;
  return gridDim.x * whole_slots + (blockIdx.x + gridDim.x * (item_slot - whole_slots)) / sharers;
}

// Stores a thread's share of the slot's partial, and merges the item if this is the last of its splits: 8
// dims a thread at a time, because there are no registers for more.
template <int kDims, int kStride>
__device__ __forceinline__ void hand_over_last_split(const Arguments& args, const ItemRow& item,
                                                     const MergedPart<kDims, kStride>& part,
                                                     SharedAddress slot, u32 split, int thread) {
  const u32 index = split / kLastSplits;
  if (part.head < args.group) store_partial(args, part, index, split % kLastSplits);
  merge_if_last<8>(args, item, slot, index, thread);
}

// ---- Cluster, workspace, or neither

// Passes on a thread's share of the CTA's partial: to the owner's inbox, to the workspace, or, without
// splits, to the result, at `to`.
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
