// Roles of single warps: which pages an item reads, the copies that bring them in, and the MMAs.
#pragma once
#include "blackwell_plan.cuh"
#include "cache_policy.cuh"
#include "cp_async_bulk.cuh"

namespace blackwell {

__device__ __forceinline__ i32 load_i32(const u8* address) { return *reinterpret_cast<const i32*>(address); }

// ---- selection warp ----------------------------------------------------------------------------------------------------

// One id of the row and the page it names. Ids are bounded before the page table is read, page ids before they are used.
struct Candidate {
  i32 id;
  i32 page;
  bool valid;
};

// Tokens that the row sees, none for a row before the first token. seqused_k may be any value.
__device__ __forceinline__ u32 visible_tokens(const Arguments& arguments, u32 request, u32 token) {
  const i32 used = load_i32(arguments.seqused_k + request * arguments.seqused_stride);
  const i32 hidden = static_cast<i32>(arguments.seqlen_q - 1 - token);
  return used > hidden ? static_cast<u32>(used - hidden) : 0;
}

// Lists the pages of each item for the other roles: those of the row's ids that are legal, in their order, and of a split
// item the CTA's share of them.
__device__ __forceinline__ void selection_role(Shared& shared, const Arguments& arguments, const Schedule& schedule, u32 rank) {
  const u32 lane = threadIdx.x % 32;
  const u32 lanes_below = (1u << lane) - 1;
  Ring<SELECTIONS> slot;
  for (u32 round = 0; round < schedule.count; ++round, slot.advance()) {
    const Item item = schedule.item(round);
    const u32 request = item.row / arguments.seqlen_q;
    const u32 token = item.row % arguments.seqlen_q;
    const u8* ids = arguments.q2k + item.kv_head * arguments.q2k_head + item.row * arguments.q2k_row;
    const u8* table = arguments.page_table + request * arguments.page_table_row;

    Candidate candidates[MAX_TOPK / 32];
#pragma unroll
    for (u32 half = 0; half < MAX_TOPK / 32; ++half) {
      const u32 position = half * 32 + lane;
      candidates[half].id = position < arguments.topk ? load_i32(ids + position * arguments.q2k_index) : -1;
    }
    // The short program fetches the row of the page table before the ids are known: one round trip to memory less.
    const i32 table_entry =
        SHORT_TABLE && lane < arguments.max_pages ? load_i32(table + lane * arguments.page_table_index) : -1;
    const u32 visible = visible_tokens(arguments, request, token);
    const u32 blocks = visible / PAGE_TOKENS + (visible % PAGE_TOKENS != 0);
    const u32 id_limit = min(blocks, arguments.max_pages);
    u32 kept[MAX_TOPK / 32];
#pragma unroll
    for (u32 half = 0; half < MAX_TOPK / 32; ++half) {
      Candidate& candidate = candidates[half];
      candidate.valid = static_cast<u32>(candidate.id) < id_limit;
      if constexpr (SHORT_TABLE) {
        candidate.page = __shfl_sync(~0u, table_entry, candidate.id & 31);
      } else {
        candidate.page = candidate.valid ? load_i32(table + candidate.id * arguments.page_table_index) : -1;
      }
      candidate.valid = candidate.valid && static_cast<u32>(candidate.page) < arguments.num_pages;
      kept[half] = __ballot_sync(~0u, candidate.valid);
    }

    u32 total = 0;
#pragma unroll
    for (u32 half = 0; half < MAX_TOPK / 32; ++half) {
      total += __popc(kept[half]);
    }
    const u32 first = item.split ? total * rank / SPLITS : 0;
    const u32 last = item.split ? total * (rank + 1) / SPLITS : total;

    Selection& selection = shared.selections[slot.index];
    wait(shared.selection_free[slot.index], slot.parity ^ 1);
    u32 position = __popc(kept[0] & lanes_below);
#pragma unroll
    for (u32 half = 0; half < MAX_TOPK / 32; ++half) {
      const Candidate& candidate = candidates[half];
      if (candidate.valid && position >= first && position < last) {
        const u32 before = static_cast<u32>(candidate.id) * PAGE_TOKENS;
        selection.pages[position - first] = {candidate.page, min(visible - before, PAGE_TOKENS)};
      }
      if (half + 1 < MAX_TOPK / 32) {
        position = __popc(kept[half]) + __popc(kept[half + 1] & lanes_below);
      }
    }
    if (lane == 0) {
      selection.count = last - first;
    }
    arrive_warp(shared.selection_full[slot.index]);
  }
}

// ---- copy warp ---------------------------------------------------------------------------------------------------------

// Brings pages into the ring, across items, as far ahead as the ring is deep. One thread.
__device__ __forceinline__ void copy_role(
    Shared& shared, const Arguments& arguments, const Schedule& schedule, const ptx::TensorMap& k_map,
    const ptx::TensorMap& v_map) {
  // One query token a request: nobody else will read these bytes in this launch. With several, neighbouring tokens tend
  // to select the same pages, and L2 should keep them.
  const u64 policy = arguments.seqlen_q == 1 ? ptx::createpolicy_evict_first() : ptx::createpolicy_evict_last();
  Ring<SELECTIONS> slot;
  Ring<STAGES> ring;
  for (u32 round = 0; round < schedule.count; ++round, slot.advance()) {
    const Item item = schedule.item(round);
    const u8* k_scale = arguments.k_scale + item.kv_head * arguments.k_scale_head;
    const u8* v_scale = arguments.v_scale + item.kv_head * arguments.v_scale_head;
    wait(shared.selection_full[slot.index], slot.parity);
    const Selection& selection = shared.selections[slot.index];
    const u32 count = selection.count;
    for (u32 i = 0; i < count; ++i, ring.advance()) {
      const i32 page = selection.pages[i].page;
      Stage& stage = shared.stages[ring.index];
      StageBarriers& barriers = shared.stage_barriers[ring.index];
      const ptx::SharedAddress full = ptx::shared_address(&barriers.full);
      wait(barriers.free, ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, STAGE_BYTES);
      const i32 kv_head = static_cast<i32>(item.kv_head);
      // K and its scales first: the page's way starts with them.
      ptx::cp_async_bulk_shared_global(
          ptx::shared_address(stage.key_scales), k_scale + page * arguments.k_scale_page, SCALE_BYTES, full, policy);
      ptx::cp_async_bulk_tensor_4d(ptx::shared_address(stage.keys), k_map, 0, 0, kv_head, page, full, policy);
      ptx::cp_async_bulk_shared_global(
          ptx::shared_address(stage.value_scales), v_scale + page * arguments.v_scale_page, SCALE_BYTES, full, policy);
      ptx::cp_async_bulk_tensor_4d(ptx::shared_address(stage.values), v_map, 0, 0, kv_head, page, full, policy);
    }
    ptx::mbarrier_arrive(ptx::shared_address(&shared.selection_free[slot.index]));
  }
  // No commit may arrive at a barrier of a CTA that has exited: the last pages are through the ring.
  for (u32 stage = 0; stage < STAGES; ++stage, ring.advance()) {
    wait(shared.stage_barriers[ring.index].free, ring.parity ^ 1);
  }
}

// ---- MMA warp ----------------------------------------------------------------------------------------------------------

// A page whose scores are issued and whose output MMA is not.
struct PendingPage {
  u32 item_buffer;
  bool first;  // of its item: the accumulator is overwritten
  bool last;   // of its item
};

// S = K q^T of one page: both halves of the head dim, for both passes of query terms. The scores that lay in the buffer
// before have been read: this thread has waited for the weights that the softmax warps made of them.
__device__ __forceinline__ void issue_scores(
    Shared& shared, u32 tensor, const Ring<STAGES>& ring, const PageBuffer& buffer, u32 item_buffer) {
  StageBarriers& stage = shared.stage_barriers[ring.index];
  ptx::mbarrier_wait_parity(buffer.key_scales_full(), buffer.parity);
  wait(stage.full, ring.parity);
  ptx::tcgen05_fence_after_thread_sync();
  const u64 keys = describe(KEYS_DESCRIPTOR, shared.stages[ring.index].keys);
  const u32 scores = buffer.tensor + TENSOR_SCORES;
  const u32 key_scales = buffer.tensor + TENSOR_KEY_SCALES;
  const u32 query_scales = tensor + TENSOR_QUERY_SCALES + item_buffer * TENSOR_ITEM;
#pragma unroll
  for (u32 pass = 0; pass < PASSES; ++pass) {
    const u64 terms = describe(KEYS_DESCRIPTOR, shared.query_terms[item_buffer][pass]);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      ptx::tcgen05_mma_mxf4nvf4_shared_shared(
          scores, keys + half * KEYS_HALF, terms + half * KEYS_HALF, SCORES_INSTRUCTION, key_scales + half * 4,
          query_scales + pass * 4 + half * 2, pass + half > 0);
    }
  }
  ptx::tcgen05_commit(buffer.scores_full());
  ptx::tcgen05_commit(ptx::shared_address(&stage.free));
}

