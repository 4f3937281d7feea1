// Before an item's first page: its legal pages out of the selection, and its queries as MMA fragments.
#pragma once
#include "convert.cuh"
#include "cp_async.cuh"
#include "global_memory.cuh"
#include "portable_plan.cuh"
#include "shared_memory.cuh"

// ---- Selection

// With kOrderedLoads a volatile load, which stays where it is written; else a plain one.
__device__ __forceinline__ int load_early(const u8* at) {
  return kOrderedLoads ? static_cast<int>(ptx::ld_global_nc_u32(at)) : load<int>(at, 0);
}

// A lane holds entries lane and lane + 32 of the item's q2k row.
struct SelectedIds {
  int id[kIdsPerLane];
};

__device__ __forceinline__ SelectedIds load_ids(const Arguments& args, const Item& item, int lane) {
  SelectedIds ids;
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) {
    const int j = w * 32 + lane;
    const u8* at = args.q2k + item.kv_head * args.q2k_head + item.row * args.q2k_row + j * args.q2k_j;
    ids.id[w] = -1;
    if (j < args.topk) ids.id[w] = load_early(at);
  }
  return ids;
}

__device__ __forceinline__ int load_seqused(const Arguments& args, const Item& item) {
  return load_early(args.seqused_k + item.request * args.seqused_k_stride);
}

// Prefetches the request's row of the page table into L1: every eighth entry, up to 8 * kThreads pages. That
// is each 32-byte sector where the row is dense (stride 4) and begins with a sector; otherwise sectors are
// missed, and their page ids come from L2 as they would without it. Nobody reads the copies at `to`.
__device__ __forceinline__ void bring_page_ids(const Arguments& args, const Item& item, SharedAddress to) {
  const int entry = (kThreads - 1 - threadIdx.x) * 8;  // short rows by the last warps, which stage no queries
  if (entry < args.max_pages)
    ptx::cp_async_ca_4(to, args.page_table + item.request * args.page_table_row + entry * args.page_table_j);
}

// The item's legal pages in the order of its q2k row.
struct Selection {
  int count;
  int rank[kIdsPerLane];  // place of the entry among the legal ones, -1 for a dropped entry
  int page[kIdsPerLane];
  int visible[kIdsPerLane];  // tokens from the page's first one up to the query's position, 0 to 128
};

// Issues the loads of the page ids; rank_pages is the first to wait for them, and for seqused. An id is legal
// if it lies inside the page table and inside the context that this token sees, a page id if it lies inside
// the pool. No other entry is ever dereferenced; places of a list that have to be filled up name page 0,
// which exists.
__device__ __forceinline__ Selection load_pages(const Arguments& args, const Item& item,
                                                const SelectedIds& ids, int seqused) {
  // 64 bits: a length near 2^31 must not wrap.
  const auto visible_of = [&](int id) {
    return static_cast<i64>(seqused) - args.seqlen_q + item.token + 1 - static_cast<i64>(id) * kPageTokens;
  };
  Selection s;
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) {
    const u8* at = args.page_table + item.request * args.page_table_row + ids.id[w] * args.page_table_j;
    s.page[w] = -1;
    // With kOrderedLoads without waiting for seqused: ids beyond the context are dropped by rank_pages.
    if (ids.id[w] >= 0 && ids.id[w] < args.max_pages && (kOrderedLoads || visible_of(ids.id[w]) > 0))
      s.page[w] = load_early(at);
  }
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) {
    const i64 visible = visible_of(ids.id[w]);
    s.visible[w] = visible <= 0 ? 0 : visible < kPageTokens ? static_cast<int>(visible) : kPageTokens;
  }
  return s;
}

__device__ __forceinline__ void rank_pages(const Arguments& args, Selection& s, int lane) {
  s.count = 0;
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) {
    const bool legal = s.page[w] >= 0 && s.page[w] < args.num_pages && s.visible[w] > 0;
    const u32 legal_lanes = __ballot_sync(~0u, legal);
    s.rank[w] = legal ? s.count + __popc(legal_lanes & ((1u << lane) - 1)) : -1;
    s.count += __popc(legal_lanes);
  }
}

