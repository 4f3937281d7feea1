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

// The partial of a slot's warps, and that it is there.
__device__ __forceinline__ void store_part(const Arguments& args, const WarpState& state, SharedAddress smem,
                                           const SlotAddresses& slot, SharedAddress stage, u32 item_slot,
                                           int warp, int lane) {
  store_piece_half<0>(args, state, slot, stage, item_slot, warp, lane, blockIdx.x, item_slot);
  store_piece_half<1>(args, state, slot, stage, item_slot, warp, lane, blockIdx.x, item_slot);
  if (warp == 0 && lane == 0) ptx::mbarrier_arrive(smem + kSharedArrival);
}

// A slot's share of the result.
__device__ __forceinline__ void merge_parts(const Arguments& args, SharedAddress smem,
                                            const SlotAddresses& slot) {
  const Item item = item_without_request(args, first_leftover() + blockIdx.x);
  ptx::mbarrier_wait_parity(smem + kSharedArrival, 0);
  merge_stored<kHeads * kHeadDim / kThreads>(args, {item.row, item.kv_head}, blockIdx.x, threadIdx.x,
                                             slot.fixed + kSlotScales + kScaleBytes);
}
