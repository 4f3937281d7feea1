"""Kernels written in CUTLASS's Python DSL, whose PTX the emulator runs. Shapes are static, so that a kernel's parameters
are plain pointers and tensor maps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory_tools
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as scale_layouts
from cutlass.cute.nvgpu import cpasync, tcgen05, warp

# --- elementwise ---------------------------------------------------------------------------------------------------

ELEMENTS = 1000
VECTOR = 4


@cute.kernel
def scaled_sum_kernel(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, a: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < ELEMENTS // VECTOR:
        tile = (VECTOR,)
        value = cute.local_tile(x, tile, (i,)).load() * a + cute.local_tile(y, tile, (i,)).load()
        cute.local_tile(out, tile, (i,)).store(value)


@cute.jit
def scaled_sum(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, a: cutlass.Float32):
    """out = a * x + y in vectors of four."""
    scaled_sum_kernel(x, y, out, a).launch(grid=(2, 1, 1), block=(128, 1, 1))


# --- reduction -----------------------------------------------------------------------------------------------------

ROWS = 6
COLUMNS = 512
REDUCE_WARPS = 4


@cute.kernel
def row_sum_kernel(x: cute.Tensor, total: cute.Tensor, largest: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    memory = memory_tools.SmemAllocator()
    sums = memory.allocate_tensor(cutlass.Float32, cute.make_layout(REDUCE_WARPS), byte_alignment=16)
    peaks = memory.allocate_tensor(cutlass.Float32, cute.make_layout(REDUCE_WARPS), byte_alignment=16)
    part = cutlass.Float32(0.0)
    peak = cutlass.Float32(-1e30)
    for column in cutlass.range(thread, COLUMNS, 32 * REDUCE_WARPS):
        value = x[row, column].to(cutlass.Float32)
        part += value
        peak = cute.arch.fmax(peak, value)
    part = cute.arch.warp_reduction_sum(part)
    peak = cute.arch.warp_reduction_max(peak)
    if thread % 32 == 0:
        sums[thread // 32] = part
        peaks[thread // 32] = peak
    cute.arch.sync_threads()
    if thread == 0:
        for i in cutlass.range_constexpr(1, REDUCE_WARPS):
            part += sums[i]
            peak = cute.arch.fmax(peak, peaks[i])
        total[row] = part
        largest[row] = peak


@cute.jit
def row_sum(x: cute.Tensor, total: cute.Tensor, largest: cute.Tensor):
    """Sum and largest value of each bfloat16 row."""
    row_sum_kernel(x, total, largest).launch(grid=(ROWS, 1, 1), block=(32 * REDUCE_WARPS, 1, 1))


# --- warp-level tensor cores -----------------------------------------------------------------------------------------

WARP_M, WARP_N, WARP_K = 32, 32, 64


@cute.kernel
def warp_matmul_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, mma: cute.TiledMma):
    thread, _, _ = cute.arch.thread_idx()
    memory = memory_tools.SmemAllocator()
    # Row pitch of 72 elements: the eight rows of an ldmatrix fall into different banks.
    sa = memory.allocate_tensor(cutlass.Float16, cute.make_layout((WARP_M, WARP_K), stride=(72, 1)), byte_alignment=16)
    sb = memory.allocate_tensor(cutlass.Float16, cute.make_layout((WARP_N, WARP_K), stride=(72, 1)), byte_alignment=16)
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.Float16, num_bits_per_copy=128)
    lanes = cute.make_layout((16, 8), stride=(8, 1))
    tiled = cute.make_tiled_copy_tv(copy, lanes, cute.make_layout((1, 8))).get_slice(thread)
    cute.copy(copy, tiled.partition_S(a), tiled.partition_D(sa))
    cute.copy(copy, tiled.partition_S(b), tiled.partition_D(sb))
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()

    part = mma.get_slice(thread)
    ra = mma.make_fragment_A(part.partition_A(sa))
    rb = mma.make_fragment_B(part.partition_B(sb))
    acc = cute.make_rmem_tensor(mma.partition_shape_C((WARP_M, WARP_N)), cutlass.Float32)
    acc.fill(0.0)
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), cutlass.Float16)
    load_a = cute.make_tiled_copy_A(load, mma)
    load_b = cute.make_tiled_copy_B(load, mma)
    cute.copy(load_a, load_a.get_slice(thread).partition_S(sa), load_a.get_slice(thread).retile(ra))
    cute.copy(load_b, load_b.get_slice(thread).partition_S(sb), load_b.get_slice(thread).retile(rb))
    for k in cutlass.range_constexpr(cute.size(ra, mode=[2])):
        cute.gemm(mma, acc, ra[None, None, k], rb[None, None, k], acc)
    cute.autovec_copy(acc, part.partition_C(c))


@cute.jit
def warp_matmul(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    """C = A B.T with cp.async, ldmatrix and mma.sync, two by two warps."""
    op = warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(op, cute.make_layout((2, 2, 1)), permutation_mnk=(WARP_M, WARP_N, 16))
    warp_matmul_kernel(a, b, c, mma).launch(grid=(1, 1, 1), block=(128, 1, 1))


# --- tcgen05: TMA producer warp, MMA warp, epilogue warps ------------------------------------------------------------

TILE = (128, 64, 64)
STAGES = 2
EPILOGUE_THREADS = 128
MMA_WARP = 4
TMA_WARP = 5


@cute.kernel
def pipelined_matmul_kernel(
    mma: cute.TiledMma,
    atom_a: cute.CopyAtom,
    a: cute.Tensor,
    atom_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
):
    thread, _, _ = cute.arch.thread_idx()
    warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    bm, bn, _ = cute.arch.block_idx()

    @cute.struct
    class Storage:
        stages: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
        accumulator: cute.struct.MemRange[cutlass.Int64, 2]
        tensor_memory: cutlass.Int32

    memory = memory_tools.SmemAllocator()
    storage = memory.allocate(Storage)
    sa = memory.allocate_tensor(cutlass.Float16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    sb = memory.allocate_tensor(cutlass.Float16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    stage_bytes = cute.size_in_bytes(cutlass.Float16, cute.select(layout_a, mode=[0, 1, 2])) + cute.size_in_bytes(
        cutlass.Float16, cute.select(layout_b, mode=[0, 1, 2])
    )
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    loads, products = pipeline.PipelineTmaUmma.create(
        num_stages=STAGES,
        producer_group=one,
        consumer_group=one,
        tx_count=stage_bytes,
        barrier_storage=storage.stages.data_ptr(),
    ).make_participants()
    finished, epilogue = pipeline.PipelineUmmaAsync.create(
        num_stages=1,
        producer_group=one,
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_THREADS),
        barrier_storage=storage.accumulator.data_ptr(),
    ).make_participants()

    part = mma.get_slice(0)
    ga = part.partition_A(cute.local_tile(a, (TILE[0], TILE[2]), (bm, None)))
    gb = part.partition_B(cute.local_tile(b, (TILE[1], TILE[2]), (bn, None)))
    gc = part.partition_C(cute.local_tile(c, (TILE[0], TILE[1]), (bm, bn)))
    alone = cute.make_layout(1)
    sa_tma, ga_tma = cpasync.tma_partition(atom_a, 0, alone, cute.group_modes(sa, 0, 3), cute.group_modes(ga, 0, 3))
    sb_tma, gb_tma = cpasync.tma_partition(atom_b, 0, alone, cute.group_modes(sb, 0, 3), cute.group_modes(gb, 0, 3))
    ra = mma.make_fragment_A(sa)
    rb = mma.make_fragment_B(sb)
    shape = mma.make_fragment_C(mma.partition_shape_C(TILE[:2]))
    k_tiles = cute.size(ga, mode=[3])

    meet = pipeline.NamedBarrier(barrier_id=1, num_threads=EPILOGUE_THREADS + 32)
    tensor_memory = memory_tools.TmemAllocator(storage.tensor_memory.ptr, barrier_for_retrieve=meet)

    if warp_index == TMA_WARP:
        for k in cutlass.range(k_tiles):
            slot = loads.acquire_and_advance()
            cute.copy(atom_a, ga_tma[None, k], sa_tma[None, slot.index], tma_bar_ptr=slot.barrier)
            cute.copy(atom_b, gb_tma[None, k], sb_tma[None, slot.index], tma_bar_ptr=slot.barrier)
        loads.tail()
    if warp_index == MMA_WARP:
        tensor_memory.wait_for_alloc()
        acc = cute.make_tensor(tensor_memory.retrieve_ptr(cutlass.Float32), shape.layout)
        turn = finished.acquire_and_advance()
        for _ in cutlass.range(k_tiles):
            slot = products.wait_and_advance()
            for k in cutlass.range_constexpr(cute.size(ra, mode=[2])):
                cute.gemm(mma, acc, ra[None, None, k, slot.index], rb[None, None, k, slot.index], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            slot.release()
        turn.commit()
    if warp_index < MMA_WARP:
        tensor_memory.allocate(64)
        tensor_memory.wait_for_alloc()
        tensor_memory.relinquish_alloc_permit()
        pointer = tensor_memory.retrieve_ptr(cutlass.Float32)
        acc = cute.make_tensor(pointer, shape.layout)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32)
        halves = ((TILE[0], TILE[1] // 2),)
        acc_parts = cute.zipped_divide(acc, halves)
        load = tcgen05.make_tmem_copy(atom, acc_parts[None, 0])
        source = load.get_slice(thread).partition_S(acc_parts)
        target = load.get_slice(thread).partition_D(cute.zipped_divide(gc, halves))
        values = cute.make_rmem_tensor(target[None, None, 0].shape, cutlass.Float32)
        turn = epilogue.wait_and_advance()
        for i in cutlass.range_constexpr(cute.size(source, mode=[2])):
            cute.copy(load, source[None, None, i], values)
            cute.autovec_copy(values, target[None, None, i])
        # Every load has finished before the columns are offered for reuse.
        cute.arch.fence_view_async_tmem_load()
        turn.release()
        cute.arch.barrier(barrier_id=2, number_of_threads=EPILOGUE_THREADS)
        tensor_memory.free(pointer)


@cute.jit
def pipelined_matmul(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    """C = A B.T, float16 in and float32 out: one warp drives TMA, one issues tcgen05.mma, four read tensor memory."""
    op = tcgen05.MmaF16BF16Op(
        cutlass.Float16,
        cutlass.Float32,
        (TILE[0], TILE[1], 16),
        tcgen05.CtaGroup.ONE,
        tcgen05.OperandSource.SMEM,
        cute.nvgpu.OperandMajorMode.K,
        cute.nvgpu.OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(op)
    layout_a = blackwell.make_smem_layout_a(mma, TILE, cutlass.Float16, STAGES)
    layout_b = blackwell.make_smem_layout_b(mma, TILE, cutlass.Float16, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    one_a, one_b = cute.select(layout_a, mode=[0, 1, 2]), cute.select(layout_b, mode=[0, 1, 2])
    atom_a, map_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_a, TILE, mma)
    atom_b, map_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_b, TILE, mma)
    grid = (c.shape[0] // TILE[0], c.shape[1] // TILE[1], 1)
    pipelined_matmul_kernel(mma, atom_a, map_a, atom_b, map_b, c, layout_a, layout_b).launch(grid=grid, block=(192, 1, 1))


# --- block-scaled NVFP4 ----------------------------------------------------------------------------------------------

SCALED_TILE = (128, 128, 256)
SCALE_BLOCK = 16


@cute.kernel
def scaled_matmul_kernel(
    mma: cute.TiledMma,
    atom_a: cute.CopyAtom,
    a: cute.Tensor,
    atom_b: cute.CopyAtom,
    b: cute.Tensor,
    atom_sa: cute.CopyAtom,
    scale_a: cute.Tensor,
    atom_sb: cute.CopyAtom,
    scale_b: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    layout_sa: cute.Layout,
    layout_sb: cute.Layout,
    stage_bytes: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    bm, bn, _ = cute.arch.block_idx()

    @cute.struct
    class Storage:
        stages: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
        accumulator: cute.struct.MemRange[cutlass.Int64, 2]
        tensor_memory: cutlass.Int32

    memory = memory_tools.SmemAllocator()
    storage = memory.allocate(Storage)
    fp4, fp8 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
    sa = memory.allocate_tensor(fp4, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    sb = memory.allocate_tensor(fp4, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    ssa = memory.allocate_tensor(fp8, layout_sa, byte_alignment=128)
    ssb = memory.allocate_tensor(fp8, layout_sb, byte_alignment=128)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    loads, products = pipeline.PipelineTmaUmma.create(
        num_stages=STAGES,
        producer_group=one,
        consumer_group=one,
        tx_count=stage_bytes,
        barrier_storage=storage.stages.data_ptr(),
    ).make_participants()
    finished, epilogue = pipeline.PipelineUmmaAsync.create(
        num_stages=1,
        producer_group=one,
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_THREADS),
        barrier_storage=storage.accumulator.data_ptr(),
    ).make_participants()

    part = mma.get_slice(0)
    rows, columns = (SCALED_TILE[0], SCALED_TILE[2]), (SCALED_TILE[1], SCALED_TILE[2])
    alone = cute.make_layout(1)

    def through_map(atom, shared, tensor):
        return cpasync.tma_partition(atom, 0, alone, cute.group_modes(shared, 0, 3), cute.group_modes(tensor, 0, 3))

    sa_tma, ga_tma = through_map(atom_a, sa, part.partition_A(cute.local_tile(a, rows, (bm, None, 0))))
    sb_tma, gb_tma = through_map(atom_b, sb, part.partition_B(cute.local_tile(b, columns, (bn, None, 0))))
    ssa_tma, gsa_tma = through_map(atom_sa, ssa, part.partition_A(cute.local_tile(scale_a, rows, (bm, None, 0))))
    ssb_tma, gsb_tma = through_map(atom_sb, ssb, part.partition_B(cute.local_tile(scale_b, columns, (bn, None, 0))))
    ssa_tma, gsa_tma = cute.filter_zeros(ssa_tma), cute.filter_zeros(gsa_tma)
    ssb_tma, gsb_tma = cute.filter_zeros(ssb_tma), cute.filter_zeros(gsb_tma)
    gc = part.partition_C(cute.local_tile(c, SCALED_TILE[:2], (bm, bn)))
    ra = mma.make_fragment_A(sa)
    rb = mma.make_fragment_B(sb)
    shape = mma.make_fragment_C(mma.partition_shape_C(SCALED_TILE[:2]))
    k_tiles = cute.size(ga_tma, mode=[1])

    meet = pipeline.NamedBarrier(barrier_id=1, num_threads=EPILOGUE_THREADS + 32)
    tensor_memory = memory_tools.TmemAllocator(storage.tensor_memory.ptr, barrier_for_retrieve=meet)

    if warp_index == TMA_WARP:
        for k in cutlass.range(k_tiles):
            slot = loads.acquire_and_advance()
            cute.copy(atom_a, ga_tma[None, k], sa_tma[None, slot.index], tma_bar_ptr=slot.barrier)
            cute.copy(atom_b, gb_tma[None, k], sb_tma[None, slot.index], tma_bar_ptr=slot.barrier)
            cute.copy(atom_sa, gsa_tma[None, k], ssa_tma[None, slot.index], tma_bar_ptr=slot.barrier)
            cute.copy(atom_sb, gsb_tma[None, k], ssb_tma[None, slot.index], tma_bar_ptr=slot.barrier)
        loads.tail()
    if warp_index == MMA_WARP:
        tensor_memory.wait_for_alloc()
        pointer = tensor_memory.retrieve_ptr(cutlass.Float32)
        acc = cute.make_tensor(pointer, shape.layout)
        # The accumulator, then the scales of A, then those of B, side by side in tensor memory.
        offset = tcgen05.find_tmem_tensor_col_offset(acc)
        stage_sa, stage_sb = cute.slice_(layout_sa, (None, None, None, 0)), cute.slice_(layout_sb, (None, None, None, 0))
        tsa_layout = scale_layouts.make_tmem_layout_sfa(mma, SCALED_TILE, SCALE_BLOCK, stage_sa)
        tsb_layout = scale_layouts.make_tmem_layout_sfb(mma, SCALED_TILE, SCALE_BLOCK, stage_sb)
        tsa = cute.make_tensor(cute.recast_ptr(pointer + offset, dtype=fp8), tsa_layout)
        offset_b = offset + tcgen05.find_tmem_tensor_col_offset(tsa)
        tsb = cute.make_tensor(cute.recast_ptr(pointer + offset_b, dtype=fp8), tsb_layout)
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), fp8)
        tsa_dense, tsb_dense = cute.filter_zeros(tsa), cute.filter_zeros(tsb)
        move_a, move_b = tcgen05.make_s2t_copy(atom, tsa_dense), tcgen05.make_s2t_copy(atom, tsb_dense)
        from_a = tcgen05.get_s2t_smem_desc_tensor(move_a, move_a.get_slice(0).partition_S(cute.filter_zeros(ssa)))
        from_b = tcgen05.get_s2t_smem_desc_tensor(move_b, move_b.get_slice(0).partition_S(cute.filter_zeros(ssb)))
        to_a = move_a.get_slice(0).partition_D(tsa_dense)
        to_b = move_b.get_slice(0).partition_D(tsb_dense)
        turn = finished.acquire_and_advance()
        for _ in cutlass.range(k_tiles):
            slot = products.wait_and_advance()
            cute.copy(move_a, from_a[None, None, None, None, slot.index], to_a)
            cute.copy(move_b, from_b[None, None, None, None, slot.index], to_b)
            for k in cutlass.range_constexpr(cute.size(ra, mode=[2])):
                mma.set(tcgen05.Field.SFA, tsa[None, None, k].iterator)
                mma.set(tcgen05.Field.SFB, tsb[None, None, k].iterator)
                cute.gemm(mma, acc, ra[None, None, k, slot.index], rb[None, None, k, slot.index], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            slot.release()
        turn.commit()
    if warp_index < MMA_WARP:
        tensor_memory.allocate(256)
        tensor_memory.wait_for_alloc()
        tensor_memory.relinquish_alloc_permit()
        pointer = tensor_memory.retrieve_ptr(cutlass.Float32)
        acc = cute.make_tensor(pointer, shape.layout)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32)
        quarters = ((SCALED_TILE[0], SCALED_TILE[1] // 4),)
        acc_parts = cute.zipped_divide(acc, quarters)
        load = tcgen05.make_tmem_copy(atom, acc_parts[None, 0])
        source = load.get_slice(thread).partition_S(acc_parts)
        target = load.get_slice(thread).partition_D(cute.zipped_divide(gc, quarters))
        values = cute.make_rmem_tensor(target[None, None, 0].shape, cutlass.Float32)
        turn = epilogue.wait_and_advance()
        for i in cutlass.range_constexpr(cute.size(source, mode=[2])):
            cute.copy(load, source[None, None, i], values)
            cute.autovec_copy(values, target[None, None, i])
        # Every load has finished before the columns are offered for reuse.
        cute.arch.fence_view_async_tmem_load()
        turn.release()
        cute.arch.barrier(barrier_id=2, number_of_threads=EPILOGUE_THREADS)
        tensor_memory.free(pointer)


@cute.jit
def scaled_matmul(a: cute.Tensor, b: cute.Tensor, scale_a: cute.Tensor, scale_b: cute.Tensor, c: cute.Tensor):
    """C = (A scales)(B scales).T with E2M1 elements and one E4M3 scale for 16 of them (the scale arrays are in the
    tensor core's own 128 x 4 tiles); tcgen05.cp brings the scales into tensor memory."""
    fp4, fp8 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
    op = tcgen05.MmaMXF4NVF4Op(
        fp8, (SCALED_TILE[0], SCALED_TILE[1], 64), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM
    )
    mma = cute.make_tiled_mma(op)
    sfa = cute.make_tensor(scale_a.iterator, scale_layouts.tile_atom_to_shape_SF(a.shape, SCALE_BLOCK))
    sfb = cute.make_tensor(scale_b.iterator, scale_layouts.tile_atom_to_shape_SF(b.shape, SCALE_BLOCK))
    layout_a = blackwell.make_smem_layout_a(mma, SCALED_TILE, fp4, STAGES)
    layout_b = blackwell.make_smem_layout_b(mma, SCALED_TILE, fp4, STAGES)
    layout_sa = scale_layouts.make_smem_layout_sfa(mma, SCALED_TILE, SCALE_BLOCK, STAGES)
    layout_sb = scale_layouts.make_smem_layout_sfb(mma, SCALED_TILE, SCALE_BLOCK, STAGES)
    stage = (None, None, None, 0)
    one_a, one_b = cute.slice_(layout_a, stage), cute.slice_(layout_b, stage)
    one_sa, one_sb = cute.slice_(layout_sa, stage), cute.slice_(layout_sb, stage)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    atom_a, map_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_a, SCALED_TILE, mma)
    atom_b, map_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_b, SCALED_TILE, mma)
    atom_sa, map_sa = cute.nvgpu.make_tiled_tma_atom_A(load, sfa, one_sa, SCALED_TILE, mma, internal_type=cutlass.Int16)
    atom_sb, map_sb = cute.nvgpu.make_tiled_tma_atom_B(load, sfb, one_sb, SCALED_TILE, mma, internal_type=cutlass.Int16)
    stage_bytes = (
        cute.size_in_bytes(fp4, one_a)
        + cute.size_in_bytes(fp4, one_b)
        + cute.size_in_bytes(fp8, one_sa)
        + cute.size_in_bytes(fp8, one_sb)
    )
    grid = (c.shape[0] // SCALED_TILE[0], c.shape[1] // SCALED_TILE[1], 1)
    scaled_matmul_kernel(
        mma, atom_a, map_a, atom_b, map_b, atom_sa, map_sa, atom_sb, map_sb, c, layout_a, layout_b, layout_sa, layout_sb,
        stage_bytes,
    ).launch(grid=grid, block=(192, 1, 1))


# --- two CTAs, one MMA, multicast loads ------------------------------------------------------------------------------

PAIR_TILE = (256, 64, 64)


@cute.kernel
def paired_matmul_kernel(
    mma: cute.TiledMma,
    atom_a: cute.CopyAtom,
    a: cute.Tensor,
    atom_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    pair: cute.Layout,
):
    thread, _, _ = cute.arch.thread_idx()
    warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    leader = rank == 0
    where = pair.get_flat_coord(rank)

    @cute.struct
    class Storage:
        stages: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
        accumulator: cute.struct.MemRange[cutlass.Int64, 2]
        freed: cutlass.Int64
        tensor_memory: cutlass.Int32

    memory = memory_tools.SmemAllocator()
    storage = memory.allocate(Storage)
    sa = memory.allocate_tensor(cutlass.Float16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    sb = memory.allocate_tensor(cutlass.Float16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    # The leader's barrier counts the bytes that both CTAs receive.
    stage_bytes = 2 * (
        cute.size_in_bytes(cutlass.Float16, cute.select(layout_a, mode=[0, 1, 2]))
        + cute.size_in_bytes(cutlass.Float16, cute.select(layout_b, mode=[0, 1, 2]))
    )
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    loads, products = pipeline.PipelineTmaUmma.create(
        num_stages=STAGES,
        producer_group=one,
        consumer_group=one,
        tx_count=stage_bytes,
        barrier_storage=storage.stages.data_ptr(),
        cta_layout_vmnk=pair,
    ).make_participants()
    finished, epilogue = pipeline.PipelineUmmaAsync.create(
        num_stages=1,
        producer_group=one,
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 2 * EPILOGUE_THREADS),
        barrier_storage=storage.accumulator.data_ptr(),
        cta_layout_vmnk=pair,
    ).make_participants()

    part = mma.get_slice(rank)
    ga = part.partition_A(cute.local_tile(a, (PAIR_TILE[0], PAIR_TILE[2]), (0, None)))
    gb = part.partition_B(cute.local_tile(b, (PAIR_TILE[1], PAIR_TILE[2]), (0, None)))
    gc = part.partition_C(cute.local_tile(c, (PAIR_TILE[0], PAIR_TILE[1]), (0, 0)))
    alone = cute.make_layout(1)
    sa_tma, ga_tma = cpasync.tma_partition(atom_a, where[2], alone, cute.group_modes(sa, 0, 3), cute.group_modes(ga, 0, 3))
    sb_tma, gb_tma = cpasync.tma_partition(atom_b, where[1], alone, cute.group_modes(sb, 0, 3), cute.group_modes(gb, 0, 3))
    ra = mma.make_fragment_A(sa)
    rb = mma.make_fragment_B(sb)
    shape = mma.make_fragment_C(mma.partition_shape_C(PAIR_TILE[:2]))
    k_tiles = cute.size(ga, mode=[3])

    meet = pipeline.NamedBarrier(barrier_id=1, num_threads=EPILOGUE_THREADS + 32)
    tensor_memory = memory_tools.TmemAllocator(
        storage.tensor_memory.ptr,
        barrier_for_retrieve=meet,
        is_two_cta=True,
        two_cta_tmem_dealloc_mbar_ptr=storage.freed.ptr,
    )
    # The peer signals `freed` from its own side: its initialisation must be known there first.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()

    if warp_index == TMA_WARP:
        for k in cutlass.range(k_tiles):
            slot = loads.acquire_and_advance()
            cute.copy(atom_a, ga_tma[None, k], sa_tma[None, slot.index], tma_bar_ptr=slot.barrier)
            cute.copy(atom_b, gb_tma[None, k], sb_tma[None, slot.index], tma_bar_ptr=slot.barrier)
        loads.tail()
    if warp_index == MMA_WARP:
        tensor_memory.wait_for_alloc()
        acc = cute.make_tensor(tensor_memory.retrieve_ptr(cutlass.Float32), shape.layout)
        if leader:
            turn = finished.acquire_and_advance()
            for _ in cutlass.range(k_tiles):
                slot = products.wait_and_advance()
                for k in cutlass.range_constexpr(cute.size(ra, mode=[2])):
                    cute.gemm(mma, acc, ra[None, None, k, slot.index], rb[None, None, k, slot.index], acc)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                slot.release()
            turn.commit()
            finished.tail()
    if warp_index < MMA_WARP:
        tensor_memory.allocate(64)
        tensor_memory.wait_for_alloc()
        tensor_memory.relinquish_alloc_permit()
        pointer = tensor_memory.retrieve_ptr(cutlass.Float32)
        acc = cute.make_tensor(pointer, shape.layout)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32)
        halves = ((PAIR_TILE[0] // 2, PAIR_TILE[1] // 2),)
        acc_parts = cute.zipped_divide(acc, halves)
        load = tcgen05.make_tmem_copy(atom, acc_parts[None, 0])
        source = load.get_slice(thread).partition_S(acc_parts)
        target = load.get_slice(thread).partition_D(cute.zipped_divide(gc, halves))
        values = cute.make_rmem_tensor(target[None, None, 0].shape, cutlass.Float32)
        turn = epilogue.wait_and_advance()
        for i in cutlass.range_constexpr(cute.size(source, mode=[2])):
            cute.copy(load, source[None, None, i], values)
            cute.autovec_copy(values, target[None, None, i])
        cute.arch.fence_view_async_tmem_load()
        turn.release()
        cute.arch.barrier(barrier_id=2, number_of_threads=EPILOGUE_THREADS)
        tensor_memory.free(pointer)


@cute.jit
def paired_matmul(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    """As pipelined_matmul with cta_group::2: each CTA of a pair holds half of A and half of B."""
    op = tcgen05.MmaF16BF16Op(
        cutlass.Float16,
        cutlass.Float32,
        (PAIR_TILE[0], PAIR_TILE[1], 16),
        tcgen05.CtaGroup.TWO,
        tcgen05.OperandSource.SMEM,
        cute.nvgpu.OperandMajorMode.K,
        cute.nvgpu.OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(op)
    layout_a = blackwell.make_smem_layout_a(mma, PAIR_TILE, cutlass.Float16, STAGES)
    layout_b = blackwell.make_smem_layout_b(mma, PAIR_TILE, cutlass.Float16, STAGES)
    pair = cute.tiled_divide(cute.make_layout((2, 1, 1)), (mma.thr_id,))
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
    one_a, one_b = cute.select(layout_a, mode=[0, 1, 2]), cute.select(layout_b, mode=[0, 1, 2])
    atom_a, map_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_a, PAIR_TILE, mma, pair.shape)
    atom_b, map_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_b, PAIR_TILE, mma, pair.shape)
    paired_matmul_kernel(mma, atom_a, map_a, atom_b, map_b, c, layout_a, layout_b, pair).launch(
        grid=(2, 1, 1), block=(192, 1, 1), cluster=(2, 1, 1)
    )
