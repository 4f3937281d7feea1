// The Blackwell program's plan: sizes, shared memory, tensor memory, operand descriptors, barriers, and which
// CTA does what.
//
// The host puts these constants in front of this text:
//   SPLITS                CTAs of a cluster, which share the pages of a split item: 1, 2, 4 or 8
//   STAGES                pages in flight
//   SHORT_TABLE           the whole page-table row (at most 32 entries) is fetched together with the ids
//   DYNAMIC_SHARED_BYTES  shared memory that the launch asks for
#pragma once
#include "barrier.cuh"
#include "cluster.cuh"
#include "cp_async_bulk_tensor.cuh"
#include "elect.cuh"
#include "mbarrier.cuh"
#include "tcgen05_mma.cuh"

namespace blackwell {

constexpr u32 PAGE_TOKENS = 128;
constexpr u32 HEAD_DIM = 128;
constexpr u32 CODE_BYTES = PAGE_TOKENS * HEAD_DIM / 2;  // a page of K or V of one KV head
constexpr u32 SCALE_BYTES = PAGE_TOKENS * HEAD_DIM / 16;
constexpr u32 STAGE_BYTES = 2 * (CODE_BYTES + SCALE_BYTES);
constexpr u32 MAX_TOPK = 64;

// Query heads of an item, padded: the least N of the output MMA, and the least that its A operand in tensor
// memory allows.
constexpr u32 HEADS = 16;
constexpr u32 WEIGHTS_BYTES = PAGE_TOKENS * HEADS * 2;

// q is the sum of six NVFP4 terms. Terms 0, 2, 4 are the rows of the first pass of the score MMA, terms 1, 3,
// 5 those of the second, which accumulates onto the same columns. Column group g counts 2^-6g: E4M3 scales
// alone span 2^17, too little for a row whose blocks differ by more. A term leaves at most 1/8 of its block's
// largest element, two terms 1/64: with steps of 2^-6 every pair of terms meets the same range.
constexpr u32 PASSES = 2;
constexpr u32 COLUMN_GROUPS = 3;
constexpr u32 SCORE_COLUMNS = COLUMN_GROUPS * HEADS;
constexpr float GROUP_STEP = 0x1p-6f;
constexpr u32 GROUP_STEP_INVERSE = 0x5400;  // 2^6 as float16
constexpr u32 PASS_BYTES = SCORE_COLUMNS * HEAD_DIM / 2;
constexpr u32 PASS_SCALES = 32 * 16;  // what tcgen05.cp moves

constexpr u32 BUFFERS = 2;     // pages between two roles, and items between two roles
constexpr u32 SELECTIONS = 4;  // page lists ahead of the slowest role

// Four warps each, whole warpgroups, because warp w reaches lanes 32 * (w % 4) of tensor memory alone.
constexpr u32 SOFTMAX_WARPS = 0;
constexpr u32 VALUE_WARPS = 4;
constexpr u32 EDGE_WARPS = 8;
constexpr u32 SELECTION_WARP = 12;
constexpr u32 COPY_WARP = 13;
constexpr u32 MMA_WARP = 14;
constexpr u32 KEY_SCALE_WARP = 15;  // also allocates tensor memory
constexpr u32 THREADS = 512;
constexpr u32 ROLE_THREADS = 128;
constexpr u32 ROLE_WARPS = 4;

constexpr u32 SOFTMAX_BARRIER = 1;
constexpr u32 VALUE_BARRIER = 2;

static_assert(
    SPLITS == 1 || SPLITS == 2 || SPLITS == 4 || SPLITS == 8, "a portable cluster has at most eight CTAs");
static_assert(!SHORT_TABLE || SPLITS == 1, "the short program does not split");

// Query heads that each CTA of a cluster merges and writes.
constexpr u32 MERGE_HEADS = HEADS / SPLITS;
constexpr u32 MERGE_BYTES = SPLITS > 1 ? HEAD_DIM * HEADS * 4 + HEADS * 8 : 0;

// A float by its bits: the language has no literal for these without toolkit headers.
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7FC00000u); }

