"""Warp instructions a second of the PTX emulator: a small decode-like kernel, single families, and the two
decode programs. Processor time and wall clock of the best of several launches; "off" is without checkers.

    python benchmarks/emulator_speed.py
"""

from __future__ import annotations

import time

import numpy as np

from msa_cudacore import emulated, portable
from msa_cudacore.blackwell import Configuration as BlackwellConfiguration
from msa_cudacore.cases import random_case
from msa_cudacore.contract import validate
from msa_cudacore.ptx import emulator, nvrtc

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


def best_rates(launch, repeats: int) -> tuple[float, float]:
    """Million warp instructions a second of processor time and of wall clock, each the best."""
    rates = []
    launch()
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        report = launch()
        spent = time.process_time() - cpu, time.perf_counter() - wall
        rates.append([report.warp_instructions / seconds / 1e6 for seconds in spent])
    return tuple(max(column) for column in zip(*rates))


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


def decode_call(**options):
    """A small problem of the contract, without hostile values."""
    case = random_case(np.random.default_rng(5), hostile=False, seqlen_q=1, **options)
    return validate(**case.arguments(), out=None, lse=None, bf16_as_uint16=False)


def portable_launch(configuration: portable.Configuration, arch: str):
    """A launch of the portable program: mma.sync, cp.async and, split over a cluster, st.async."""
    call = decode_call(batch=2, num_kv_heads=2, topk=8, lengths=[900, 700])
    text = nvrtc.compile_ptx(portable.source(configuration), arch, name="portable.cu", lineinfo=True)
    module = emulator.load(text)
    arguments = portable.kernel_arguments(call, 0, pointer=emulated.pointer_argument)
    arguments |= {"workspace": None, "arrivals": None}

    def launch(checks):
        memory = emulated.memory_of(call)
        try:
            return module.launch(
                portable.ENTRY, configuration.ctas(call.problem.items, 2), configuration.block,
                list(arguments.values()),
                cluster=(configuration.cluster,) if configuration.cluster > 1 else None,
                shared_bytes=configuration.shared_bytes, checks=checks, memory=memory,
            )
        finally:
            memory.close()

    return launch


def blackwell_launch(configuration: BlackwellConfiguration, kv_heads: int):
    """A launch of the Blackwell program: TMA, mbarrier, tcgen05."""
    call = decode_call(batch=1, num_kv_heads=kv_heads, group=5, topk=3, lengths=[330], max_pages=4)
    return lambda checks: emulated.launch(call, configuration, checks=checks)


def main() -> None:
    n = 1 << 17
    rng = np.random.default_rng()
    args = [rng.standard_normal(4 * n).astype(np.float32), rng.standard_normal(64).astype(np.float32),
            np.zeros(8, np.float32), np.int32(n)]
    decode = emulator.compile(DECODE, "sm_90a")
    rows = [("decode-like kernel", lambda checks: decode.launch("decode", (8,), (256,), args, checks=checks))]
    for name, body in FAMILIES.items():
        module, array = family_module(body), np.zeros(64, np.float32)
        rows.append((name, lambda checks, m=module, a=array: m.launch("k", (1,), (64,), [a], checks=checks)))
    portable_rows = {
        "portable program": (portable.Configuration(1, 1, False, 1), "sm_80"),
        "portable, cluster of two": (portable.Configuration(1, 2, True, 1), "sm_90a"),
        "portable, cooperating warps": (portable.Configuration(1, 2, True, 1, cooperative=True), "sm_90a"),
    }
    rows += [(name, portable_launch(*choice)) for name, choice in portable_rows.items()]
    rows += [("Blackwell program", blackwell_launch(BlackwellConfiguration(1, 10, False, 1, 0), 1)),
             ("Blackwell, cluster of two", blackwell_launch(BlackwellConfiguration(2, 10, False, 2, 0), 1)),
             ("Blackwell, short", blackwell_launch(BlackwellConfiguration(1, 4, True, 1, 0), 2))]
    columns = "".join(f"{name:>10}" for name in ("on: cpu", "wall", "off: cpu", "wall"))
    print(f"{'million warp instructions a second':<36}{columns}")
    for name, launch in rows:
        rates = [*best_rates(lambda: launch(True), 5), *best_rates(lambda: launch(False), 3)]
        print(f"{name:<36}" + "".join(f"{rate:>10.2f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
