"""A PTX kernel, made to measure, that runs one tcgen05.mma on operands given as memory images."""

from __future__ import annotations

import numpy as np

from msa_cudacore.ptx import emulator


def columns_loop(count, body):
    """PTX for each group of eight columns."""
    return "\n".join(body(8 * i) for i in range(count // 8))


def registers(name, count):
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


def kernel(
    kind,
    idesc,
    *,
    n,
    a_bytes,
    b_bytes,
    a_descriptor,
    b_descriptor,
    a_columns=0,
    scale_columns=(0, 0),
    accumulate=True,
    extra="",
    pair=False,
    prepare_scales="",
):
    """PTX text.  Columns: D at 0, A (in tensor memory) at 256, scales of A at 300 and of B at 320.

    The images of A and B go to shared memory at 0x800 (A, at most 16 KB) and 0x4800 (B).  With ``pair`` the
    two CTAs of a cluster work together; each finds its own part behind its peer's in every argument, and
    ``n`` counts the columns of D that one of them holds.  ``prepare_scales`` is PTX that the issuing thread
    runs before the product.
    """
    group, everyone = (
        ("cta_group::2", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;")
        if pair
        else ("cta_group::1", "bar.sync 0;")
    )

    def store(column, pointer, width, count):
        """Each thread copies its row of a [128, count] u32 matrix to columns from ``column``, ``width`` at a
        time.
        """
        lines = [f"mul.wide.u32 %rd20, %tid, {4 * count}; add.u64 %rd20, %rd20, {pointer};"]
        for i in range(0, count, width):
            for j in range(width):
                lines.append(f"ld.global.b32 %v{j}, [%rd20 + {4 * (i + j)}];")
            lines.append(f"add.u32 %r5, %r4, {column + i};")
            lines.append(f"tcgen05.st.sync.aligned.32x32b.x{width}.b32 [%r5], {registers('v', width)};")
        return "\n".join(lines)

    prepare = [store(0, "%rd3", 8, n)]
    if a_columns:
        prepare.append(store(256, "%rd1", 8, a_columns))
    for index, (column, pointer) in enumerate(((300, "%rd4"), (320, "%rd5"))):
        if scale_columns[index] and not prepare_scales:
            prepare.append(store(column, pointer, 1, scale_columns[index]))
    a_operand = "[%r8]" if a_columns else "%rd10"
    scales = ", [%r9], [%r10]" if scale_columns[0] else ""
    result = columns_loop(
        n,
        lambda c: (
            f"""
        add.u32 %r5, %r4, {c};
        tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers("v", 8)}, [%r5];
        tcgen05.wait::ld.sync.aligned;
        """
            + "\n".join(f"st.global.b32 [%rd21 + {4 * (c + j)}], %v{j};" for j in range(8))
        ),
    )

    def copy(pointer, offset, nbytes):
        return f"""
        mul.wide.u32 %rd20, %tid, 16; add.u64 %rd20, %rd20, {pointer};
        shl.b32 %r6, %tid, 4; add.u32 %r6, %r6, %base; add.u32 %r6, %r6, {offset};
        mov.u32 %r7, %tid;
        {{ LOOP: setp.ge.u32 %p2, %r7, {nbytes // 16};
        @%p2 bra DONE;
        ld.global.v4.b32 {registers("v", 4)}, [%rd20];
        st.shared.v4.b32 [%r6], {registers("v", 4)};
        add.u64 %rd20, %rd20, 2048; add.u32 %r6, %r6, 2048; add.u32 %r7, %r7, 128;
        bra LOOP; DONE: }}"""

    return f"""
    .version 8.8
    .target sm_100a
    .address_size 64
    .extern .shared .align 1024 .b8 buffer[];
    .visible .entry product(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 sa, .param .u64 sb,
    .param .u64 d)
    {{
        .reg .b32 %r<20>, %v<32>, %tid, %base;
        .reg .b64 %rd<30>;
        .reg .pred %p<4>;
        .reg .b16 %h<2>;
        ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c];
        ld.param.u64 %rd4, [sa]; ld.param.u64 %rd5, [sb]; ld.param.u64 %rd6, [d];
        mov.u32 %tid, %tid.x;
        mov.u32 %base, buffer;
        mov.u32 %r12, %cluster_ctarank;
        mad.wide.u32 %rd1, %r12, {128 * 4 * a_columns if a_columns else a_bytes}, %rd1;
        mad.wide.u32 %rd2, %r12, {b_bytes}, %rd2;
        mad.wide.u32 %rd3, %r12, {512 * n}, %rd3;
        mad.wide.u32 %rd4, %r12, {512 * scale_columns[0]}, %rd4;
        mad.wide.u32 %rd5, %r12, {512 * scale_columns[1]}, %rd5;
        mad.wide.u32 %rd6, %r12, {512 * n}, %rd6;
        shr.u32 %r1, %tid, 5;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra ALLOCATED;
        tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%base], 512;
        tcgen05.relinquish_alloc_permit.{group}.sync.aligned;
        add.u32 %r2, %base, 8;
        setp.eq.u32 %p3, %tid, 0;
        @%p3 mbarrier.init.shared::cta.b64 [%r2], 1;
        ALLOCATED:
        {copy("%rd1", 1024, a_bytes) if not a_columns else ""}
        {copy("%rd2", 17408, b_bytes)}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        ld.shared.b32 %r3, [%base];
        shl.b32 %r4, %r1, 21;
        add.u32 %r4, %r4, %r3;
        {chr(10).join(prepare)}
        tcgen05.wait::st.sync.aligned;
        tcgen05.fence::before_thread_sync;
        {everyone}
        add.u32 %r13, %tid, %r12;
        setp.ne.u32 %p1, %r13, 0;
        @%p1 bra ISSUED;
        tcgen05.fence::after_thread_sync;
        add.u32 %r8, %r3, 256; add.u32 %r9, %r3, 300; add.u32 %r10, %r3, 320;
        mov.b64 %rd10, {a_descriptor}; mov.b64 %rd11, {b_descriptor};
        mov.b32 %r11, {idesc};
        {prepare_scales}
        setp.{"eq" if accumulate else "ne"}.u32 %p2, %tid, 0;
        tcgen05.mma.{group}.{kind} [%r3], {a_operand}, %rd11, %r11{scales}{extra}, %p2;
        add.u32 %r2, %base, 8;
        {"mov.b16 %h1, 3;" if pair else ""}
        tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster{
        ".multicast::cluster" if pair else ""
    }.b64 [%r2]{", %h1" if pair else ""};
        ISSUED:
        add.u32 %r2, %base, 8;
        WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
        @!%p2 bra WAIT;
        tcgen05.fence::after_thread_sync;
        mul.wide.u32 %rd21, %tid, {4 * n}; add.u64 %rd21, %rd21, %rd6;
        {result}
        {everyone}
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra END;
        tcgen05.dealloc.{group}.sync.aligned.b32 %r3, 512;
        END:
        ret;
    }}
    """


def shared_descriptor(offset, leading, stride, swizzle=0):
    """tcgen05 shared-memory descriptor of a place in the kernel's buffer, which starts at 0x400."""
    return (0x400 + offset) >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | swizzle << 61


def core_matrix_image(rows, k_bytes):
    """K-major image without swizzle of uint8 [rows, K bytes], rows a multiple of 8: leading 128, stride 256
    bytes.
    """
    count, width = rows.shape
    assert width == k_bytes == 32 and count % 8 == 0
    image = np.zeros((count // 8, 2, 8, 16), np.uint8)
    image[:] = rows.reshape(count // 8, 8, 2, 16).transpose(0, 2, 1, 3)
    return image.ravel()


def run(
    kind,
    idesc,
    a,
    b,
    c,
    *,
    scales=None,
    a_words=None,
    images=None,
    schedule="random",
    seed=0,
    checks=True,
    **options,
):
    """D of one product.

    Args:
        a, b: uint8 [128, 32] and [N, 32], the bytes of K of each row (``options["pair"]``: [2, 128 or 64, 32]
            and [2, N / 2, 32]).
        c: uint32 [128, N] (pair: [2, 128, columns of one CTA]).
        scales: (uint32 [128, columns], uint32 [128, columns]) cells of the scale factors of A and B.
        a_words: uint32 [128, 8], A in tensor memory instead of ``a``.
        images: (image of A, its descriptor, image of B, its descriptor) instead of ``a`` and ``b``; the
            images go to offsets 1024 and 17408 of the buffer.
    """
    pair = options.get("pair", False)
    n = c.shape[-1]
    parts = 2 if pair else 1
    descriptors = [shared_descriptor(1024, 128, 256), shared_descriptor(17408, 128, 256)]
    if images is not None:
        a_image, descriptors[0], b_image, descriptors[1] = images
    else:
        a_image = (
            np.ascontiguousarray(a_words)
            if a is None
            else np.concatenate([core_matrix_image(x, 32) for x in (a if pair else [a])])
        )
        b_image = np.concatenate([core_matrix_image(x, 32) for x in (b if pair else [b])])
    sa, sb = scales if scales is not None else (np.zeros((128, 1), np.uint32),) * 2
    text = kernel(
        kind,
        idesc,
        n=n,
        a_bytes=a_image.nbytes // parts,
        b_bytes=b_image.nbytes // parts,
        a_descriptor=descriptors[0],
        b_descriptor=descriptors[1],
        a_columns=8 if a_words is not None else 0,
        scale_columns=(sa.shape[-1], sb.shape[-1]) if scales is not None else (0, 0),
        **options,
    )
    d = np.zeros(c.shape, np.uint32)
    emulator.load(text).launch(
        "product",
        (parts,),
        (128,),
        [a_image, b_image, np.ascontiguousarray(c), np.ascontiguousarray(sa), np.ascontiguousarray(sb), d],
        cluster=(parts,),
        shared_bytes=40960,
        schedule=schedule,
        seed=seed,
        checks=checks,
    )
    return d
