// The portable program's plan: specialisation, schedule, shared-memory layout, launch arguments.
//
// The specialisation is constexpr text in front of the source, written by Configuration.constants in
// msa_cudacore/portable.py:
//   int  kItemSlots     items side by side in a CTA: 1, 2, 4 or 8 (more than 1 only without splits)
//   bool kManyItems     an item slot takes one item after the other
//   int  kWarpsPerPage  4 (32 tokens a warp) or, where warps cooperate, 8 (16 tokens a warp); with eight item
//                       slots 2, of which each takes 32 tokens of a page and then another 32
//   int  kPageSlots     pages of an item that a CTA decodes side by side: 1, 2 or 4
//   int  kSplits        CTAs that share an item: 1, 2, 4, 8 or 16
//   bool kClusterMerge  the splits of an item are a cluster and merge through distributed shared memory;
//                       else the last of them to arrive merges what all have put into a workspace
//   int  kIdsPerLane    1: top-k up to 32, 2: up to 64
//   bool kTable         keys, and values unless warps cooperate, are decoded by a 64 KB table in shared
//                       memory
//   int  kPieces        0, or the CTAs have item slots for all items but a few, the leftovers, which are cut
//                       into this many pieces
//   int  kPieceSlots    page slots of an item slot that begin with a piece: 0, 1 or 2
//   bool kPairs         two CTAs, a cluster, share a leftover and merge it through distributed shared memory;
//                       else whoever stores a leftover's last piece into a workspace merges it
//   int  kLastSplits    item slots, of different CTAs, that share each item of the last quarter of the item
//                       slots: 1, 2, 4 or 8
//   bool kSharedItem    the item slots of a CTA begin with parts of one item more, which they share
//   bool kCooperative   the warps of a page share their probabilities, and each takes a slice of the value
//                       dims
#pragma once
#include "types.cuh"

using ptx::SharedAddress;

// ---- Shape of a CTA: follows from the configuration

constexpr int kHeadDim = 128;
constexpr int kPageTokens = 128;
constexpr int kHeads = 16;  // rows of an MMA tile; heads beyond the group are zero queries
constexpr int kTurns = kWarpsPerPage == 2 ? 2 : 1;  // parts of a page that a warp takes one after the other
constexpr int kWarpTokens = kPageTokens / (kWarpsPerPage * kTurns);
constexpr int kTokenTiles = kWarpTokens / 8;            // columns of score tiles
constexpr int kItemWarps = kWarpsPerPage * kPageSlots;  // warps that share an item in a CTA
constexpr int kItemThreads = 32 * kItemWarps;
constexpr int kWarps = kItemWarps * kItemSlots;
constexpr int kThreads = 32 * kWarps;
constexpr bool kLeftovers = kPieces > 0;
constexpr int kOwnSlots = kPageSlots - (kPairs ? 1 : 0);  // page slots that work on a CTA's own item
// From one page of a page slot to its next: pages of an item that are in work at the same time, or one where
// each page slot has a list of its own.
constexpr int kPageStride = kLeftovers ? 1 : kPageSlots * kSplits;
constexpr int kMaxTopk = 32 * kIdsPerLane;
constexpr bool kSplit = kSplits > 1;
constexpr bool kWorkspaceMerge = kSplit && !kClusterMerge;
constexpr bool kLastSplit = kLastSplits > 1;
constexpr int kWholeSlots = kItemSlots - (kLastSplit ? kItemSlots / 4 : 0);  // that have whole items
// Partials of an item in the workspace.
constexpr int kStored = kLeftovers ? kPieces : kSharedItem ? kItemSlots : kLastSplit ? kLastSplits : kSplits;

// ---- Register budget: follows from the configuration and the architecture
//
// The number of warps resident on an SM sets the registers a thread may have: 128 with 16 warps on 9.0; 168
// with 12 warps on 8.0 and 10.x, where ptxas would spill at 128; on the parts with 100 KB of shared memory
// (8.6, 8.9, 12.x) no more than 8 warps fit. Many splits mean few CTAs, which gain more from registers
// (kRoomy) than from 16 warps on their SM: three CTAs of four warps, or one of eight.
constexpr int kArch = __CUDA_ARCH__;
constexpr bool kSmallSharedMemory = kArch == 860 || kArch == 890 || kArch >= 1200;
constexpr bool kRoomy = kWarps <= 8 && (kSplits >= 4 || kWarpsPerPage == 8);
constexpr int kResidentWarps = kSmallSharedMemory ? 8 : kArch == 900 && !kRoomy ? 16 : 12;
constexpr int kResidentCtas = kResidentWarps > kWarps ? kResidentWarps / kWarps : 1;

