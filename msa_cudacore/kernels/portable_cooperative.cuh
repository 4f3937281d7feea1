// The page loop's work when the warps of a page cooperate: each scores its own tokens, all share the
// probabilities, and each multiplies those of all 128 tokens with its slice of the value dims.
//
// Compared with warps on their own this costs two barriers a page and saves merging a 16 x 128 sum for each
// warp, on which a CTA with few pages would spend most of its time.
#pragma once
#include "barrier.cuh"
#include "ldmatrix.cuh"
#include "portable_attention.cuh"

// A slice is 32 dims: a row of eight 16-bit words of codes, which ldmatrix transposes. Eight warps are two to
// a slice: one multiplies the even dims, the other the odd ones.
constexpr int kSliceWarps = kCooperative ? kWarpsPerPage / 4 : 1;
constexpr int kSliceCodes = 4 / kSliceWarps;  // codes of a word that a warp multiplies
constexpr u32 kSliceRowBytes = 32 / kSliceWarps * 4;

// Lane 4*g + t holds rows g and g + 8; out[j][0], out[j][1] are dims 8*t + d and 8*t + 4 + d of the slice,
// where d is j, or 2*j and 2*j + 1 for the two warps of a slice. P is 2^((score - reference) * scale -
// kHeadroom).
struct SliceState {
  float out[kSliceCodes][4];
  float sum[4];
  float reference[2];
};

// Barrier of the warps that work on the same page. page_slot: of the CTA.
__device__ __forceinline__ void page_sync(u32 page_slot) {
  if constexpr (kWarps > kWarpsPerPage)
    ptx::barrier_cta_sync(1 + page_slot, 32 * kWarpsPerPage);
  else
    __syncthreads();
}

// Ring of the warp that brought a token of the page, relative to that of the page's warp 0.
__device__ __forceinline__ constexpr u32 ring_of_token(u32 token) {
  return token / kWarpTokens * kWarpRingBytes;
}

// Clears the value scales of the warp's part from token `visible` on: stale bytes may be NaN.
__device__ __forceinline__ void clear_value_scales(SharedAddress ring, u32 stage, int visible, u32 lane) {
#pragma unroll
  for (u32 word = lane; word < kPartScales / 4; word += 32) {  // four tokens of a scale group
    const int live = visible - static_cast<int>(word / 8 * 4);
    if (live >= 4) continue;
    const SharedAddress at = ring + stage + kStageValueScales + word * 4;
    ptx::st_shared_u32(at, live <= 0 ? 0 : ptx::ld_shared_u32(at) & ((1u << (8 * live)) - 1));
  }
}

// A warp's slice of V as B fragments, k-steps of 16 tokens.
struct SliceFragments {
  u32 pairs[kPageTokens / 16][kSliceCodes][2];
};

// 32 tokens at a time: ldmatrix transposes four 8 x 8 tiles of 16-bit words, so that a register holds the
// codes of dims 4*g to 4*g + 3 for tokens 2*t (lower half) and 2*t + 1 (upper half).
__device__ __forceinline__ void decode_slice(SliceFragments& fragments, SharedAddress page_ring, u32 warp,
                                             u32 lane, u32 stage) {
  const u32 g = lane >> 2, t = lane & 3, slice = warp / kSliceWarps;
  const SharedAddress codes_at =
      page_ring + stage + kStageValues + ring_of_token(lane) +
      ((lane % kWarpTokens * 64 + slice * 16) ^ (((lane >> 1) & 1) << 6) ^ (((lane >> 2) & 1) << 5));
  const SharedAddress scales_at =
      page_ring + stage + kStageValueScales + (t >> 1) * 32 + (2 * slice + (g >> 2)) * 4 + (t & 1) * 2;
  const u32 to_high = warp % kSliceWarps == 0 ? 16 : 1;  // a factor: shifts would wait for the integer pipe
#pragma unroll
  for (int part = 0; part < kPageTokens / 32; ++part) {
    u32 codes[4];
    ptx::ldmatrix_x4_trans_b16(codes_at + ring_of_token(32 * part), codes);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const u32 token = 32 * part + 8 * tile;
      const u32 scales = decode_scales(
          ptx::ld_shared_u16(scales_at + ring_of_token(token) + token % kWarpTokens * 8));
      u32 pairs[4];
      if constexpr (kSliceWarps == 1)
        decode_e2m1_halves(codes[tile], pairs);
      else
        decode_e2m1_high_columns(codes[tile] * to_high, pairs);
#pragma unroll
      for (int j = 0; j < kSliceCodes; ++j)
        fragments.pairs[token / 16][j][tile & 1] = ptx::mul_rn_f16x2(pairs[j], scales);
    }
  }
}

