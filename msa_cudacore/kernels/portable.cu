// Sparse decode attention over NVFP4 pages on mma.sync, compute capability 8.0 and up.
//
// An item is one (query token, KV head); its up to 16 query heads are the 16 rows of the MMA tiles. kSplits CTAs share
// an item; a CTA decodes kPageSlots pages side by side, four warps a page, 32 tokens a warp. Every warp streams its
// quarter pages through a private cp.async ring, keeps its own softmax origin and its own 16 x 128 accumulators, and
// waits for nobody until the CTA merges its warps. Splits meet in distributed shared memory (kClusterMerge) or in a
// workspace that msa_merge reads. All sums run in a fixed order, and nothing survives a launch.
//
// Specialisation, as constexpr text in front of this file: int kPageSlots (1, 2, 4), int kSplits (1, 2, 4, 8, 16),
// bool kClusterMerge, int kIdsPerLane (1: top-k up to 32, 2: up to 64).
#include "arithmetic.cuh"
#include "cluster.cuh"
#include "convert.cuh"
#include "cp_async.cuh"
#include "fence.cuh"
#include "mbarrier.cuh"
#include "mma_sync.cuh"
#include "nvfp4.cuh"
#include "opaque.cuh"
#include "shared_memory.cuh"
#include "types.cuh"