// Keeps what one of `splits` CTAs has of the item's pages, every splits-th, and ranks them anew.
template <int splits>
__device__ __forceinline__ void keep_split(Selection& s, int split) {
  s.count = (s.count + splits - 1 - split) / splits;
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) s.rank[w] = s.rank[w] % splits == split ? s.rank[w] / splits : -1;
}

// Page id of the given rank, which exists, in all lanes.
__device__ __forceinline__ int page_of_rank(const Selection& s, int rank) {
  int page = 0;
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) {
    const u32 owner = __ballot_sync(~0u, s.rank[w] == rank);
    const int candidate = __shfl_sync(~0u, s.page[w], __ffs(owner) - 1);
    if (owner != 0) page = candidate;
  }
  return page;
}

struct PageSources {
  const u8 *keys, *values, *key_scales, *value_scales;
};

__device__ __forceinline__ PageSources page_sources(const Arguments& args, int kv_head, int page) {
  return {args.k + kv_head * args.k_head + page * args.k_page,
          args.v + kv_head * args.v_head + page * args.v_page,
          args.k_scale + kv_head * args.k_scale_head + page * args.k_scale_page,
          args.v_scale + kv_head * args.v_scale_head + page * args.v_scale_page};
}

// One warp lists the pages for the others. place(rank): where in the list.
template <typename Place>
__device__ __forceinline__ void list_pages(const Arguments& args, const Item& item, const Selection& s,
                                           const SlotAddresses& slot, const Place& place) {
  static_assert(sizeof(PageSources) == 32);
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) {
    if (s.rank[w] < 0) continue;
    const PageSources from = page_sources(args, item.kv_head, s.page[w]);
    const SharedAddress entry = slot.sources(place(s.rank[w]));
    ptx::st_shared_v2_u64(entry, reinterpret_cast<u64>(from.keys), reinterpret_cast<u64>(from.values));
    ptx::st_shared_v2_u64(entry + 16, reinterpret_cast<u64>(from.key_scales),
                          reinterpret_cast<u64>(from.value_scales));
    ptx::st_shared_u32(slot.fixed + kSlotVisible + place(s.rank[w]) * 4, s.visible[w]);
  }
}

// The list of an item's pages. Every warp has read the selection for itself; should it change during the
// launch, another warp may count more pages than this one has listed. It then finds page 0, without visible
// tokens, in the places behind them. Cooperating warps, which meet at barriers in every page, take the number
// of pages from here.
__device__ __forceinline__ void list_item(const Arguments& args, const Item& item, Selection s,
                                          const SlotAddresses& slot, int lane) {
  int others = s.count;
  if constexpr (kCooperative) {
    if (lane == 0) ptx::st_shared_u32(slot.fixed + kSlotPages, s.count);
  } else {
#pragma unroll
    for (int w = 0; w < kIdsPerLane; ++w) {
      const u32 other_lanes = __ballot_sync(~0u, s.rank[w] < 0);
      if (s.rank[w] < 0) {
        s.rank[w] = others + __popc(other_lanes & ((1u << lane) - 1));
        s.page[w] = s.visible[w] = 0;
      }
      others += __popc(other_lanes);
    }
  }
  list_pages(args, item, s, slot, [](int rank) { return kOwnPlace + rank; });
}

// ---- Queries

// x * 2^exponent by two exact factors, for exponents from -252 to 252.
__device__ __forceinline__ float times_power_of_two(float x, int exponent) {
  const int half = exponent >> 1;
  return x * __int_as_float((127 + half) << 23) * __int_as_float((127 + exponent - half) << 23);
}

// How a row's scores become base-2 logits: logit = score * scale * lift. lift is 1 unless logits could leave
// binary32; logits that large are so far apart that softmax sees only ties, which the smaller scale keeps.
struct RowScale {
  float scale, lift;
};

