// Shared items: with more items than four a multiprocessor, but not more than five, the four item slots of a
// CTA have an item each and share a fifth. Each begins with every fourth of its pages, puts the merged partial
// of its warps into the workspace, and goes on with its own item. At its end it merges a quarter of what all
// have stored. So 80 pages a multiprocessor are no second round. All happens within a CTA: its slots tell each
// other by a barrier of its own, and what one thread stores for another goes no further than L2.
#pragma once
#include "mbarrier.cuh"
#include "portable_leftovers.cuh"

// The warp of a slot that stages four heads of the shared item's queries, and the one that lists the slot's
// own item. The first one lists the pages of the shared item.
constexpr u32 kSharedStager = 2, kOwnLister = 1;
// Pages come in turns of two, one for each stage of the ring, so that each item begins with the first.
constexpr u32 kSharedQueries = 128 + kItemSlots * (2 * kQueryBytes);
constexpr u32 kSharedArrival = kSlotsAt + kSlotArrival;  // mbarrier of the slots: their partials are stored

__device__ __forceinline__ bool has_shared_item(const Arguments& args) {
  return kSharedItem && first_leftover() + blockIdx.x < item_count(args);
}

// A head of the shared item; every slot gets its scale.
__device__ __forceinline__ void stage_shared_head(const Arguments& args, const QueryPart& query, int head,
                                                  int index, SharedAddress smem) {
  const int exponent = row_exponent(query);
  stage_query(query, exponent, head, index, smem + kSharedQueries);
  const RowScale row = bounded_scale(args.score_scale, exponent);
  if (index < kItemSlots)
    ptx::st_shared_v2_f32(SlotAddresses(smem, index).fixed + kSlotScales + kScaleBytes + head * 8, row.scale,
                          row.lift);
}

// The pages of a slot's part of the shared item, every fourth, and behind an odd number, or none, places
// without tokens.
__device__ __forceinline__ void list_part(const Arguments& args, const Item& item, Selection s,
                                          const SlotAddresses& slot, int item_slot, int lane) {
  const int pages = (s.count + kItemSlots - 1 - item_slot) / kItemSlots;
  const int first = kOwnPlace - max((pages + 1) & ~1, 2);
  if (lane >= pages && first + lane < kOwnPlace)
    ptx::st_shared_u32(slot.fixed + kSlotVisible + (first + lane) * 4, 0);
  if (lane == 0) ptx::st_shared_u32(slot.fixed + kSlotFirst, first);
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w)
    if (s.rank[w] % kItemSlots != item_slot) s.rank[w] = -1;
  list_pages(args, item, s, slot, [&](int rank) { return first + rank / kItemSlots; });
}

// Those of its own item, and what the loop looks at behind them.
__device__ __forceinline__ void list_own(const Arguments& args, const Item& item, const Selection& s,
                                         const SlotAddresses& slot, bool begins, int lane) {
  if (lane == 0) {
    ptx::st_shared_u32(slot.fixed + kSlotPages, kOwnPlace + s.count);
    if (begins) ptx::st_shared_u32(slot.fixed + kSlotFirst, kOwnPlace);
  }
  if (lane < 4) ptx::st_shared_u32(slot.fixed + kSlotVisible + (kOwnPlace + kMaxTopk + lane) * 4, 0);
  list_item(args, item, s, slot, lane);
}

// Where a slot's partial is in the workspace: sums as the lanes of a warp hold them, [16][32 lanes][16 bytes],
// and (origin, sum) of every head.
constexpr u32 kPartSums = kHeads * kHeadDim * 4, kPartBytes = kPartSums + kHeads * 8;

__device__ __forceinline__ u8* stored_part(const Arguments& args, u32 item_slot) {
  return args.workspace + static_cast<u64>(blockIdx.x * kItemSlots + item_slot) * kPartBytes;
}

// Half of the sums, two of every four, in the stage that the slot's last page has left: one of the other page's
// copies is on its way into the other.
template <int half>
__device__ __forceinline__ void publish_half(const WarpState& state, SharedAddress at) {
#pragma unroll
  for (int o = 0; o < 16; ++o) {
    if (o / 2 % 2 != half) continue;
    const float (&x)[4] = state.out[o];
    ptx::st_shared_v4_f32(at + (o / 4 * 2 + o % 2) * 512, x[0], x[1], x[2], x[3]);
  }
}

