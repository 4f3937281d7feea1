// Sparse decode attention over NVFP4 pages on mma.sync, compute capability 8.0 and up.
//
// An item is one (query token, KV head); its up to 16 query heads are the 16 rows of the MMA tiles. kSplits
// CTAs share an item; in a CTA, kPageSlots of its pages are in work side by side, kWarpsPerPage warps each.
// Every warp streams its part of the pages through a private cp.async ring, keeps its own softmax origin and
// its own 16 x 128 sums, and waits for nobody until the warps of the item merge; portable_cooperative.cuh has
// the other way, for few pages. Splits meet in distributed shared memory or in a workspace that msa_merge
// reads. All sums run in a fixed order, and nothing survives a launch. docs/portable.md has the design.
#include "barrier.cuh"
#include "opaque.cuh"
#include "portable_merge.cuh"

namespace {

// Meets the other warps of the item.
__device__ __forceinline__ void item_sync(u32 item_slot) {
  if constexpr (kItemSlots > 1)
    ptx::barrier_cta_sync(1 + kItemSlots * kPageSlots + item_slot, kItemThreads);
  else
    __syncthreads();
}

// Where a warp of the CTA works.
struct Place {
  u32 item_slot;
  int warp;  // of the item
  SlotAddresses slot;
  SharedAddress item_ring, page_ring, ring;

