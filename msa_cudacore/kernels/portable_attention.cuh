// The page loop's work: a warp's part of a page from global memory to its accumulators.
#pragma once
#include "cp_async.cuh"
#include "logic.cuh"
#include "mma_sync.cuh"
#include "nvfp4.cuh"
#include "portable_plan.cuh"
#include "portable_prologue.cuh"

// Origin of a row that has none yet. Below every logit that bounded_scale admits, so that
// 2^(score * scale - origin) is infinite.
constexpr float kNoOrigin = -3.0e38f;
constexpr float kNoReference = -1.0e30f;  // below every score
// The rounding of an origin as large as this would show in P: such a row is kept relative to a score instead,
// see move_origins.
constexpr float kFarLogit = 1048576.0f;
// A new origin puts the largest P at 2^11, well above binary16's subnormals, so that keys up to 25 binades
// below it keep their precision; scores may grow by four binades before the next one.
constexpr float kHeadroom = -11.0f;
constexpr float kLargestExponent = 15.0f;
constexpr u32 kOnes = 0x3C003C00u;  // a pair of binary16 ones: P times ones is the row's sum

// ---- Ring

// Where a lane's copies land: keys and scales in the pool's order, at the lane's 16 bytes of every 512;
// values with address bit 6 ^= token bit 1 and bit 5 ^= token bit 2, so that accumulate_values meets no bank
// conflict.
struct RingLanes {
  u32 linear, values;
};

__device__ __forceinline__ RingLanes ring_lanes(SharedAddress ring, u32 lane) {
  return {ring + lane * 16,
          ring + kStageValues + ((lane * 16) ^ (((lane >> 3) & 1) << 6) ^ (((lane >> 4) & 1) << 5))};
}

// A lane's offsets into the sources of a page.
struct SourceLanes {
  u32 codes, scales;   // bytes
  bool brings_scales;  // this lane copies scales: those of keys if key_scales, else those of values
  bool key_scales;
};

__device__ __forceinline__ SourceLanes source_lanes(u32 lane16, u32 part) {
  return {lane16 + part * kPartCodes, (lane16 & (kPartScales - 1)) + part * kPartScales,
          lane16 < 2 * kPartScales, lane16 < kPartScales};
}

// Issues the copies of a warp's part of a page; the pointers are this lane's. The scales of keys and of
// values come with the keys.
__device__ __forceinline__ void request_keys(const RingLanes& to, u32 stage, const u8* keys, const u8* scales,
                                             bool brings_scales) {
#pragma unroll
  for (u32 i = 0; i < kPartCodes; i += 512) ptx::cp_async_cg_16(to.linear + stage + i, keys + i);
  if (kPartScales == 256 || brings_scales) ptx::cp_async_cg_16(to.linear + stage + kStageKeyScales, scales);
}

__device__ __forceinline__ void request_values(const RingLanes& to, u32 stage, const u8* values) {
#pragma unroll
  for (u32 i = 0; i < kPartCodes; i += 512) ptx::cp_async_cg_16(to.values + stage + i, values + i);
}

__device__ __forceinline__ void request_part(const RingLanes& to, u32 stage, const u8* keys, const u8* values,
                                             const u8* scales, bool brings_scales) {
  request_keys(to, stage, keys, scales, brings_scales);
  if constexpr (kKeysFirst) ptx::cp_async_commit_group();
  request_values(to, stage, values);
}

// Stands in for request_part where there is no part, so that equally many groups are pending. The caller
// commits the last group of either.
__device__ __forceinline__ void request_nothing() {
  if constexpr (kKeysFirst) ptx::cp_async_commit_group();
}

