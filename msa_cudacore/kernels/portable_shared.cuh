// Shared items: where full rounds of four items for each multiprocessor leave up to one item more for each,
// the four item slots of a CTA share that fifth item. Each slot begins with a part of it, every fourth page,
// and goes on with an item of its own. So a multiprocessor has 80 pages instead of 64 and then another round
// of 64. A slot's list is its part of the shared item, then the pages of its own item. The page loop takes
// two pages an iteration, one for each stage of the ring. A part with an odd number of pages, or none, is
// filled up with places without tokens, so that both items begin with the first stage and the same code.
//
// Between the two items a slot merges the sums of its warps and stores them into the workspace, by way of the
// stage that the part's last page has left, while the first page of the own item is in flight into the other
// stage. The last slot, which has the youngest warps and finishes first, then merges the four parts.
// One CTA stores and reads them all, so its mbarrier suffices: there is no counter in global memory and no
// fence at device scope.
#pragma once
#include "mbarrier.cuh"
#include "portable_leftovers.cuh"

// Warps of a slot: the first one lists the slot's part of the shared item, the second one the slot's own
// item, and the third one stages four heads of the shared item's queries.
constexpr u32 kOwnLister = 1, kSharedStager = 2;
constexpr u32 kMergingSlot = kItemSlots - 1;  // has the youngest warps and finishes first
constexpr u32 kSharedQueries = 128 + kItemSlots * (2 * kQueryBytes);  // behind those of the slots
constexpr u32 kSharedArrival = kSlotsAt + kSlotArrival;               // mbarrier: all parts are stored

__device__ __forceinline__ bool has_shared_item(const Arguments& args) {
  return first_leftover() + blockIdx.x < item_count(args);
}

// Stages a head of the shared item's queries, for all slots, and writes its scale to every slot.
__device__ __forceinline__ void stage_shared_head(const Arguments& args, const QueryPart& query, int head,
                                                  int index, SharedAddress smem) {
  const int exponent = row_exponent(query);
  stage_query(query, exponent, head, index, smem + kSharedQueries);
  const RowScale row = bounded_scale(args.score_scale, exponent);
  if (index < kItemSlots)
    ptx::st_shared_v2_f32(SlotAddresses(smem, index).fixed + kSlotScales + kScaleBytes + head * 8, row.scale,
                          row.lift);
}

// Lists a slot's part of the shared item, every fourth page, so that it ends at kOwnPlace. If the number of
// pages is odd, or zero, one or two places without tokens follow them.
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

// Lists a slot's own item from kOwnPlace on, and stores where the list ends. Behind it are places without
// tokens, because the page loop looks two places ahead. begins: there is no shared item, so the list begins
// with the own item.
__device__ __forceinline__ void list_own(const Arguments& args, const Item& item, const Selection& s,
                                         const SlotAddresses& slot, bool begins, int lane) {
  if (lane == 0) {
    ptx::st_shared_u32(slot.fixed + kSlotPages, kOwnPlace + s.count);
    if (begins) ptx::st_shared_u32(slot.fixed + kSlotFirst, kOwnPlace);
  }
  if (lane < kPlacesBehind)
    ptx::st_shared_u32(slot.fixed + kSlotVisible + (kOwnPlace + kMaxTopk + lane) * 4, 0);
  list_item(args, item, s, slot, lane);
}

// Stores the merged sums of a slot's warps and arrives for the slot.
__device__ __forceinline__ void store_part(const Arguments& args, const WarpState& state, SharedAddress smem,
                                           const SlotAddresses& slot, SharedAddress stage, u32 item_slot,
                                           int warp, int lane) {
  store_piece_half<0>(args, state, slot, stage, item_slot, warp, lane, blockIdx.x, item_slot);
  store_piece_half<1>(args, state, slot, stage, item_slot, warp, lane, blockIdx.x, item_slot);
  if (warp == 0 && lane == 0) ptx::mbarrier_arrive(smem + kSharedArrival);  // all have stored
}

// Waits until all parts are stored and merges them into the shared item's result. kMergingSlot does this.
__device__ __forceinline__ void merge_parts(const Arguments& args, SharedAddress smem,
                                            const SlotAddresses& slot, int thread) {
  const Item item = item_without_request(args, first_leftover() + blockIdx.x);
  ptx::mbarrier_wait_parity(smem + kSharedArrival, 0);
  merge_stored<kPartDims>(args, {item.row, item.kv_head}, blockIdx.x, thread,
                          slot.fixed + kSlotScales + kScaleBytes);
}
