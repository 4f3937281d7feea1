// Roles of single warps: which pages an item reads, the copies that bring them in, and the MMAs.
#pragma once
#include "blackwell_plan.cuh"
#include "cache_policy.cuh"
#include "fence.cuh"
#include "opaque.cuh"

namespace blackwell {

__device__ __forceinline__ i32 load_i32(const u8* address) { return *reinterpret_cast<const i32*>(address); }

// ---- selection warp ---------------------------------------------------------------------------------------

// One id of the row and the page it names. Ids are bounded before the page table is read, page ids before
// they are used.
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

// Lists the pages of each item for the other roles: those of the row's ids that are legal, in their order but
// for pages that the row sees in part, which come last, so that the page loops need not look at every page;
// and of a split item the CTA's share of them.
__device__ __forceinline__ void selection_role(
    Shared& shared, const Arguments& arguments, const Schedule& schedule, u32 rank) {
  const u32 lane = threadIdx.x % 32;
  const u32 lanes_below = (1u << lane) - 1;
  Ring<SELECTIONS> slot;
  Items items(schedule);
  for (u32 round = 0; round < schedule.count; ++round, slot.advance(), items.advance()) {
    const Item item = items.item;
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
    // The short program fetches the row of the page table before the ids are known: one round trip to memory
    // less.
    const i32 table_entry =
        SHORT_TABLE && lane < arguments.max_pages ? load_i32(table + lane * arguments.page_table_index) : -1;
    const u32 visible = visible_tokens(arguments, request, token);
    const u32 blocks = visible / PAGE_TOKENS + (visible % PAGE_TOKENS != 0);
    const u32 id_limit = min(blocks, arguments.max_pages);
    // Lanes with a page to keep: seen whole, and in part.
    u32 whole[MAX_TOPK / 32];
    u32 partial[MAX_TOPK / 32];
    u32 total_whole = 0;
    u32 total = 0;
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
      const u32 kept = __ballot_sync(~0u, candidate.valid);
      whole[half] =
          __ballot_sync(~0u, candidate.valid && static_cast<u32>(candidate.id) < visible / PAGE_TOKENS);
      partial[half] = kept & ~whole[half];
      total_whole += __popc(whole[half]);
      total += __popc(kept);
    }
    const u32 first = item.split ? total * rank / SPLITS : 0;
    const u32 last = item.split ? total * (rank + 1) / SPLITS : total;

    Selection& selection = shared.selections[slot.index];
    wait(shared.selection_free[slot.index], slot.parity ^ 1);
    u32 whole_before = 0;
    u32 partial_before = total_whole;
#pragma unroll
    for (u32 half = 0; half < MAX_TOPK / 32; ++half) {
      const Candidate& candidate = candidates[half];
      const u32 position = whole[half] >> lane & 1 ? whole_before + __popc(whole[half] & lanes_below)
                                                  : partial_before + __popc(partial[half] & lanes_below);
      if (candidate.valid && position >= first && position < last) {
        const u32 before = static_cast<u32>(candidate.id) * PAGE_TOKENS;
        selection.pages[position - first] = {candidate.page, min(visible - before, PAGE_TOKENS)};
      }
      whole_before += __popc(whole[half]);
      partial_before += __popc(partial[half]);
    }
    if (lane == 0) {
      selection.count = last - first;
      selection.whole = min(max(total_whole, first), last) - first;
    }
    arrive_warp(shared.selection_full[slot.index], lane == 0);
  }
}

// ---- copy warp --------------------------------------------------------------------------------------------

// How the four parts of a page are seen by tensor copies. All take the same coordinates.
struct PageMaps {
  const ptx::TensorMap& keys;
  const ptx::TensorMap& values;
  const ptx::TensorMap& key_scales;
  const ptx::TensorMap& value_scales;
};

// Brings pages into the ring, across items, as far ahead as the ring is deep. The whole warp walks the loop,
// so that its state stays in uniform registers, where the copies want their operands; one lane issues.
__device__ __forceinline__ void copy_role(
    Shared& shared, const Arguments& arguments, const Schedule& schedule, const PageMaps& maps) {
  // One query token a request: nobody else will read these bytes in this launch. With several, neighbouring
  // tokens tend to select the same pages, and L2 should keep them.
  const u64 policy =
      arguments.seqlen_q == 1 ? ptx::createpolicy_evict_first() : ptx::createpolicy_evict_last();
  const bool leader = ptx::elect_sync();
  Ring<SELECTIONS> slot;
  Ring<STAGES> ring;
  Items items(schedule);
  for (u32 round = 0; round < schedule.count; ++round, slot.advance(), items.advance()) {
    const i32 kv_head = static_cast<i32>(items.item.kv_head);
    wait(shared.selection_full[slot.index], slot.parity);
    const Selection& selection = shared.selections[slot.index];
    const u32 count = selection.count;
    for (u32 i = 0; i < count; ++i, ring.advance()) {
      const i32 page = selection.pages[i].page;
      Stage& stage = shared.stages[ring.index];
      StageBarriers& barriers = shared.stage_barriers[ring.index];
      const ptx::SharedAddress full = ptx::shared_address(&barriers.full);
      wait(barriers.free, ring.parity ^ 1);
      if (leader) {
        ptx::mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        const auto copy = [&](const u8* to, const ptx::TensorMap& map) {
          ptx::cp_async_bulk_tensor_4d(ptx::shared_address(to), map, 0, 0, kv_head, page, full, policy);
        };
        // K and its scales first: the page's way starts with them.
        copy(stage.key_scales, maps.key_scales);
        copy(stage.keys, maps.keys);
        copy(stage.value_scales, maps.value_scales);
        copy(stage.values, maps.values);
      }
    }
    arrive_warp(shared.selection_free[slot.index], leader);
  }
  // No commit may arrive at a barrier of a CTA that has exited: the last pages are through the ring.
  for (u32 stage = 0; stage < STAGES; ++stage, ring.advance()) {
    wait(shared.stage_barriers[ring.index].free, ring.parity ^ 1);
  }
}