// out += P V for a slice.
__device__ __forceinline__ void accumulate_slice(SliceState& state, const SliceFragments& fragments,
                                                 SharedAddress page_ring, u32 lane, u32 stage) {
  constexpr int kSteps = kPageTokens / 16;
  // Eight warps a page have nothing else left to do: all of P is loaded at once, and odd k-steps have sums of
  // their own, a second chain.
  constexpr int kAhead = kEightWarps ? kSteps : 1;
  float second[kSliceCodes][4] = {};
#pragma unroll
  for (int first = 0; first < kSteps; first += kAhead) {
    uint4 p[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      p[i] = ptx::ld_shared_v4_u32(page_ring + stage + ring_of_token(16 * (first + i)) +
                                   16 * (first + i) % kWarpTokens * 32 + lane * 16);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int j = 0; j < kSliceCodes; ++j)
        ptx::mma_sync_m16n8k16_f32_f16(kEightWarps && i % 2 ? second[j] : state.out[j], p[i],
                                       fragments.pairs[first + i][j][0], fragments.pairs[first + i][j][1]);
  }
#pragma unroll
  for (int j = 0; kEightWarps && j < kSliceCodes; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[j][i] += second[j][i];
}

// A page, whose keys have arrived in its warps' rings; tokens from `visible` on are hidden. page_ring: ring
// of the page's warp 0. await_values: waits for this lane's copies of values. refill: called when every warp
// has finished the page before this one. push_sums: called on the item's last page, with kDirectSlices, as
// soon as kSlotSums has the sums of all warps' tokens.
template <typename Queries, typename AwaitValues, typename Refill, typename PushSums>
__device__ __forceinline__ void attend_page(SliceState& state, const WarpAddresses& at,
                                            SharedAddress page_maxima, SharedAddress page_ring, u32 page_slot,
                                            u32 warp, u32 stage, int visible, bool last,
                                            const Queries& queries, const AwaitValues& await_values,
                                            const Refill& refill, const PushSums& push_sums) {
  const u32 lane = at.lane16 >> 4;
  const int own_visible = visible - static_cast<int>(warp) * kWarpTokens;
  float score[kTokenTiles][4];
  if (own_visible > 0) score_keys(score, at, stage, queries);
  if (own_visible < kWarpTokens) {
    hide_scores(score, own_visible, lane & 3);
    clear_value_scales(at.ring, stage, own_visible, lane);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float largest = row_maximum(score, row);
    if ((lane & 3) == 0)
      ptx::st_shared_f32(page_maxima + ((lane >> 2) + 8 * row) * (kWarpsPerPage * 4) + warp * 4, largest);
  }
  await_values();
  page_sync(page_slot);  // also: every warp's values have arrived
  refill();

  // Every warp sees the maxima of all and moves its references alike.
  float factor[2] = {1.0f, 1.0f};
  const float scale[2] = {ptx::ld_shared_f32(at.scales + (lane >> 2) * 8),
                          ptx::ld_shared_f32(at.scales + (lane >> 2) * 8 + 64)};
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const SharedAddress maxima = page_maxima + ((lane >> 2) + 8 * row) * (kWarpsPerPage * 4);
    float largest = kNoReference;
#pragma unroll
    for (int w = 0; w < kWarpsPerPage; w += 4) {
      const float4 x = ptx::ld_shared_v4_f32(maxima + w * 4);
      largest = fmaxf(largest, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    }
    if (fmaf(largest - state.reference[row], scale[row], -kHeadroom) >= kLargestExponent) {
      factor[row] = ptx::ex2_approx_ftz_f32((state.reference[row] - largest) * scale[row]);
      state.reference[row] = largest;
    }
  }
  if (kRoomy || __any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
    scale_sums(state, 0, factor[0]);
    scale_sums(state, 1, factor[1]);
  }
  SliceFragments fragments;
  if constexpr (kRoomy) decode_slice(fragments, page_ring, warp, lane, stage);  // overlaps the exponentials
  auto pair = [&](const float* s, int row) {
    const float lower = ptx::ex2_approx_ftz_f32(fmaf(s[0] - state.reference[row], scale[row], -kHeadroom));
    const float upper = ptx::ex2_approx_ftz_f32(fmaf(s[1] - state.reference[row], scale[row], -kHeadroom));
    return ptx::cvt_rn_f16x2_f32(upper, lower);
  };
  // As A fragments, 512 bytes a k-step, in place of the codes of keys that this lane alone has read.
#pragma unroll
  for (int u = 0; u < kTokenTiles / 2; ++u) {
    const uint4 p = make_uint4(pair(score[2 * u], 0), pair(score[2 * u] + 2, 1), pair(score[2 * u + 1], 0),
                               pair(score[2 * u + 1] + 2, 1));
    ptx::st_shared_v4_u32(at.ring + stage + u * 512 + at.lane16, p.x, p.y, p.z, p.w);
    ptx::mma_sync_m16n8k16_f32_f16(state.sum, p, kOnes, kOnes);
  }
  if (kDirectSlices && last && (lane & 3) == 0) {
    const SharedAddress sums = page_maxima + kMaximaBytes + (lane >> 2) * (kWarpsPerPage * 4) + warp * 4;
    ptx::st_shared_f32(sums, state.sum[0]);
    ptx::st_shared_f32(sums + 8 * (kWarpsPerPage * 4), state.sum[2]);
  }
  page_sync(page_slot);
  if (kDirectSlices && last) push_sums();  // this branch keeps ptxas from moving decode_slice down here
  if constexpr (!kRoomy) decode_slice(fragments, page_ring, warp, lane, stage);
  accumulate_slice(state, fragments, page_ring, lane, stage);
}