namespace {

using ptx::SharedAddress;

constexpr int kHeadDim = 128;
constexpr int kPageTokens = 128;
constexpr int kHeads = 16;  // rows of an MMA tile; heads beyond the group are zero queries
constexpr int kWarpsPerPage = 4;
constexpr int kWarpTokens = kPageTokens / kWarpsPerPage;
constexpr int kWarps = kWarpsPerPage * kPageSlots;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 2;
constexpr int kPageStride = kPageSlots * kSplits;  // pages of an item that are in work at the same time
constexpr int kMaxTopk = 32 * kIdsPerLane;
// Resident warps on an SM set the register budget: 128 registers where 16 warps fit and the compiler needs no more, and
// what shared memory leaves room for on the parts with 100 KB (8.6, 8.9, 12.x).
constexpr int kArch = __CUDA_ARCH__;
constexpr bool kSmallSharedMemory = kArch == 860 || kArch == 890 || kArch >= 1200;
constexpr int kResidentWarps = kSmallSharedMemory ? 8 : kArch >= 1000 ? 12 : 16;
constexpr int kResidentCtas = kResidentWarps > kWarps ? kResidentWarps / kWarps : 1;
constexpr bool kSplit = kSplits > 1;
// One page in flight until it has arrived: all CTAs' first pages then come before anybody's second (1 us on 512 items).
constexpr bool kLateSecondPage = !kSplit;

static_assert(kPageSlots == 1 || kPageSlots == 2 || kPageSlots == 4, "warps of a CTA: 4, 8 or 16");
static_assert(kSplits >= 1 && kSplits <= kHeads && (kSplits & (kSplits - 1)) == 0, "a split owns kHeads / kSplits heads");
static_assert(!kClusterMerge || kSplit, "one CTA has nothing to merge with");
static_assert(kIdsPerLane == 1 || kIdsPerLane == 2, "top-k up to 64");

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kNoOrigin = -3.0e38f;  // below every score that bounded_scale lets through
// P stays below 2 in binary16; a new origin leaves room for scores to grow by this many binades before the next one.
constexpr float kHeadroom = 4.0f;
constexpr u32 kAtLeastTwo = 0x40004000u;  // exponent bit that binary16 sets from 2.0 on
constexpr u32 kOnes = 0x3C003C00u;

// A quarter page in the ring: 32 tokens' codes, then their scales.
constexpr u32 kStageValues = 2048;
constexpr u32 kStageKeyScales = 4096;
constexpr u32 kStageValueScales = 4352;
constexpr u32 kStageBytes = 4608;
constexpr u32 kWarpRingBytes = kStages * kStageBytes;
static_assert(kWarpRingBytes >= kHeads * kHeadDim * 4, "a warp's accumulators replace its ring at the end");

// Dynamic shared memory, in bytes.
constexpr u32 kRingAt = 0;
constexpr u32 kQueriesAt = kRingAt + kWarps * kWarpRingBytes;       // A fragments of q: [8 k-steps][32 lanes][16 bytes]
constexpr u32 kSourcesAt = kQueriesAt + kHeads * kHeadDim * 2;      // [kMaxTopk] PageSources
constexpr u32 kVisibleAt = kSourcesAt + kMaxTopk * 32;              // [kMaxTopk] visible tokens from the page's first on
constexpr u32 kScaleAt = kVisibleAt + kMaxTopk * 4;                 // [kHeads] RowScale
constexpr u32 kArrivalAt = kScaleAt + kHeads * 8;                   // mbarrier of the cluster merge
constexpr u32 kItemAt = kArrivalAt + 16;                            // row and KV head, for the epilogue
constexpr u32 kWarpStatsAt = kArrivalAt + 64;                       // [kWarps][kHeads] (origin, sum)
constexpr u32 kInboxAt = kWarpStatsAt + kWarps * kHeads * 8;        // [kSplits][kHeads / kSplits][128] of the owned heads
constexpr u32 kInboxStatsAt = kInboxAt + kHeads * kHeadDim * 4;     // [kSplits][kHeads / kSplits] (origin, sum)

// Everything a launch gets; strides in bytes.
struct Arguments {
  const u8 *q, *k, *v, *k_scale, *v_scale, *q2k, *page_table, *seqused_k;
  u8 *out, *lse, *workspace;
  i64 k_page, k_head, v_page, v_head, k_scale_page, k_scale_head, v_scale_page, v_scale_head;
  i64 q_row, q_head, q2k_head, q2k_row, q2k_j, page_table_row, page_table_j, seqused_stride;
  i64 out_row, out_head, lse_row, lse_head;
  i32 batch, seqlen_q, num_kv_heads, group, topk, max_pages, num_pages;
  float score_scale;  // softmax scale * K global scale * log2(e)
  float v_global_scale;
};

struct Item {
  int kv_head, request, token, row;
};

// What the results need of an item. The main loop has no registers to spare, so it waits in shared memory.
struct ItemRow {
  int row, kv_head;
};

__device__ __forceinline__ Item item_of(const Arguments& args, u32 item) {
  const u32 tokens = item / args.num_kv_heads;
  Item x;
  x.kv_head = item % args.num_kv_heads;
  x.request = tokens / args.seqlen_q;
  x.token = tokens % args.seqlen_q;
  x.row = tokens;
  return x;
}

template <typename T>
__device__ __forceinline__ T load(const u8* base, i64 offset) {
  return __ldg(reinterpret_cast<const T*>(base + offset));
}

// ---- Queries -------------------------------------------------------------------------------------------------------

// 2^exponent for |exponent| <= 252, 0 or inf beyond binary32, in two exact factors.
__device__ __forceinline__ float times_power_of_two(float x, int exponent) {
  const int half = exponent >> 1;
  return x * __int_as_float((127 + half) << 23) * __int_as_float((127 + exponent - half) << 23);
}

// How a row's scores become base-2 logits: logit = score * scale * lift. lift is 1 unless scale would push scores out
// of binary32; such logits are so far apart that softmax sees only ties, which the smaller scale keeps.
struct RowScale {
  float scale, lift;
};

// row_exponent: floor(log2) of the row's largest |q|, which staging moved to 2^14. Scores stay below 2^20.
__device__ __forceinline__ RowScale bounded_scale(float score_scale, int row_exponent) {
  const float magnitude = fabsf(score_scale);
  const int scale_exponent = static_cast<int>(__float_as_uint(magnitude) >> 23) - 127;
  const int cut = max(0, row_exponent + scale_exponent - 105);
  // A scale that underflowed to zero would turn the -inf of a hidden token into NaN; scores below 2^20 make this one as good.
  const float scale = fmaxf(times_power_of_two(magnitude, row_exponent - cut), 0x1p-126f);
  return {scale, times_power_of_two(1.0f, cut)};
}

// Sixteen bfloat16 of a row, as eight lanes hold a row.
struct QueryPart {
  u32 words[8];
};

__device__ __forceinline__ QueryPart load_query(const Arguments& args, const Item& item, int head, int part) {
  QueryPart x = {};
  if (head < args.group) {
    const i64 at = item.row * args.q_row + (item.kv_head * args.group + head) * args.q_head + part * 32;
    const uint4 a = load<uint4>(args.q, at), b = load<uint4>(args.q, at + 16);
    x = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
  return x;
}

__device__ __forceinline__ int row_exponent(const QueryPart& part) {
  u32 largest = 1;  // an all-zero row counts as bfloat16's smallest subnormal
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, max(part.words[i] & 0x7FFFu, (part.words[i] >> 16) & 0x7FFFu));
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes <<= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
  return largest >= 0x80u ? static_cast<int>(largest >> 7) - 127 : 31 - __clz(largest) - 133;
}

// The row, moved to [2^14, 2^15) by an exact power of two, as binary16 A fragments. Step 2*i + odd multiplies dims
// 32*t + 8*i + odd + {0, 2, 4, 6} of lane 4*g + t: the order in which decode_e2m1 delivers a lane's 32 key codes.
__device__ __forceinline__ void stage_query(const QueryPart& part, int exponent, bool negate, int head, int index, u8* queries) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = part.words[4 * half + i] ^ (negate ? 0x80008000u : 0u);
      x[2 * i] = times_power_of_two(__uint_as_float(word << 16), 14 - exponent);
      x[2 * i + 1] = times_power_of_two(__uint_as_float(word & 0xFFFF0000u), 14 - exponent);
    }
    const int word_of_lane = (index & 1) * 2 + half;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      u32* fragment = reinterpret_cast<u32*>(queries + (2 * word_of_lane + odd) * 512 + ((head & 7) * 4 + (index >> 1)) * 16 +
                                             (head >> 3) * 4);
      fragment[0] = ptx::cvt_rn_f16x2_f32(x[odd + 2], x[odd]);
      fragment[2] = ptx::cvt_rn_f16x2_f32(x[odd + 6], x[odd + 4]);
    }
  }
}