// ---- K scale warp -----------------------------------------------------------------------------------------

// The MMA ignores the sign of a scale. A block whose scale is negative gets its codes negated instead. A
// cache writer makes no such scale, so the code is for completeness, not for speed.
__device__ __noinline__ void negate_blocks(Stage& stage, u32 lane) {
  for (u32 token = lane; token < PAGE_TOKENS; token += 32) {
    const u64 scales = reinterpret_cast<const u64*>(stage.key_scales)[token];
    u64* row = reinterpret_cast<u64*>(stage.keys) + token * 8;
    for (u32 block = 0; block < 8; ++block) {
      if (scales >> (8 * block + 7) & 1) {
        // 64B swizzle: 16-byte chunks of a row move by bits 2:1 of the row.
        row[block ^ (token >> 1 & 3) << 1] ^= 0x8888888888888888ull;
      }
    }
  }
}

// Row m of A takes the word of its scales from lane m % 32, column m / 32. tcgen05.cp fills a lane's four
// columns from 16 bytes, which the pool has 256 bytes apart: the page's scales change places in shared
// memory, once for all quarters.
__device__ __forceinline__ void order_key_scales(Stage& stage, u32 lane) {
  constexpr u32 SIGNS = 0x80808080;
  u32 words[8];
  u32 all = 0;
#pragma unroll
  for (u32 column = 0; column < 4; ++column) {
    const uint2 pair = reinterpret_cast<const uint2*>(stage.key_scales)[column * 32 + lane];
    words[column] = pair.x;
    words[4 + column] = pair.y;
    all |= pair.x | pair.y;
  }
  if (__any_sync(~0u, all & SIGNS)) {
    negate_blocks(stage, lane);
    // The lanes took different ways through it, and it reads scales that are overwritten below.
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      words[i] &= ~SIGNS;
    }
  }
  // The vote had the words of all lanes: nothing else is overwritten before it has been read.
  uint4* rows = reinterpret_cast<uint4*>(stage.key_scales) + lane;
  rows[0] = make_uint4(words[0], words[1], words[2], words[3]);
  rows[32] = make_uint4(words[4], words[5], words[6], words[7]);
  ptx::fence_proxy_async_shared_cta();
}

__device__ __forceinline__ void key_scale_role(Shared& shared, const Schedule& schedule) {
  const u32 lane = threadIdx.x % 32;
  const bool leader = ptx::elect_sync();
  Ring<SELECTIONS> slot;
  Ring<STAGES> ring;
  for (u32 round = 0; round < schedule.count; ++round, slot.advance()) {
    wait(shared.selection_full[slot.index], slot.parity);
    const u32 count = shared.selections[slot.index].count;
    arrive_warp(shared.selection_free[slot.index], leader);
    for (u32 i = 0; i < count; ++i, ring.advance()) {
      StageBarriers& barriers = shared.stage_barriers[ring.index];
      wait(barriers.full, ring.parity);
      order_key_scales(shared.stages[ring.index], lane);
      arrive_warp(barriers.keys_ready, leader);
    }
  }
}

// ---- MMA warp ---------------------------------------------------------------------------------------------

// S = K q^T of one page: both halves of the head dim, for both passes of query terms. The scores that lay in
// the buffer before have been read, and so its scales: this warp has waited for the weights that the softmax
// warps made of them.
template <class Buffer>
__device__ __forceinline__ void issue_scores(
    const Page<Buffer>& page, u32 tensor, u32 item_buffer, bool leader) {
  Shared& shared = page.shared;
  wait(page.stage_barriers().keys_ready, page.at.stage_parity);
  ptx::tcgen05_fence_after_thread_sync();
  if (leader) {
    const u64 stage = page.at.pair * u64{2 * STAGE_BYTES >> 4};
    const u64 scales = describe(SCALES_DESCRIPTOR, shared.stages[page.buffer].key_scales) + stage;
    const u64 keys = describe(KEYS_DESCRIPTOR, shared.stages[page.buffer].keys) + stage;
    const u64 terms = describe(KEYS_DESCRIPTOR, shared.query_terms[item_buffer][0]);
    const u32 key_scales = tensor + page.tensor(TENSOR_KEY_SCALES);
    const u32 query_scales = tensor + TENSOR_QUERY_SCALES + item_buffer * TENSOR_ITEM;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      ptx::tcgen05_cp_32x128b_warpx4(key_scales + half * 4, scales + half * (SCALE_BYTES / 2 >> 4));
    }
#pragma unroll
    for (u32 pass = 0; pass < PASSES; ++pass) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        ptx::tcgen05_mma_mxf4nvf4_shared_shared(
            tensor + page.tensor(TENSOR_SCORES), keys + half * KEYS_HALF,
            terms + (pass * (PASS_BYTES >> 4) + half * KEYS_HALF), SCORES_INSTRUCTION, key_scales + half * 4,
            query_scales + pass * 4 + half * 2, pass + half > 0);
      }
    }
    ptx::tcgen05_commit(ptx::shared_address(&page.barriers().scores_full));
    ptx::tcgen05_commit(ptx::shared_address(&page.stage_barriers().free));
  }
}

