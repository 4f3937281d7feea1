// Pairs: two CTAs, a cluster, have an item each and share a leftover. The third page slot of each begins with
// a piece of it. At the end of the piece its warps store their sums in shared memory as they are, without
// merging or waiting, and go on with the CTA's own item. The last page slot has nothing but a piece. At its
// end it merges both pieces of its CTA, exchanges half of the heads with the partner's last page slot, and
// finishes the other half. So the change from the leftover to its own item costs a CTA a store of 32 KB.
#pragma once
#include "barrier.cuh"
#include "portable_leftovers.cuh"

constexpr u32 kPairHeads = kHeads / 2;  // heads that a CTA finishes: rows g (rank 0) or g + 8 (rank 1)

// As open_inbox: announces what this CTA will receive, before it arrives at the cluster's barrier.
__device__ __forceinline__ void open_pair(SharedAddress slot, bool opens) {
  if (opens) {
    ptx::mbarrier_init(slot + kSlotArrival, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  __syncwarp();
  if (opens)
    ptx::mbarrier_arrive_expect_tx(slot + kSlotArrival, kPairHeads * (kHeadDim * 4 + kWarpsPerPage * 8));
}

// A lane's 16 of a warp's 512 bytes, which lie in four gaps.
__device__ __forceinline__ SharedAddress lane_in_gaps(const SlotAddresses& slot, u32 gap, int lane) {
  return slot.gap(gap) + (lane >> 3) * 256 + (lane & 7) * 16;
}

// The named barrier at which the warps that keep a piece arrive and those that merge it wait; its number is
// the next after those of the page slots and of the item.
constexpr u32 kPieceBarrier = 2 + kPageSlots, kPieceThreads = 2 * kWarpsPerPage * 32;

// A warp stores its sums of a piece: out[0] to out[11] in gaps, the others behind the slot.
__device__ __forceinline__ void keep_piece(const WarpState& state, const SlotAddresses& slot, int warp,
                                           int part, int lane) {
  const WarpRow mine(slot, warp, lane, lane & 1, 1);
  const SharedAddress in_gaps = lane_in_gaps(slot, kPieceGap + 48 * part, lane),
                      beside = slot.fixed + kSlotPieceSums + part * 2048 + lane * 16;
#pragma unroll
  for (int o = 0; o < 16; ++o) {
    const float (&x)[4] = state.out[o];
    ptx::st_shared_v4_f32(o < 12 ? in_gaps + o * 1024 : beside + (o - 12) * 512, x[0], x[1], x[2], x[3]);
  }
  const float origin = mine.origin(state);
  if ((lane & 2) == 0)
    ptx::st_shared_v2_f32(slot.fixed + kSlotPieceStats + part * 128 + mine.head * 8, origin, mine.sum(state));
  __syncwarp();  // all lanes have read their references
  ptx::barrier_cta_arrive(kPieceBarrier, kPieceThreads);
}

// The last page slot merges its warps' sums, which they have divided, and the kept ones. A warp sends the
// partner the rows that the partner finishes, waits at the CTA's mbarrier until the partner's four warps have
// sent theirs, and finishes its own; a lane and the same lane of the partner hold the same dims. So the four
// warps meet once more at the end, and the CTA stays until all that is sent to it has arrived.
__device__ __forceinline__ void finish_leftover(const Arguments& args, const OwnSums& own,
                                                const SlotAddresses& slot, SharedAddress page_ring, u32 part,
                                                int lane) {
  constexpr u32 kFirst = kOwnSlots * kWarpsPerPage;
  const u32 g = lane >> 2, t = lane & 3, rank = blockIdx.x & 1;
  const uint2 row = ptx::ld_shared_v2_u32(slot.fixed + kSlotLeftover);
  MergedPart<8, 16> mine;
  mine.head = g + kPairHeads * rank;
  mine.dim = 32 * t + 4 * part;
  const ResultPlace to = result_place_now(args, {static_cast<int>(row.x), static_cast<int>(row.y)},
                                          mine.head, mine.dim);
  ptx::barrier_cta_sync(kPieceBarrier, kPieceThreads);
  float factor[2][2][kWarpsPerPage];  // [row][own piece, kept piece]
  float origin[2], sum[2];
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    float2 stats[2][kWarpsPerPage];
    const u32 at = (g + kPairHeads * r) * 8;
#pragma unroll
    for (u32 k = 0; k < kWarpsPerPage; ++k) {
      stats[0][k] = ptx::ld_shared_v2_f32(slot.warp_stats(kFirst + (part ^ k)) + at);
      stats[1][k] = ptx::ld_shared_v2_f32(slot.fixed + kSlotPieceStats + k * 128 + at);
    }
    origin[r] = kNoOrigin, sum[r] = 0.0f;
#pragma unroll
    for (u32 k = 0; k < 2 * kWarpsPerPage; ++k) origin[r] = fmaxf(origin[r], stats[k & 1][k / 2].x);
#pragma unroll
    for (u32 k = 0; k < 2 * kWarpsPerPage; ++k) {
      factor[r][k & 1][k / 2] = ptx::ex2_approx_ftz_f32(stats[k & 1][k / 2].x - origin[r]);
      sum[r] = fmaf(factor[r][k & 1][k / 2], stats[k & 1][k / 2].y, sum[r]);
    }
  }
  float4 merged[2][2] = {};
  const auto add = [&](int kept, u32 k, const float4 (&x)[4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) add_row(merged[r], factor[r][kept][k], x, r);
  };
  // The last quarter of the kept sums lies behind the slot, the others in gaps.
  const bool beside = part == 3;
  const SharedAddress from = page_ring + part * 2048 + lane * 16,
                      kept = beside ? slot.fixed + kSlotPieceSums + lane * 16
                                    : lane_in_gaps(slot, kPieceGap + 16 * part, lane);
  const u32 next_warp = beside ? 2048 : 48 * 256, next = beside ? 512 : 1024;
#pragma unroll
  for (u32 k = 0; k < kWarpsPerPage; ++k) {
    float4 x[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) x[i] = ptx::ld_shared_v4_f32(kept + k * next_warp + i * next);
    add(1, k, x);
  }
#pragma unroll
  for (u32 k = 0; k < kWarpsPerPage; ++k) {
    float4 x[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      x[i] = k == 0 ? own.out[i] : ptx::ld_shared_v4_f32(from + (part ^ k) * kWarpRingBytes + i * 512);
    add(0, k, x);
  }

  const u32 partner = rank ^ 1;
  const SharedAddress inbox = lane_in_gaps(slot, kPartnerGap + 8 * part, lane),
                      inbox_stats = slot.fixed + kSlotPartnerStats + part * 64 + g * 8;
  ptx::barrier_cluster_wait();  // the partner's inbox is open
  const SharedAddress arrival = ptx::mapa_shared_cluster(slot.fixed + kSlotArrival, partner),
                      theirs = ptx::mapa_shared_cluster(inbox, partner);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 x = rank == 0 ? merged[1][half] : merged[0][half];
    ptx::st_async_v4(theirs + half * 1024, x.x, x.y, x.z, x.w, arrival);
    mine.out[half] = rank == 0 ? merged[0][half] : merged[1][half];
  }
  if (t == 0)
    ptx::st_async_v2(ptx::mapa_shared_cluster(inbox_stats, partner), rank == 0 ? origin[1] : origin[0],
                     rank == 0 ? sum[1] : sum[0], arrival);
  mine.origin = rank == 0 ? origin[0] : origin[1];
  mine.sum = rank == 0 ? sum[0] : sum[1];
  wait_for_inbox(slot.fixed + kSlotArrival);
  const float2 sent_stats = ptx::ld_shared_v2_f32(inbox_stats);
  const float4 sent[2] = {ptx::ld_shared_v4_f32(inbox), ptx::ld_shared_v4_f32(inbox + 1024)};
  merge_second(mine, sent_stats, sent);
  if (mine.head < args.group) store_result(to, mine, slot.fixed + kSlotScales + kScaleBytes);
}