// Each warp merges its quarter of what all four of the slot have published.
template <int half>
__device__ __forceinline__ void store_half(const float (&factor)[2][kWarpsPerPage], SharedAddress page_stage,
                                           u8* to, u32 part, int lane) {
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (u32 w = 0; w < kWarpsPerPage; ++w) {
      const float4 x = ptx::ld_shared_v4_f32(page_stage + w * kWarpRingBytes + (part * 2 + i) * 512 + lane * 16);
      sum.x = fmaf(factor[0][w], x.x, sum.x);
      sum.y = fmaf(factor[0][w], x.y, sum.y);
      sum.z = fmaf(factor[1][w], x.z, sum.z);
      sum.w = fmaf(factor[1][w], x.w, sum.w);
    }
    *reinterpret_cast<float4*>(to + (part * 4 + half * 2 + i) * 512 + lane * 16) = sum;
  }
}

// The partial of a slot's warps, and that it is there.
__device__ __forceinline__ void store_part(const Arguments& args, const WarpState& state, SharedAddress smem,
                                           const SlotAddresses& slot, SharedAddress page_stage, u32 item_slot,
                                           u32 part, int lane) {
  const OwnRow mine(slot, part, lane, 1);
  const SharedAddress at = page_stage + part * kWarpRingBytes + lane * 16;
  u8* const to = stored_part(args, item_slot);
  publish_half<0>(state, at);
  const float own_origin = mine.origin(state);
  __syncwarp();  // all lanes have their references
  if ((lane & 2) == 0)
    ptx::st_shared_v2_f32(slot.warp_stats(part) + mine.head * 8, own_origin, mine.sum(state));
  page_sync(item_slot);
  float factor[2][kWarpsPerPage];
#pragma unroll
  for (u32 row = 0; row < 2; ++row) {
    const u32 head = (lane >> 2) + 8 * row;
    float2 stats[kWarpsPerPage];
    float origin = kNoOrigin, sum = 0.0f;
#pragma unroll
    for (u32 w = 0; w < kWarpsPerPage; ++w) {
      stats[w] = ptx::ld_shared_v2_f32(slot.warp_stats(w) + head * 8);
      origin = fmaxf(origin, stats[w].x);
    }
#pragma unroll
    for (u32 w = 0; w < kWarpsPerPage; ++w) {
      factor[row][w] = ptx::ex2_approx_ftz_f32(stats[w].x - origin);
      sum = fmaf(factor[row][w], stats[w].y, sum);
    }
    if (part == 0 && (lane & 3) == 0)
      *reinterpret_cast<float2*>(to + kPartSums + head * 8) = make_float2(origin, sum);
  }
  store_half<0>(factor, page_stage, to, part, lane);
  page_sync(item_slot);  // nobody reads the stage any more
  publish_half<1>(state, at);
  page_sync(item_slot);
  store_half<1>(factor, page_stage, to, part, lane);
  page_sync(item_slot);
  if (part == 0 && lane == 0) ptx::mbarrier_arrive(smem + kSharedArrival);
}

// The parts of all slots become the result; by the slot whose warps are youngest, which ends first.
__device__ __forceinline__ void merge_parts(const Arguments& args, SharedAddress smem,
                                            const SlotAddresses& slot, u32 part, int lane) {
  const Item item = item_without_request(args, first_leftover() + blockIdx.x);
  const u32 g = lane >> 2, t = lane & 3;
  ptx::mbarrier_wait_parity(smem + kSharedArrival, 0);
  float2 stats[2][kItemSlots];
  float4 sums[kItemSlots][4];
#pragma unroll
  for (u32 s = 0; s < kItemSlots; ++s) {
    const u8* const from = stored_part(args, s);
#pragma unroll
    for (u32 row = 0; row < 2; ++row)
      stats[row][s] = *reinterpret_cast<const float2*>(from + kPartSums + (g + 8 * row) * 8);
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      sums[s][i] = *reinterpret_cast<const float4*>(from + (part * 4 + i) * 512 + lane * 16);
  }
#pragma unroll
  for (u32 row = 0; row < 2; ++row) {
    MergedPart<8, 16> merged = {};
    merged.head = g + 8 * row;
    merged.dim = 32 * t + 4 * part;
    merged.origin = kNoOrigin;
#pragma unroll
    for (const float2& of_slot : stats[row]) merged.origin = fmaxf(merged.origin, of_slot.x);
#pragma unroll
    for (u32 s = 0; s < kItemSlots; ++s) {
      const float factor = ptx::ex2_approx_ftz_f32(stats[row][s].x - merged.origin);
      merged.sum = fmaf(factor, stats[row][s].y, merged.sum);
      add_row(merged.out, factor, sums[s], row);
    }
    if (merged.head < args.group)
      store_result(result_place(args, {item.row, item.kv_head}, merged.head, merged.dim), merged,
                   slot.fixed + kSlotScales + kScaleBytes);
  }
}
