// Where a warp of the CTA works.
#pragma once
#include "portable_pairs.cuh"
#include "portable_shared.cuh"

// Barrier of the warps that share an item. With several item slots it is a named one, numbered behind those
// of the page slots; eight item slots, which have one page slot each, need none of those, and there would not
// be enough: a CTA has 16.
__device__ __forceinline__ void item_sync(u32 item_slot) {
  if constexpr (kItemSlots > 1 || kPairs)
    ptx::barrier_cta_sync((kItemSlots < 8 ? 1 + kItemSlots * kPageSlots : 1) + item_slot,
                          kOwnSlots * kWarpsPerPage * 32);
  else
    __syncthreads();
}

// Warp and thread are numbered within the item slot. Handed to functions instead of being worked out in each:
// from a thread index of their own the compiler makes another page loop.
struct Place {
  u32 item_slot;
  int warp, lane, thread;
  SlotAddresses slot;
  SharedAddress queries, item_ring;
  u32 page_slot;
  SharedAddress page_ring, ring;

  __device__ __forceinline__ Place(SharedAddress smem, int cta_warp)
      : item_slot(kItemSlots > 1 ? cta_warp / kItemWarps : 0),
        warp(kItemSlots > 1 ? cta_warp % kItemWarps : cta_warp),
        lane(threadIdx.x & 31),
        thread(warp * 32 + lane),
        slot(smem, item_slot),
        queries(kQueriesInGaps ? smem + 128 + item_slot * (2 * kQueryBytes) : slot.fixed + kSlotQueries),
        item_ring(smem + kRingAt + item_slot * (kItemWarps * kWarpRingBytes)),
        page_slot(kPageSlots > 1 ? warp / kWarpsPerPage : 0),
        page_ring(item_ring + page_slot * (kWarpsPerPage * kWarpRingBytes)),
        ring(item_ring + warp * kWarpRingBytes) {}
};

// What the start of an item has to know of the slot's leftover, or of the CTA's shared item.
struct Share {
  u32 index;          // of the slot's own item
  u32 leftover;       // number of the leftover that the slot has a piece of
  bool has_leftover;  // there is one
  bool on_piece;      // the warp begins with the piece
  bool has_shared;    // the slot begins with a part of the shared item
  bool live;          // there is an item for the warp
};