// ---- Selection -----------------------------------------------------------------------------------------------------

// The item's legal pages in the order of its q2k row. A lane holds entries lane and lane + 32 of the row.
struct Selection {
  int count;
  int rank[kIdsPerLane];  // place among the legal pages, -1 for a dropped entry
  int page[kIdsPerLane];
  int visible[kIdsPerLane];  // tokens from the page's first one up to the query's position
};

// An id is legal inside the page table and inside the context that this token sees; its page id inside the pool.
// Nothing else is ever dereferenced.
__device__ __forceinline__ Selection select_pages(const Arguments& args, const Item& item, const int (&ids)[kIdsPerLane],
                                                  int seqused, int lane) {
  // 64 bits: a length near 2^31 that the caller wrote by mistake must not wrap.
  const i64 context = static_cast<i64>(seqused) - args.seqlen_q + item.token + 1;
  Selection s;
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) {
    const i64 visible = context - static_cast<i64>(ids[w]) * kPageTokens;
    const bool legal = ids[w] >= 0 && ids[w] < args.max_pages && visible > 0;
    s.page[w] = legal ? load<int>(args.page_table, item.request * args.page_table_row + ids[w] * args.page_table_j) : -1;
    s.visible[w] = visible < kPageTokens ? static_cast<int>(visible) : kPageTokens;
  }
  s.count = 0;
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) {
    const bool legal = s.page[w] >= 0 && s.page[w] < args.num_pages;
    const u32 legal_lanes = __ballot_sync(~0u, legal);
    s.rank[w] = legal ? s.count + __popc(legal_lanes & ((1u << lane) - 1)) : -1;
    s.count += __popc(legal_lanes);
  }
  return s;
}

// Page id of the given rank, on all lanes. The rank exists.
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
  return {args.k + kv_head * args.k_head + page * args.k_page, args.v + kv_head * args.v_head + page * args.v_page,
          args.k_scale + kv_head * args.k_scale_head + page * args.k_scale_page,
          args.v_scale + kv_head * args.v_scale_head + page * args.v_scale_page};
}

// ---- Ring ----------------------------------------------------------------------------------------------------------

// Where a lane's copies of a quarter page land: keys and scales in the pool's order, at the lane's 16 bytes of every 512;
// values with address bit 6 ^= token bit 1 and bit 5 ^= token bit 2, so that accumulate_values meets no bank conflict.
struct RingLanes {
  u32 linear, values;
};

__device__ __forceinline__ RingLanes ring_lanes(SharedAddress ring, u32 lane) {
  return {ring + lane * 16, ring + kStageValues + ((lane * 16) ^ (((lane >> 3) & 1) << 6) ^ (((lane >> 4) & 1) << 5))};
}

// Starts the copies of a quarter page; the pointers are this lane's. Lanes 0..15 bring the key scales, the others the
// value scales.
__device__ __forceinline__ void request_quarter(const RingLanes& to, u32 stage, const u8* keys, const u8* values, const u8* scales) {
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::cp_async_cg_16(to.linear + stage + i * 512, keys + i * 512);
  ptx::cp_async_cg_16(to.linear + stage + kStageKeyScales, scales);
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::cp_async_cg_16(to.values + stage + i * 512, values + i * 512);
}

__device__ __forceinline__ void request_listed(const RingLanes& to, u32 stage, SharedAddress sources, u32 rank, u32 lane16,
                                               u32 quarter) {
  const SharedAddress at = sources + rank * static_cast<u32>(sizeof(PageSources));
  const ulonglong2 codes = ptx::ld_shared_v2_u64(at);
  const u64 scales = ptx::ld_shared_u64(at + (lane16 < 256 ? 16 : 24));
  const u32 codes_at = lane16 + quarter * 2048, scales_at = (lane16 & 255) + quarter * 256;
  request_quarter(to, stage, reinterpret_cast<const u8*>(codes.x + codes_at), reinterpret_cast<const u8*>(codes.y + codes_at),
                  reinterpret_cast<const u8*>(scales + scales_at));
}

// ---- Attention of one warp -----------------------------------------------------------------------------------------

// Lane 4*g + t holds rows g and g + 8. out[o] has dims 32*t + o and 32*t + 16 + o of either row.
struct WarpState {
  float out[16][4];
  float sum[4];  // [0] row g, [2] row g + 8
  float origin[2];
  float scale[2];
};

