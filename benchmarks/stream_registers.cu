// The page-streaming ceiling with register loads: reads the tiles of a list, 16 bytes a load, and computes nothing.
//
// Specialised by kThreads and kLoads: a CTA takes kThreads * kLoads words of 16 bytes, a whole fraction of a tile, at a
// time. The grid is persistent; the number of the next tile is fetched while the words of this one are on their way.
#include "global_memory.cuh"
#include "opaque.cuh"
#include "stream_tile.cuh"

constexpr i32 kWords = kTileBytes / 16;
constexpr i32 kPieces = kWords / (kThreads * kLoads);
static_assert(kPieces * kThreads * kLoads == kWords, "a tile is a whole number of pieces");

__device__ const u8* word_address(const Pool& pool, i32 tile, i32 word) {
  const i32 side = word >= kWords / 2;
  const i32 offset = (word - side * (kWords / 2)) * 16;
  return offset < kCodeBytes ? pool.codes(tile, side) + offset : pool.scales(tile, side) + (offset - kCodeBytes);
}

__device__ u32 folded(const uint4& word) { return word.x ^ word.y ^ word.z ^ word.w; }

// sink is written only if the XOR of a thread's words is an odd constant, which keeps the loads alive.
extern "C" __global__ void __launch_bounds__(kThreads)
    stream_registers(const u8* base, const i32* tiles, i32 count, i32 log2_heads, u32* sink) {
  const Pool pool{base, log2_heads};
  const i32 pieces = count * kPieces;
  i32 piece = blockIdx.x;
  i32 tile = piece < pieces ? tiles[piece / kPieces] : 0;
  u32 sum = 0;
  while (piece < pieces) {
    const i32 first = piece % kPieces * (kThreads * kLoads) + threadIdx.x;
    uint4 word[kLoads];
#pragma unroll
    for (i32 j = 0; j < kLoads; ++j) word[j] = ptx::ld_global_nc_v4_u32(word_address(pool, tile, first + j * kThreads));
    piece += gridDim.x;
    if (piece < pieces) tile = tiles[piece / kPieces];
    // The chain starts at the last load, so that all of them are in flight before the first word is used.
    sum ^= folded(word[kLoads - 1]);
    ptx::opaque(sum);
#pragma unroll
    for (i32 j = 0; j < kLoads - 1; ++j) {
      sum ^= folded(word[j]);
      ptx::opaque(sum);
    }
  }
  if (sum == 0x9E3779B9u) *sink = sum;
}
