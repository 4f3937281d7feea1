// The order in which a warp takes its pages: the loops around attend_item's step.
#pragma once
#include "portable_shared.cuh"

// Calls step(rank, stage, begins) for each page from `first` to `pages`, kPageStride apart, in alternating
// stages of the ring. begins: it is the first one.
template <typename Step>
__device__ __forceinline__ void for_each_page(int first, int pages, const Step& step) {
  if constexpr (kRolledLoop) {
    u32 stage = 0;
#pragma unroll 1
    for (int rank = first; rank < pages; rank += kPageStride) {
      step(rank, stage, rank == first);
      stage = stage + kStageBytes == kWarpRingBytes ? 0 : stage + kStageBytes;
    }
  } else if constexpr (kTurns == 2) {
    // A stage for each part of a page. The first part of the first page has code of its own.
    int rank = 0;
    if (rank < pages) step(rank, 0, true);
    while (rank < pages) {
      step(rank, kStageBytes, false);
      if (++rank >= pages) break;
      step(rank, 0, false);
    }
  } else {
    // Two pages an iteration. Where the first page has code of its own, the loop begins with the second
    // stage.
    constexpr u32 kStageNow = kFirstApart ? kStageBytes : 0;
    int rank = first;
    if constexpr (kFirstApart) {
      if (rank < pages) step(rank, 0, true);
      rank += kPageStride;
    }
    // For 10.x and 12.x the compiler would unroll this 8 to 16 times, to 34,000 instructions.
#pragma unroll 1
    for (; rank < pages; rank += 2 * kPageStride) {
      step(rank, kStageNow, kFirstOrigins && !kFirstApart && rank == first);
      if (rank + kPageStride >= pages) break;
      step(rank + kPageStride, kStageBytes - kStageNow, false);
    }
  }
}

// The same for a piece of a leftover and then the slot's own item, each with a page that begins. Both ends
// are read again for every page, because the loop has no registers for them; `pages` is what request_after
// looks at. end_piece(rank, stage): called between the two, with the stage that the piece's last page has
// left.
template <typename Step, typename RequestAfter, typename EndPiece>
__device__ __forceinline__ void for_each_page_of_both(const SlotAddresses& slot, u32 page_slot, int first,
                                                      int& pages, const Step& step,
                                                      const RequestAfter& request_after,
                                                      const EndPiece& end_piece) {
  int rank = first;
  u32 stage = 0;
  while (rank < pages) {
    int end_of_piece;
    bool begins = true;
#pragma unroll 1
    while (true) {
      step(rank, stage, begins);
      begins = false;
      ++rank;
      const uint2 ends = ptx::ld_shared_v2_u32(slot.fixed + kSlotEnds + page_slot * 8);
      pages = static_cast<int>(ends.x);
      end_of_piece = static_cast<int>(ends.y);  // kNoPiece is no rank
      if (rank == pages || rank == end_of_piece) break;
      request_after(rank - 1, stage);
      stage ^= kStageBytes;
    }
    if (rank != end_of_piece) break;
    end_piece(rank, stage);
    stage ^= kStageBytes;
  }
}

// The same for the slot's part of the shared item, where there is one, and then the slot's own item. The part
// has an even number of places, so both begin with the first stage. begin(): called ahead of either.
// end_part(): called behind either; false if it was the own item.
template <typename Step, typename RequestAfter, typename Begin, typename EndPart>
__device__ __forceinline__ void for_each_page_of_shared(const SlotAddresses& slot, int rank, int pages,
                                                        const Step& step, const RequestAfter& request_after,
                                                        const Begin& begin, const EndPart& end_part) {
#pragma unroll 1
  while (true) {
    begin();
    ptx::cp_async_wait_group<kPageGroups - 1>();
    if (rank < pages) {
      step(rank, 0, true);
      request_after(rank, 0);
    }
    for (++rank; rank < pages; rank += 2) {
      step(rank, kStageBytes, false);
      if (rank + 1 >= pages) break;
      request_after(rank, kStageBytes);
      step(rank + 1, 0, false);
      request_after(rank + 1, 0);
    }
    if (!end_part()) break;
    rank = kOwnPlace;
    pages = static_cast<int>(ptx::ld_shared_u32(slot.fixed + kSlotPages));
  }
}
