// The end of an item: the sums of its warps become its result or, with splits, this CTA's partial of it.
#pragma once
#include "portable_place.cuh"

// only_piece: the warp has worked on a leftover alone. inbox: of rows g and g + 8, with kDirectSlices.
// Returns the index of the slot's next item, which may not exist.
template <typename State>
__device__ __forceinline__ u32 finish_item(const Arguments& args, SharedAddress smem, const Place& place,
                                           const State& state, u32 index, u32 split, u32 part, u32 lane16,
                                           bool only_piece, const Inbox (&inbox)[2]) {
  const SlotAddresses& slot = place.slot;
  const int warp = place.warp;
  const u32 page_slot = place.page_slot;
  if constexpr (kDirectSlices) {
#pragma unroll
    for (int row = 0; row < 2; ++row)
      push_values(slice_of(state, slot.fixed, warp, lane16 >> 4, row), inbox[row]);
  }
  ptx::cp_async_wait_group<0>();
  __syncwarp();

  // Recomputed from what the page loop keeps anyway, which saves it two registers.
  const int lane_now = lane16 >> 4, thread_now = threadIdx.x % kItemThreads;
  const uint2 stored = ptx::ld_shared_v2_u32(slot.fixed + kSlotItem);
  const ItemRow item_row = {static_cast<int>(stored.x), static_cast<int>(stored.y)};
  if constexpr (!kDirectSlices) {
    // Warps to page slots.
    if constexpr (kCooperative) {
      page_sync(page_slot);  // nobody reads this warp's ring any more
      publish_slice(state, slot, place.ring, page_slot, part, lane_now);
    } else if constexpr (kDividedSums) {
      const OwnSums own = publish_others(state, slot, place.ring, warp, part, lane_now, only_piece ? 1 : 0);
      page_sync(place.item_slot * kPageSlots + page_slot);
      if constexpr (kPairs) {
        if (only_piece) {
          finish_leftover(args, own, slot, place.page_ring, part, lane_now);
          return ~0u;
        }
      }
      merge_divided(own, slot, place.page_ring, page_slot, part, lane_now);
    } else {
      publish_warp(state, slot, place.ring, warp, lane_now);
      if (kSharedItem && place.item_slot == kMergingSlot && has_shared_item(args))
        merge_parts(args, smem, slot, thread_now);
      if constexpr (kPageSlots > 1) {
        page_sync(place.item_slot * kPageSlots + page_slot);
        merge_page(slot, place.page_ring, page_slot, thread_now % (32 * kWarpsPerPage));
      }
    }
    // Page slots to the item, and that to where it belongs.
    ResultPlace to = {};
    if constexpr (!kSplit || kHalves) {
      const auto mine = part_of_thread<kPartDims>(thread_now);
      to = result_place_now(args, item_row, mine.head, mine.dim);
    }
    item_sync(place.item_slot);
    if (kPairs && thread_now >= kMergeThreads) return ~0u;
    const auto merged = merge_item(slot, place.item_ring, thread_now);
    if constexpr (kClusterMerge) ptx::barrier_cluster_wait();  // every inbox is open
    if (has_last_split(place.item_slot)) {
      hand_over_last_split(args, item_row, merged, slot.fixed, last_split(place.item_slot), thread_now);
      return ~0u;
    }
    hand_over(args, to, merged, slot.fixed, split);
    if constexpr (kHalves) collect_half(args, to, merged, slot.fixed, split);
    if constexpr (kWorkspaceMerge) merge_if_last(args, item_row, slot.fixed, index, thread_now);
  }
  if constexpr (kClusterMerge && !kHalves) collect_partials(args, item_row, slot.fixed, split, thread_now);
  if constexpr (kManyItems)  // from shared memory, because the page loop has no register for the index
    return item_row.row * args.num_kv_heads + item_row.kv_head + gridDim.x * kItemSlots;
  else
    return ~0u;
}
