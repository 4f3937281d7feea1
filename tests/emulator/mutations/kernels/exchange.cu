// Clusters of two CTAs of one warp: each sends 64 floats to the other by st.async and adds what it receives.
#include "cluster.cuh"
#include "fence.cuh"
#include "instructions.cuh"
#include "mbarrier.cuh"

extern "C" __global__ void __launch_bounds__(32) exchange(const float* in, float* out) {
  __shared__ alignas(16) float inbox[64];
  __shared__ u64 arrived;
  const u32 lane = threadIdx.x, rank = ptx::cluster_ctarank(), bar = ptx::shared_address(&arrived);
  if (lane == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init_release_cluster();
    constexpr u32 bytes = fault == Fault::bytes_too_many ? 264 : fault == Fault::bytes_too_few ? 248 : 256;
    if (fault == Fault::missing_expect) {
      ptx::mbarrier_arrive(bar);
    } else {
      ptx::mbarrier_arrive_expect_tx(bar, bytes);
    }
  }
  __syncwarp();
  if (fault == Fault::barrier_in_divergent_code) {
    if (lane < 16) ptx::barrier_cluster_arrive();  // <- barrier_in_divergent_code
    if (lane >= 16) ptx::barrier_cluster_arrive();  // <- barrier_in_divergent_code
    ptx::barrier_cluster_wait();
  } else if (fault != Fault::missing_cluster_barrier) {
    ptx::barrier_cluster_arrive();
    if (fault != Fault::missing_cluster_wait) ptx::barrier_cluster_wait();
  }
  const u32 peer = fault == Fault::rank_outside_cluster ? rank + 2 : rank ^ 1;
  const u32 shift = fault == Fault::misaligned_store ? 4 : fault == Fault::store_past_the_end ? 0x40000 : 0;
  const u32 to = ptx::mapa_shared_cluster(ptx::shared_address(inbox) + 8 * lane + shift, peer);  // <- rank_outside_cluster
  const u32 signal = ptx::mapa_shared_cluster(bar, fault == Fault::barrier_of_other_cta ? rank : peer);
  const float* from = in + 64 * blockIdx.x + 2 * lane;
  ptx::st_async_v2(to, from[0], from[1], signal);  // <- rank_outside_cluster missing_cluster_barrier missing_cluster_wait misaligned_store store_past_the_end barrier_of_other_cta missing_expect bytes_too_few
  if (fault != Fault::missing_wait) ptx::mbarrier_wait_parity_cluster(bar, 0);  // <- bytes_too_many
  for (u32 i = 0; i < 2; ++i) {
    const u32 at = 2 * lane + i;
    out[64 * blockIdx.x + at] = in[64 * blockIdx.x + at] + inbox[at];  // <- missing_wait missing_expect bytes_too_few
  }
}
