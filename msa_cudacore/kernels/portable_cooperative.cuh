// The page loop's work when the four warps of a page cooperate: each scores its own 32 tokens, all share the
// probabilities, and each multiplies those of all 128 tokens with its slice of 32 value dims.
//
// Against warps on their own this costs barriers in each page and saves the merge of a 16 x 128 sum for each
// warp, which is what a CTA with one or two pages would spend most of its time on.
#pragma once
#include "ldmatrix.cuh"
#include "portable_attention.cuh"

// Lane 4*g + t holds rows g and g + 8; out[j][0], out[j][1] are dims 8*t + j and 8*t + 4 + j of the slice. P
// is 2^((score - reference) * scale - kHeadroom).
struct SliceState {
  float out[4][4];
  float sum[4];
  float reference[2];
};

// out += P V for a slice of 32 dims. 32 tokens at a time: four 8 x 8 tiles of words of four codes,
// transposed, so that a register holds the codes of dims 4*g to 4*g + 3 for tokens 2*t (lower half) and 2*t
// + 1.
__device__ __forceinline__ void accumulate_slice(SliceState& state, SharedAddress page_ring,
                                                 SharedAddress probabilities, u32 slice, u32 lane, u32 stage,
                                                 int visible) {
  const u32 g = lane >> 2, t = lane & 3;
  const SharedAddress codes_at =
      page_ring + stage + kStageValues +
      ((lane * 64 + slice * 16) ^ (((lane >> 1) & 1) << 6) ^ (((lane >> 2) & 1) << 5));
  const SharedAddress scales_at =
      page_ring + stage + kStageValueScales + (t >> 1) * 32 + (2 * slice + (g >> 2)) * 4 + (t & 1) * 2;
#pragma unroll
  for (int part = 0; part < 4; ++part) {  // of the page: each lies in its own warp's ring
    u32 codes[4];
    ptx::ldmatrix_x4_trans_b16(codes_at + part * kWarpRingBytes, codes);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      u32 scales[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int n = 2 * u + e, live = visible - (32 * part + 8 * n + 2 * static_cast<int>(t));
        const u32 bytes = ptx::ld_shared_u16(scales_at + part * kWarpRingBytes + n * 64);
        scales[e] = decode_scales(live >= 2   ? bytes
                                  : live == 1 ? bytes & 0xFFu
                                              : 0u);  // stale bytes may be NaN
      }
      const uint4 p = ptx::ld_shared_v4_u32(probabilities + (2 * part + u) * 512 + lane * 16);
      u32 first[4], second[4];
      decode_e2m1_columns(codes[2 * u], first);
      decode_e2m1_columns(codes[2 * u + 1], second);
      ptx::mma_sync_m16n8k16_f32_f16(state.sum, p, kOnes, kOnes);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        ptx::mma_sync_m16n8k16_f32_f16(state.out[j], p, ptx::mul_rn_f16x2(first[j], scales[0]),
                                       ptx::mul_rn_f16x2(second[j], scales[1]));
    }
  }
}

// A page whose parts have arrived in their warps' rings; tokens from `visible` on are hidden. page_ring: ring
// of warp 0.
__device__ __forceinline__ void attend_page(SliceState& state, const WarpAddresses& at,
                                            const SlotAddresses& slot, SharedAddress page_ring, u32 warp,
                                            u32 stage, int visible) {
  const u32 lane = at.lane16 >> 4;
  const SharedAddress maxima = slot.fixed + kSlotMaxima, shared_p = slot.fixed + kSlotProbabilities;
  const int own_visible = visible - static_cast<int>(warp) * kWarpTokens;
  float score[kTokenTiles][4];
  u32 unused_scales[kTokenTiles] = {};
  if (own_visible > 0) score_keys(score, at, stage);
  if (own_visible < kWarpTokens) hide_tail(score, unused_scales, own_visible, lane & 3);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float largest = row_maximum(score, row);
    if ((lane & 3) == 0) ptx::st_shared_f32(maxima + ((lane >> 2) + 8 * row) * 16 + warp * 4, largest);
  }
  __syncthreads();

  // All four warps move their references alike.
  const float scale[2] = {ptx::ld_shared_f32(at.scales + (lane >> 2) * 8),
                          ptx::ld_shared_f32(at.scales + (lane >> 2) * 8 + 64)};
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float4 x = ptx::ld_shared_v4_f32(maxima + ((lane >> 2) + 8 * row) * 16);
    const float largest = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
    if (fmaf(largest - state.reference[row], scale[row], -kHeadroom) >= kLargestExponent) {
      scale_sums(state, row, ptx::ex2_approx_ftz_f32((state.reference[row] - largest) * scale[row]));
      state.reference[row] = largest;
    }
  }
  auto pair = [&](const float* s, int row) {
    const float lower = ptx::ex2_approx_ftz_f32(fmaf(s[0] - state.reference[row], scale[row], -kHeadroom));
    const float upper = ptx::ex2_approx_ftz_f32(fmaf(s[1] - state.reference[row], scale[row], -kHeadroom));
    return ptx::cvt_rn_f16x2_f32(upper, lower);
  };
#pragma unroll
  for (int u = 0; u < kTokenTiles / 2; ++u)
    ptx::st_shared_v4_u32(shared_p + (2 * warp + u) * 512 + at.lane16, pair(score[2 * u], 0),
                          pair(score[2 * u] + 2, 1), pair(score[2 * u + 1], 0),
                          pair(score[2 * u + 1] + 2, 1));
  __syncthreads();  // also: every warp's values have arrived
  accumulate_slice(state, page_ring, shared_p, warp, lane, stage, visible);
}