// ---- What may be combined

static_assert(kItemSlots == 1 || kItemSlots == 2 || kItemSlots == 4 || kItemSlots == 8, "item slots");
static_assert(kWarpsPerPage == 4 || (kWarpsPerPage == 8 && kCooperative) ||
                  (kWarpsPerPage == 2 && kItemSlots == 8),
              "a warp takes 32 or 16 tokens at a time");
static_assert(kPageSlots == 1 || kPageSlots == 2 || kPageSlots == 4, "page slots");
static_assert(kWarpsPerPage == 4 || kPageSlots == 1, "eight warps share the CTA's only page");
static_assert(kWarpsPerPage != 8 || !kTable, "at their start eight warps fill no table");
static_assert(kItemSlots < 8 || (kTable && kPageSlots == 1 && kIdsPerLane == 1 && !kManyItems),
              "eight item slots have room for 32 ids each");
static_assert(kWarps <= 16, "128 registers a thread and the ring limit a CTA to 16 warps");
static_assert(kSplits >= 1 && kSplits <= kHeads && (kSplits & (kSplits - 1)) == 0,
              "a split owns kHeads / kSplits heads");
static_assert(!kClusterMerge || kSplit, "one CTA has nothing to merge with");
static_assert(kItemSlots == 1 || !kSplit, "splits of several items would share barriers");
static_assert(!kManyItems || kItemSlots > 1, "with one item slot, rounds of CTAs serve as well");
static_assert(!kCooperative || kItemSlots == 1, "cooperation is for CTAs with few pages");
static_assert(!kLeftovers || (kTable && !kCooperative && !kSplit && kPieceSlots >= 1 &&
                              kPieceSlots < kPageSlots && kPieces % kPieceSlots == 0),
              "slots without a piece take more of the item's pages");
static_assert(!kPairs || (kPieces == 4 && kPieceSlots == 2 && kPageSlots == 4 && kIdsPerLane == 1),
              "one page slot of each CTA has nothing but its piece, and one goes on");
static_assert(!kSharedItem || (kItemSlots == 4 && kTable && !kManyItems && !kCooperative),
              "the table's gaps hold the queries of five items");
static_assert(!kLastSplit || (kItemSlots >= 4 && kPageSlots == 1 && kTable && !kManyItems && !kSharedItem &&
                              (kLastSplits & (kLastSplits - 1)) == 0),
              "the last of four item slots, or two of eight, have splits");
static_assert(kIdsPerLane == 1 || kIdsPerLane == 2, "top-k up to 64");

// ---- Schedule: follows from the configuration
//
// The shape of the code, and the order in which a CTA requests what it needs. None of these flags is set by
// itself: each is a function of the specialisation, with the limits where measurements put them
// (docs/portable.md).

// Shape of the code.
//
// Eight warps a page: one page is all the work of an SM, and latency is what there is to save. Four of the
// warps select the page and request it, two parts each, while the other four stage the queries; each warp
// holds the queries in registers and sums its products in two independent chains.
constexpr bool kEightWarps = kWarpsPerPage == 8;
// Score tiles in work at the same time: two where decoding by arithmetic leaves no registers for more.
constexpr int kTilesAtOnce = kRoomy || kTable || kCooperative ? kTokenTiles : 2;
// One copy of the page loop's body instead of one for each stage. Straight-line code for both stages saves
// address arithmetic; a CTA with few pages spends more on fetching it.
constexpr bool kRolledLoop = kSplits >= 4 || kCooperative || kLeftovers;
// A warp finds its rows' first origins from the scores of its first page, before the exponentials. Not where
// slots take one item after the other: there the loop's schedule would lose more than that gains.
constexpr bool kFirstOrigins = !kManyItems;
// The first page has code of its own, ahead of the loop: without the table, and with four item slots or more.
// Others have few pages a warp, and fetching more code costs more than it saves.
constexpr bool kFirstApart = kFirstOrigins && !kRolledLoop && (!kTable || kItemSlots >= 4);
// Every item slot has one item, or split of one, from its first page to its last, and decodes by table; with
// kSharedItem it begins with a part of another.
constexpr bool kWholeItems = kTable && !kCooperative && !kSplit && !kLeftovers && !kManyItems;

