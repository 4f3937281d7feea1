// A ring of two stages filled by tensor copies: warp 0 produces, warp 1 sums each tile.
// map: [TILES * ROWS][COLUMNS] float, box [ROWS][COLUMNS]. out[tile][lane]: the sum of a lane's four elements.
#include "fence.cuh"
#include "instructions.cuh"
#include "mbarrier.cuh"

constexpr u32 TILES = 5, STAGES = 2, ROWS = 8, COLUMNS = 16;
constexpr u32 TILE_BYTES = ROWS * COLUMNS * 4;

struct Shared {
  alignas(1024) float stage[STAGES][ROWS * COLUMNS];
  u64 ready[STAGES];
  u64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(64) tensor_ring(const __grid_constant__ ptx::TensorMap map, float* out) {
  __shared__ Shared shared;
  const u32 lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.ready[s]), 1);
      if (fault == Fault::missing_init) continue;
      constexpr u32 readers = fault == Fault::count_one_too_many ? 33 : fault == Fault::count_one_too_few ? 31 : 32;
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), readers);
      if (fault == Fault::init_twice) ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), 32);  // <- init_twice
      if (fault == Fault::init_count_zero) ptx::mbarrier_init(ptx::shared_address(&shared.ready[s]), 0);  // <- init_count_zero
    }
    ptx::fence_mbarrier_init_release_cluster();
  }
  if (fault != Fault::missing_barrier_after_init) __syncthreads();
  if (threadIdx.x < 32) {
    if (lane != 0) return;
    for (u32 tile = 0; tile < TILES; ++tile) {
      const u32 s = tile % STAGES, turn = tile / STAGES;
      const u32 ready = ptx::shared_address(&shared.ready[s]);
      const u32 first = fault == Fault::wrong_phase_of_empty ? 0 : 1;
      if (fault != Fault::early_reuse) {
        ptx::mbarrier_wait_parity(ptx::shared_address(&shared.empty[s]), (turn + first) % 2);  // <- missing_init wrong_phase_of_empty count_one_too_many missing_release bytes_too_many box_one_row_too_short
      }
      constexpr u32 bytes = fault == Fault::bytes_too_few ? TILE_BYTES / 2 : fault == Fault::bytes_too_many ? 2 * TILE_BYTES : TILE_BYTES;
      if (fault == Fault::missing_expect) {
        ptx::mbarrier_arrive(ready);  // <- missing_expect
      } else {
        ptx::mbarrier_arrive_expect_tx(ready, bytes);  // <- bytes_too_few early_reuse
        if (fault == Fault::arrives_twice) ptx::mbarrier_arrive(ready);  // <- arrives_twice
      }
      const u32 shift = fault == Fault::misaligned_destination ? 16 : 0;
      const i32 row = tile * ROWS;
      ptx::tensor_load_2d(ptx::shared_address(shared.stage[s]) + shift, map, 0, row, ready);  // <- early_reuse count_one_too_few misaligned_destination missing_expect bytes_too_few box_one_row_too_tall missing_wait wrong_phase_of_ready arrives_twice waits_for_other_stage
      if (fault == Fault::loads_twice) ptx::tensor_load_2d(ptx::shared_address(shared.stage[s]), map, 0, row, ready);  // <- loads_twice
    }
    return;
  }
  for (u32 tile = 0; tile < TILES; ++tile) {
    const u32 s = tile % STAGES, turn = tile / STAGES;
    const u32 waited = fault == Fault::waits_for_other_stage ? 1 - s : s;
    const u32 parity = fault == Fault::wrong_phase_of_ready ? turn + 1 : turn;
    if (fault != Fault::missing_wait) {
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.ready[waited]), parity % 2);  // <- bytes_too_many missing_barrier_after_init box_one_row_too_short wrong_phase_of_empty count_one_too_many missing_release
    }
    float sum = 0;
    for (u32 i = 0; i < 4; ++i) {
      sum += shared.stage[s][32 * i + lane];  // <- missing_wait wrong_phase_of_ready missing_expect bytes_too_few early_reuse count_one_too_few waits_for_other_stage arrives_twice loads_twice box_one_row_too_tall
    }
    out[tile * 32 + lane] = sum;
    if (fault != Fault::missing_release) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[s]));  // <- missing_barrier_after_init count_one_too_few
  }
}
