// BYTES bytes through shared memory: a bulk load, one ordinary addition, a bulk store.
#include "fence.cuh"
#include "instructions.cuh"
#include "mbarrier.cuh"

constexpr u32 WORDS = 64, BYTES = 4 * WORDS;

extern "C" __global__ void __launch_bounds__(32) bulk_copy(const u32* in, u32* out) {
  __shared__ alignas(128) u32 buffer[WORDS];
  __shared__ u64 ready;
  const u32 lane = threadIdx.x, bar = ptx::shared_address(&ready), to = ptx::shared_address(buffer);
  if (lane == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init_release_cluster();
    constexpr u32 bytes = fault == Fault::size_not_a_multiple_of_16 ? BYTES - 8
                          : fault == Fault::load_past_the_array     ? BYTES + 65536
                                                                    : BYTES;
    const u32* from = in + (fault == Fault::misaligned_source ? 1 : fault == Fault::source_past_the_end ? 16 : 0);
    const u32 target = fault == Fault::destination_past_the_end ? to + 0x40000 : fault == Fault::misaligned_destination ? to + 8 : to;
    ptx::mbarrier_arrive_expect_tx(bar, bytes);
    ptx::bulk_load(target, from, bytes, bar);  // <- size_not_a_multiple_of_16 misaligned_source source_past_the_end destination_past_the_end misaligned_destination load_past_the_array
  }
  __syncwarp();
  if (fault != Fault::missing_wait) ptx::mbarrier_wait_parity(bar, 0);
  for (u32 i = lane; i < WORDS; i += 32) {
    buffer[i] += 1;  // <- missing_wait
  }
  if (fault != Fault::missing_proxy_fence) ptx::fence_proxy_async_shared_cta();
  __syncwarp();
  if (lane == 0) {
    ptx::bulk_store(fault == Fault::store_past_the_end ? out + 16 : out, to, BYTES);  // <- missing_proxy_fence store_past_the_end reads_before_store_done
    ptx::bulk_commit_group();
    if (fault == Fault::reads_before_store_done) {
      ptx::bulk_wait_read();
    } else {
      ptx::bulk_wait();
    }
    out[0] = out[1] + 1;  // <- reads_before_store_done
  }
}
