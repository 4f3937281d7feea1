// Sparse decode attention over NVFP4 pages on mma.sync, compute capability 8.0 and up.
//
// An item is one (query token, KV head); its up to 16 query heads are the 16 rows of the MMA tiles. kSplits
// CTAs share an item; in a CTA, kPageSlots of its pages are in work side by side, kWarpsPerPage warps each.
// Every warp streams its part of the pages through a private cp.async ring, keeps its own softmax origin and
// its own 16 x 128 sums, and waits for nobody until the warps of the item merge; portable_cooperative.cuh has
// the other way, for few pages. Splits meet in distributed shared memory, or in a workspace where the last
// one to arrive merges them. All sums run in a fixed order. docs/portable.md has the design.
#include "barrier.cuh"
#include "control.cuh"
#include "opaque.cuh"
#include "portable_finish.cuh"
#include "portable_loop.cuh"
#include "portable_start.cuh"

namespace {

// A warp's work on an item, or on a split of one. State: WarpState, or SliceState where warps cooperate.
// first_item: of the slot. Returns the index of the slot's next item, which may not exist.
//
// Phases, and the flags of portable_plan.cuh that change them:
//
//   1. start_item: ids, page ids, requests of the first pages; queries, list of pages and table into shared
//      memory; a barrier. kEightWarps: warps divide this. kLateQueries, kOrderedLoads, kIdsFirst, kManyPages:
//      its order. kLateValues, kFirstPages: how much is requested. kLeftovers, kSharedItem: some warps, or
//      all, begin with another item. kLastSplit: a slot may have a split of its item.
//   2. Behind the barrier: what is left to request of the first pages (kLateValues, kGradualStart), addresses
//      that stay in registers, empty sums.
//   3. The page loop: `step` for each page, by for_each_page or, for two items, for_each_page_of_both
//      (kLeftovers) or for_each_page_of_shared (kSharedItem). kCooperative: the warps of a page meet in it.
//      kSecondBehindScores, kManyPages: when the next page is requested.
//   4. finish_item: warps merge to page slots, these to the item, splits to the result. kCooperative,
//      kDividedSums, kDirectSlices: how the sums of warps meet. kClusterMerge, kHalves, kWorkspaceMerge,
//      kLastSplit: how splits do. kSharedItem: one slot merges the parts.
template <typename State>
__device__ __forceinline__ u32 attend_item(const Arguments& args, SharedAddress smem, const Place& place,
                                           u32 index, bool first_item) {
  const int lane = place.lane;
  const SlotAddresses& slot = place.slot;
  const int warp = place.warp;
  const u32 page_slot = place.page_slot, part = warp - page_slot * kWarpsPerPage;
  const u32 split = kSplit ? blockIdx.x % kSplits : 0;
  // The slot's leftover, if there is one; a warp may begin with a piece of it, or have nothing else.
  const u32 leftover = index / kSharers;
  const bool has_leftover = kLeftovers && first_leftover() + leftover < item_count(args);
  const bool only_piece = kPairs && page_slot == kOwnSlots;
  const bool live = (kItemSlots == 1 && !kLeftovers) ||
                    (index < item_count(args) && (!only_piece || has_leftover));
  const bool on_piece = has_leftover && page_slot >= kOtherSlots;
  u32 item_index = live ? index : 0;  // of the item that the warp begins with
  if (on_piece) item_index = first_leftover() + leftover;
  Item item = item_without_request(args, item_index);
  // The item slots of a CTA may begin with parts of a shared item, ahead of the slot's own.
  const bool has_shared = kSharedItem && has_shared_item(args);
  const Item own = item;
  if (has_shared) item = item_without_request(args, first_leftover() + blockIdx.x);
  const Share share = {index, leftover, has_leftover, on_piece, has_shared, live};
  u32 lane16 = lane * 16;
  RingLanes lanes = ring_lanes(place.ring, lane);
  int pages, first = split * kPageSlots + page_slot;
  start_item(args, smem, place, share, item, own, first_item, first, pages);
  if (!live) return ~0u;

  // ---- Behind the barrier. From here on `first` and `pages` are places in the list of pages.
  if constexpr (kCooperative) pages = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotPages));
  if constexpr (kLeftovers) {  // in the list of the page slot
    pages = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotEnds + page_slot * 8));
    first = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotFirsts + page_slot * 4));
  }
  if constexpr (kSharedItem) {
    first = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotFirst));
    pages = has_shared ? kOwnPlace : static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotPages));
  }
  if constexpr (kLateValues) {  // not of a piece without pages, which lists a page without tokens
    if (first < pages && (!kLeftovers || ptx::ld_shared_u32(slot.fixed + kSlotVisible + first * 4) != 0)) {
      const ulonglong2 codes = ptx::ld_shared_v2_u64(slot.sources(first));
      request_values(lanes, 0, reinterpret_cast<const u8*>(codes.y + source_lanes(lane16, part).codes));
    }
    ptx::cp_async_commit_group();
  }

  const int g = lane >> 2, t = lane & 3;
  u32 values_at = place.ring + kStageValues + 128 * t + ((8 * g) ^ ((t >> 1) << 5)) + (t & 1) * 64;
  u32 value_scales_at = place.ring + kStageValueScales + (t >> 1) * 32 + g * 4 + (t & 1) * 2;
  // Cheaper kept than recomputed; with the table there are no registers for the last two.
  ptx::opaque(lane16);
  ptx::opaque(values_at);
  if constexpr (kSecondBehindScores && kItemSlots == 1) ptx::opaque(first);
  if constexpr (!kTable) {
    ptx::opaque(value_scales_at);
    ptx::opaque(lanes.values);
  }
  WarpAddresses at = {place.ring,
                      values_at,
                      value_scales_at,
                      place.queries,
                      smem,
                      slot.fixed + kSlotScales,
                      slot.warp_stats(warp),
                      lane16};
  if constexpr (kFirstPages < kStages && !kManyPages && !kSharedItem) {
    if constexpr (kGradualStart || kSecondBehindScores) ptx::cp_async_wait_group<kPageGroups - 1>();
#pragma unroll
    for (int s = kFirstPages; s < kStages && !kSecondBehindScores; ++s) {
      if (first + s * kPageStride < pages)
        request_listed(lanes, s * kStageBytes, slot, first + s * kPageStride, source_lanes(lane16, part));
      else
        request_nothing();
      ptx::cp_async_commit_group();
    }
  }

  State state;
  auto begin_item = [&] {
    state = {};
    if constexpr (kCooperative) {
      state.reference[0] = state.reference[1] = kNoReference;
    } else {
      state.origin[0] = state.origin[1] = kNoOrigin;
      if (t == 0) {  // read by this warp after a __syncwarp
        ptx::st_shared_f32(at.references + g * 8, kNoReference);
        ptx::st_shared_f32(at.references + g * 8 + 64, kNoReference);
      }
    }
  };
  begin_item();
  if (on_piece) {
    at.queries += kQueryBytes;
    at.scales += kScaleBytes;
  }
  if (has_shared) {
    at.queries = smem + kSharedQueries;
    at.scales += kScaleBytes;
  }
  const auto queries = queries_for_all_pages({at.queries + lane16});
  Inbox inbox[2];  // of rows g and g + 8
  if constexpr (kDirectSlices) {
#pragma unroll
    for (int row = 0; row < 2; ++row) inbox[row] = inbox_of_slice(slot.fixed, split, warp, lane16 >> 4, row);
    ptx::barrier_cluster_wait();  // every inbox is open
    if (first >= pages && part == 0) push_stats(state, slot.fixed, lane16 >> 4, split, false);
  }

  // ---- The page loop
  auto store_piece = [&](u32 stage) {
    if constexpr (kLeftovers) {
      u32 lane_now = lane16 >> 4;
      ptx::opaque(lane_now);  // or what depends on it would be computed before the loop, and take registers
      const int warp_now = threadIdx.x / 32 % kItemWarps;
      const int piece_now = piece_of_slot(index, warp_now / kWarpsPerPage);
      const SharedAddress left = place.page_ring + stage;
      store_piece_half<0>(args, state, slot, left, place.item_slot, warp_now, lane_now, leftover, piece_now);
      store_piece_half<1>(args, state, slot, left, place.item_slot, warp_now, lane_now, leftover, piece_now);
    }
  };
  // Which part of a page a stage holds, where a warp takes two.
  const auto turn_of = [](u32 stage) { return kTurns == 1 || stage == 0 ? 0 : 1; };
  // While a slot works on a part of a shared item, `pages` is the end of that part, and the pages that follow
  // are its own item's. Behind them the list has places without tokens.
  const auto is_visible = [&](int rank) {
    return ptx::ld_shared_u32(slot.fixed + kSlotVisible + rank * 4) != 0;
  };
  // Refills the stage that the page of this rank has left.
  auto request_after = [&](int rank, u32 stage) {
    if constexpr (kLeftovers) {  // recomputed: one register less in the loop
      u32 lane_now = lane16 >> 4;
      ptx::opaque(lane_now);
      lanes = ring_lanes(place.ring, lane_now);
    }
    constexpr int kAhead = kStages / kTurns * kPageStride;
    if (kSharedItem ? is_visible(rank + kAhead) : rank + kAhead < pages)
      request_listed(lanes, stage, slot, rank + kAhead, source_lanes(lane16, part), turn_of(stage));
    else
      request_nothing();
    ptx::cp_async_commit_group();
  };
  // What the warp takes second, if this is its first page.
  auto request_second = [&](int rank, bool begins) {
    if constexpr (kSecondBehindScores) {
      if (!begins) return;
      if constexpr (kTurns == 2)  // the other part of the same page
        request_listed(lanes, kStageBytes, slot, rank, source_lanes(lane16, part), turn_of(kStageBytes));
      else if (kSharedItem ? is_visible(rank + kPageStride) : rank + kPageStride < pages)
        request_listed(lanes, kStageBytes, slot, rank + kPageStride, source_lanes(lane16, part));
      else
        request_nothing();
      ptx::cp_async_commit_group();
    }
  };
  auto step = [&](int rank, u32 stage, bool begins) {
    // Cooperating warps request a page's successor behind its scores (refill), so this page is the only one
    // in flight, except, without kManyPages, the first one, which was requested together with its successor.
    const bool alone = kCooperative && (kManyPages || rank != first);
    if (alone)
      wait_for_keys<1>();
    else
      wait_for_keys();
    __syncwarp();
    if (kEightWarps && rank == first) page_sync(page_slot);  // others have requested this warp's part
    const int visible = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotVisible + rank * 4));
    if constexpr (kCooperative) {
      const auto await_values = [&] {
        if (alone)
          wait_for_values<1>();
        else
          wait_for_values();
      };
      const auto refill = [&] {
        if (alone) request_after(rank - kPageStride, stage ^ kStageBytes);
      };
      const auto push_sums = [&] {
        if (part == 0) push_stats(state, slot.fixed, lane16 >> 4, split, true);
      };
      attend_page(state, at, slot.fixed + kSlotMaxima + page_slot * kMaximaBytes, place.page_ring, page_slot,
                  part, stage, visible, rank + kPageStride >= pages, queries, await_values, refill,
                  push_sums);
    } else {
      const int own_visible = visible - static_cast<int>(part + turn_of(stage) * kWarpsPerPage) * kWarpTokens;
      if (own_visible > 0) {
        attend_part(state, at, stage, own_visible, begins, [&] { request_second(rank, begins); });
      } else {
        request_second(rank, begins);
        wait_for_values();  // or the next copies into this stage might overtake these
      }
      __syncwarp();
      if constexpr (!kLeftovers && !kSharedItem) request_after(rank, stage);
    }
  };
  // A piece is stored by way of the stage that its last page has left, before that stage is refilled; while
  // the refill is in flight it is counted, or merged if it was the last one. Pairs keep it instead.
  auto end_piece = [&](int rank, u32 stage) {
    if constexpr (kLeftovers) {
      if constexpr (!kPairs) store_piece(stage);
      request_after(rank - 1, stage);
      u32 lane_now = lane16 >> 4;
      ptx::opaque(lane_now);
      const int warp_now = threadIdx.x / 32;
      if constexpr (kPairs)
        keep_piece(state, slot, warp_now, warp_now % kWarpsPerPage, lane_now);
      else
        merge_pieces_if_last(args, slot.fixed, leftover, warp_now % kWarpsPerPage, lane_now);
      begin_item();
      at.queries -= kQueryBytes;
      at.scales -= kScaleBytes;
    }
  };
  // Addresses anew for either item, or ptxas' schedule of the page loop is worse (1,530 cycles for 1,340).
  auto renew_addresses = [&] {
    ptx::opaque(lane16);
    ptx::opaque(at.values);
    at.lane16 = lane16;
  };
  // A part of a shared item is stored like a piece, and the slot's own item follows. False behind that.
  auto end_part = [&] {
    if constexpr (kSharedItem) {
      if (at.queries == place.queries) return false;
      u32 lane_now = lane16 >> 4;
      ptx::opaque(lane_now);
      store_part(args, state, smem, slot, place.page_ring + kStageBytes, place.item_slot,
                 threadIdx.x / 32 % kItemWarps, lane_now);
      begin_item();
      at.queries = place.queries;
      at.scales -= kScaleBytes;
    }
    return true;
  };
  if constexpr (kLeftovers) {
    for_each_page_of_both(slot, page_slot, first, pages, step, request_after, end_piece);
  } else if constexpr (kSharedItem) {
    for_each_page_of_shared(slot, first, pages, step, request_after, renew_addresses, end_part);
  } else {
    for_each_page(first, pages, step);
  }
  return finish_item(args, smem, place, state, index, split, part, lane16, only_piece, inbox);
}