// Wait until the keys, or then the values, of the oldest page in flight have arrived; without kKeysFirst they
// are one group. The pages of the other stages stay in flight; `idle` of these stages have none. A lane waits
// for its own copies: a __syncwarp must follow before it reads those of others.
template <int idle = 0>
__device__ __forceinline__ void wait_for_keys() {
  ptx::cp_async_wait_group<kPageGroups*(kStages - idle) - 1>();
}
template <int idle = 0>
__device__ __forceinline__ void wait_for_values() {
  if constexpr (kKeysFirst) ptx::cp_async_wait_group<kPageGroups*(kStages - idle) - 2>();
}

// Where a lane's share of a warp's part begins in page 0: all that is known ahead of the page ids.
struct PartSources {
  const u8 *keys, *values, *scales;
  i64 scales_page;
};

__device__ __forceinline__ PartSources part_sources(const Arguments& args, int kv_head,
                                                    const SourceLanes& lanes) {
  return {args.k + kv_head * args.k_head + lanes.codes, args.v + kv_head * args.v_head + lanes.codes,
          (lanes.key_scales ? args.k_scale + kv_head * args.k_scale_head
                            : args.v_scale + kv_head * args.v_scale_head) +
              lanes.scales,
          lanes.key_scales ? args.k_scale_page : args.v_scale_page};
}

// The same for two neighbouring parts: codes of the first, and the lane's 16 bytes of the scales of either.
struct PagePair {
  const u8 *keys, *values, *scales;
  i64 scales_page;
};

__device__ __forceinline__ PagePair page_pair(const Arguments& args, int kv_head, u32 lane16, u32 part) {
  const SourceLanes codes = source_lanes(lane16, part),
                    scales = source_lanes(lane16 % (2 * kPartScales), part + lane16 / (2 * kPartScales));
  const PartSources of_codes = part_sources(args, kv_head, codes),
                    of_scales = part_sources(args, kv_head, scales);
  return {of_codes.keys, of_codes.values, of_scales.scales, of_scales.scales_page};
}

// ring: of the first part. Commits the group of keys and scales and leaves that of the values to the caller.
__device__ __forceinline__ void request_pair(const Arguments& args, const PagePair& from, i64 page,
                                             SharedAddress ring, u32 lane) {
  static_assert(!kEightWarps || kPartScales == 128, "16 bytes of scales for each lane");
  const u8 *keys = from.keys + page * args.k_page, *values = from.values + page * args.v_page;
  const RingLanes first = ring_lanes(ring, lane), second = ring_lanes(ring + kWarpRingBytes, lane);
  request_keys(first, 0, keys, nullptr, false);
  request_keys(second, 0, keys + kPartCodes, nullptr, false);
  ptx::cp_async_cg_16(ring + lane / 16 * kWarpRingBytes + kStageKeyScales + lane % 16 * 16,
                      from.scales + page * from.scales_page);
  ptx::cp_async_commit_group();
  request_values(first, 0, values);
  request_values(second, 0, values + kPartCodes);
}

// Requests the page at place `rank` of the list. turn: which part of it, for a warp that takes two.
__device__ __forceinline__ void request_listed(const RingLanes& to, u32 stage, const SlotAddresses& slot,
                                               u32 rank, const SourceLanes& lanes, u32 turn = 0) {
  const SharedAddress at = slot.sources(rank);
  const ulonglong2 codes = ptx::ld_shared_v2_u64(at);
  const u64 scales = ptx::ld_shared_u64(at + (lanes.key_scales ? 16 : 24));
  const u32 parts = turn * kWarpsPerPage;
  request_part(to, stage, reinterpret_cast<const u8*>(codes.x + lanes.codes) + parts * kPartCodes,
               reinterpret_cast<const u8*>(codes.y + lanes.codes) + parts * kPartCodes,
               reinterpret_cast<const u8*>(scales + lanes.scales) + parts * kPartScales,
               lanes.brings_scales);
}

// ---- Table

