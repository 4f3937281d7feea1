// Shared items: behind full rounds of four items a multiprocessor, up to one more for each. The four item
// slots of a CTA begin with a quarter of that item, every fourth page, before each goes on with an item of
// its own, so that a multiprocessor has 80 pages and not 64 and then 64 again. A slot's list is its part of
// the shared item and then its own item. Pages come in turns of two, one for each stage of the ring: behind
// an odd number of pages the part ends with a place without tokens, so that both items begin with the first
// stage, through the same code.
//
// Between the two a slot merges its warps' sums and puts them into the workspace, through the stage that the
// part's last page has left, while the first page of its own item comes into the other. One slot merges all
// four parts when it has no more pages. They meet within a CTA: no counter in memory, no fence of the device.
#pragma once
#include "mbarrier.cuh"
#include "portable_leftovers.cuh"

// Warps of a slot: the first lists its part of the shared item, the next its own item, and another stages
// four heads of the shared item's queries.
constexpr u32 kOwnLister = 1, kSharedStager = 2;
constexpr u32 kMergingSlot = kItemSlots - 1;  // its warps are youngest, so it ends first
constexpr u32 kSharedQueries = 128 + kItemSlots * (2 * kQueryBytes);  // behind those of the slots
constexpr u32 kSharedArrival = kSlotsAt + kSlotArrival;               // mbarrier: the slots have stored

__device__ __forceinline__ bool has_shared_item(const Arguments& args) {
  return first_leftover() + blockIdx.x < item_count(args);
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

// The pages of a slot's part, every fourth, and behind an odd number, or none, places without tokens.
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

// The pages of a slot's own item, and where they end. begins: there is no shared item.
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

// The sums of a slot's warps, and that they are there.
__device__ __forceinline__ void store_part(const Arguments& args, const WarpState& state, SharedAddress smem,
                                           const SlotAddresses& slot, SharedAddress stage, u32 item_slot,
                                           int warp, int lane) {
  store_piece_half<0>(args, state, slot, stage, item_slot, warp, lane, blockIdx.x, item_slot);
  store_piece_half<1>(args, state, slot, stage, item_slot, warp, lane, blockIdx.x, item_slot);
  if (warp == 0 && lane == 0) ptx::mbarrier_arrive(smem + kSharedArrival);  // behind a barrier of the slot
}

// All parts become the result.
__device__ __forceinline__ void merge_parts(const Arguments& args, SharedAddress smem,
                                            const SlotAddresses& slot, int thread) {
  const Item item = item_without_request(args, first_leftover() + blockIdx.x);
  ptx::mbarrier_wait_parity(smem + kSharedArrival, 0);
  merge_stored<kPartDims>(args, {item.row, item.kv_head}, blockIdx.x, thread,
                          slot.fixed + kSlotScales + kScaleBytes);
}