// Order of the copies.
//
// Keys, with the scales of keys and values, and values are commit groups of their own: scores start as soon
// as the keys have arrived.
constexpr bool kKeysFirst = kTable || kCooperative;
constexpr int kPageGroups = kKeysFirst ? 2 : 1;
// One item a CTA and no splits: what is needed first is requested alone. No second page before the first keys
// have arrived; with the table, no values before every warp has requested keys. Where items share a CTA they
// hide each other's start, and requesting early is better.
constexpr bool kGradualStart = !kSplit && kItemSlots == 1;
// What a warp takes second, its second page or the other part of its first, is requested behind its first
// scores, which would otherwise wait until the load path has taken those copies. Two item slots lose by it.
constexpr bool kSecondBehindScores = kWholeItems && kItemSlots != 2;
// Cooperating warps with the table have page slots for more pages than memory brings while the first one is
// scored, so a page's successor is requested behind its scores. With fewer pages a CTA, or without the table,
// that is too late.
constexpr bool kManyPages = kTable && kCooperative;
// The first page's values are requested behind the barrier that ends the start.
constexpr bool kLateValues = kKeysFirst && (kManyPages || (!kCooperative && kGradualStart));

// Order of the start.
//
// Queries are staged behind the request of the first page, in the shadow of its copies, instead of in that of
// the page ids: with few pages, and where most warps have queries to stage before they could request a page.
// The table is then filled ahead of the request, while page ids (with kManyPages: ids) are on their way;
// otherwise it is filled last.
constexpr bool kLateQueries = kCooperative || kLeftovers || (kWholeItems && kItemSlots == 4);
// Loads of the selection and of the queries are issued in the order in which they are written, and page ids
// are requested without waiting for the context's length.
constexpr bool kOrderedLoads = kLateQueries || kSecondBehindScores;
// Ids are requested ahead of the division that finds the item's request.
constexpr bool kIdsFirst = kOrderedLoads && !kCooperative;

// Order of the cluster merge.
//
// With one page slot a slice goes to its owners in the cluster unmerged. The rows' origins and sums, which
// are known before any value has been multiplied, go ahead of it.
constexpr bool kDirectSlices = kCooperative && kClusterMerge && kPageSlots == 1;
// With two splits whose warps or page slots merge first, a thread keeps what it holds of the heads that its
// CTA owns and sends only the other half: st.async takes two cycles or more for every 16 bytes.
constexpr bool kHalves = kClusterMerge && kSplits == 2 && !kDirectSlices;

// ---- Ring of a warp

// A stage holds a warp's part of a page: codes of keys, codes of values, scales of keys, scales of values.
constexpr int kStages = 2;
// Pages that a warp requests from the selection it has read itself; it takes the others from the list of
// pages, behind the barrier that ends the start. One, so that no second page of the CTA is requested ahead of
// a first one; splits, with few pages each, request both.
constexpr int kFirstPages = !kSplit || kCooperative ? 1 : kStages;
constexpr u32 kPartCodes = kWarpTokens * 64;
constexpr u32 kPartScales = kWarpTokens * 8;
constexpr u32 kStageValues = kPartCodes;
constexpr u32 kStageKeyScales = 2 * kPartCodes;
constexpr u32 kStageValueScales = kStageKeyScales + kPartScales;
constexpr u32 kStageBytes = kStageValueScales + kPartScales;
constexpr u32 kWarpRingBytes = kStages * kStageBytes;
static_assert(kCooperative || kWarpRingBytes >= kHeads * kHeadDim * 4,
              "a warp's accumulators replace its ring at the end");