// score[n][i], score[n][2 + i]: token 8*n + 2*t + i, rows g and g + 8.
__device__ __forceinline__ void score_keys(float (&score)[4][4], SharedAddress keys, SharedAddress key_scales, SharedAddress queries) {
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    uint4 codes[2];
    u32 scales[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      codes[e] = ptx::ld_shared_v4_u32(keys + u * 1024 + e * 512);
      scales[e] = decode_scales(ptx::ld_shared_u16(key_scales + u * 128 + e * 64));
#pragma unroll
      for (int i = 0; i < 4; ++i) score[2 * u + e][i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 even = ptx::ld_shared_v4_u32(queries + 2 * i * 512), odd = ptx::ld_shared_v4_u32(queries + (2 * i + 1) * 512);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 word = i == 0 ? codes[e].x : i == 1 ? codes[e].y : i == 2 ? codes[e].z : codes[e].w;
        const u32 scale = i < 2 ? lower_twice(scales[e]) : upper_twice(scales[e]);
        u32 pairs[4];
        decode_e2m1(word, pairs);
        ptx::mma_sync_m16n8k16_f32_f16(score[2 * u + e], even, ptx::mul_rn_f16x2(pairs[0], scale), ptx::mul_rn_f16x2(pairs[1], scale));
        ptx::mma_sync_m16n8k16_f32_f16(score[2 * u + e], odd, ptx::mul_rn_f16x2(pairs[2], scale), ptx::mul_rn_f16x2(pairs[3], scale));
      }
    }
  }
}

// Hides tokens from `visible` on: their scores, and their value scales, whose stale bytes may be NaN.
__device__ __forceinline__ void hide_tail(float (&score)[4][4], u32 (&value_scales)[4], int visible, int t) {
  const float minus_infinity = __int_as_float(0xFF800000);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int live = visible - (8 * n + 2 * t);
    if (live < 1) score[n][0] = score[n][2] = minus_infinity;
    if (live < 2) score[n][1] = score[n][3] = minus_infinity;
    value_scales[n] &= live >= 2 ? 0xFFFFu : live == 1 ? 0x00FFu : 0u;
  }
}

// P = 2^(score * scale - origin) as binary16 A fragments of two k-steps.
__device__ __forceinline__ void exponentials(uint4 (&p)[2], const float (&score)[4][4], const WarpState& state) {
  auto pair = [&](const float* s, int row) {
    const float lower = ptx::ex2_approx_ftz_f32(fmaf(s[0], state.scale[row], -state.origin[row]));
    const float upper = ptx::ex2_approx_ftz_f32(fmaf(s[1], state.scale[row], -state.origin[row]));
    return ptx::cvt_rn_f16x2_f32(upper, lower);
  };
#pragma unroll
  for (int u = 0; u < 2; ++u)
    p[u] = make_uint4(pair(score[2 * u], 0), pair(score[2 * u] + 2, 1), pair(score[2 * u + 1], 0), pair(score[2 * u + 1] + 2, 1));
}

// Moves the origin of each row that has a P of 2 or more. A row moves by its own scores alone, so that its bits do not
// depend on the other heads.
__device__ __forceinline__ void move_origins(WarpState& state, const float (&score)[4][4]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float largest = fmaxf(score[0][2 * row], score[0][2 * row + 1]);
#pragma unroll
    for (int n = 1; n < 4; ++n) largest = fmaxf(largest, fmaxf(score[n][2 * row], score[n][2 * row + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    if (fmaf(largest, state.scale[row], -state.origin[row]) >= 1.0f) {
      const float origin = fmaf(largest, state.scale[row], kHeadroom);
      const float factor = ptx::ex2_approx_ftz_f32(state.origin[row] - origin);
      state.origin[row] = origin;
      state.sum[2 * row] *= factor;
      state.sum[2 * row + 1] *= factor;
#pragma unroll
      for (int o = 0; o < 16; ++o) {
        state.out[o][2 * row] *= factor;
        state.out[o][2 * row + 1] *= factor;
      }
    }
  }
}

// out += P V. A lane holds the 16 dims of scale group g for the four tokens of its column in a k-step.
__device__ __forceinline__ void accumulate_values(WarpState& state, const uint4 (&p)[2], SharedAddress values, const u32 (&value_scales)[4]) {
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const SharedAddress at = values + u * 1024, swapped = (values ^ 64) + u * 1024;
    const uint2 token[4] = {ptx::ld_shared_v2_u32(at), ptx::ld_shared_v2_u32(swapped), ptx::ld_shared_v2_u32(at + 512),
                            ptx::ld_shared_v2_u32(swapped + 512)};
    const u32 scale01 = decode_scales(value_scales[2 * u]), scale23 = decode_scales(value_scales[2 * u + 1]);
    ptx::mma_sync_m16n8k16_f32_f16(state.sum, p[u], kOnes, kOnes);
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        const u32 order = z ? 0x7351 : 0x6240;  // bytes z and z + 2 of two tokens, tokens innermost
        u32 first[4], second[4];
        decode_e2m1(__byte_perm(w ? token[0].y : token[0].x, w ? token[1].y : token[1].x, order), first);
        decode_e2m1(__byte_perm(w ? token[2].y : token[2].x, w ? token[3].y : token[3].x, order), second);
        const int dims[4] = {8 * w + 2 * z, 8 * w + 2 * z + 4, 8 * w + 2 * z + 1, 8 * w + 2 * z + 5};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::mma_sync_m16n8k16_f32_f16(state.out[dims[i]], p[u], ptx::mul_rn_f16x2(first[i], scale01),
                                         ptx::mul_rn_f16x2(second[i], scale23));
      }
  }
}