// Entry of a byte: its two codes as a binary16 pair (times 2^-14), once for each bank.
__device__ __forceinline__ void fill_table(SharedAddress table, int thread) {
  for (int i = thread; i < 256 * 8; i += kThreads) {
    const u32 byte = i >> 3;
    u32 pairs[4];
    decode_e2m1(byte, pairs);
    const float entry = __uint_as_float((pairs[0] & 0xFFFFu) | (pairs[2] << 16));
    ptx::st_shared_v4_f32(table + byte * 256 + (i & 7) * 16, entry, entry, entry, entry);
  }
}

// lane4: 4 * lane, so that every lane reads its own bank. The offset, byte * 256 + lane4, is one permutation:
// byte 0 is lane4, byte 1 the code's byte, the others are lane4's zeros.
__device__ __forceinline__ u32 look_up(SharedAddress table, u32 word, int byte, u32 lane4) {
  return ptx::ld_shared_u32(table + __byte_perm(word, lane4, 0x5504 | (byte << 4)));
}

// The low nibbles of x and the high nibbles of y.
__device__ __forceinline__ u32 low_nibbles_else(u32 x, u32 y) {
  return ptx::lop3_b32<(0xF0 & 0xAA) | (0xCC & 0x55)>(x, y, 0x0F0F0F0Fu);
}

// ---- Attention

// Lane 4*g + t holds rows g and g + 8. out[o] has dims 32*t + o and 32*t + 16 + o of either row.
struct WarpState {
  float out[16][4];
  float sum[4];  // of P: [0] row g, [2] row g + 8
  float origin[2];
};

struct WarpAddresses {
  SharedAddress ring, values, value_scales, queries, table, scales;
  SharedAddress references;  // reference scores of this warp's rows, 8 bytes apart; see move_origins
  u32 lane16;                // 16 * lane
};

// The queries' A fragments by k-step: read from shared memory each time, or held in registers.
struct StagedQueries {
  SharedAddress at;  // this lane's
  __device__ __forceinline__ uint4 operator()(int step) const {
    return ptx::ld_shared_v4_u32(at + step * kQueryStepBytes);
  }
};
struct HeldQueries {
  uint4 step[kHeadDim / 16];
  __device__ __forceinline__ uint4 operator()(int i) const { return step[i]; }
};

// Eight warps a page have the registers to hold them.
__device__ __forceinline__ auto queries_for_all_pages(const StagedQueries& staged) {
  if constexpr (kEightWarps) {
    HeldQueries held;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) held.step[i] = staged(i);
    return held;
  } else {
    return staged;
  }
}

// score[n][i], score[n][2 + i]: token 8*n + 2*t + i, rows g and g + 8.
template <typename Queries>
__device__ __forceinline__ void score_keys(float (&score)[kTokenTiles][4], const WarpAddresses& at, u32 stage,
                                           const Queries& queries) {
  const SharedAddress keys = at.ring + stage + at.lane16,
                      key_scales = at.ring + stage + kStageKeyScales + (at.lane16 >> 3);
#pragma unroll
  for (int first = 0; first < kTokenTiles; first += kTilesAtOnce) {
    uint4 codes[kTilesAtOnce];
    u32 scales[kTilesAtOnce];
#pragma unroll
    for (int e = 0; e < kTilesAtOnce; ++e) {
      codes[e] = ptx::ld_shared_v4_u32(keys + (first + e) * 512);
      scales[e] = decode_scales(ptx::ld_shared_u16(key_scales + (first + e) * 64));
#pragma unroll
      for (int i = 0; i < 4; ++i) score[first + e][i] = 0.0f;
    }
    float second[kTilesAtOnce][4] = {};  // with eight warps a page, the products of the upper dims
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 q0 = queries(2 * i), q1 = queries(2 * i + 1);
#pragma unroll
      for (int e = 0; e < kTilesAtOnce; ++e) {
        const u32 word = i == 0 ? codes[e].x : i == 1 ? codes[e].y : i == 2 ? codes[e].z : codes[e].w;
        const u32 scale = i < 2 ? lower_twice(scales[e]) : upper_twice(scales[e]);
        u32 pairs[4];
        if constexpr (kTable) {
#pragma unroll
          for (int j = 0; j < 4; ++j) pairs[j] = look_up(at.table, word, j, at.lane16 >> 2);
        } else {
          decode_e2m1_halves(word, pairs);
        }
        float (&tile)[4] = kEightWarps && i >= 2 ? second[e] : score[first + e];
        ptx::mma_sync_m16n8k16_f32_f16(tile, q0, ptx::mul_rn_f16x2(pairs[0], scale),
                                       ptx::mul_rn_f16x2(pairs[1], scale));
        ptx::mma_sync_m16n8k16_f32_f16(tile, q1, ptx::mul_rn_f16x2(pairs[2], scale),
                                       ptx::mul_rn_f16x2(pairs[3], scale));
      }
    }
#pragma unroll
    for (int e = 0; kEightWarps && e < kTilesAtOnce; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[first + e][i] += second[e][i];
  }
}