  __device__ __forceinline__ Place(SharedAddress smem, int cta_warp)
      : item_slot(cta_warp / kItemWarps),
        warp(cta_warp % kItemWarps),
        slot(smem, item_slot),
        item_ring(smem + kRingAt + item_slot * (kItemWarps * kWarpRingBytes)),
        page_ring(item_ring + warp / kWarpsPerPage * (kWarpsPerPage * kWarpRingBytes)),
        ring(item_ring + warp * kWarpRingBytes) {}
};

// State: WarpState, or SliceState where warps cooperate.
template <typename State>
__device__ __forceinline__ void decode(const Arguments& args) {
  extern __shared__ __align__(1024) u8 shared[];
  const SharedAddress smem = ptx::shared_address(shared);
  const int lane = threadIdx.x & 31, cta_warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const Place place(smem, cta_warp);
  const SlotAddresses& slot = place.slot;
  const int warp = place.warp, thread = warp * 32 + lane;
  const u32 part = warp % kWarpsPerPage, split = kSplit ? blockIdx.x % kSplits : 0;
  const u32 index = kItemSlots > 1 ? blockIdx.x + gridDim.x * place.item_slot : blockIdx.x / kSplits;
  const bool live = kItemSlots == 1 || index < item_count(args);
  const Item item = item_of(args, live ? index : 0);
  if constexpr (kClusterMerge) open_inbox(slot.fixed, thread);
  const SelectedIds ids = load_ids(args, item, lane);
  const int head = thread >> 3, query_index = thread & 7;
  const QueryPart query = load_query(args, item, head < kHeads ? head : args.group, query_index);
  Selection selection = load_pages(args, item, ids);
  u32 lane16 = lane * 16;
  const SourceLanes from_lanes = source_lanes(lane16, part);
  const PartSources sources = part_sources(args, item.kv_head, from_lanes);
  if constexpr (kTable && kLateQueries) fill_table(smem, threadIdx.x);

  auto stage_queries = [&] {
    if (thread == 0) ptx::st_shared_v2_u32(slot.fixed + kSlotItem, item.row, item.kv_head);
    if (head >= kHeads) return;
    const int exponent = row_exponent(query);
    stage_query(query, exponent, args.score_scale < 0.0f, head, query_index, slot.fixed + kSlotQueries);
    if (query_index == 0) {
      const RowScale row = bounded_scale(args.score_scale, exponent);
      ptx::st_shared_v2_f32(slot.fixed + kSlotScales + head * 8, row.scale, row.lift);
    }
  };
  if constexpr (!kLateQueries) stage_queries();

  rank_pages(args, selection, lane);
  // A slot without an item asks for nothing: its warps leave before a copy would have arrived.
  const int pages = live ? selection.count : 0, first = split * kPageSlots + warp / kWarpsPerPage;
  RingLanes lanes = ring_lanes(place.ring, lane);
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
    } else if constexpr (!kLateValues) {
      request_nothing();
    }
    ptx::cp_async_commit_group();
  }
  if constexpr (kClusterMerge) {
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
  }
  if (warp == 0) list_pages(args, item, selection, slot);
  if constexpr (kLateQueries) stage_queries();
  if constexpr (kTable && !kLateQueries) fill_table(smem, threadIdx.x);
  __syncthreads();
  if (!live) return;
  if constexpr (kLateValues) {
    if (first < pages) {
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
  if constexpr (!kTable) {
    ptx::opaque(value_scales_at);
    ptx::opaque(lanes.values);
  }
  const WarpAddresses at = {place.ring,
                            values_at,
                            value_scales_at,
                            slot.fixed + kSlotQueries,
                            smem,
                            slot.fixed + kSlotScales,
                            slot.warp_stats(warp),
                            lane16};
  if constexpr (kFirstPages < kStages) {
    if constexpr (kGradualStart) ptx::cp_async_wait_group<kPageGroups - 1>();
#pragma unroll
    for (int s = kFirstPages; s < kStages; ++s) {
      if (first + s * kPageStride < pages)
        request_listed(lanes, s * kStageBytes, slot, first + s * kPageStride, source_lanes(lane16, part));
      else
        request_nothing();
      ptx::cp_async_commit_group();
    }
  }

  State state = {};
  if constexpr (kCooperative) {
    state.reference[0] = state.reference[1] = kNoReference;
  } else {
    state.origin[0] = state.origin[1] = kNoOrigin;
    if (t == 0) {  // read by this warp after a __syncwarp
      ptx::st_shared_f32(at.references + g * 8, kNoReference);
      ptx::st_shared_f32(at.references + g * 8 + 64, kNoReference);
    }
  }
  const u32 page_slot = warp / kWarpsPerPage;
  auto request_after = [&](int rank, u32 stage) {
    if (rank + kStages * kPageStride < pages)
      request_listed(lanes, stage, slot, rank + kStages * kPageStride, source_lanes(lane16, part));
    else
      request_nothing();
    ptx::cp_async_commit_group();
  };
  auto step = [&](int rank, u32 stage) {
    // A cooperating warp has not yet asked for the page that follows the last one in flight.
    const bool refilled = kCooperative && rank != first;
    if (refilled)
      wait_for_keys<1>();
    else
      wait_for_keys();
    __syncwarp();
    const int visible = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotVisible + rank * 4));
    if constexpr (kCooperative) {
      const auto arrive = [&] {
        if (refilled)
          wait_for_values<1>();
        else
          wait_for_values();
      };
      const auto refill = [&] {
        if (refilled) request_after(rank - kPageStride, stage ^ kStageBytes);
      };
      attend_page(state, at, slot.fixed + kSlotMaxima + page_slot * kMaximaBytes, place.page_ring, page_slot,
                  part, stage, visible, arrive, refill);
    } else {
      const int own_visible = visible - static_cast<int>(part) * kWarpTokens;
      if (own_visible > 0)
        attend_part(state, at, stage, own_visible);
      else
        wait_for_values();  // the next copies go where these do
      __syncwarp();
      request_after(rank, stage);
    }
  };
  if constexpr (kRolledLoop) {
    u32 stage = 0;
#pragma unroll 1
    for (int rank = first; rank < pages; rank += kPageStride) {
      step(rank, stage);
      stage = stage + kStageBytes == kWarpRingBytes ? 0 : stage + kStageBytes;
    }
  } else {
    for (int rank = first; rank < pages; rank += 2 * kPageStride) {
      step(rank, 0);
      if (rank + kPageStride >= pages) break;
      step(rank + kPageStride, kStageBytes);
    }
  }
  ptx::cp_async_wait_group<0>();
  __syncwarp();

  // Out of what is at hand anyway: two registers less in the loop.
  const int lane_now = lane16 >> 4, thread_now = threadIdx.x % kItemThreads;
  const uint2 stored = ptx::ld_shared_v2_u32(slot.fixed + kSlotItem);
  const ItemRow item_row = {static_cast<int>(stored.x), static_cast<int>(stored.y)};
  if constexpr (kDirectSlices) {
    ptx::barrier_cluster_wait();  // every inbox is open
#pragma unroll
    for (int row = 0; row < 2; ++row)
      push_partial(slice_of(state, slot.fixed, warp, lane_now, row), slot.fixed, split);
  } else {
    if constexpr (kCooperative) {
      page_sync(page_slot);  // nobody reads this warp's ring any more
      publish_slice(state, slot, place.ring, page_slot, part, lane_now);
    } else {
      publish_warp(state, slot, place.ring, warp, lane_now);
    }
    if constexpr (!kCooperative && kPageSlots > 1) {
      page_sync(place.item_slot * kPageSlots + page_slot);
      merge_page(slot, place.page_ring, page_slot, thread_now % (32 * kWarpsPerPage));
    }
    ResultPlace to = {};
    if constexpr (!kSplit) {
      const auto mine = part_of_thread<kPartDims>(thread_now);
      to = result_place_now(args, item_row, mine.head, mine.dim);
    }
    item_sync(place.item_slot);
    const auto merged = merge_item(slot, place.item_ring, thread_now);
    if constexpr (kClusterMerge) ptx::barrier_cluster_wait();  // every inbox is open
    hand_over(args, to, merged, slot.fixed, split);
  }
  if constexpr (kClusterMerge) collect_partials(args, item_row, slot.fixed, split, thread_now);
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
               i64 out_head, u8* lse, i64 lse_row, i64 lse_head, i32 batch) {
  decode<StateOf<kCooperative>::type>({
      num_kv_heads, seqlen_q, topk, max_pages, q2k, q2k_head, q2k_row, q2k_j, seqused_k,
      seqused_k_stride, page_table, page_table_row, page_table_j, q, q_row, q_head, num_pages,
      group, k, k_page, k_head, v, v_page, v_head, k_scale, k_scale_page, k_scale_head, v_scale,
      v_scale_page, v_scale_head, score_scale, v_global_scale, workspace, out, out_row, out_head,
      lse, lse_row, lse_head, batch});
}