// A page whose scores are issued and whose output MMA is not: the last one.
struct PendingPage {
  bool exists = false;
  bool first;  // of its item: the accumulator is overwritten
  u32 item_buffer;
};

// O^T += V^T P^T of the pending page, 16 tokens an MMA. `page` is the page after it.
template <class Buffer>
__device__ __forceinline__ void issue_output(
    const Page<Buffer>& page, u32 tensor, const PendingPage& pending, bool last, bool leader) {
  Shared& shared = page.shared;
  PageBarriers& barriers = page.barriers_before();
  wait(barriers.values_full, page.parity_before());
  wait(barriers.weights_full, page.parity_before());
  ptx::tcgen05_fence_after_thread_sync();
  if (leader) {
    // Unchanging descriptors would be kept in uniform registers, of which there are too few for all of them.
    u64 weights = describe(WEIGHTS_DESCRIPTOR, shared.weights[page.buffer_before()]);
    ptx::opaque(weights);
    const u32 values = tensor + page.buffer_before() * TENSOR_PAGE + TENSOR_VALUES;
    const u32 output = tensor + TENSOR_OUTPUT + pending.item_buffer * TENSOR_ITEM;
#pragma unroll
    for (u32 step = 0; step < PAGE_TOKENS / 16; ++step) {
      ptx::tcgen05_mma_f16_tensor_shared(
          output, values + step * 8, weights + step * WEIGHTS_STEP, OUTPUT_INSTRUCTION,
          step > 0 || !pending.first);
    }
    ptx::tcgen05_commit(ptx::shared_address(&barriers.output_done));
    if (last) {
      ptx::tcgen05_commit(ptx::shared_address(&shared.item_done[pending.item_buffer]));
    }
  }
}

// The scores of a page go out before the output of the page before it, across items, so that the tensor cores
// have work while the softmax warps do theirs. The whole warp walks the loop, as in the copy warp; one lane
// issues.
__device__ __forceinline__ void mma_role(Shared& shared, const Schedule& schedule, u32 tensor) {
  const bool leader = ptx::elect_sync();
  Ring<SELECTIONS> slot;
  Ring<BUFFERS> item_buffer;
  PageSequence sequence;  // the next page to score
  PendingPage pending;
  // One round more than there are items, for the output of the last page.
  for (u32 round = 0; round <= schedule.count; ++round, slot.advance(), item_buffer.advance()) {
    u32 count = 0;
    if (round < schedule.count) {
      wait(shared.selection_full[slot.index], slot.parity);
      count = shared.selections[slot.index].count;
      arrive_warp(shared.selection_free[slot.index], leader);
    }
    if (count == 0 && pending.exists) {
      // The edge warps may need the pending item's output before they can publish this item's query.
      issue_output(next_page(shared, sequence), tensor, pending, true, leader);
      pending.exists = false;
    }
    if (round == schedule.count) {
      break;
    }
    wait(shared.query_full[item_buffer.index], item_buffer.parity);
    if (count == 0) {
      arrive_warp(shared.item_done[item_buffer.index], leader);
    } else if (leader) {
#pragma unroll
      for (u32 pass = 0; pass < PASSES; ++pass) {
        ptx::tcgen05_cp_32x128b_warpx4(
            tensor + TENSOR_QUERY_SCALES + item_buffer.index * TENSOR_ITEM + pass * 4,
            describe(SCALES_DESCRIPTOR, shared.query_scales[item_buffer.index][pass]));
      }
    }
    for_each_page(shared, sequence, count, count, [&](const auto& page, u32 i) {
      issue_scores(page, tensor, item_buffer.index, leader);
      if (pending.exists) {
        // The second page of a pair follows one of its own item.
        issue_output(page, tensor, pending, i == 0 && !(page.IN_PAIR && page.buffer == 1), leader);
      }
      pending = {true, i == 0, item_buffer.index};
    });
  }
  // As in the copy warp: the last commits have arrived before the CTA exits.
  for_each_page(shared, sequence, BUFFERS, 0, [&](const auto& page, u32) {
    wait(page.barriers().output_done, sequence.parity ^ 1);
  });
}

}  // namespace blackwell
