// The page-streaming ceiling with bulk copies: brings the tiles of a list into a ring in shared memory and drops them.
//
// Specialised by kSides, the sides of a tile (K, V) that one stage holds: 2 copies a whole tile, 1 half of one. One warp
// per CTA; its lanes fetch the tile numbers together, one lane issues and waits. Dynamic shared memory: stages * kSides *
// kSideBytes for the ring, 8 * stages for its barriers, 4 bytes for every piece that a CTA takes.
#include "cache_policy.cuh"
#include "cp_async_bulk.cuh"
#include "fence.cuh"
#include "mbarrier.cuh"
#include "stream_tile.cuh"

constexpr i32 kPieces = 2 / kSides;
constexpr u32 kStageBytes = kSides * kSideBytes;

extern "C" __global__ void __launch_bounds__(32)
    stream_bulk(const u8* base, const i32* tiles, i32 count, i32 log2_heads, i32 stages) {
  extern __shared__ __align__(128) u8 shared[];
  const Pool pool{base, log2_heads};
  const u32 ring = ptx::shared_address(shared);
  const u32 barriers = ring + stages * kStageBytes;
  i32* numbers = reinterpret_cast<i32*>(shared + stages * (kStageBytes + 8));

  const i32 pieces = count * kPieces;
  const i32 first = blockIdx.x, step = gridDim.x;
  const i32 mine = first < pieces ? (pieces - 1 - first) / step + 1 : 0;
  for (i32 n = threadIdx.x; n < mine; n += 32) numbers[n] = tiles[(first + n * step) / kPieces];
  if (static_cast<i32>(threadIdx.x) < stages) ptx::mbarrier_init(barriers + 8 * threadIdx.x, 1);
  ptx::fence_mbarrier_init_release_cluster();
  __syncwarp();
  if (threadIdx.x != 0) return;

  const u64 policy = ptx::createpolicy_evict_first();
  const auto issue = [&](i32 n) {
    const i32 stage = n % stages, tile = numbers[n];
    const u32 barrier = barriers + 8 * stage;
    u32 to = ring + stage * kStageBytes;
    ptx::mbarrier_arrive_expect_tx(barrier, kStageBytes);
#pragma unroll
    for (i32 s = 0; s < kSides; ++s, to += kSideBytes) {
      const i32 side = kSides == 2 ? s : (first + n * step) % kPieces;
      ptx::cp_async_bulk_shared_global(to, pool.codes(tile, side), kCodeBytes, barrier, policy);
      ptx::cp_async_bulk_shared_global(to + kCodeBytes, pool.scales(tile, side), kScaleBytes, barrier, policy);
    }
  };
  for (i32 n = 0; n < stages && n < mine; ++n) issue(n);
  for (i32 n = 0; n < mine; ++n) {
    ptx::mbarrier_wait_parity(barriers + 8 * (n % stages), (n / stages) & 1);
    if (n + stages < mine) issue(n + stages);
  }
}