// ---- Merges --------------------------------------------------------------------------------------------------------

constexpr int kPartDims = kHeads * kHeadDim / kThreads;  // dims of one head that a thread merges: 16, 8 or 4
constexpr int kPartsPerHead = kHeadDim / kPartDims;

struct MergedPart {
  int head, dim;  // first of kPartDims
  float origin, sum;
  float4 out[kPartDims / 4];
};

// A warp's 16 x 128 accumulators replace its ring: row of 4 lines (t) of 32 dims, 16-byte chunks swizzled by lane.
__device__ __forceinline__ void publish_warp(const WarpState& state, SharedAddress smem, SharedAddress ring, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  if (t == 0) {
    const SharedAddress stats = smem + kWarpStatsAt + (warp * kHeads + g) * 8;
    ptx::st_shared_v2_f32(stats, state.origin[0], state.sum[0]);
    ptx::st_shared_v2_f32(stats + 64, state.origin[1], state.sum[2]);
  }
  const u32 base = ring + g * 512 + t * 128, swizzle = (lane & 7) * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int x = 0; x < 4; ++x)
      ptx::st_shared_v4_f32(base + (x >> 1) * 4096 + (swizzle ^ (i * 16 + (x & 1) * 64)), state.out[4 * i][x], state.out[4 * i + 1][x],
                            state.out[4 * i + 2][x], state.out[4 * i + 3][x]);
}

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& x) {
  sum.x = fmaf(factor, x.x, sum.x);
  sum.y = fmaf(factor, x.y, sum.y);
  sum.z = fmaf(factor, x.z, sum.z);
  sum.w = fmaf(factor, x.w, sum.w);
}

__device__ __forceinline__ MergedPart merge_warps(SharedAddress smem, int thread) {
  MergedPart part;
  part.head = thread / kPartsPerHead;
  part.dim = thread % kPartsPerHead * kPartDims;
  float2 stats[kWarps];
  part.origin = kNoOrigin;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    stats[w] = ptx::ld_shared_v2_f32(smem + kWarpStatsAt + (w * kHeads + part.head) * 8);
    part.origin = fmaxf(part.origin, stats[w].x);
  }
  part.sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPartDims / 4; ++i) part.out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const u32 line = part.dim >> 5, swizzle = ((part.head & 1) * 4 + line) * 16;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float factor = ptx::ex2_approx_ftz_f32(stats[w].x - part.origin);
    part.sum = fmaf(factor, stats[w].y, part.sum);
#pragma unroll
    for (int i = 0; i < kPartDims / 4; ++i) {
      const u32 chunk = ((part.dim & 31) >> 2) + i;
      add_scaled(part.out[i], factor,
                 ptx::ld_shared_v4_f32(smem + kRingAt + w * kWarpRingBytes + part.head * 512 + line * 128 + (swizzle ^ (chunk * 16))));
    }
  }
  return part;
}

// ---- Results -------------------------------------------------------------------------------------------------------

// 1 / sum with the factors that decoding left out; a row without keys is exactly zero.
__device__ __forceinline__ float output_factor(const Arguments& args, float sum) {
  return sum == 0.0f ? 0.0f : args.v_global_scale * kCodeUnit / sum;
}

// Natural logarithm of the sum of exponentials, -inf without keys. Beyond 2^50 an origin is all logit.
__device__ __forceinline__ void store_lse(const Arguments& args, const ItemRow& item, int head, float origin, float sum, float lift) {
  const float lifted = fabsf(origin) > 0x1p50f ? origin * lift : origin;
  const float lse = sum == 0.0f ? __int_as_float(0xFF800000) : (lifted + ptx::lg2_approx_ftz_f32(sum)) * kLn2;
  *reinterpret_cast<float*>(args.lse + item.row * args.lse_row + (item.kv_head * args.group + head) * args.lse_head) = lse;
}

__device__ __forceinline__ u8* output_at(const Arguments& args, const ItemRow& item, int head, int dim) {
  return args.out + item.row * args.out_row + (item.kv_head * args.group + head) * args.out_head + dim * 2;
}

__device__ __forceinline__ uint2 rounded(const float4& x, float factor) {
  return make_uint2(ptx::cvt_rn_bf16x2_f32(x.y * factor, x.x * factor), ptx::cvt_rn_bf16x2_f32(x.w * factor, x.z * factor));
}

template <int n>
__device__ __forceinline__ void store_output(const Arguments& args, const ItemRow& item, int head, int dim, float sum, const float4 (&out)[n]) {
  const float factor = output_factor(args, sum);
  uint2* to = reinterpret_cast<uint2*>(output_at(args, item, head, dim));
#pragma unroll
  for (int i = 0; i < n; ++i) to[i] = rounded(out[i], factor);
}