// O^T += V^T P^T of the pending page, 16 tokens an MMA; `buffer` is that of the pending page.
__device__ __forceinline__ void issue_output(
    Shared& shared, u32 tensor, const PageBuffer& buffer, const PendingPage& pending) {
  ptx::mbarrier_wait_parity(buffer.values_full(), buffer.parity);
  ptx::mbarrier_wait_parity(buffer.weights_full(), buffer.parity);
  ptx::tcgen05_fence_after_thread_sync();
  const u64 weights = describe(WEIGHTS_DESCRIPTOR, shared.weights[buffer.index()]);
  const u32 values = buffer.tensor + TENSOR_VALUES;
  const u32 output = tensor + TENSOR_OUTPUT + pending.item_buffer * TENSOR_ITEM;
#pragma unroll
  for (u32 step = 0; step < PAGE_TOKENS / 16; ++step) {
    ptx::tcgen05_mma_f16_tensor_shared(
        output, values + step * 8, weights + step * WEIGHTS_STEP, OUTPUT_INSTRUCTION, step > 0 || !pending.first);
  }
  ptx::tcgen05_commit(buffer.output_done());
  if (pending.last) {
    ptx::tcgen05_commit(ptx::shared_address(&shared.item_done[pending.item_buffer]));
  }
}

