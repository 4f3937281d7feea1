// Three groups of cp.async by two warps; each thread then reads what the other warp has fetched.
// in, out: [3][64] words.
#include "cp_async.cuh"
#include "instructions.cuh"

extern "C" __global__ void __launch_bounds__(64) staged_copy(const u32* in, u32* out) {
  __shared__ alignas(16) u32 stage[3][64];
  const u32 thread = threadIdx.x;
  for (u32 s = 0; s < 3; ++s) {
    const u32 to = ptx::shared_address(&stage[s][thread]) + (fault == Fault::misaligned_destination ? 2 : 0);
    const u32* from = in + 64 * s + thread + (fault == Fault::source_past_the_end ? 64 : 0);
    ptx::cp_async_ca_4(to, from);  // <- misaligned_destination source_past_the_end missing_wait waits_for_too_few missing_barrier missing_commit overwritten_early
    if (fault != Fault::missing_commit) ptx::cp_async_commit_group();
  }
  if (fault == Fault::overwritten_early) stage[2][thread] = 0;  // <- overwritten_early
  if (fault == Fault::waits_for_too_few) {
    ptx::cp_async_wait_group<1>();
  } else if (fault == Fault::missing_commit) {
    ptx::cp_async_wait_group<0>();
  } else if (fault != Fault::missing_wait) {
    ptx::cp_async_wait_group<0>();
  }
  if (fault != Fault::missing_barrier) __syncthreads();
  for (u32 s = 0; s < 3; ++s) {
    out[64 * s + thread] = stage[s][thread ^ 32];  // <- missing_wait waits_for_too_few missing_barrier missing_commit
  }
}