// Hides the scores of tokens from `visible` on.
__device__ __forceinline__ void hide_scores(float (&score)[kTokenTiles][4], int visible, int t) {
  const float minus_infinity = __int_as_float(0xFF800000);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const int live = visible - (8 * n + 2 * t);
    if (live < 1) score[n][0] = score[n][2] = minus_infinity;
    if (live < 2) score[n][1] = score[n][3] = minus_infinity;
  }
}

// The same, and clears the value scales of these tokens: stale bytes may be NaN, which P = 0 would not hide.
__device__ __forceinline__ void hide_tail(float (&score)[kTokenTiles][4], u32 (&value_scales)[kTokenTiles],
                                          int visible, int t) {
  hide_scores(score, visible, t);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const int live = visible - (8 * n + 2 * t);
    value_scales[n] &= live >= 2 ? 0xFFFFu : live == 1 ? 0x00FFu : 0u;
  }
}

// P = 2^(score * scale - origin) as binary16 A fragments; two score tiles make a k-step.
__device__ __forceinline__ void exponentials(uint4 (&p)[kTokenTiles / 2],
                                             const float (&score)[kTokenTiles][4], const float (&scale)[2],
                                             const float (&origin)[2]) {
  auto pair = [&](const float* s, int row) {
    const float lower = ptx::ex2_approx_ftz_f32(fmaf(s[0], scale[row], -origin[row]));
    const float upper = ptx::ex2_approx_ftz_f32(fmaf(s[1], scale[row], -origin[row]));
    return ptx::cvt_rn_f16x2_f32(upper, lower);
  };
#pragma unroll
  for (int u = 0; u < kTokenTiles / 2; ++u)
    p[u] = make_uint4(pair(score[2 * u], 0), pair(score[2 * u] + 2, 1), pair(score[2 * u + 1], 0),
                      pair(score[2 * u + 1] + 2, 1));
}

// The largest of a row's scores in the warp's tokens.
__device__ __forceinline__ float row_maximum(const float (&score)[kTokenTiles][4], int row) {
  float largest = fmaxf(score[0][2 * row], score[0][2 * row + 1]);
#pragma unroll
  for (int n = 1; n < kTokenTiles; ++n)
    largest = fmaxf(largest, fmaxf(score[n][2 * row], score[n][2 * row + 1]));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
}

template <typename State>
__device__ __forceinline__ void scale_sums(State& state, int row, float factor) {
  state.sum[2 * row] *= factor;
  state.sum[2 * row + 1] *= factor;
#pragma unroll
  for (int o = 0; o < static_cast<int>(sizeof(state.out) / sizeof(state.out[0])); ++o) {
    state.out[o][2 * row] *= factor;
    state.out[o][2 * row + 1] *= factor;
  }
}