// ---- tensor memory, columns of 32 bits in all 128 lanes ---------------------------------------------------

// Of each page buffer.
constexpr u32 TENSOR_SCORES = 0;                                // lane = token; float32
constexpr u32 TENSOR_KEY_SCALES = SCORE_COLUMNS;                // 4 columns for each half of the head dim
constexpr u32 TENSOR_VALUES = 64;                               // lane = dim; float16, two tokens a column
constexpr u32 TENSOR_PAGE = TENSOR_VALUES + PAGE_TOKENS / 2;
static_assert(TENSOR_KEY_SCALES + 8 <= TENSOR_VALUES, "tensor memory of a page");
// Of each item buffer.
constexpr u32 TENSOR_ITEMS = BUFFERS * TENSOR_PAGE;
constexpr u32 TENSOR_OUTPUT = TENSOR_ITEMS;                     // lane = dim, column = head; float32
// 2 columns for each pass and half of the head dim.
constexpr u32 TENSOR_QUERY_SCALES = TENSOR_ITEMS + HEADS;
constexpr u32 TENSOR_ITEM = HEADS + 8;
constexpr u32 TENSOR_COLUMNS = 512;  // the least power of two that holds them; one CTA runs on an SM
static_assert(TENSOR_ITEMS + BUFFERS * TENSOR_ITEM <= TENSOR_COLUMNS, "tensor memory");

__device__ __forceinline__ u32 lanes_of_warp(u32 warp) { return warp * 32 << 16; }

// Lane l of a quarter holds this dim of the quarter's 32: what ldmatrix and the 16x256b store leave. Lanes l
// and l + 16 hold neighbours.
__device__ __forceinline__ u32 dim_of_lane(u32 lane) {
  return 4 * (lane & 7) + 2 * (lane >> 3 & 1) + (lane >> 4);
}

// ---- shared memory ----------------------------------------------------------------------------------------

// One page of one KV head. Codes lie as the tensor maps' swizzles leave them; 1024-byte alignment makes the
// patterns start with the tiles.
struct alignas(1024) Stage {
  u8 keys[CODE_BYTES];    // [128 tokens][64 bytes], 64B swizzle: A of the score MMA as it is
  u8 values[CODE_BYTES];  // [64 token pairs][128 bytes], 128B swizzle: ldmatrix without bank conflicts
  // [128 tokens][8 groups]; then [2 halves of the head dim][32 lanes][4 x 32 tokens][4 groups].
  u8 key_scales[SCALE_BYTES];
  u8 value_scales[SCALE_BYTES];  // [32 token quads][8 groups][4 tokens]
};
static_assert(sizeof(Stage) == STAGE_BYTES, "a stage is one page without gaps");

struct SelectedPage {
  i32 page;
  u32 live;  // tokens that the row sees, 1 to 128: always the first ones
};

struct Selection {
  u32 count;
  u32 whole;  // the first ones, of which the row sees all tokens
  SelectedPage pages[MAX_TOPK];
};

// Maximum and sum of one head over the pages of one CTA: sum of 2^(score - origin).
struct HeadSum {
  float origin;
  float total;
};

// Barriers are named by what has happened; initialise_barriers has the arrivals of a phase.
struct StageBarriers {
  u64 full;
  u64 keys_ready;  // K scales lie as tcgen05.cp reads them, codes of negative ones are negated
  u64 free;
};

// Of one of the buffers in which pages pass from role to role.
struct PageBarriers {
  u64 scores_full;
  u64 values_full;
  u64 weights_full;
  u64 output_done;  // the output MMA of a page has read its weights and values
};