template <typename State>
__device__ __forceinline__ void decode(const Arguments& args) {
  if constexpr (kArch >= 900) {
    // A dependent launch may begin before its predecessor has ended. Nothing in global memory is read or
    // written ahead of this, and every thread waits, so that the end of this launch is the end of all before.
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
  }
  extern __shared__ __align__(1024) u8 shared[];
  const SharedAddress smem = ptx::shared_address(shared);
  const int cta_warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const Place place(smem, cta_warp);
  u32 index = first_item_of_slot(place.item_slot);
  if constexpr (kManyItems) {
    // A slot takes its next item when it has finished one, whatever the other slots of the CTA are at.
    bool first_item = true;
#pragma unroll 1
    while (true) {
      index = attend_item<State>(args, smem, place, index, first_item);
      if (index >= item_count(args)) break;
      first_item = false;
      item_sync(place.item_slot);  // nobody reads what the next item replaces
    }
  } else {
    attend_item<State>(args, smem, place, index, true);
  }
}

template <bool cooperative>
struct StateOf {
  using type = WarpState;
};
template <>
struct StateOf<true> {
  using type = SliceState;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kResidentCtas)
    msa_decode(i32 num_kv_heads, i32 seqlen_q, i32 topk, i32 max_pages, const u8* q2k, i64 q2k_head,
               i64 q2k_row, i64 q2k_j, const u8* seqused_k, i64 seqused_k_stride, const u8* page_table,
               i64 page_table_row, i64 page_table_j, const u8* q, i64 q_row, i64 q_head, i32 num_pages,
               i32 group, const u8* k, i64 k_page, i64 k_head, const u8* v, i64 v_page, i64 v_head,
               const u8* k_scale, i64 k_scale_page, i64 k_scale_head, const u8* v_scale, i64 v_scale_page,
               i64 v_scale_head, float score_scale, float v_global_scale, u8* workspace, u8* out, i64 out_row,
               i64 out_head, u8* lse, i64 lse_row, i64 lse_head, i32 batch, u8* arrivals) {
  decode<StateOf<kCooperative>::type>({
      num_kv_heads, seqlen_q, topk, max_pages, q2k, q2k_head, q2k_row, q2k_j, seqused_k,
      seqused_k_stride, page_table, page_table_row, page_table_j, q, q_row, q_head, num_pages,
      group, k, k_page, k_head, v, v_page, v_head, k_scale, k_scale_page, k_scale_head, v_scale,
      v_scale_page, v_scale_head, score_scale, v_global_scale, workspace, out, out_row, out_head,
      lse, lse_row, lse_head, batch, arrivals});
}