extern "C" __global__ void __launch_bounds__(128)
    msa_merge(i32 num_kv_heads, i32 seqlen_q, i32 topk, i32 max_pages, const u8* q2k, i64 q2k_head,
              i64 q2k_row, i64 q2k_j, const u8* seqused_k, i64 seqused_k_stride, const u8* page_table,
              i64 page_table_row, i64 page_table_j, const u8* q, i64 q_row, i64 q_head, i32 num_pages,
              i32 group, const u8* k, i64 k_page, i64 k_head, const u8* v, i64 v_page, i64 v_head,
              const u8* k_scale, i64 k_scale_page, i64 k_scale_head, const u8* v_scale, i64 v_scale_page,
              i64 v_scale_head, float score_scale, float v_global_scale, u8* workspace, u8* out, i64 out_row,
              i64 out_head, u8* lse, i64 lse_row, i64 lse_head, i32 batch) {
  merge_workspace({
      num_kv_heads, seqlen_q, topk, max_pages, q2k, q2k_head, q2k_row, q2k_j, seqused_k,
      seqused_k_stride, page_table, page_table_row, page_table_j, q, q_row, q_head, num_pages,
      group, k, k_page, k_head, v, v_page, v_head, k_scale, k_scale_page, k_scale_head, v_scale,
      v_scale_page, v_scale_head, score_scale, v_global_scale, workspace, out, out_row, out_head,
      lse, lse_row, lse_head, batch});
}