// One thread. The scores of a page go out before the output of the page before it, across items, so that the tensor cores
// have work while the softmax warps do theirs.
__device__ __forceinline__ void mma_role(Shared& shared, const Schedule& schedule, u32 tensor) {
  Ring<SELECTIONS> slot;
  Ring<STAGES> ring;
  Ring<BUFFERS> item_buffer;
  PageBuffer scored(shared, tensor);   // the next page to score
  PageBuffer weighted(shared, tensor);  // the next page to multiply with its values: behind by one at most
  PendingPage pending{};
  for (u32 round = 0; round < schedule.count; ++round, slot.advance(), item_buffer.advance()) {
    wait(shared.selection_full[slot.index], slot.parity);
    const u32 count = shared.selections[slot.index].count;
    ptx::mbarrier_arrive(ptx::shared_address(&shared.selection_free[slot.index]));
    if (count == 0 && weighted.page != scored.page) {
      // The edge warps may need the pending item's output before they can publish this item's query.
      issue_output(shared, tensor, weighted, pending);
      weighted.advance();
    }
    wait(shared.query_full[item_buffer.index], item_buffer.parity);
    if (count == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.item_done[item_buffer.index]));
    }
    for (u32 i = 0; i < count; ++i, ring.advance()) {
      issue_scores(shared, tensor, ring, scored, item_buffer.index);
      if (weighted.page != scored.page) {
        issue_output(shared, tensor, weighted, pending);
        weighted.advance();
      }
      scored.advance();
      pending = {item_buffer.index, i == 0, i + 1 == count};
    }
  }
  if (weighted.page != scored.page) {
    issue_output(shared, tensor, weighted, pending);
    weighted.advance();
  }
  // As in the copy warp: the last commits have arrived before the CTA exits.
  for (u32 buffer = 0; buffer < BUFFERS; ++buffer, weighted.advance()) {
    ptx::mbarrier_wait_parity(weighted.output_done(), weighted.parity ^ 1);
  }
}

}  // namespace blackwell
