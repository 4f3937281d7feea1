// The start of an item: from its index to a first page that is on its way, with everything that the page loop
// reads from shared memory in place.
#pragma once
#include "portable_place.cuh"

// ---- Queries

// Stages a head's queries as fragments, eight threads a head, and its scale. of: 0 for the slot's own item, 1
// for a leftover.
__device__ __forceinline__ void stage_head(const Arguments& args, const QueryPart& query, int head, int index,
                                           SharedAddress queries, SharedAddress slot, u32 of) {
  const int exponent = row_exponent(query);
  stage_query(query, exponent, head, index, queries + of * kQueryBytes);
  if (index == 0) {
    const RowScale row = bounded_scale(args.score_scale, exponent);
    ptx::st_shared_v2_f32(slot + kSlotScales + of * kScaleBytes + head * 8, row.scale, row.lift);
  }
}

// Heads that the threads of an item stage at once, eight threads a head, and how often they do.
constexpr int kHeadsAtOnce = kItemThreads / 8;
constexpr int kStagings = kHeadsAtOnce < kHeads ? kHeads / kHeadsAtOnce : 1;

// Which queries a thread stages: part `index` of heads head, head + kHeadsAtOnce, ...
struct QueryShare {
  bool of_leftover;
  Item item;
  int head, index;  // head is kHeads or more for a thread that stages none
  bool stages_shared;  // and, of the shared item, part `index` of shared_head
  int shared_head;
};

// With leftovers, the slot's own item is staged by the first page slot, whose warps are the oldest and so
// issue first. A leftover is staged by the last page slot or, with pairs, by the second one, which has the
// least to do, while the last one has the most. Each item slot stages a quarter of a shared item's heads.
// item: the slot's own or, for a warp that begins with a piece, the leftover.
__device__ __forceinline__ QueryShare query_share(const Arguments& args, const Place& place,
                                                  const Share& share, const Item& item) {
  QueryShare mine;
  mine.of_leftover = kPairs ? share.has_leftover && place.page_slot == 1
                            : share.on_piece && place.page_slot == kPageSlots - 1;
  const bool stages = !kLeftovers || place.warp < kWarpsPerPage || mine.of_leftover;
  mine.item = item;
  if (kPairs && mine.of_leftover) mine.item = item_without_request(args, first_leftover() + share.leftover);
  const int head = place.thread >> 3;
  mine.head = kLeftovers ? (stages ? head % kHeads : kHeads) : head;
  mine.index = place.thread & 7;
  mine.stages_shared = share.has_shared && place.warp % kWarpsPerPage == kSharedStager;
  mine.shared_head = place.item_slot * (kHeads / kItemSlots) + (place.lane >> 3);
  return mine;
}

__device__ __forceinline__ void load_queries(const Arguments& args, const QueryShare& mine,
                                             QueryPart (&part)[kStagings]) {
#pragma unroll
  for (int i = 0; i < kStagings; ++i)
    part[i] = load_query(args, mine.item, mine.head < kHeads ? mine.head + i * kHeadsAtOnce : args.group,
                         mine.index);
}

__device__ __forceinline__ void stage_queries(const Arguments& args, SharedAddress smem, const Place& place,
                                              const QueryShare& mine, const QueryPart (&part)[kStagings],
                                              const QueryPart& shared_part) {
  const SharedAddress slot = place.slot.fixed;
  const u32 of = mine.of_leftover ? 1 : 0;
  if (kLeftovers ? mine.head == 0 && mine.index == 0 : place.thread == 0)
    ptx::st_shared_v2_u32(slot + (of ? kSlotLeftover : kSlotItem), mine.item.row, mine.item.kv_head);
  if (mine.head >= kHeads) return;
#pragma unroll
  for (int i = 0; i < kStagings; ++i)
    stage_head(args, part[i], mine.head + i * kHeadsAtOnce, mine.index, place.queries, slot, of);
  if (mine.stages_shared) stage_shared_head(args, shared_part, mine.shared_head, mine.index, smem);
}

// ---- Pages

// This CTA's inbox is open. Others of the cluster wait for this before they send.
__device__ __forceinline__ void arrive_at_cluster() {
  if constexpr (kClusterMerge || kPairs) {
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
  }
}

