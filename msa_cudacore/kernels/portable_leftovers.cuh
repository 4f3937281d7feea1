// Leftovers: the few items beyond the item slots of all CTAs. Each is cut into kPieces pieces, every
// kPieces-th page, and the last page slots of kSharers item slots begin with one each. They store its
// partial, merge the leftover if they are the last to do so, and go on with their own item, of which they
// take fewer pages; the other page slots are busy meanwhile. So every multiprocessor has about as many pages.
#pragma once
#include "portable_merge.cuh"

// Item slots that have pieces of the same leftover.
constexpr u32 kSharers = kLeftovers ? kPieces / kPieceSlots : 1;
constexpr int kOtherSlots = kPageSlots - kPieceSlots;

constexpr int kNoPiece = -1;  // as the end of a piece

// Where the list of a page slot begins. In the lists of slots with a piece the pages of their own item begin
// as many places behind that as there are turns without them, and the piece ends there, so that each can be
// listed without the other. All that the warps of a page slot do together follows from its list, which one
// warp has written, and not from what each has read of the selection.
__device__ __forceinline__ constexpr u32 list_of(u32 page_slot) { return page_slot * (kListed / kPageSlots); }

// Turns of dealing that the piece slots sit out: the size of a full piece, whatever the leftover's length, so
// that the order of a row's sums does not depend on other requests; and one for storing its partial.
__device__ __forceinline__ int turns_of_piece(const Arguments& args, bool has_leftover) {
  return has_leftover ? (min(args.topk, args.max_pages) + kStored - 1) / kStored + 1 : 0;
}

constexpr int kMostTurns = kLeftovers ? (kMaxTopk + kStored - 1) / kStored + 1 : 0;
constexpr int kMostLater = kMaxTopk - kMostTurns * kOtherSlots;  // pages of the turns with all page slots
static_assert(kMostTurns + (kMostLater > 0 ? kMostLater + kPageSlots - 1 : 0) / kPageSlots <=
                  kListed / kPageSlots,
              "room for every list");

// What the first warp of a page slot lists: a piece, which ends where its slot's turns begin, or, for the
// first page slot, the pages of the slot's own item, dealt to its page slots in turn, and where all lists
// end. A piece without pages is a page without tokens: it is stored and counted as others are, so that the
// number of arrivals does not depend on the selection.
__device__ __forceinline__ void list_turns(const Arguments& args, const Item& item, Selection s,
                                           const SlotAddresses& slot, bool on_piece, int piece, u32 page_slot,
                                           int turns, int lane) {
  int first = list_of(page_slot);
  const int early = turns * kOtherSlots;  // pages of the turns without piece slots
  if (on_piece) {
    const int pages = (s.count + kStored - 1 - piece) / kStored, end = first + turns;
    first = end - max(pages, 1);
#pragma unroll
    for (int w = 0; w < kIdsPerLane; ++w)
      if (s.rank[w] % kStored != piece) s.rank[w] = -1;
    if (lane == 0) {
      ptx::st_shared_u32(slot.fixed + kSlotFirsts + page_slot * 4, first);
      ptx::st_shared_u32(slot.fixed + kSlotEnds + page_slot * 8 + 4, end);
      if (pages == 0) ptx::st_shared_u32(slot.fixed + kSlotVisible + first * 4, 0);
    }
  } else if (lane < kPageSlots) {
    const int before =
        lane < kOtherSlots ? (min(s.count, early) + kOtherSlots - 1 - lane) / kOtherSlots : turns;
    const int after = (max(s.count - early, 0) + kPageSlots - 1 - lane) / kPageSlots;
    ptx::st_shared_u32(slot.fixed + kSlotEnds + lane * 8, list_of(lane) + before + after);
    if (turns == 0 || lane < kOtherSlots) {
      ptx::st_shared_u32(slot.fixed + kSlotEnds + lane * 8 + 4, kNoPiece);
      ptx::st_shared_u32(slot.fixed + kSlotFirsts + lane * 4, list_of(lane));
    }
  }
  list_pages(args, item, s, slot, [&](int rank) {
    if (on_piece) return first + rank / kStored;
    if (rank < early) return static_cast<int>(list_of(rank % kOtherSlots)) + rank / kOtherSlots;
    return static_cast<int>(list_of((rank - early) % kPageSlots)) + turns + (rank - early) / kPageSlots;
  });
}

// Half of the heads, all that the stage holds which the page slot's last page has left. 8 dims a thread.
constexpr int kHalf = kHeads / 2;
constexpr int kPieceDims = kHalf * kHeadDim / (32 * kWarpsPerPage);

template <int half>
__device__ __forceinline__ void store_piece_half(const Arguments& args, const WarpState& state,
                                                 const SlotAddresses& slot, SharedAddress page_stage,
                                                 u32 item_slot, int warp, int lane, u32 leftover, u32 piece) {
  static_assert(!kLeftovers || kStageBytes >= kHalf * kHeadDim * 4);
  const u32 page_slot = warp / kWarpsPerPage, first = page_slot * kWarpsPerPage;
  const int page_warp = warp % kWarpsPerPage, thread = page_warp * 32 + lane;
  publish_warp<half>(state, slot, page_stage + page_warp * kWarpRingBytes, warp, lane, 1);
  page_sync(item_slot * kPageSlots + page_slot);
  const auto part = merge_partials<kWarpsPerPage, kPieceDims>(
      thread + half * (32 * kWarpsPerPage),
      [&](int w, int head) { return ptx::ld_shared_v2_f32(slot.warp_stats(first + w) + head * 8); },
      [&](int w, int head, int dim) {
        return load_warp(page_stage + w * kWarpRingBytes, head - half * kHalf, dim);
      });
  if (part.head < args.group) store_partial(args, part, leftover, piece);
  page_sync(item_slot * kPageSlots + page_slot);  // nobody reads the stage any more
}

// As with splits, equal warps of a leftover's page slots hold equal places, and the last one merges them.
__device__ __forceinline__ void merge_pieces_if_last(const Arguments& args, SharedAddress slot, u32 leftover,
                                                     int page_warp, int lane) {
  u8* counter = args.arrivals + (static_cast<u64>(leftover) * kWarpsPerPage + page_warp) * 4;
  if (arrive(counter, lane) != kStored - 1) return;
  const uint2 row = ptx::ld_shared_v2_u32(slot + kSlotLeftover);
  const ItemRow item = {static_cast<int>(row.x), static_cast<int>(row.y)};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    merge_stored<kPieceDims>(args, item, leftover, page_warp * 32 + lane + half * (32 * kWarpsPerPage),
                             slot + kSlotScales + kScaleBytes);
}