struct Shared {
  Stage stages[STAGES];
  alignas(1024) u8 weights[BUFFERS][WEIGHTS_BYTES];  // P^T, float16 [128 tokens][16 heads], 32B swizzle
  u8 query_terms[BUFFERS][PASSES][PASS_BYTES];       // [48 rows][64 bytes], 64B swizzle
  // [32 lanes][2 halves of the head dim][2 x 32 rows][4 groups].
  alignas(16) u8 query_scales[BUFFERS][PASSES][PASS_SCALES];
  // Score of a product in units of the scores in tensor memory.
  alignas(16) float query_unit[BUFFERS][HEADS];
  alignas(16) float minus_origin[BUFFERS][HEADS];
  alignas(16) float totals[BUFFERS][ROLE_WARPS][HEADS];
  alignas(16) float exchange[ROLE_WARPS][HEADS];
  alignas(16) float factors[ROLE_WARPS][HEADS];
  u32 item_pages[BUFFERS];
  alignas(16) float merge_outputs[SPLITS][SPLITS > 1 ? HEAD_DIM : 1][MERGE_HEADS];
  HeadSum merge_sums[SPLITS][MERGE_HEADS];
  Selection selections[SELECTIONS];

  StageBarriers stage_barriers[STAGES];
  PageBarriers page_barriers[BUFFERS];
  u64 selection_full[SELECTIONS];
  u64 selection_free[SELECTIONS];
  u64 query_full[BUFFERS];
  u64 item_done[BUFFERS];
  u64 merge_full;
  u32 tensor_base;
};
static_assert(sizeof(Shared) <= DYNAMIC_SHARED_BYTES, "the host asks for too little shared memory");
static_assert(DYNAMIC_SHARED_BYTES <= 227 * 1024, "the most that a CTA can have on compute capability 10.x");