// Workspace of the split without clusters: float [items, kSplits, group, 128], then (origin, sum) [items, kSplits, group].
struct Workspace {
  float4* out;
  float2* stats;
};

__device__ __forceinline__ Workspace workspace_of(const Arguments& args, u32 item, int split, int head) {
  const i64 items = static_cast<i64>(args.batch) * args.seqlen_q * args.num_kv_heads;
  const i64 row = (static_cast<i64>(item) * kSplits + split) * args.group + head;
  return {reinterpret_cast<float4*>(args.workspace + row * kHeadDim * 4),
          reinterpret_cast<float2*>(args.workspace + items * kSplits * args.group * kHeadDim * 4) + row};
}

// Each CTA of the cluster owns kHeads / kSplits heads and receives their partials from all the others.
__device__ __forceinline__ void merge_cluster(const Arguments& args, const ItemRow& item, const MergedPart& part, SharedAddress smem,
                                              u32 split, int thread) {
  constexpr int kOwned = kHeads / kSplits;
  const SharedAddress arrival = smem + kArrivalAt;
  ptx::barrier_cluster_wait();  // every CTA has started and announced its bytes
  {
    const u32 owner = part.head / kOwned, slot = split * kOwned + part.head % kOwned;
    const SharedAddress arrival_there = ptx::mapa_shared_cluster(arrival, owner);
    const SharedAddress there = ptx::mapa_shared_cluster(smem + kInboxAt + slot * (kHeadDim * 4) + part.dim * 4, owner);
#pragma unroll
    for (int i = 0; i < kPartDims / 4; ++i) ptx::st_async_v4(there + i * 16, part.out[i].x, part.out[i].y, part.out[i].z, part.out[i].w, arrival_there);
    if (part.dim == 0)
      ptx::st_async_v2(ptx::mapa_shared_cluster(smem + kInboxStatsAt + slot * 8, owner), part.origin, part.sum, arrival_there);
  }
  while (!ptx::mbarrier_try_wait_parity_cluster(arrival, 0)) {
  }
  const int owned = thread / (kHeadDim / 4), dim = thread % (kHeadDim / 4) * 4;
#pragma unroll
  for (int base = 0; base < kOwned; base += kThreads / (kHeadDim / 4)) {
    const int head = split * kOwned + base + owned;
    if (base + owned >= kOwned || head >= args.group) continue;
    float2 stats[kSplits];
    float origin = kNoOrigin, sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      stats[s] = ptx::ld_shared_v2_f32(smem + kInboxStatsAt + (s * kOwned + base + owned) * 8);
      origin = fmaxf(origin, stats[s].x);
    }
    float4 out[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      const float factor = ptx::ex2_approx_ftz_f32(stats[s].x - origin);
      sum = fmaf(factor, stats[s].y, sum);
      add_scaled(out[0], factor, ptx::ld_shared_v4_f32(smem + kInboxAt + ((s * kOwned + base + owned) * kHeadDim + dim) * 4));
    }
    store_output(args, item, head, dim, sum, out);
    if (dim == 0) store_lse(args, item, head, origin, sum, ptx::ld_shared_f32(smem + kScaleAt + head * 8 + 4));
  }
}

// ---- Entries -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void decode(const Arguments& args) {
  extern __shared__ __align__(1024) u8 shared[];
  const SharedAddress smem = ptx::shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0);
  const int slot = warp / kWarpsPerPage;
  const u32 quarter = warp % kWarpsPerPage;
  const u32 split = kSplit ? blockIdx.x % kSplits : 0;
  const Item item = item_of(args, blockIdx.x / kSplits);

  int ids[kIdsPerLane];
#pragma unroll
  for (int w = 0; w < kIdsPerLane; ++w) {
    const int j = w * 32 + lane;
    ids[w] = j < args.topk ? load<int>(args.q2k, item.kv_head * args.q2k_head + item.row * args.q2k_row + j * args.q2k_j) : -1;
  }
  const int seqused = load<int>(args.seqused_k, item.request * args.seqused_stride);
  const int head = thread >> 3, query_index = thread & 7;
  const QueryPart query = load_query(args, item, head, query_index);
  const Selection selection = select_pages(args, item, ids, seqused, lane);
  const int pages = selection.count, first = split * kPageSlots + slot;

  const SharedAddress ring = smem + kRingAt + warp * kWarpRingBytes;
  RingLanes lanes = ring_lanes(ring, lane);
  u32 lane16 = lane * 16;