// Moves the origin of each row that has a P of 2^15 or more, and computes P again. A row moves by its own
// scores alone, so that its bits do not depend on the other heads.
//
// A row with far logits has a reference score instead, in shared memory:
// P = 2^((score - reference) * scale - kHeadroom). Its origin stays kNoOrigin, so that the exponentials of
// every later page are infinite and lead here again.
__device__ __forceinline__ void move_origins(WarpState& state, uint4 (&p)[kTokenTiles / 2],
                                             const float (&score)[kTokenTiles][4], const float (&scale)[2],
                                             SharedAddress references, u32 lane) {
  float reference[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float largest = row_maximum(score, row);
    const SharedAddress at = references + ((lane >> 2) + 8 * row) * 8;
    reference[row] = ptx::ld_shared_f32(at);
    if (reference[row] != kNoReference) {
      if (fmaf(largest - reference[row], scale[row], -kHeadroom) >= kLargestExponent) {
        scale_sums(state, row, ptx::ex2_approx_ftz_f32((reference[row] - largest) * scale[row]));
        reference[row] = largest;
      }
    } else if (fmaf(largest, scale[row], -state.origin[row]) >= kLargestExponent) {
      const float origin = fmaf(largest, scale[row], kHeadroom);
      scale_sums(state, row, ptx::ex2_approx_ftz_f32(state.origin[row] - origin));
      const bool far = fabsf(origin) >= kFarLogit;
      state.origin[row] = far ? kNoOrigin : origin;
      if (far) reference[row] = largest;
    }
    __syncwarp();  // the row's four lanes have read
    if ((lane & 3) == 0) ptx::st_shared_f32(at, reference[row]);
  }
  auto one = [&](float s, int row) {
    const float near = fmaf(s, scale[row], -state.origin[row]);
    const float far = fmaf(s - reference[row], scale[row], -kHeadroom);
    return ptx::ex2_approx_ftz_f32(reference[row] == kNoReference ? near : far);
  };
  auto pair = [&](const float* s, int row) { return ptx::cvt_rn_f16x2_f32(one(s[1], row), one(s[0], row)); };
#pragma unroll
  for (int u = 0; u < kTokenTiles / 2; ++u)
    p[u] = make_uint4(pair(score[2 * u], 0), pair(score[2 * u] + 2, 1), pair(score[2 * u + 1], 0),
                      pair(score[2 * u + 1] + 2, 1));
}

// Origins for a warp's first page of an item: those that move_origins would find after a wasted round of
// exponentials. There are no sums to scale yet.
__device__ __forceinline__ void first_origins(WarpState& state, const float (&score)[kTokenTiles][4],
                                              const float (&scale)[2], SharedAddress references, u32 lane) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float largest = row_maximum(score, row);
    if (fmaf(largest, scale[row], -kNoOrigin) < kLargestExponent) continue;
    const float origin = fmaf(largest, scale[row], kHeadroom);
    if (fabsf(origin) < kFarLogit)
      state.origin[row] = origin;
    else if ((lane & 3) == 0)  // read by this warp in move_origins
      ptx::st_shared_f32(references + ((lane >> 2) + 8 * row) * 8, largest);
  }
  __syncwarp();  // other lanes of the row read the reference
}

