// One warp writes a tile with ordinary stores and hands it to tensor stores, twice through the same buffer.
// map: [2 * ROWS][COLUMNS] float, box [ROWS][COLUMNS]; element (r, c) becomes 100 * r + c.
#include "fence.cuh"
#include "instructions.cuh"

constexpr u32 ROWS = 8, COLUMNS = 16;

extern "C" __global__ void __launch_bounds__(32) tensor_store(const __grid_constant__ ptx::TensorMap map) {
  __shared__ alignas(128) float tile[ROWS * COLUMNS];
  const u32 lane = threadIdx.x;
  for (u32 half = 0; half < 2; ++half) {
    for (u32 i = lane; i < ROWS * COLUMNS; i += 32) {
      if (fault == Fault::hole_in_tile && i == 77) continue;
      tile[i] = 100.0f * static_cast<float>(half * ROWS + i / COLUMNS) + static_cast<float>(i % COLUMNS);  // <- missing_read_wait missing_commit
    }
    if (fault != Fault::missing_proxy_fence) ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (lane == 0) {
      const u32 from = ptx::shared_address(tile) + (fault == Fault::misaligned_source ? 32 : 0);
      ptx::tensor_store_2d(map, 0, half * ROWS, from);  // <- missing_proxy_fence missing_read_wait missing_commit hole_in_tile misaligned_source
      if (fault != Fault::missing_commit) ptx::bulk_commit_group();
      if (fault != Fault::missing_read_wait) ptx::bulk_wait_read();
    }
    __syncwarp();
  }
}