#pragma unroll
  for (int s = 0; s < (kLateSecondPage ? 1 : kStages); ++s) {
    const int rank = first + s * kPageStride;
    if (rank < pages) {
      const PageSources from = page_sources(args, item.kv_head, page_of_rank(selection, rank));
      const u32 at = lane16 + quarter * 2048, scales_at = (lane16 & 255) + quarter * 256;
      request_quarter(lanes, s * kStageBytes, from.keys + at, from.values + at,
                      (lane < 16 ? from.key_scales : from.value_scales) + scales_at);
    }
    ptx::cp_async_commit_group();
  }
  if (warp == 0) {
#pragma unroll
    for (int w = 0; w < kIdsPerLane; ++w) {
      if (selection.rank[w] < 0) continue;
      const PageSources from = page_sources(args, item.kv_head, selection.page[w]);
      const SharedAddress entry = smem + kSourcesAt + selection.rank[w] * static_cast<u32>(sizeof(PageSources));
      ptx::st_shared_v2_u64(entry, reinterpret_cast<u64>(from.keys), reinterpret_cast<u64>(from.values));
      ptx::st_shared_v2_u64(entry + 16, reinterpret_cast<u64>(from.key_scales), reinterpret_cast<u64>(from.value_scales));
      ptx::st_shared_u32(smem + kVisibleAt + selection.rank[w] * 4, selection.visible[w]);
    }
  }
  if constexpr (kClusterMerge) {
    if (thread == 0) {
      ptx::mbarrier_init(smem + kArrivalAt, 1);
      ptx::fence_mbarrier_init_release_cluster();
      ptx::mbarrier_arrive_expect_tx(smem + kArrivalAt, kHeads * (kHeadDim * 4 + 8));
    }
    __syncwarp();
    ptx::barrier_cluster_arrive();
  }
  if (thread == 0) ptx::st_shared_v2_u32(smem + kItemAt, item.row, item.kv_head);
  if (head < kHeads) {
    const int exponent = row_exponent(query);
    stage_query(query, exponent, args.score_scale < 0.0f, head, query_index, shared + kQueriesAt);
    if (query_index == 0) {
      const RowScale row = bounded_scale(args.score_scale, exponent);
      ptx::st_shared_v2_f32(smem + kScaleAt + head * 8, row.scale, row.lift);
    }
  }
  __syncthreads();

  const int g = lane >> 2, t = lane & 3;
  WarpState state = {};
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    state.scale[row] = ptx::ld_shared_f32(smem + kScaleAt + (g + 8 * row) * 8);
    state.origin[row] = kNoOrigin;
  }
  u32 values_at = ring + kStageValues + 128 * t + ((8 * g) ^ ((t >> 1) << 5)) + (t & 1) * 64;
  u32 value_scales_at = ring + kStageValueScales + (t >> 1) * 32 + g * 4 + (t & 1) * 2;
  ptx::opaque(lane16);
  ptx::opaque(values_at);
  ptx::opaque(value_scales_at);
  ptx::opaque(lanes.linear);
  ptx::opaque(lanes.values);
  if constexpr (kLateSecondPage) {
    ptx::cp_async_wait_group<0>();
    if (first + kPageStride < pages) request_listed(lanes, kStageBytes, smem + kSourcesAt, first + kPageStride, lane16, quarter);
    ptx::cp_async_commit_group();
  }

  auto attend = [&](int rank, u32 stage) {
    ptx::cp_async_wait_group<kStages - 1>();
    __syncwarp();
    const int visible = static_cast<int>(ptx::ld_shared_u32(smem + kVisibleAt + rank * 4)) - static_cast<int>(quarter) * kWarpTokens;
    if (visible > 0) {
      float score[4][4];
      score_keys(score, lanes.linear + stage, ring + stage + kStageKeyScales + (lane16 >> 3), smem + kQueriesAt + lane16);
      u32 value_scales[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) value_scales[n] = ptx::ld_shared_u16(value_scales_at + stage + n * 64);
      if (visible < kWarpTokens) hide_tail(score, value_scales, visible, (lane16 >> 4) & 3);
      uint4 p[2];
      exponentials(p, score, state);
      const u32 bits = (p[0].x | p[0].y | p[0].z) | (p[0].w | p[1].x | p[1].y) | (p[1].z | p[1].w);
      if (__any_sync(~0u, bits & kAtLeastTwo)) {
        move_origins(state, score);
        exponentials(p, score, state);
      }
      accumulate_values(state, p, values_at + stage, value_scales);
    }
    __syncwarp();
    if (rank + kStages * kPageStride < pages)
      request_listed(lanes, stage, smem + kSourcesAt, rank + kStages * kPageStride, lane16, quarter);
    ptx::cp_async_commit_group();
  };
  for (int rank = first; rank < pages; rank += kStages * kPageStride) {
    attend(rank, 0);
    if (rank + kPageStride >= pages) break;
    attend(rank + kPageStride, kStageBytes);
  }
  ptx::cp_async_wait_group<0>();
  __syncwarp();

  // Lane and thread out of what is at hand anyway: two registers less in the loop.
  const int lane_now = lane16 >> 4, thread_now = warp * 32 + lane_now;
  publish_warp(state, smem, ring, warp, lane_now);
  __syncthreads();
  const MergedPart part = merge_warps(smem, thread_now);
  const uint2 stored = ptx::ld_shared_v2_u32(smem + kItemAt);
  const ItemRow item_row = {static_cast<int>(stored.x), static_cast<int>(stored.y)};
  if constexpr (kClusterMerge) {
    merge_cluster(args, item_row, part, smem, split, thread_now);
  } else if (part.head < args.group) {
    if constexpr (kSplit) {
      const Workspace to = workspace_of(args, blockIdx.x / kSplits, split, part.head);
#pragma unroll
      for (int i = 0; i < kPartDims / 4; ++i) to.out[part.dim / 4 + i] = part.out[i];
      if (part.dim == 0) *to.stats = make_float2(part.origin, part.sum);
    } else {
      store_output(args, item_row, part.head, part.dim, part.sum, part.out);
      if (part.dim == 0)
        store_lse(args, item_row, part.head, part.origin, part.sum, ptx::ld_shared_f32(smem + kScaleAt + part.head * 8 + 4));
    }
  }
}