// score_scale is positive. row_exponent: floor(log2) of the row's largest |q|; staging moves the row so that
// this becomes 14. Scores stay below 2^20.
__device__ __forceinline__ RowScale bounded_scale(float score_scale, int row_exponent) {
  const int scale_exponent = static_cast<int>(__float_as_uint(score_scale) >> 23) - 127;
  const int cut = max(0, row_exponent + scale_exponent - 105);
  // Never zero, because a hidden token's -inf times zero would be NaN; scores times 2^-126 are as good as
  // zero.
  const float scale = times_power_of_two(score_scale, row_exponent - cut);
  return {fmaxf(scale, 0x1p-126f), times_power_of_two(1.0f, cut)};
}

// Offset of a lane's 16 bytes in a k-step of the queries; a gap of the table holds eight lanes.
__device__ __forceinline__ u32 query_lane(u32 lane16) {
  return kQueriesInGaps ? lane16 + (lane16 & 0x180) : lane16;
}

// Sixteen bfloat16 of a row; eight lanes hold a row, 128 threads all 16.
struct QueryPart {
  u32 words[8];
};

__device__ __forceinline__ QueryPart load_query(const Arguments& args, const Item& item, int head,
                                                int index) {
  if (head >= args.group) return {};
  const i64 at = item.row * args.q_row + (item.kv_head * args.group + head) * args.q_head + index * 32;
  uint4 a, b;
  if constexpr (kOrderedLoads) {  // volatile: a plain load would be moved down to its use
    a = ptx::ld_global_nc_v4_u32(args.q + at);
    b = ptx::ld_global_nc_v4_u32(args.q + at + 16);
  } else {
    a = load<uint4>(args.q, at);
    b = load<uint4>(args.q, at + 16);
  }
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ int row_exponent(const QueryPart& part) {
  u32 largest = 1;  // an all-zero row counts as bfloat16's smallest subnormal
#pragma unroll
  for (int i = 0; i < 8; ++i)
    largest = max(largest, max(part.words[i] & 0x7FFFu, (part.words[i] >> 16) & 0x7FFFu));
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes <<= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
  return largest >= 0x80u ? static_cast<int>(largest >> 7) - 127 : 31 - __clz(largest) - 133;
}

// Stages the row, moved to [2^14, 2^15) by an exact power of two, as binary16 A fragments. Lane t of a quad
// multiplies dims 32*t to 32*t + 31, eight of them (word i of a key's codes) in k-steps 2*i and 2*i + 1, in
// the order in which keys are decoded: by arithmetic pairs of dims i and i + 4, by table of neighbours.
__device__ __forceinline__ void stage_query(const QueryPart& part, int exponent, int head, int index,
                                            SharedAddress queries) {
  const int lower = (14 - exponent) >> 1;
  const float factor = __int_as_float((127 + lower) << 23),
              factor2 = __int_as_float((127 + 14 - exponent - lower) << 23);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = part.words[4 * half + i];
      x[2 * i] = __uint_as_float(word << 16) * factor * factor2;
      x[2 * i + 1] = __uint_as_float(word & 0xFFFF0000u) * factor * factor2;
    }
    const SharedAddress fragment =
        queries + ((index & 1) * 2 + half) * (2 * kQueryStepBytes) +
        query_lane(((head & 7) * 4 + (index >> 1)) * 16) + (head >> 3) * 4;
    constexpr int next = kTable ? 1 : 4;  // distance of the two dims of a pair
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int dim = kTable ? 4 * step : 2 * step, other = kTable ? dim + 2 : dim + 1;
      const SharedAddress at = fragment + step * kQueryStepBytes;
      ptx::st_shared_u32(at, ptx::cvt_rn_f16x2_f32(x[dim + next], x[dim]));
      ptx::st_shared_u32(at + 8, ptx::cvt_rn_f16x2_f32(x[other + next], x[other]));
    }
  }
}