// ---- Dynamic shared memory, in bytes; Configuration.shared_bytes has the same sum
//
// Decoding table, rings of all warps, then a part for each item slot. A table entry, a word for each bank,
// takes 128 of every 256 bytes. The gaps between entries hold those parts of the slots that are not read for
// every page, or, with eight slots or a shared item, the queries of all.
constexpr u32 kTableBytes = kTable ? 65536 : 0;
constexpr u32 kRingAt = kTableBytes;
constexpr u32 kSlotsAt = kRingAt + kWarps * kWarpRingBytes;
constexpr u32 kSlotQueries = 0;  // A fragments of q: [8 k-steps][32 lanes][16 bytes], of the leftover next
constexpr u32 kQueryBytes = 8 * 512;
constexpr bool kQueriesInGaps = kItemSlots == 8 || kSharedItem;
constexpr bool kListsInGaps = kTable && !kQueriesInGaps;
constexpr u32 kQueryStepBytes = kQueriesInGaps ? 1024 : 512;  // from one k-step to the next
constexpr u32 kScaleBytes = kHeads * 8;
constexpr int kItems = kLeftovers || kSharedItem ? 2 : 1;  // that a slot works on
// A list of pages for the slot, or for each page slot, which has room for twice its share of one item.
// With a shared item, the slot's part of it ends where the pages of its own item begin; and a page's request
// looks two places ahead (four, for alignment).
constexpr int kOwnPlace = kSharedItem ? kMaxTopk / kItemSlots : 0, kPlacesBehind = kSharedItem ? 4 : 0;
constexpr int kListed = kSharedItem ? kOwnPlace + kMaxTopk + kPlacesBehind : kItems * kMaxTopk;
// [kListed] visible tokens, at most 128.
constexpr u32 kSlotVisible = kQueriesInGaps ? 0 : kSlotQueries + kItems * kQueryBytes;
constexpr u32 kSlotScales = kSlotVisible + kListed * 4;            // [kItems][kHeads] RowScale
constexpr u32 kSlotArrival = kSlotScales + kItems * kScaleBytes;   // mbarrier of the cluster merge
constexpr u32 kSlotStatsArrival = kSlotArrival + 8;                // that of origins and sums that go ahead
constexpr u32 kSlotItem = kSlotArrival + 16;                       // ItemRow, for the epilogue
constexpr u32 kSlotPages = kSlotItem + 8;   // cooperating warps: the item's pages; or where the list ends,
constexpr u32 kSlotFirst = kSlotPages + 4;  // and where it begins, with a shared item
constexpr u32 kSlotLeftover = kSlotItem + 8;                       // ItemRow of the leftover
constexpr u32 kSlotFirsts = kSlotLeftover + 8;  // of each page slot: the place of its first page
// Of each page slot: where its list ends, and where its piece does.
constexpr u32 kSlotEnds = kSlotArrival + 64;
// [kListed] PageSources, unless in the gaps.
constexpr u32 kSlotSources = kSlotArrival + (kLeftovers ? 96 : 64);
// [kItemWarps][kHeads] (origin, sum), unless in the gaps; until the last page, references of rows with far
// logits. Cooperating warps need kPageSlots of them.
constexpr u32 kSlotWarpStats = kSlotSources + kListed * 32;
// Cooperative: maxima of the scores of each page in work, [kPageSlots][kHeads][kWarpsPerPage].
constexpr u32 kMaximaBytes = kCooperative ? kHeads * kWarpsPerPage * 4 : 0;
constexpr u32 kSlotMaxima = kListsInGaps ? kSlotSources : kSlotWarpStats + kItemWarps * 128;
// Direct slices: sums of each warp's tokens, [kHeads][kWarpsPerPage].
constexpr u32 kSlotSums = kSlotMaxima + kPageSlots * kMaximaBytes;
constexpr u32 kSlotEnd = kSlotSums + (kDirectSlices ? kMaximaBytes : 0);
constexpr u32 kSlotBytes = kListsInGaps ? (kSlotEnd + 255) / 256 * 256 : kSlotEnd;
// Pairs, behind the slot: the last quarter of each warp's sums of a piece, [kWarpsPerPage][2048]; their
// (origin, sum), [kWarpsPerPage][kHeads]; and the partner's (origin, sum) of the rows that this CTA finishes,
// [kWarpsPerPage][kHeads / 2].
constexpr u32 kSlotPieceSums = kSlotBytes;
constexpr u32 kSlotPieceStats = kSlotPieceSums + kWarpsPerPage * 2048;
constexpr u32 kSlotPartnerStats = kSlotPieceStats + kWarpsPerPage * 128;
// And in the gaps, behind 16 for sources and 16 for statistics: the partner's sums of values, and the first
// three quarters of a piece's.
constexpr u32 kPartnerGap = 32, kPieceGap = 64;
static_assert(!kPairs || (kListed / 4 <= 16 && kItemWarps <= 16 && kPieceGap + 4 * 48 <= 256), "gaps");
static_assert(!kQueriesInGaps || (kItemSlots + kSharedItem) * 2 * kQueryBytes <= kTableBytes,
              "gaps for the queries of all items");
