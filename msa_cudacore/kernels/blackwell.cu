// Sparse decode attention on data-centre Blackwell: tcgen05 MMAs straight from the packed NVFP4 pool.
//
// A work item is one query token with one KV head. S = K q^T takes the packed K page from shared memory as
// its A operand; O^T = V^T P^T takes V from tensor memory, widened to float16, and P from shared memory.
// docs/blackwell.md has the design.
//
//   selection warp   ids -> page lists
//   copy warp        pages -> ring of stages, by tensor copies
//   K scale warp     K scales -> the order in which tcgen05.cp takes them to tensor memory
//   value warps      V -> float16 in tensor memory
//   MMA warp         issues both MMAs
//   softmax warps    scores -> weights, sums
//   edge warps       q -> NVFP4 terms; accumulator -> out, lse
#include "blackwell_edge.cuh"
#include "blackwell_pages.cuh"
#include "blackwell_plan.cuh"
#include "blackwell_softmax.cuh"
#include "blackwell_values.cuh"
#include "control.cuh"

using namespace blackwell;

extern "C" __global__ void __launch_bounds__(THREADS, 1) msa_decode_blackwell(
    const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
    const __grid_constant__ ptx::TensorMap k_scale_map, const __grid_constant__ ptx::TensorMap v_scale_map,
    const u8* q, const u8* q2k, const u8* page_table, const u8* seqused_k, u8* out, u8* lse, i64 q_row,
    i64 q_head, i64 q2k_head, i64 q2k_row, i64 q2k_index, i64 page_table_row, i64 page_table_index,
    i64 seqused_stride, i64 out_row, i64 out_head, i64 lse_row, i64 lse_head, i32 items, i32 seqlen_q,
    i32 num_kv_heads, i32 group, i32 topk, i32 max_pages, i32 num_pages, i32 unsplit_rounds, i32 round_rows,
    i32 round_heads, float score_scale, float v_global_scale) {
  extern __shared__ __align__(1024) u8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Arguments arguments = {
      q, q2k, page_table, seqused_k, out, lse, q_row, q_head, q2k_head, q2k_row, q2k_index, page_table_row,
      page_table_index, seqused_stride, out_row, out_head, lse_row, lse_head, static_cast<u32>(items),
      static_cast<u32>(seqlen_q), static_cast<u32>(num_kv_heads), static_cast<u32>(group),
      static_cast<u32>(topk), static_cast<u32>(max_pages), static_cast<u32>(num_pages),
      static_cast<u32>(unsplit_rounds), static_cast<u32>(round_rows), static_cast<u32>(round_heads),
      score_scale, v_global_scale};
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  if (warp == KEY_SCALE_WARP) {
    ptx::tcgen05_alloc(ptx::shared_address(&shared.tensor_base), TENSOR_COLUMNS);
    ptx::tcgen05_relinquish_alloc_permit();
    ptx::tcgen05_fence_before_thread_sync();
  }
  if (threadIdx.x == 0) {
    initialise_barriers(shared);
    ptx::fence_mbarrier_init_release_cluster();
    if constexpr (SPLITS > 1) {
      ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&shared.merge_full), MERGE_BYTES);
    }
  }
  if (warp == COPY_WARP && ptx::elect_sync()) {
    ptx::prefetch_tensormap(k_map);
    ptx::prefetch_tensormap(v_map);
    ptx::prefetch_tensormap(k_scale_map);
    ptx::prefetch_tensormap(v_scale_map);
  }
  __syncthreads();
  if constexpr (SPLITS > 1) {
    // Awaited only before the first remote store: loads and MMAs start before the cluster has met.
    ptx::barrier_cluster_arrive();
  }
  ptx::tcgen05_fence_after_thread_sync();
  const u32 tensor = shared.tensor_base;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  const Schedule schedule(arguments);
  const u32 rank = SPLITS > 1 ? ptx::cluster_ctarank() : 0;
  if (warp / 4 == EDGE_WARPS / 4) {
    edge_role(shared, arguments, schedule, tensor, rank);
  } else {
    if (warp / 4 == SOFTMAX_WARPS / 4) {
      softmax_role(shared, schedule, tensor, warp % 4);
    } else if (warp / 4 == VALUE_WARPS / 4) {
      value_role(shared, schedule, tensor, warp % 4);
    } else if (warp == SELECTION_WARP) {
      selection_role(shared, arguments, schedule, rank);
    } else if (warp == COPY_WARP) {
      copy_role(shared, arguments, schedule, {k_map, v_map, k_scale_map, v_scale_map});
    } else if (warp == KEY_SCALE_WARP) {
      key_scale_role(shared, schedule);
    } else if (warp == MMA_WARP) {
      mma_role(shared, schedule, tensor);
    }
    __syncwarp();
    if constexpr (SPLITS > 1) {
      ptx::barrier_cluster_wait();
    }
  }

  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (warp == KEY_SCALE_WARP) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc(tensor, TENSOR_COLUMNS);
  }
}