// out += P V. In a k-step a lane decodes the 16 dims of scale group g for its four tokens, rows of B. A
// register of B pairs two tokens of one dim, while a byte of codes has two dims of one token, so the codes of
// two tokens are interleaved first: bytes for decoding by arithmetic, nibbles for the table.
__device__ __forceinline__ void accumulate_values(WarpState& state, const uint4 (&p)[kTokenTiles / 2],
                                                  const u32 (&value_scales)[kTokenTiles],
                                                  const WarpAddresses& at, u32 stage) {
#pragma unroll
  for (int u = 0; u < kTokenTiles / 2; ++u) {
    const SharedAddress row = at.values + stage + u * 1024, swapped = (at.values ^ 64) + stage + u * 1024;
    const uint2 token[4] = {ptx::ld_shared_v2_u32(row), ptx::ld_shared_v2_u32(swapped),
                            ptx::ld_shared_v2_u32(row + 512), ptx::ld_shared_v2_u32(swapped + 512)};
    const u32 scale01 = decode_scales(value_scales[2 * u]), scale23 = decode_scales(value_scales[2 * u + 1]);
    ptx::mma_sync_m16n8k16_f32_f16(state.sum, p[u], kOnes, kOnes);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const u32 a = w ? token[0].y : token[0].x, b = w ? token[1].y : token[1].x,
                c = w ? token[2].y : token[2].x, d = w ? token[3].y : token[3].x;
      if constexpr (kTable) {
        const u32 first[2] = {low_nibbles_else(a, b << 4), low_nibbles_else(a >> 4, b)};
        const u32 second[2] = {low_nibbles_else(c, d << 4), low_nibbles_else(c >> 4, d)};
#pragma unroll
        for (int dim = 0; dim < 8; ++dim) {
          const u32 pair01 = look_up(at.table, first[dim & 1], dim >> 1, at.lane16 >> 2);
          const u32 pair23 = look_up(at.table, second[dim & 1], dim >> 1, at.lane16 >> 2);
          ptx::mma_sync_m16n8k16_f32_f16(state.out[8 * w + dim], p[u], ptx::mul_rn_f16x2(pair01, scale01),
                                         ptx::mul_rn_f16x2(pair23, scale23));
        }
      } else {
#pragma unroll
        for (int z = 0; z < 2; ++z) {
          const u32 order = z ? 0x7351 : 0x6240;  // bytes z and z + 2 of two tokens, tokens innermost
          u32 first[4], second[4];
          decode_e2m1(__byte_perm(a, b, order), first);
          decode_e2m1(__byte_perm(c, d, order), second);
          const int dims[4] = {8 * w + 2 * z, 8 * w + 2 * z + 4, 8 * w + 2 * z + 1, 8 * w + 2 * z + 5};
#pragma unroll
          for (int i = 0; i < 4; ++i)
            ptx::mma_sync_m16n8k16_f32_f16(state.out[dims[i]], p[u], ptx::mul_rn_f16x2(first[i], scale01),
                                           ptx::mul_rn_f16x2(second[i], scale23));
        }
      }
    }
  }
}

// A warp's part of a page, whose keys have arrived in the ring; tokens from `visible` on are hidden. begins:
// it is the warp's first of the item. scored: called between the scores and the wait for values.
template <typename Scored>
__device__ __forceinline__ void attend_part(WarpState& state, const WarpAddresses& at, u32 stage, int visible,
                                            bool begins, const Scored& scored) {
  float score[kTokenTiles][4];
  score_keys(score, at, stage, StagedQueries{at.queries + query_lane(at.lane16)});
  scored();
  wait_for_values();
  if constexpr (kKeysFirst) __syncwarp();
  u32 value_scales[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n)
    value_scales[n] = ptx::ld_shared_u16(at.value_scales + stage + n * 64);
  if (visible < kWarpTokens) hide_tail(score, value_scales, visible, (at.lane16 >> 4) & 3);
  uint4 p[kTokenTiles / 2];
  const float scale[2] = {ptx::ld_shared_f32(at.scales + (at.lane16 >> 6) * 8),
                          ptx::ld_shared_f32(at.scales + (at.lane16 >> 6) * 8 + 64)};
  if (begins) first_origins(state, score, scale, at.references, at.lane16 >> 4);
  exponentials(p, score, scale, state.origin);
  u32 largest = 0;
#pragma unroll
  for (int u = 0; u < kTokenTiles / 2; ++u)
    largest = ptx::max_f16x2(largest,
                             ptx::max_f16x2(ptx::max_f16x2(p[u].x, p[u].y), ptx::max_f16x2(p[u].z, p[u].w)));
  // A half of 2^15 or more, infinity included, carries into its sign bit; P is never negative.
  if (__any_sync(~0u, (largest + 0x08000800u) & 0x80008000u)) {
    move_origins(state, p, score, scale, at.references, at.lane16 >> 4);
  }
  accumulate_values(state, p, value_scales, at, stage);
}