// Eight warps a page: four select the item's pages and request the first one, two parts each, and the other
// four stage the queries. The number of pages is left in kSlotPages.
__device__ __forceinline__ void divide_start(const Arguments& args, const Place& place, Item item, int first,
                                             int lane) {
  const SharedAddress slot = place.slot.fixed;
  if (place.warp < kItemWarps / 2) {
    // seqused arrives after the ids and before it is needed.
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
  arrive_at_cluster();
}

// Otherwise every warp selects for itself and requests its own parts, and all stage queries. first, end:
// ranks of the warp's first page and of the end of the item's; a warp takes every kPageStride-th page. With a
// shared item, all warps of the slot begin with that, and one of them also selects the slot's own pages.
__device__ __forceinline__ void select_pages(const Arguments& args, SharedAddress smem, const Place& place,
                                             const Share& share, Item item, Item own, int& first,
                                             int& end) {
  const SlotAddresses& slot = place.slot;
  const int warp = place.warp, lane = place.lane;
  const u32 page_slot = place.page_slot, part = warp - page_slot * kWarpsPerPage;
  const bool lists_own = kSharedItem && part == kOwnLister;
  if constexpr (!kIdsFirst) find_request(args, item);
  if constexpr (kClusterMerge) open_inbox(slot.fixed, place.thread == 0);
  if constexpr (kPairs) open_pair(slot.fixed, warp == kWarpsPerPage && lane == 0);  // it has the least to do
  const SelectedIds ids = load_ids(args, item, lane);
  SelectedIds own_ids = {};
  if (lists_own) own_ids = load_ids(args, own, lane);
  if constexpr (kIdsFirst) find_request(args, item);
  if constexpr (kSharedItem) find_request(args, own);
  // Into the second stage: its page is requested when the first one has arrived, and with it these copies.
  if constexpr (kManyPages) bring_page_ids(args, item, place.ring + kStageBytes + lane * 4);
  const int seqused = load_seqused(args, item);
  int own_seqused = 0;
  if (lists_own) own_seqused = load_seqused(args, own);
  const QueryShare mine = query_share(args, place, share, kSharedItem ? own : item);
  QueryPart queries[kStagings];
  load_queries(args, mine, queries);
  QueryPart shared_query;
  if constexpr (kSharedItem)
    shared_query = load_query(args, item, mine.stages_shared ? mine.shared_head : args.group, mine.index);
  if constexpr (kManyPages) fill_table(smem, threadIdx.x);
  Selection selection = load_pages(args, item, ids, seqused);
  Selection own_selection;
  if (lists_own) own_selection = load_pages(args, own, own_ids, own_seqused);
  const SourceLanes from_lanes = source_lanes(lane * 16, part);
  const PartSources sources = part_sources(args, item.kv_head, from_lanes);
  const RingLanes to = ring_lanes(place.ring, lane);
  if constexpr (kTable && kLateQueries && !kManyPages) fill_table(smem, threadIdx.x);
  if constexpr (!kLateQueries) stage_queries(args, smem, place, mine, queries, shared_query);

  rank_pages(args, selection, lane);
  if (has_last_split(place.item_slot))
    keep_split<kLastSplits>(selection, last_split(place.item_slot) % kLastSplits);
  // A slot without an item requests nothing: its warps exit before a copy would have arrived.
  end = share.live ? selection.count : 0;
  const int turns = turns_of_piece(args, share.has_leftover);
  const int piece = piece_of_slot(share.index, page_slot);
  if (share.on_piece)
    first = piece;
  else if (kPairs && page_slot >= kOtherSlots)
    first = turns * kOtherSlots + page_slot;
  if (share.has_shared) first = place.item_slot;
#pragma unroll
  for (int s = 0; s < kFirstPages; ++s) {
    const int rank = first + s * kPageStride;
    if (rank < end) {
      const i64 page = page_of_rank(selection, rank);
      const u8* keys = sources.keys + page * args.k_page;
      const u8* scales = sources.scales + page * sources.scales_page;
      if constexpr (kLateValues)
        request_keys(to, s * kStageBytes, keys, scales, from_lanes.brings_scales);
      else
        request_part(to, s * kStageBytes, keys, sources.values + page * args.v_page, scales,
                     from_lanes.brings_scales);
    } else if (!kLateValues) {
      request_nothing();
    }
    ptx::cp_async_commit_group();
  }
  arrive_at_cluster();
  if constexpr (kLeftovers) {
    if (part == 0 && (share.on_piece || page_slot == 0))
      list_turns(args, item, selection, slot, share.has_leftover, share.on_piece, piece, page_slot, turns,
                 lane);
  } else if constexpr (kSharedItem) {
    if (threadIdx.x == 0) ptx::mbarrier_init(smem + kSharedArrival, kItemSlots);
    if (share.has_shared && part == 0) list_part(args, item, selection, slot, place.item_slot, lane);
    if (lists_own) {
      rank_pages(args, own_selection, lane);
      list_own(args, own, own_selection, slot, !share.has_shared, lane);
    }
  } else {
    if (warp == 0) list_item(args, item, selection, slot, lane);
  }
  if constexpr (kLateQueries) stage_queries(args, smem, place, mine, queries, shared_query);
}

// Ends with the barrier behind which lists, queries and table are complete. item: what the warp begins with.
// own: the slot's own item, which is another one if it begins with a shared item. first_item: of the slot.
__device__ __forceinline__ void start_item(const Arguments& args, SharedAddress smem, const Place& place,
                                           const Share& share, const Item& item, const Item& own,
                                           bool first_item, int& first, int& end) {
  if constexpr (kEightWarps)
    divide_start(args, place, item, first, place.lane);
  else
    select_pages(args, smem, place, share, item, own, first, end);
  if (first_item) {
    // By a shuffle, or the compiler would keep the entries from item to item, for which there are no
    // registers.
    const int table_thread = kManyItems ? __shfl_sync(~0u, threadIdx.x, place.lane) : threadIdx.x;
    if constexpr (kTable && !kLateQueries) fill_table(smem, table_thread);
    __syncthreads();
  } else {
    item_sync(place.item_slot);
  }
}