// The splits of an item out of the workspace: a warp merges a head, a lane four dims.
__device__ __forceinline__ void merge(const Arguments& args) {
  const Item item = item_of(args, blockIdx.x);
  const int lane = threadIdx.x & 31;
  for (int base = 0; base < args.group; base += 4) {
    const int head = base + threadIdx.x / 32;
    // Only eight lanes of a row take part in row_exponent, in the order in which decode staged the row.
    const QueryPart query = load_query(args, item, head, lane & 7);
    const RowScale row = bounded_scale(args.score_scale, row_exponent(query));
    if (head >= args.group) continue;
    float2 stats[kSplits];
    float origin = kNoOrigin, sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      stats[s] = *workspace_of(args, blockIdx.x, s, head).stats;
      origin = fmaxf(origin, stats[s].x);
    }
    float4 out[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      const float factor = ptx::ex2_approx_ftz_f32(stats[s].x - origin);
      sum = fmaf(factor, stats[s].y, sum);
      add_scaled(out[0], factor, workspace_of(args, blockIdx.x, s, head).out[lane]);
    }
    store_output(args, {item.row, item.kv_head}, head, lane * 4, sum, out);
    if (lane == 0) store_lse(args, {item.row, item.kv_head}, head, origin, sum, row.lift);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kResidentCtas) msa_decode(
    const u8* q, const u8* k, const u8* v, const u8* k_scale, const u8* v_scale, const u8* q2k, const u8*
    page_table, const u8* seqused_k, u8* out, u8* lse, u8* workspace, i64 k_page, i64 k_head, i64 v_page, i64
    v_head, i64 k_scale_page, i64 k_scale_head, i64 v_scale_page, i64 v_scale_head, i64 q_row, i64 q_head, i64
    q2k_head, i64 q2k_row, i64 q2k_j, i64 page_table_row, i64 page_table_j, i64 seqused_stride, i64 out_row,
    i64 out_head, i64 lse_row, i64 lse_head, i32 batch, i32 seqlen_q, i32 num_kv_heads, i32 group, i32 topk,
    i32 max_pages, i32 num_pages, float score_scale, float v_global_scale) {
  decode({
      q, k, v, k_scale, v_scale, q2k, page_table, seqused_k, out, lse, workspace, k_page, k_head, v_page,
      v_head, k_scale_page, k_scale_head, v_scale_page, v_scale_head, q_row, q_head, q2k_head, q2k_row, q2k_j,
      page_table_row, page_table_j, seqused_stride, out_row, out_head, lse_row, lse_head, batch, seqlen_q,
      num_kv_heads, group, topk, max_pages, num_pages, score_scale, v_global_scale});
}

extern "C" __global__ void __launch_bounds__(128) msa_merge(
    const u8* q, const u8* k, const u8* v, const u8* k_scale, const u8* v_scale, const u8* q2k, const u8*
    page_table, const u8* seqused_k, u8* out, u8* lse, u8* workspace, i64 k_page, i64 k_head, i64 v_page, i64
    v_head, i64 k_scale_page, i64 k_scale_head, i64 v_scale_page, i64 v_scale_head, i64 q_row, i64 q_head, i64
    q2k_head, i64 q2k_row, i64 q2k_j, i64 page_table_row, i64 page_table_j, i64 seqused_stride, i64 out_row,
    i64 out_head, i64 lse_row, i64 lse_head, i32 batch, i32 seqlen_q, i32 num_kv_heads, i32 group, i32 topk,
    i32 max_pages, i32 num_pages, float score_scale, float v_global_scale) {
  merge({
      q, k, v, k_scale, v_scale, q2k, page_table, seqused_k, out, lse, workspace, k_page, k_head, v_page,
      v_head, k_scale_page, k_scale_head, v_scale_page, v_scale_head, q_row, q_head, q2k_head, q2k_row, q2k_j,
      page_table_row, page_table_j, seqused_stride, out_row, out_head, lse_row, lse_head, batch, seqlen_q,
      num_kv_heads, group, topk, max_pages, num_pages, score_scale, v_global_scale});
}