static_assert(!kListsInGaps || (kSlotBytes >= kListed / 4 * 256 && kSlotBytes >= kItemWarps * 256 &&
                          2 * kItemSlots * kSlotBytes <= kTableBytes),
              "gaps: four sources each, then one a warp, as far apart as the slots");
// Partials of the heads that this CTA owns in a cluster: [kSplits][kHeads / kSplits][128], then their
// (origin, sum).
constexpr u32 kSlotInbox = kSlotBytes;
constexpr u32 kSlotInboxStats = kSlotInbox + kHeads * kHeadDim * 4;

// An item slot, with its parts in the table's gaps. One register holds both addresses, because the gaps of
// two slots are as far apart as the slots.
struct SlotAddresses {
  SharedAddress fixed;

  __device__ __forceinline__ SlotAddresses(SharedAddress smem, u32 item_slot)
      : fixed(smem + kSlotsAt + item_slot * kSlotBytes) {}
  __device__ __forceinline__ SharedAddress gap(u32 index) const {
    return fixed - kSlotsAt + 128 + index * 256;
  }
  __device__ __forceinline__ SharedAddress sources(u32 rank) const {
    return kListsInGaps ? gap(rank >> 2) + (rank & 3) * 32 : fixed + kSlotSources + rank * 32;
  }
  // Cooperative: sums of a row, one for each warp, where the page's maxima were.
  __device__ __forceinline__ SharedAddress sums(u32 page_slot, u32 head) const {
    return fixed + kSlotMaxima + page_slot * kMaximaBytes + head * (kWarpsPerPage * 4);
  }
  __device__ __forceinline__ SharedAddress warp_stats(u32 warp) const {
    if constexpr (kPairs) return gap(16 + warp);
    return kListsInGaps ? gap(warp) + kItemSlots * kSlotBytes : fixed + kSlotWarpStats + warp * 128;
  }
};

// ---- Launch arguments and items

// In the order of first use; strides in bytes. The first read of each 64-byte line of parameters takes some
// 115 cycles, and in this order the loads of the selection need only the first two lines.
struct Arguments {
  i32 num_kv_heads, seqlen_q, topk, max_pages;
  const u8* q2k;
  i64 q2k_head, q2k_row, q2k_j;
  const u8* seqused_k;
  i64 seqused_k_stride;
  const u8* page_table;
  i64 page_table_row, page_table_j;
  const u8* q;
  i64 q_row, q_head;
  i32 num_pages, group;
  const u8* k;
  i64 k_page, k_head;
  const u8* v;
  i64 v_page, v_head;
  const u8* k_scale;
  i64 k_scale_page, k_scale_head;
  const u8* v_scale;
  i64 v_scale_page, v_scale_head;
  float score_scale;  // softmax scale * K global scale * log2(e)
  float v_global_scale;
  u8* workspace;
  u8* out;
  i64 out_row, out_head;
  u8* lse;
  i64 lse_row, lse_head;
  i32 batch;
  u8* arrivals;  // u32 counters of partials stored into the workspace, zero between launches
};

struct Item {
  int kv_head, request, token, row;
};

// What the results need of an item. It waits in shared memory: the page loop has no register for it.
struct ItemRow {
  int row, kv_head;
};

__device__ __forceinline__ u32 item_count(const Arguments& args) {
  return args.batch * args.seqlen_q * args.num_kv_heads;
}

// Items from here on have no slot of their own.
__device__ __forceinline__ u32 first_leftover() {
  return kLeftovers || kSharedItem || kLastSplit ? gridDim.x * kWholeSlots : 0;
}

// Every load of the start waits for this division. By a power of two, the common case, it is a shift and
// takes a fifth of the time.
__device__ __forceinline__ u32 quotient(u32 dividend, u32 divisor) {
  if ((divisor & (divisor - 1)) == 0) return dividend >> (31 - __clz(divisor));
  return dividend / divisor;
}

// An item without its request and token, which the loads of its ids do not need.
__device__ __forceinline__ Item item_without_request(const Arguments& args, u32 index) {
  Item item = {};
  item.row = quotient(index, args.num_kv_heads);
  item.kv_head = index - item.row * args.num_kv_heads;
  return item;
}

__device__ __forceinline__ void find_request(const Arguments& args, Item& item) {
  item.request = quotient(item.row, args.seqlen_q);
  item.token = item.row - item.request * args.seqlen_q;
}

template <typename T>
__device__ __forceinline__ T load(const u8* base, i64 offset) {
  return __ldg(reinterpret_cast<const T*>(base + offset));
}
