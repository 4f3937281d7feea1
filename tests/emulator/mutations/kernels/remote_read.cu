// Clusters of two CTAs of one warp: each reads the other's shared memory after a cluster barrier.
#include "cluster.cuh"
#include "instructions.cuh"

extern "C" __global__ void __launch_bounds__(32) remote_read(const u32* in, u32* out) {
  __shared__ u32 mine[32];
  const u32 lane = threadIdx.x, rank = ptx::cluster_ctarank();
  if (fault == Fault::barrier_before_store) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
  mine[lane] = in[32 * blockIdx.x + lane];  // <- barrier_before_store
  if (fault == Fault::barrier_before_store) {
  } else if (fault != Fault::missing_first_barrier) {
    ptx::barrier_cluster_arrive();
    if (fault != Fault::missing_wait) ptx::barrier_cluster_wait();
    if (fault == Fault::arrives_twice) {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_arrive();  // <- arrives_twice
      ptx::barrier_cluster_wait();
    }
  }
  const u32 value = ptx::ld_shared_cluster(ptx::mapa_shared_cluster(ptx::shared_address(&mine[31 - lane]), rank ^ 1));  // <- missing_first_barrier missing_wait barrier_before_store missing_last_barrier one_cta_skips_barrier
  out[32 * blockIdx.x + lane] = value;
  if (fault == Fault::missing_wait) ptx::barrier_cluster_wait();
  if (fault != Fault::missing_last_barrier) {
    if (fault == Fault::one_cta_skips_barrier && rank == 1) return;
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}
