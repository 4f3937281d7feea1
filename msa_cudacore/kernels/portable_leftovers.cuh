// Leftovers: the few items beyond the item slots of all CTAs. Each is cut into kPieces pieces, every
// kPieces-th page, and the last page slots of kSharers item slots begin with one each. They store its
// partial, merge the leftover if they are the last to do so, and go on with their own item, of which they
// take fewer pages; meanwhile the other page slots work on the own item. So every multiprocessor has about as
// many pages. Pairs deal them otherwise, see turns_of_piece, and keep their partials, see portable_pairs.cuh.
#pragma once
#include "portable_splits.cuh"

// Item slots that have pieces of the same leftover.
constexpr u32 kSharers = kLeftovers ? kPieces / kPieceSlots : 1;
constexpr int kOtherSlots = kPageSlots - kPieceSlots;

constexpr int kNoPiece = -1;  // as the end of a piece

// Where the list of a page slot begins. A slot with a piece lists the piece, which ends at list_of + turns,
// and then its own pages from there on: so the warp that lists the piece and the one that lists the own pages
// need not know of each other. All that the warps of a page slot do together follows from its list, which one
// warp has written, and not from what each has read of the selection.
__device__ __forceinline__ constexpr u32 list_of(u32 page_slot) { return page_slot * (kListed / kPageSlots); }

// The pages of the own item are dealt to the page slots in turns: a turn is one page for each of them. This
// is the number of turns that the slots with a piece sit out: the size of a full piece, whatever the
// leftover's length, so that the order of a row's sums does not depend on other requests; and one turn for
// storing the piece's partial.
//
// With pairs, the last page slots have nothing but a leftover, and so more of it. A page slot that goes on
// with its own item gets an eighth of the leftover, and so all have the same number of pages: six of three
// times 16. Own pages are dealt in the same way where there is no leftover.
__device__ __forceinline__ int turns_of_piece(const Arguments& args, bool has_leftover) {
  const int pages = min(args.topk, args.max_pages);
  if constexpr (kPairs) return (pages + 2 * kStored - 1) / (2 * kStored);
  return has_leftover ? (pages + kStored - 1) / kStored + 1 : 0;
}

// Which piece a page slot has; of pairs, the first two pieces are those of the last page slots.
__device__ __forceinline__ int piece_of_slot(u32 index, u32 page_slot) {
  if constexpr (kPairs) return index % kSharers + (page_slot < kOwnSlots ? kSharers : 0);
  return index % kSharers * kPieceSlots + page_slot - kOtherSlots;
}

constexpr int kMostTurns = !kLeftovers ? 0
                           : kPairs    ? (kMaxTopk + 2 * kStored - 1) / (2 * kStored)
                                       : (kMaxTopk + kStored - 1) / kStored + 1;
constexpr int kMostLater = kMaxTopk - kMostTurns * kOtherSlots;  // pages of the turns with all page slots
static_assert(kMostTurns + (kMostLater > 0 ? kMostLater + kOwnSlots - 1 : 0) / kOwnSlots <=
                  kListed / kPageSlots,
              "room for every list");

// What the first warp of a page slot lists: a piece, which ends where its slot's turns begin, or, for the
// first page slot, the pages of the slot's own item, dealt to its page slots in turn, and where all lists
// end. A piece without pages lists a page without visible tokens: it is stored and counted as others are, so
// that the number of arrivals does not depend on the selection.
__device__ __forceinline__ void list_turns(const Arguments& args, const Item& item, Selection s,
                                           const SlotAddresses& slot, bool has_leftover, bool on_piece,
                                           int piece, u32 page_slot, int turns, int lane) {
  int first = list_of(page_slot);
  const int early = turns * kOtherSlots;   // pages of the turns without piece slots
  const int in_turn = turns * kStored;     // of pairs: pages of a leftover that all pieces share
  const bool only_piece = kPairs && page_slot == kOwnSlots;
  if (on_piece) {
    const int pages = ((kPairs ? min(s.count, in_turn) : s.count) + kStored - 1 - piece) / kStored;
    int end = first + turns;
    if (only_piece)
      end = first + pages + (max(s.count - in_turn, 0) + static_cast<int>(kSharers) - 1 - piece) / kSharers;
    else
      first = end - max(pages, 1);
#pragma unroll
    for (int w = 0; w < kIdsPerLane; ++w) {
      const int pieces = kPairs && s.rank[w] >= in_turn ? kSharers : kStored;
      if (s.rank[w] % pieces != piece) s.rank[w] = -1;
    }
    if (lane == 0) {
      ptx::st_shared_u32(slot.fixed + kSlotFirsts + page_slot * 4, first);
      ptx::st_shared_u32(slot.fixed + kSlotEnds + page_slot * 8 + 4, only_piece ? kNoPiece : end);
      if (only_piece) ptx::st_shared_u32(slot.fixed + kSlotEnds + page_slot * 8, end);
      if (!only_piece && pages == 0) ptx::st_shared_u32(slot.fixed + kSlotVisible + first * 4, 0);
    }
  } else if (lane < kOwnSlots) {
    const int before =
        lane < kOtherSlots ? (min(s.count, early) + kOtherSlots - 1 - lane) / kOtherSlots : turns;
    const int after = (max(s.count - early, 0) + kOwnSlots - 1 - lane) / kOwnSlots;
    ptx::st_shared_u32(slot.fixed + kSlotEnds + lane * 8, list_of(lane) + before + after);
    if (!has_leftover || lane < kOtherSlots) {
      ptx::st_shared_u32(slot.fixed + kSlotEnds + lane * 8 + 4, kNoPiece);
      ptx::st_shared_u32(slot.fixed + kSlotFirsts + lane * 4,
                         list_of(lane) + (kPairs && lane >= kOtherSlots ? turns : 0));
    }
  }
  list_pages(args, item, s, slot, [&](int rank) {
    if (kPairs && on_piece && rank >= in_turn)
      return first + turns + (rank - in_turn) / static_cast<int>(kSharers);
    if (on_piece) return first + rank / kStored;
    if (rank < early) return static_cast<int>(list_of(rank % kOtherSlots)) + rank / kOtherSlots;
    return static_cast<int>(list_of((rank - early) % kOwnSlots)) + turns + (rank - early) / kOwnSlots;
  });
}

// A piece is stored in two halves of the heads, 8 dims a thread: the stage that the page slot's last page has
// left holds no more.
constexpr int kHalf = kHeads / 2;
constexpr int kPieceDims = kHalf * kHeadDim / (32 * kWarpsPerPage);

template <int half>
__device__ __forceinline__ void store_piece_half(const Arguments& args, const WarpState& state,
                                                 const SlotAddresses& slot, SharedAddress page_stage,
                                                 u32 item_slot, int warp, int lane, u32 leftover, u32 piece) {
  static_assert(!(kLeftovers || kSharedItem) || kStageBytes >= kHalf * kHeadDim * 4);
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

// As with splits, warps of the same index in a leftover's page slots hold the same heads and dims, so each
// such set of warps has a counter of its own, and its last warp to arrive merges its share.
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
