"""Warp instructions a second of the PTX emulator: a small decode-like kernel, and single families.

    python benchmarks/emulator_speed.py
"""

from __future__ import annotations

import time

import numpy as np

from msa_cudacore.ptx import emulator

DECODE = r"""
extern "C" __global__ void decode(const float4* k, const float* q, float* out, int n) {
  __shared__ float scores[256];
  __shared__ float sums[8];
  int t = threadIdx.x;
  float sum = 0, top = -1e30f;
  for (int i = t; i < n; i += blockDim.x) {
    float4 v = k[i];
    float dot = v.x * q[t & 63] + v.y * q[(t + 1) & 63] + v.z * q[(t + 2) & 63] + v.w * q[(t + 3) & 63];
    top = fmaxf(top, dot);
    sum += exp2f(dot - top);
    for (int o = 16; o; o >>= 1) dot += __shfl_xor_sync(~0u, dot, o);
    scores[t] = dot;
    __syncthreads();
    sum += scores[t ^ 32];
    __syncthreads();
  }
  if ((t & 31) == 0) sums[t >> 5] = sum;
  __syncthreads();
  if (t == 0) { float r = 0; for (int i = 0; i < 8; i++) r += sums[i]; out[blockIdx.x] = r; }
}
"""

#: family -> one instruction of it; %s is a shared, %g a global address of the thread
FAMILIES = {
    "integer add": "add.u32 %x3, %x1, %x2;",
    "integer mad": "mad.lo.s32 %x3, %x1, %x2, %x1;",
    "f32 fma": "fma.rn.f32 %f4, %f1, %f2, %f3;",
    "f32 max": "max.f32 %f4, %f1, %f2;",
    "ex2": "ex2.approx.ftz.f32 %f4, %f1;",
    "setp": "setp.lt.s32 %q1, %x1, %x2;",
    "prmt": "prmt.b32 %x3, %x1, %x2, 0x5410;",
    "cvt to bf16x2": "cvt.rn.bf16x2.f32 %x3, %f1, %f2;",
    "bf16x2 fma": "fma.rn.bf16x2 %x3, %x1, %x2, %x1;",
    "shfl": "shfl.sync.bfly.b32 %x3, %x1, 1, 31, -1;",
    "shared load": "ld.shared.b32 %x3, [%s];",
    "shared store": "st.shared.b32 [%s], %x2;",
    "global load": "ld.global.f32 %f4, [%g];",
    "barrier": "bar.sync 0;",
}


def best_rate(module, entry: str, grid, block, args, checks) -> float:
    """Million warp instructions a second of processor time, best of three."""
    rates = []
    for _ in range(3):
        start = time.process_time()
        report = module.launch(entry, grid, block, args, checks=checks)
        rates.append(report.warp_instructions / (time.process_time() - start) / 1e6)
    return max(rates)


def family_module(body: str):
    return emulator.load(f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {{
  .reg .b32 %i; .reg .pred %p; .reg .b32 %x<9>; .reg .f32 %f<9>; .reg .b64 %y<3>; .reg .pred %q<3>;
  .reg .b64 %g; .reg .b32 %s; .shared .align 16 .b8 buffer[256];
  ld.param.u64 %g, [p]; mov.u32 %x1, %tid.x; mad.wide.u32 %g, %x1, 4, %g; mov.u32 %s, buffer;
  mad.lo.u32 %s, %x1, 4, %s; mov.u32 %x2, 7; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F800001;
  mov.f32 %f3, %f1;
  st.shared.b32 [%s], %x2; mov.u32 %i, 0;
  L: {body * 20}
  add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 2000; @%p bra L;
  ret; }}""")


def main() -> None:
    n = 1 << 17
    rng = np.random.default_rng()
    args = [rng.standard_normal(4 * n).astype(np.float32), rng.standard_normal(64).astype(np.float32),
            np.zeros(8, np.float32), np.int32(n)]
    rows = [("decode-like kernel", emulator.compile(DECODE, "sm_90a"), "decode", (8,), (256,), args)]
    rows += [(name, family_module(body), "k", (1,), (64,), [np.zeros(64, np.float32)])
             for name, body in FAMILIES.items()]
    print(f"{'million warp instructions a second':<36}{'checks on':>10}{'off':>10}")
    for name, *launch in rows:
        print(f"{name:<36}{best_rate(*launch, True):>10.1f}{best_rate(*launch, False):>10.1f}")


if __name__ == "__main__":
    main()
