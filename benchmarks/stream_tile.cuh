// Where the bytes of one KV head lie in a page of the planar pool, as 16-byte words: the ceiling kernels' address map.
#pragma once
#include "types.cuh"

constexpr i32 kCodeBytes = 128 * 64;
constexpr i32 kScaleBytes = 128 * 8;
constexpr i32 kSideBytes = kCodeBytes + kScaleBytes;  // K or V
constexpr i32 kTileBytes = 2 * kSideBytes;

// A pool whose number of KV heads is a power of two, so that splitting a tile number takes no division.
struct Pool {
  const u8* base;
  i32 log2_heads;

  __device__ const u8* page(i32 tile) const {
    return base + (static_cast<i64>(tile >> log2_heads) * kTileBytes << log2_heads);
  }
  __device__ i32 head(i32 tile) const { return tile & ((1 << log2_heads) - 1); }
  // The codes of side 0 (K) or 1 (V), and its scales.
  __device__ const u8* codes(i32 tile, i32 side) const {
    return page(tile) + (static_cast<i64>(side * kSideBytes) << log2_heads) + head(tile) * kCodeBytes;
  }
  __device__ const u8* scales(i32 tile, i32 side) const {
    return page(tile) + (static_cast<i64>(side * kSideBytes + kCodeBytes) << log2_heads) + head(tile) * kScaleBytes;
  }
};
