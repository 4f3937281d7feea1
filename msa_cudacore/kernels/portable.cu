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
#include "portable_pairs.cuh"
#include "portable_shared.cuh"

namespace {

// Meets the other warps of the item. Of 16 barriers there are none for page slots, too, with eight slots,
// which have one page slot each.
__device__ __forceinline__ void item_sync(u32 item_slot) {
  if constexpr (kItemSlots > 1 || kPairs)
    ptx::barrier_cta_sync((kItemSlots < 8 ? 1 + kItemSlots * kPageSlots : 1) + item_slot,
                          kOwnSlots * kWarpsPerPage * 32);
  else
    __syncthreads();
}

// Where a warp of the CTA works.
struct Place {
  u32 item_slot;
  int warp;  // of the item
  SlotAddresses slot;
  SharedAddress queries, item_ring;
  u32 page_slot;
  SharedAddress page_ring, ring;

  __device__ __forceinline__ Place(SharedAddress smem, int cta_warp)
      : item_slot(kItemSlots > 1 ? cta_warp / kItemWarps : 0),
        warp(kItemSlots > 1 ? cta_warp % kItemWarps : cta_warp),
        slot(smem, item_slot),
        queries(kQueriesInGaps ? smem + 128 + item_slot * (2 * kQueryBytes) : slot.fixed + kSlotQueries),
        item_ring(smem + kRingAt + item_slot * (kItemWarps * kWarpRingBytes)),
        page_slot(kPageSlots > 1 ? warp / kWarpsPerPage : 0),
        page_ring(item_ring + page_slot * (kWarpsPerPage * kWarpRingBytes)),
        ring(item_ring + warp * kWarpRingBytes) {}
};

// A head's queries as fragments, eight threads a head, and its scale; of: 1 for a leftover's.
__device__ __forceinline__ void stage_head(const Arguments& args, const QueryPart& query, int head, int index,
                                           SharedAddress queries, SharedAddress slot, u32 of) {
  const int exponent = row_exponent(query);
  stage_query(query, exponent, head, index, queries + of * kQueryBytes);
  if (index == 0) {
    const RowScale row = bounded_scale(args.score_scale, exponent);
    ptx::st_shared_v2_f32(slot + kSlotScales + of * kScaleBytes + head * 8, row.scale, row.lift);
  }
}

// Eight warps: four select the item's pages and request the first, two parts each, and the others stage the
// queries. The number of pages is left beside the item.
__device__ __forceinline__ void divide_start(const Arguments& args, const Place& place, Item item, int first,
                                             int lane) {
  const SharedAddress slot = place.slot.fixed;
  if (place.warp < kItemWarps / 2) {
    // seqused comes after the ids and before it is needed.
    const SelectedIds ids = load_ids(args, item, lane);
    find_request(args, item);
    Selection selection = load_pages(args, item, ids, load_seqused(args, item));
    const PagePair pair = page_pair(args, item.kv_head, lane * 16, 2 * place.warp);
    rank_pages(args, selection, lane);
    if (first < selection.count)
      request_pair(args, pair, page_of_rank(selection, first),
                   place.page_ring + 2 * place.warp * kWarpRingBytes, lane);
    else
      request_nothing();
    if (place.warp == 0) list_item(args, item, selection, place.slot, lane);
  } else {
    const int stager = (place.warp - kItemWarps / 2) * 32 + lane, head = stager >> 3;
    if constexpr (kClusterMerge) open_inbox(slot, stager == kItemThreads / 2 - 32);
    stage_head(args, load_query(args, item, head, stager & 7), head, stager & 7, place.queries, slot, 0);
    if (stager == 0) ptx::st_shared_v2_u32(slot + kSlotItem, item.row, item.kv_head);
    request_nothing();
  }
  ptx::cp_async_commit_group();
}

// An item, or a split of one. State: WarpState, or SliceState where warps cooperate. first_item: of the slot.
// Returns the index of its next one, which may not exist.
template <typename State>
__device__ __forceinline__ u32 attend_item(const Arguments& args, SharedAddress smem, const Place& place,
                                           u32 index, bool first_item) {
  const int lane = threadIdx.x & 31;
  const SlotAddresses& slot = place.slot;
  const int warp = place.warp, thread = warp * 32 + lane;
  const u32 page_slot = place.page_slot, part = warp - page_slot * kWarpsPerPage;
  const u32 split = kSplit ? blockIdx.x % kSplits : 0;
  const u32 leftover = index / kSharers;
  const bool has_leftover = kLeftovers && first_leftover() + leftover < item_count(args);
  const bool only_piece = kPairs && page_slot == kOwnSlots;
  const bool live = (kItemSlots == 1 && !kLeftovers) ||
                    (index < item_count(args) && (!only_piece || has_leftover));
  u32 item_index = live ? index : 0;
  // Warps that begin with a piece of a leftover know their own item by what others list.
  const bool on_piece = has_leftover && page_slot >= kOtherSlots;
  if (on_piece) item_index = first_leftover() + leftover;
  Item item = item_without_request(args, item_index);
  // All warps of a slot begin with a shared item, and one lists the slot's own besides.
  const bool has_shared = kSharedItem && has_shared_item(args), lists_own = kSharedItem && part == kOwnLister;
  Item own = item;
  if (has_shared) item = item_without_request(args, first_leftover() + blockIdx.x);
  u32 lane16 = lane * 16;
  RingLanes lanes = ring_lanes(place.ring, lane);
  int pages, first = split * kPageSlots + page_slot;
  Selection selection;
  auto arrive_at_cluster = [&] {
    if constexpr (kClusterMerge || kPairs) {
      __syncwarp();
      ptx::barrier_cluster_arrive_relaxed();
    }
  };
  if constexpr (kEightWarps) {
    divide_start(args, place, item, first, lane);
    arrive_at_cluster();
  } else {
    if constexpr (!kIdsFirst) find_request(args, item);
    if constexpr (kClusterMerge) open_inbox(slot.fixed, thread == 0);
    if constexpr (kPairs) open_pair(slot.fixed, warp == kWarpsPerPage && lane == 0);  // it has least to do
    const SelectedIds ids = load_ids(args, item, lane);
    SelectedIds own_ids = {};
    if (lists_own) own_ids = load_ids(args, own, lane);
    if constexpr (kIdsFirst) find_request(args, item);
    if constexpr (kSharedItem) find_request(args, own);
    // Into the second stage, whose page is requested when these copies have come with the first.
    if constexpr (kManyPages) bring_page_ids(args, item, place.ring + kStageBytes + lane * 4);
    const int seqused = load_seqused(args, item);
    int own_seqused = 0;
    if (lists_own) own_seqused = load_seqused(args, own);
    // Queries: eight threads a head. Those of the slot's own item are the first page slot's, whose warps are
    // oldest and so issue first, and a leftover's the last one's, or the second one's of pairs: it has least
    // to do, and the last one most.
    const bool of_leftover =
        kPairs ? has_leftover && page_slot == 1 : on_piece && page_slot == kPageSlots - 1;
    const bool brings_queries = !kLeftovers || warp < kWarpsPerPage || of_leftover;
    Item asked = kSharedItem ? own : item;
    if (kPairs && of_leftover) asked = item_without_request(args, first_leftover() + leftover);
    const int head = kLeftovers ? (brings_queries ? (thread >> 3) % kHeads : kHeads) : thread >> 3;
    const int query_index = thread & 7;
    constexpr int kHeadsAtOnce = kItemThreads / 8;
    constexpr int kStagings = kHeadsAtOnce < kHeads ? kHeads / kHeadsAtOnce : 1;
    QueryPart query[kStagings];
#pragma unroll
    for (int i = 0; i < kStagings; ++i)
      query[i] = load_query(args, asked, head < kHeads ? head + i * kHeadsAtOnce : args.group, query_index);
    const bool stages_shared = has_shared && part == kSharedStager;
    const int shared_head = place.item_slot * (kHeads / kItemSlots) + (lane >> 3);
    QueryPart shared_query;
    if constexpr (kSharedItem)
      shared_query = load_query(args, item, stages_shared ? shared_head : args.group, query_index);
    if constexpr (kManyPages) fill_table(smem, threadIdx.x);
    selection = load_pages(args, item, ids, seqused);
    Selection own_selection;
    if (lists_own) own_selection = load_pages(args, own, own_ids, own_seqused);
    const SourceLanes from_lanes = source_lanes(lane16, part);
    const PartSources sources = part_sources(args, item.kv_head, from_lanes);
    if constexpr (kTable && kLateQueries && !kManyPages) fill_table(smem, threadIdx.x);

    auto stage_queries = [&] {
      const u32 of = of_leftover ? 1 : 0;
      if (kLeftovers ? head == 0 && query_index == 0 : thread == 0)
        ptx::st_shared_v2_u32(slot.fixed + (of ? kSlotLeftover : kSlotItem), asked.row, asked.kv_head);
      if (head >= kHeads) return;
#pragma unroll
      for (int i = 0; i < kStagings; ++i)
        stage_head(args, query[i], head + i * kHeadsAtOnce, query_index, place.queries, slot.fixed, of);
      if (stages_shared) stage_shared_head(args, shared_query, shared_head, query_index, smem);
    };
    if constexpr (!kLateQueries) stage_queries();

    rank_pages(args, selection, lane);
    if (has_last_split(place.item_slot))
      keep_split<kLastSplits>(selection, last_split(place.item_slot) % kLastSplits);
    // A slot without an item asks for nothing: its warps leave before a copy would have arrived.
    pages = live ? selection.count : 0;
    const int turns = turns_of_piece(args, has_leftover);
    const int piece = piece_of_slot(index, page_slot);
    if (on_piece)
      first = piece;
    else if (kPairs && page_slot >= kOtherSlots)
      first = turns * kOtherSlots + page_slot;
    if (has_shared) first = place.item_slot;
#pragma unroll
    for (int s = 0; s < kFirstPages; ++s) {
      const int rank = first + s * kPageStride;
      if (rank < pages) {
        const i64 page = page_of_rank(selection, rank);
        const u8* keys = sources.keys + page * args.k_page;
        const u8* scales = sources.scales + page * sources.scales_page;
        if constexpr (kLateValues)
          request_keys(lanes, s * kStageBytes, keys, scales, from_lanes.brings_scales);
        else
          request_part(lanes, s * kStageBytes, keys, sources.values + page * args.v_page, scales,
                       from_lanes.brings_scales);
      } else if (!kLateValues) {
        request_nothing();
      }
      ptx::cp_async_commit_group();
    }
    arrive_at_cluster();
    if constexpr (kLeftovers) {
      if (part == 0 && (on_piece || page_slot == 0))
        list_turns(args, item, selection, slot, has_leftover, on_piece, piece, page_slot, turns, lane);
    } else if constexpr (kSharedItem) {
      if (threadIdx.x == 0) ptx::mbarrier_init(smem + kSharedArrival, kItemSlots);
      if (has_shared && part == 0) list_part(args, item, selection, slot, place.item_slot, lane);
      if (lists_own) {
        rank_pages(args, own_selection, lane);
        list_own(args, own, own_selection, slot, !has_shared, lane);
      }
    } else {
      if (warp == 0) list_item(args, item, selection, slot, lane);
    }
    if constexpr (kLateQueries) stage_queries();
  }
  if (first_item) {
    // By a shuffle: the compiler would keep the entries from item to item, and there are no registers for it.
    const int table_thread = kManyItems ? __shfl_sync(~0u, threadIdx.x, lane) : threadIdx.x;
    if constexpr (kTable && !kLateQueries) fill_table(smem, table_thread);
    __syncthreads();
  } else {
    item_sync(place.item_slot);
  }
  if (!live) return ~0u;
  if constexpr (kCooperative) pages = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotPages));
  if constexpr (kLeftovers) {  // from here on places in the page slot's list
    pages = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotEnds + page_slot * 8));
    first = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotFirsts + page_slot * 4));
  }
  if constexpr (kSharedItem) {
    first = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotFirst));
    pages = has_shared ? kOwnPlace : static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotPages));
  }
  if constexpr (kLateValues) {
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
  Inbox inbox[2];  // a row's
  if constexpr (kDirectSlices) {
#pragma unroll
    for (int row = 0; row < 2; ++row) inbox[row] = inbox_of_slice(slot.fixed, split, warp, lane16 >> 4, row);
    ptx::barrier_cluster_wait();  // every inbox is open
    if (first >= pages && part == 0) push_stats(state, slot.fixed, lane16 >> 4, split, false);
  }
  auto store_piece = [&](u32 stage) {
    if constexpr (kLeftovers) {
      u32 lane_now = lane16 >> 4;
      ptx::opaque(lane_now);  // or what follows from it would be computed before the loop, and take registers
      const int warp_now = threadIdx.x / 32 % kItemWarps;
      const int piece_now = piece_of_slot(index, warp_now / kWarpsPerPage);
      const SharedAddress left = place.page_ring + stage;
      store_piece_half<0>(args, state, slot, left, place.item_slot, warp_now, lane_now, leftover, piece_now);
      store_piece_half<1>(args, state, slot, left, place.item_slot, warp_now, lane_now, leftover, piece_now);
    }
  };
  const auto turn_of = [](u32 stage) { return kTurns == 1 || stage == 0 ? 0 : 1; };
  // While a slot has a part of a shared item, its own item's end is not at hand; behind it, nothing is
  // visible.
  const auto is_visible = [&](int rank) {
    return ptx::ld_shared_u32(slot.fixed + kSlotVisible + rank * 4) != 0;
  };
  auto request_after = [&](int rank, u32 stage) {
    if constexpr (kLeftovers) {  // one register less in the loop
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
  auto request_second = [&](int rank, bool begins) {
    if constexpr (kSecondBehindScores) {
      if (!begins) return;
      if constexpr (kTurns == 2)  // of the same page
        request_listed(lanes, kStageBytes, slot, rank, source_lanes(lane16, part), turn_of(kStageBytes));
      else if (kSharedItem ? is_visible(rank + kPageStride) : rank + kPageStride < pages)
        request_listed(lanes, kStageBytes, slot, rank + kPageStride, source_lanes(lane16, part));
      else
        request_nothing();
      ptx::cp_async_commit_group();
    }
  };
  auto step = [&](int rank, u32 stage, bool begins) {
    // A cooperating warp has not yet asked for the page that follows the last one in flight.
    const bool alone = kCooperative && (kManyPages || rank != first);
    if (alone)
      wait_for_keys<1>();
    else
      wait_for_keys();
    __syncwarp();
    if (kEightWarps && rank == first) page_sync(page_slot);  // others have asked for this warp's part
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
        wait_for_values();  // the next copies go where these do
      }
      __syncwarp();
      if constexpr (!kLeftovers && !kSharedItem) request_after(rank, stage);
    }
  };
  if constexpr (kLeftovers) {
    // Until the piece ends, and then until the list does. The loop has no registers for either.
    int rank = first;
    u32 stage = 0;
    while (rank < pages) {
      int end_of_piece;
      bool begins = true;
#pragma unroll 1
      while (true) {
        step(rank, stage, begins);
        begins = false;
        ++rank;
        const uint2 ends = ptx::ld_shared_v2_u32(slot.fixed + kSlotEnds + page_slot * 8);
        pages = static_cast<int>(ends.x);
        end_of_piece = static_cast<int>(ends.y);  // never at kNoPiece
        if (rank == pages || rank == end_of_piece) break;
        request_after(rank - 1, stage);
        stage ^= kStageBytes;
      }
      if (rank != end_of_piece) break;
      if constexpr (!kPairs) store_piece(stage);
      request_after(rank - 1, stage);
      stage ^= kStageBytes;
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
  } else if constexpr (kSharedItem) {
    // The slot's part of the shared item, where there is one, and then its own item.
    int rank = first;
#pragma unroll 1
    while (true) {
      // Anew for each item, or ptxas finds a worse schedule for the page loop (1,530 cycles for 1,340).
      ptx::opaque(lane16);
      ptx::opaque(at.values);
      at.lane16 = lane16;
      ptx::cp_async_wait_group<kPageGroups - 1>();
      if (rank < pages) {
        step(rank, 0, true);
        request_after(rank, 0);
      }
      for (++rank; rank < pages; rank += 2) {
        step(rank, kStageBytes, false);
        if (rank + 1 >= pages) break;
        request_after(rank, kStageBytes);
        step(rank + 1, 0, false);
        request_after(rank + 1, 0);
      }
      if (at.queries == place.queries) break;
      u32 lane_now = lane16 >> 4;
      ptx::opaque(lane_now);
      store_part(args, state, smem, slot, place.page_ring + kStageBytes, place.item_slot,
                 threadIdx.x / 32 % kItemWarps, lane_now);
      begin_item();
      at.queries = place.queries;
      at.scales -= kScaleBytes;
      rank = kOwnPlace;
      pages = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotPages));
    }
  } else if constexpr (kRolledLoop) {
    u32 stage = 0;
#pragma unroll 1
    for (int rank = first; rank < pages; rank += kPageStride) {
      step(rank, stage, rank == first);
      stage = stage + kStageBytes == kWarpRingBytes ? 0 : stage + kStageBytes;
    }
  } else if constexpr (kTurns == 2) {
    // A stage for each part of a page; the first part of all is apart.
    int rank = 0;
    if (rank < pages) step(rank, 0, true);
    while (rank < pages) {
      step(rank, kStageBytes, false);
      if (++rank >= pages) break;
      step(rank, 0, false);
    }
  } else {
    // With the first page apart, the loop begins with the second stage.
    constexpr u32 kStageNow = kFirstApart ? kStageBytes : 0;
    int rank = first;
    if constexpr (kFirstApart) {
      if (rank < pages) step(rank, 0, true);
      rank += kPageStride;
    }
    // For 10.x and 12.x the compiler would unroll this 8 to 16 times, to 34,000 instructions.
#pragma unroll 1
    for (; rank < pages; rank += 2 * kPageStride) {
      step(rank, kStageNow, kFirstOrigins && !kFirstApart && rank == first);
      if (rank + kPageStride >= pages) break;
      step(rank + kPageStride, kStageBytes - kStageNow, false);
    }
  }
  if constexpr (kDirectSlices) {
#pragma unroll
    for (int row = 0; row < 2; ++row)
      push_values(slice_of(state, slot.fixed, warp, lane16 >> 4, row), inbox[row]);
  }
  ptx::cp_async_wait_group<0>();
  __syncwarp();

  // Out of what is at hand anyway: two registers less in the loop.
  const int lane_now = lane16 >> 4, thread_now = threadIdx.x % kItemThreads;
  const uint2 stored = ptx::ld_shared_v2_u32(slot.fixed + kSlotItem);
  const ItemRow item_row = {static_cast<int>(stored.x), static_cast<int>(stored.y)};
  if constexpr (!kDirectSlices) {
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
  if constexpr (kManyItems)  // out of shared memory: the loop over pages has no register for it
    return item_row.row * args.num_kv_heads + item_row.kv_head + gridDim.x * kItemSlots;
  else
    return ~0u;
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
