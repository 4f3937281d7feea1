"""Data races: checkers speak on a planted race and are silent on its correct twin, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest

from msa_cudacore.ptx import emulator

SEEDS = range(12)
SCHEDULES = [("random", seed) for seed in SEEDS] + [("eager", 0), ("late", 0)]


def launch(source: str, *args, grid=(1,), block=(128,), schedule=("random", 0), **more):
    module = emulator.compile(source, "sm_90a")
    return module.launch(module.entries[0], grid, block, args, schedule=schedule[0], seed=schedule[1], **more)


def assert_race_and_silent_twin(source: str, mark: str, fix: str, make_args, kinds=("race",), **more) -> None:
    """`mark` in the source becomes nothing (the fault must be found) and `fix` (it must be silent)."""
    broken = emulator.compile(source.replace(mark, ""), "sm_90a")
    correct = emulator.compile(source.replace(mark, fix), "sm_90a")
    for name, seed in SCHEDULES:
        with pytest.raises(emulator.Fault) as caught:
            broken.launch(broken.entries[0], args=make_args(), schedule=name, seed=seed, **more)
        assert caught.value.kind in kinds, caught.value
        assert caught.value.source is not None and caught.value.warp is not None
        correct.launch(correct.entries[0], args=make_args(), schedule=name, seed=seed, **more)


def test_missing_barrier_between_write_and_read_of_shared_memory():
    source = """extern "C" __global__ void k(int* out) {
      __shared__ int s[128];
      s[threadIdx.x] = threadIdx.x;
      BARRIER
      out[threadIdx.x] = s[127 - threadIdx.x];
    }"""
    # Without the barrier either the race or the read of a value that is not there yet shows first.
    assert_race_and_silent_twin(source, "BARRIER", "__syncthreads();", lambda: [np.zeros(128, np.int32)],
                                kinds=("race", "uninitialised"), grid=(1,), block=(128,))


def test_missing_barrier_before_shared_memory_is_reused():
    source = """extern "C" __global__ void k(int* out) {
      __shared__ int s[128];
      int total = 0;
      for (int round = 0; round < 3; ++round) {
        s[threadIdx.x] = round * threadIdx.x;
        __syncthreads();
        total += s[127 - threadIdx.x];
        BARRIER
      }
      out[threadIdx.x] = total;
    }"""
    assert_race_and_silent_twin(
        source, "BARRIER", "__syncthreads();", lambda: [np.zeros(128, np.int32)], grid=(1,), block=(128,)
    )


def test_two_warps_write_the_same_global_word():
    source = """extern "C" __global__ void k(int* out) {
      if (threadIdx.x % 32 == 0) { INCREMENT }
    }"""
    plain = emulator.compile(source.replace("INCREMENT", "out[0] += 1;"), "sm_90a")
    atomic = emulator.compile(source.replace("INCREMENT", "atomicAdd(out, 1);"), "sm_90a")
    for name, seed in SCHEDULES:
        with pytest.raises(emulator.Fault) as caught:
            plain.launch("k", (1,), (64,), [np.zeros(1, np.int32)], schedule=name, seed=seed)
        assert caught.value.kind == "race"
        out = np.zeros(1, np.int32)
        atomic.launch("k", (3,), (64,), [out], schedule=name, seed=seed)
        assert out[0] == 6


def test_ctas_race_on_global_memory():
    source = (
        """extern "C" __global__ void k(int* out) { out[threadIdx.x + blockIdx.x * STEP] = blockIdx.x; }"""
    )
    for name, seed in SCHEDULES:
        with pytest.raises(emulator.Fault) as caught:
            launch(
                source.replace("STEP", "31"),
                np.zeros(128, np.int32),
                grid=(4,),
                block=(32,),
                schedule=(name, seed),
            )
        assert caught.value.kind == "race" and "an earlier CTA" in str(caught.value)
        launch(
            source.replace("STEP", "32"),
            np.zeros(128, np.int32),
            grid=(4,),
            block=(32,),
            schedule=(name, seed),
        )


LAST_BLOCK = """
extern "C" __global__ void k(const float* x, float* partial, unsigned* counter, float* out) {
  __shared__ unsigned last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = x[blockIdx.x] * 2;
    RELEASE
    last = atomicAdd(counter, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) {
    ACQUIRE
    if (threadIdx.x == 0) { float sum = 0; for (int i = 0; i < gridDim.x; ++i) sum += partial[i];
    *out = sum; }
  }
}"""


@pytest.mark.parametrize("missing", ["RELEASE", "ACQUIRE"])
@pytest.mark.parametrize("concurrent", [1, 3])
def test_the_last_block_pattern_needs_both_fences(missing, concurrent):
    correct = LAST_BLOCK.replace("RELEASE", "__threadfence();").replace("ACQUIRE", "__threadfence();")
    broken = (
        LAST_BLOCK.replace(missing, "")
        .replace("RELEASE", "__threadfence();")
        .replace("ACQUIRE", "__threadfence();")
    )
    x = np.arange(6, dtype=np.float32)

    def args():
        return [x, np.zeros(6, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32)]

    for name, seed in SCHEDULES[:6]:
        values = args()
        launch(
            correct, *values, grid=(6,), block=(64,), schedule=(name, seed), concurrent_clusters=concurrent
        )
        assert values[3][0] == 30
        with pytest.raises(emulator.Fault) as caught:
            launch(
                broken, *args(), grid=(6,), block=(64,), schedule=(name, seed), concurrent_clusters=concurrent
            )
        assert caught.value.kind == "race"


def test_a_flag_in_global_memory_orders_what_was_written_before():
    source = """extern "C" __global__ void k(int* data, int* flag, int* out) {
      if (threadIdx.x == 0) {
        data[0] = 42;
        int one = 1; asm volatile("st.STORE.gpu.global.s32 [%0], %1;" :: "l"(flag), "r"(one) : "memory");
      } else if (threadIdx.x == 32) {
        int seen;
        do {
          asm volatile("ld.LOAD.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        } while (!seen);
        out[0] = data[0];
      }
    }"""
    for store, load, silent in (("release", "acquire", True), ("relaxed", "acquire", False),
                                ("release", "relaxed", False)):
        text = source.replace("STORE", store).replace("LOAD", load)
        for schedule in SCHEDULES[:6]:
            out = np.zeros(1, np.int32)
            args = [np.zeros(1, np.int32), np.zeros(1, np.int32), out]
            if silent:
                launch(text, *args, block=(64,), schedule=schedule)
                assert out[0] == 42
            else:
                with pytest.raises(emulator.Fault) as caught:
                    launch(text, *args, block=(64,), schedule=schedule)
                assert caught.value.kind == "race"


def test_named_barriers_order_producer_and_consumer():
    source = """extern "C" __global__ void k(int* out) {
      __shared__ int s[32];
      if (threadIdx.x < 32) { s[threadIdx.x] = threadIdx.x; asm volatile("bar.arrive 1, 64;" ::: "memory"); }
      else { asm volatile("bar.sync NUMBER, 64;" ::: "memory"); out[threadIdx.x - 32] = s[63 - threadIdx.x]; }
    }"""
    for schedule in SCHEDULES:
        out = np.zeros(32, np.int32)
        launch(source.replace("NUMBER", "1"), out, block=(64,), schedule=schedule)
        assert (out == np.arange(32)[::-1]).all()
    with pytest.raises(emulator.Fault) as caught:
        launch(source.replace("NUMBER", "2"), np.zeros(32, np.int32), block=(64,))
    assert caught.value.kind == "deadlock"


def test_equal_values_stored_twice_are_no_race():
    source = """extern "C" __global__ void k(int* out) { __shared__ int s[8];
      s[threadIdx.x % 8] = 3; __syncthreads();
      out[threadIdx.x % 8] = s[threadIdx.x % 8]; }"""
    for schedule in SCHEDULES:
        out = np.zeros(8, np.int32)
        launch(source, out, block=(96,), schedule=schedule)
        assert (out == 3).all()


def test_checks_can_be_switched_off():
    source = """extern "C" __global__ void k(int* out) { out[0] = threadIdx.x; }"""
    launch(source, np.zeros(1, np.int32), block=(64,), checks=False)
    launch(source, np.zeros(1, np.int32), block=(64,), checks=emulator.Checks(races=False))
    with pytest.raises(emulator.Fault):
        launch(source, np.zeros(1, np.int32), block=(64,))


def test_bytes_of_one_word_belong_to_different_writers():
    source = """extern "C" __global__ void k(unsigned char* out) {
      if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = threadIdx.x / 32;
    }"""
    for schedule in SCHEDULES:
        out = np.zeros(4, np.uint8)
        launch(source, out, block=(128,), schedule=schedule)
        assert out.tolist() == [0, 1, 2, 3]


def test_results_do_not_depend_on_the_schedule():
    source = """extern "C" __global__ void k(const float* x, float* out, int n) {
      __shared__ float s[128];
      float v = 0;
      for (int i = blockIdx.x * 128 + threadIdx.x; i < n; i += 128 * gridDim.x) v += x[i];
      s[threadIdx.x] = v; __syncthreads();
      for (int k = 64; k; k >>= 1) { if (threadIdx.x < k) s[threadIdx.x] += s[threadIdx.x + k];
      __syncthreads(); }
      if (threadIdx.x == 0) out[blockIdx.x] = s[0];
    }"""
    x = np.random.default_rng().standard_normal(5000).astype(np.float32)
    results = set()
    for schedule in SCHEDULES:
        out = np.full(3, np.nan, np.float32)
        launch(source, x, out, np.int32(5000), grid=(3,), schedule=schedule)
        results.add(out.tobytes())
    assert len(results) == 1
