"""Tensor copies through PTX: loads, stores, reductions, gather and scatter, multicast, maps built by the
kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import Fault, TensorMap

sys.path.insert(0, str(Path(__file__).parent))
from small_kernel import SCHEDULES, filled, launch  # noqa: E402

every_schedule = pytest.mark.parametrize("schedule, seed", SCHEDULES)
INIT = """
    setp.eq.u32 %p0, %tid, 0;
    @%p0 mbarrier.init.shared::cta.b64 [%base], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    add.u32 %r1, %base, 1024;
"""
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%base], 0; @!%p1 bra W;"
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
#: each thread copies 4-byte words tid, tid + 32, ... of {n} bytes at 1024 to argument {a}
OUT = """
    mov.u32 %r20, %tid;
    L: mad.lo.u32 %r21, %r20, 4, %r1; ld.shared.b32 %r22, [%r21];
    mul.wide.u32 %rd20, %r20, 4; add.u64 %rd20, %rd20, %a{a}; st.global.b32 [%rd20], %r22;
    add.u32 %r20, %r20, 32; setp.lt.u32 %p5, %r20, {n} / 4; @%p5 bra L;
"""


def out_of(argument, nbytes):
    return OUT.replace("{a}", str(argument)).replace("{n} / 4", str(nbytes // 4))


def load(coordinates, tx, dimension):
    return f"""
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%base], {tx};
        cp.async.bulk.tensor.{dimension}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
            [%r1], [%a0, {{{coordinates}}}], [%base];
    """


def once(text):
    return f"@!%p0 bra AFTER; {text} AFTER:"


@every_schedule
def test_a_swizzled_box_arrives_as_its_image(schedule, seed):
    rng = np.random.default_rng()
    array = rng.integers(0, 1 << 32, (3, 20, 64), dtype=np.uint64).astype(np.uint32)
    out = filled(16, 32)
    launch(
        INIT + once(load("32, 8, 1", 2048, 3)) + WAIT + out_of(1, 2048),
        TensorMap.from_array(array, (1, 16, 32), swizzle="128B"),
        out,
        schedule=schedule,
        seed=seed,
    )
    box = np.zeros((16, 32), np.uint32)
    box[:12] = array[1, 8:20, 32:]
    line, chunk = np.arange(16)[:, None], np.arange(8)[None, :]
    np.testing.assert_array_equal(out.reshape(16, 8, 4)[line, chunk ^ (line % 8)], box.reshape(16, 8, 4))


@every_schedule
def test_stores_and_reductions_write_the_inside_of_the_box(schedule, seed):
    rng = np.random.default_rng()
    for operation, mnemonic in (
        ("store", "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"),
        ("add", "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"),
    ):
        array = rng.integers(-50, 50, (6, 16)).astype(np.float32)
        before = array.copy()
        launch(
            "setp.eq.u32 %p0, %tid, 0;"
            + """
            add.u32 %r1, %base, 1024; mad.lo.u32 %r2, %tid, 4, %r1;
            cvt.rn.f32.u32 %f1, %tid; st.shared.f32 [%r2], %f1;
            fence.proxy.async.shared::cta;
            bar.warp.sync -1;
        """
            + once(f"""
            {mnemonic} [%a0, {{8, 4}}], [%r1];
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        """),
            TensorMap.from_array(array, (4, 8)),
            schedule=schedule,
            seed=seed,
        )
        before[4:, 8:] = np.arange(16).reshape(2, 8) + (before[4:, 8:] if operation == "add" else 0)
        np.testing.assert_array_equal(array, before)


@every_schedule
def test_four_rows_are_gathered_and_scattered(schedule, seed):
    array = np.random.default_rng().integers(0, 99, (10, 16)).astype(np.float32)
    before, out = array.copy(), filled(4, 8, dtype=np.uint32)
    launch(
        INIT
        + once("""
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%base], 128;
        cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
            [%r1], [%a0, {8, 9, 2, 2, 31}], [%base];
    """)
        + WAIT
        + out_of(1, 128)
        + """
        bar.warp.sync -1;
        @!%p0 bra END;
        cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%a0, {0, 5, 0, 1, 7}], [%r1];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        END:
    """,
        TensorMap.from_array(array, (1, 8)),
        out,
        schedule=schedule,
        seed=seed,
    )
    rows = np.stack([before[9, 8:], before[2, 8:], before[2, 8:], before[0, 8:] * 0])
    np.testing.assert_array_equal(out.view(np.float32), rows)
    before[[5, 0, 1, 7], :8] = rows
    np.testing.assert_array_equal(array, before)


@every_schedule
def test_multicast_gives_every_chosen_cta_its_copy_and_its_bytes(schedule, seed):
    array = np.random.default_rng().integers(0, 99, (8, 32)).astype(np.uint32)
    out = filled(2, 64)
    launch(
        INIT
        + f"""
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%base], 256;
        {CLUSTER}
        shl.b32 %r3, %rank, 2; mov.b16 %h1, 3; shl.b32 %r4, %rank, 7; add.u32 %r5, %r1, %r4;
        @%p0
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
            [%r5], [%a0, {{0, %r3}}], [%base], %h1;
        {WAIT}
        shl.b32 %r6, %rank, 8; cvt.u64.u32 %rd1, %r6; add.u64 %a1, %a1, %rd1;
    """
        + out_of(1, 256)
        + CLUSTER,
        TensorMap.from_array(array, (4, 8)),
        out,
        ctas=2,
        cluster=2,
        schedule=schedule,
        seed=seed,
    )
    expected = np.stack([array[:4, :8], array[4:8, :8]]).reshape(64)
    np.testing.assert_array_equal(out, np.stack([expected, expected]))


def test_padded_fp4_counts_its_packed_bytes():
    data = np.random.default_rng().integers(0, 256, (4, 128)).astype(np.uint8)
    out = filled(2, 8, 4)
    made = TensorMap("16u4_align16b", 2, data, (256, 4), (128,), (128, 2))
    launch(INIT + once(load("128, 1", 128, 2)) + WAIT + out_of(1, 256), made, out)
    np.testing.assert_array_equal(
        out.view(np.uint8).reshape(2, 8, 16)[:, :, :8], data[1:3, 64:].reshape(2, 8, 8)
    )


@every_schedule
def test_a_map_built_in_shared_memory_works_from_global_memory(schedule, seed):
    array = np.random.default_rng().integers(0, 1 << 16, (16, 64)).astype(np.uint16)
    space, out = np.zeros(128, np.uint8), filled(4, 8)
    replace = "tensormap.replace.tile.{}.shared::cta.b1024.b{} [%r1], {};\n"
    fields = [
        ("global_address", 64, "%a0"),
        ("rank", 32, 1),
        ("box_dim", 32, "0, 16"),
        ("box_dim", 32, "1, 4"),
        ("global_dim", 32, "0, 64"),
        ("global_dim", 32, "1, 16"),
        ("global_stride", 64, "0, 128"),
        ("element_stride", 32, "0, 1"),
        ("element_stride", 32, "1, 1"),
        ("elemtype", 32, 1),
        ("interleave_layout", 32, 0),
        ("swizzle_mode", 32, 0),
        ("fill_mode", 32, 0),
    ]
    launch(
        INIT
        + "mad.lo.u32 %r2, %tid, 4, %r1; st.shared.b32 [%r2], 0; bar.warp.sync -1;"
        + "@!%p0 bra BUILT;"
        + "".join(replace.format(*f) for f in fields)
        + """
        BUILT: bar.warp.sync -1;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%a1], [%r1], 128;
        fence.proxy.tensormap::generic.acquire.gpu [%a1], 128;
        add.u32 %r1, %r1, 1024;
    """
        + once(load("16, 3", 128, 2).replace("%a0", "%a1"))
        + WAIT
        + out_of(2, 128),
        array,
        space,
        out,
        schedule=schedule,
        seed=seed,
    )
    np.testing.assert_array_equal(out.view(np.uint16).reshape(4, 16), array[3:7, 16:32])


ARRAY = np.zeros((16, 32), np.float32)


@pytest.mark.parametrize(
    "body, kind, message",
    [
        (
            once(
                load("0, 0", 128, 2)
                .replace("[%r1]", "[%base + 64]")
                .replace("[%base + 64], [%a0", "[%r9], [%a0")
            ),
            "misaligned",
            "multiple of 128",
        ),
        (once(load("2, 0", 128, 2)), "tensor-map", "16 bytes"),
        (once(load("0, 0, 0", 128, 3)), "tensor-map", "rank 2"),
        (
            once(
                "mov.u32 %r1, %base; add.u32 %r1, %r1, 15360;" + load("0, 0", 4096, 2).replace("4096", "1024")
            ),
            "out-of-bounds",
            "outside|ends at",
        ),
        (
            once("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%a0, {-4, 0}], [%r1];"),
            "tensor-map",
            "negative",
        ),
        (once("add.u64 %a0, %a0, 8;" + load("0, 0", 128, 2)), "misaligned", "multiple of 64"),
        (once("add.u64 %a0, %a1, 0;" + load("0, 0", 128, 2)), "tensor-map", "no tensor map"),
    ],
)
def test_wrong_tensor_copies_are_reported(body, kind, message):
    box = (16, 32) if "15360" in body else (4, 8)
    for schedule, seed in SCHEDULES[2:]:
        with pytest.raises(Fault, match=message) as caught:
            launch(
                INIT + "add.u32 %r9, %base, 64;" + body,
                TensorMap.from_array(ARRAY, box),
                np.full(64, 7, np.uint32),
                schedule=schedule,
                seed=seed,
            )
        assert caught.value.kind == kind, caught.value