__device__ __forceinline__ void initialise_barriers(Shared& shared) {
  const auto initialise = [](u64& barrier, u32 arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (StageBarriers& stage : shared.stage_barriers) {
    initialise(stage.full, 1);               // copy warp, with the bytes of the page
    initialise(stage.keys_ready, 1);         // K scale warp
    initialise(stage.free, ROLE_WARPS + 1);  // value warps; the score MMA's commit
  }
  for (u32 slot = 0; slot < SELECTIONS; ++slot) {
    initialise(shared.selection_full[slot], 1);
    // Softmax and value warps, copy, MMA, K scale warp.
    initialise(shared.selection_free[slot], 2 * ROLE_WARPS + 3);
  }
  for (PageBarriers& page : shared.page_barriers) {
    initialise(page.scores_full, 1);
    initialise(page.values_full, ROLE_WARPS);
    initialise(page.weights_full, ROLE_WARPS);
    initialise(page.output_done, 1);
  }
  for (u32 buffer = 0; buffer < BUFFERS; ++buffer) {
    initialise(shared.query_full[buffer], ROLE_WARPS);
    initialise(shared.item_done[buffer], ROLE_WARPS + 1);  // softmax warps; the last output MMA's commit
  }
  initialise(shared.merge_full, 1);
}

__device__ __forceinline__ void wait(const u64& barrier, u32 parity) {
  ptx::mbarrier_wait_parity(ptx::shared_address(&barrier), parity);
}

// One arrival of a warp, after all its lanes have come here. `leader` holds in one lane.
__device__ __forceinline__ void arrive_warp(u64& barrier, bool leader) {
  __syncwarp();
  if (leader) {
    ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }
}

// Position in a ring of buffers. A consumer waits for `full` with `parity`, a producer for `free` with the
// other one: on a fresh barrier that returns at once.
template <u32 SLOTS>
struct Ring {
  u32 index = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == SLOTS) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Where a role stands in the sequence of pages. Page p of a CTA lies in stage p % STAGES, page buffer p % 2.
static_assert(BUFFERS == 2 && STAGES % 2 == 0, "a pair of pages has both buffers, and a pair of stages");
struct PageSequence {
  u32 pair = 0;  // of stages
  u32 stage_parity = 0;
  u32 parity = 0;  // of the page buffers
  u32 odd = 0;     // 1: the next page is the second of its pair

  __device__ __forceinline__ void next_pair() {
    parity ^= 1;
    if (++pair == STAGES / 2) {
      pair = 0;
      stage_parity ^= 1;
    }
  }
};

// Which buffer a page has: a number, or a type that stands for one.
template <u32 BUFFER>
struct FixedBuffer {
  static constexpr bool FIXED = true;
  __device__ __forceinline__ constexpr operator u32() const { return BUFFER; }
};
struct AnyBuffer {
  static constexpr bool FIXED = false;
  u32 buffer;
  __device__ __forceinline__ operator u32() const { return buffer; }
};

// A page of the sequence's pair. Its parities are the sequence's.
template <class Buffer>
struct Page {
  static constexpr bool IN_PAIR = Buffer::FIXED;  // then the row sees all tokens
  Shared& shared;
  const PageSequence& at;
  Buffer buffer;

  __device__ __forceinline__ u32 stage_index() const { return 2 * at.pair + buffer; }
  __device__ __forceinline__ Stage& stage() const { return shared.stages[stage_index()]; }
  __device__ __forceinline__ StageBarriers& stage_barriers() const {
    return shared.stage_barriers[stage_index()];
  }
  __device__ __forceinline__ PageBarriers& barriers() const { return shared.page_barriers[buffer]; }
  __device__ __forceinline__ u32 tensor(u32 column) const { return buffer * TENSOR_PAGE + column; }
  // The page before lies in the other buffer, whose parity turns between the pairs.
  __device__ __forceinline__ u32 buffer_before() const { return 1 - buffer; }
  __device__ __forceinline__ PageBarriers& barriers_before() const {
    return shared.page_barriers[buffer_before()];
  }
  __device__ __forceinline__ u32 parity_before() const { return at.parity ^ 1 ^ buffer; }
};

// The next page of the sequence.
__device__ __forceinline__ Page<AnyBuffer> next_page(Shared& shared, const PageSequence& sequence) {
  return {shared, sequence, {sequence.odd}};
}

// body(page, i) for the next `count` pages, i from 0. The page loops have no issue slot to spare for
// addresses and tests: as far as the first `whole` pages make pairs, they are taken two at a time, the
// buffers being constants.
template <class Body>
__device__ __forceinline__ void for_each_page(
    Shared& shared, PageSequence& sequence, u32 count, u32 whole, Body body) {
  u32 i = 0;
  while (true) {
    if (sequence.odd == 0) {
#pragma unroll 1
      for (; i + 2 <= whole; i += 2) {
        body(Page<FixedBuffer<0>>{shared, sequence, {}}, i);
        body(Page<FixedBuffer<1>>{shared, sequence, {}}, i + 1);
        sequence.next_pair();
      }
    }
    if (i == count) {
      break;
    }
    body(next_page(shared, sequence), i);
    ++i;
    if (sequence.odd) {
      sequence.next_pair();
    }
    sequence.odd ^= 1;
  }
}

// ---- operand descriptors ----------------------------------------------------------------------------------

// Shared-memory matrix descriptor: swizzle mode, bytes between groups of eight rows, version 1; the leading
// offset is not used by these forms.
__host__ __device__ constexpr u64 matrix_descriptor(u64 swizzle, u64 stride_bytes) {
  return swizzle << 61 | 1ull << 46 | stride_bytes >> 4 << 32 | 1ull << 16;
}
// 64B swizzle, K-major, also for the query terms.
constexpr u64 KEYS_DESCRIPTOR = matrix_descriptor(4, 8 * 64);
constexpr u64 WEIGHTS_DESCRIPTOR = matrix_descriptor(6, 8 * 32);  // 32B swizzle, MN-major
// Rows of 16 bytes, K and query scales for tcgen05.cp.
constexpr u64 SCALES_DESCRIPTOR = matrix_descriptor(0, 8 * 16);
// 64 E2M1 elements further along the head dim.
constexpr u64 KEYS_HALF = 32 >> 4;
constexpr u64 WEIGHTS_STEP = 16 * 32 >> 4;                        // 16 tokens further

__device__ __forceinline__ u64 describe(u64 descriptor, const u8* tile) {
  return descriptor | (ptx::shared_address(tile) & 0x3FFFF) >> 4;
}

// Instruction descriptors: M 128. Scores: E2M1 both, E4M3 scales. Output: float16 both, B MN-major, float32
// accumulator.
constexpr u32 SCORES_INSTRUCTION = 128 >> 7 << 27 | SCORE_COLUMNS >> 3 << 17 | 1 << 10 | 1 << 7;
constexpr u32 OUTPUT_INSTRUCTION = 128 >> 4 << 24 | HEADS >> 3 << 17 | 1 << 16 | 1 << 4;

// ---- arguments and the distribution of items --------------------------------------------------------------

// Strides in bytes.
struct Arguments {
  const u8* q;
  const u8* q2k;
  const u8* page_table;
  const u8* seqused_k;
  u8* out;
  u8* lse;
  i64 q_row, q_head;
  i64 q2k_head, q2k_row, q2k_index;
  i64 page_table_row, page_table_index;
  i64 seqused_stride;
  i64 out_row, out_head;
  i64 lse_row, lse_head;
  u32 items, seqlen_q, num_kv_heads, group, topk, max_pages, num_pages, unsplit_rounds, round_rows,
      round_heads;
  float score_scale;  // to base-2 logarithm units
  float v_global_scale;
};

struct Item {
  u32 row;
  u32 kv_head;
  bool split;
};

// The items of this CTA, in order. First `unsplit_rounds` rounds of one whole item a CTA, then at most one
// item that the cluster splits, so that the last, partly filled round of a persistent grid can occupy idle
// SMs.
struct Schedule {
  u32 count;
  u32 num_kv_heads;
  u32 split_round;
  u32 split_item;
  u32 round_rows;   // from an item to the next one of the CTA: the grid, in rows and KV heads
  u32 round_heads;

  __device__ __forceinline__ explicit Schedule(const Arguments& arguments) {
    num_kv_heads = arguments.num_kv_heads;
    round_rows = arguments.round_rows;
    round_heads = arguments.round_heads;
    if constexpr (SPLITS == 1) {
      count = blockIdx.x < arguments.items ? (arguments.items - 1 - blockIdx.x) / gridDim.x + 1 : 0;
      split_round = ~0u;
      split_item = 0;
    } else {
      split_round = arguments.unsplit_rounds;
      split_item = arguments.unsplit_rounds * gridDim.x + blockIdx.x / SPLITS;
      count = split_round + (split_item < arguments.items ? 1 : 0);
    }
  }
};

// A walk over the items. Integer division is twenty instructions: only the first item and a split one are
// divided.
struct Items {
  const Schedule& schedule;
  Item item;
  u32 round = 0;

  __device__ __forceinline__ explicit Items(const Schedule& schedule) : schedule(schedule) {
    if (SPLITS > 1 && schedule.split_round == 0) {
      jump(schedule.split_item, true);
    } else {
      jump(blockIdx.x, false);
    }
  }

  __device__ __forceinline__ void advance() {
    ++round;
    if (SPLITS > 1 && round == schedule.split_round) {
      jump(schedule.split_item, true);
      return;
    }
    item.row += schedule.round_rows;
    item.kv_head += schedule.round_heads;
    if (item.kv_head >= schedule.num_kv_heads) {
      item.kv_head -= schedule.num_kv_heads;
      ++item.row;
    }
  }

 private:
  __device__ __forceinline__ void jump(u32 index, bool split) {
    item = {index / schedule.num_kv_heads, index % schedule.num_kv_heads, split};
  }
};

}  // namespace blackwell
