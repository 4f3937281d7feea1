"""Encoders of instruction, matrix and tensor-map descriptors, field by field against independent sources."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from msa_cudacore.ptx.descriptors import FORMATS, SWIZZLES, TiledMap, instruction_descriptor, matrix_descriptor
from msa_cudacore.ptx.source import load_text

# Printed by CUTLASS's `cute::UMMA::make_instr_desc` and `make_instr_desc_block_scaled` (cute/arch/mma_sm100_desc.hpp).
CUTLASS_VALUES = (
    (("f16", 128, 256), {"a": "f16"}, 0x08400010),
    (("f16", 64, 8), {"a": "bf16", "a_mn_major": True}, 0x04028490),
    (("tf32", 256, 16), {"a": "tf32", "b_mn_major": True}, 0x10050910),
    (("f8f6f4", 128, 64), {"a": "e4m3", "b": "e5m2"}, 0x08100410),
    (("i8", 128, 64), {"a": "s8", "accumulator": "s32"}, 0x081004A0),
    (("mxf8f6f4", 128, 128), {"a": "e4m3"}, 0x08A00000),
    (("mxf8f6f4", 128, 128), {"a": "e2m1", "b": "e4m3"}, 0x08A00280),
    (("mxf4", 128, 128), {"a": "e2m1"}, 0x08A00480),
    (("mxf4nvf4", 256, 128), {"a": "e2m1"}, 0x10200480),
)


@pytest.mark.parametrize(("shape", "options", "word"), CUTLASS_VALUES)
def test_instruction_descriptors_of_cutlass(shape, options, word):
    assert instruction_descriptor(*shape, **options) == word


def fields(word: int, layout: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Cut a word into fields; every bit that no field covers must be zero."""
    covered = 0
    values = {}
    for name, (high, low) in layout.items():
        mask = (1 << high - low + 1) - 1
        assert not covered & mask << low
        covered |= mask << low
        values[name] = word >> low & mask
    assert word & ~covered == 0, f"{word:#x} has bits outside its fields"
    return values


# PTX ISA, tables of the instruction descriptor: bits of each field.
PLAIN = {
    "saturate": (3, 3), "accumulator": (5, 4), "a": (9, 7), "b": (12, 10), "negate_a": (13, 13), "negate_b": (14, 14),
    "a_mn_major": (15, 15), "b_mn_major": (16, 16), "n": (22, 17), "m": (28, 24),
}
BLOCK_SCALED = {
    "b_scale_id": (5, 4), "a": (9, 7), "b": (12, 10), "negate_a": (13, 13), "negate_b": (14, 14), "a_mn_major": (15, 15),
    "b_mn_major": (16, 16), "n": (22, 17), "ue8m0": (23, 23), "m": (28, 27), "a_scale_id": (30, 29),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_field_of_the_instruction_descriptor_is_where_the_isa_has_it(kind):
    scaled = kind.startswith("mx")
    flags = [False] if kind in ("mxf4", "mxf4nvf4") else [False, True]
    negations = [False] if kind == "i8" else [False, True]
    accumulator = {"i8": "s32"}.get(kind, "f32")
    for (a, a_code), (b, b_code) in itertools.product(FORMATS[kind].items(), repeat=2):
        if kind == "f16" and a != b:
            continue
        for a_major, b_major, negate_a, negate_b in itertools.product(flags, flags, negations, negations):
            for m, n in ((128, 8), (256, 256), (128, 48)):
                word = instruction_descriptor(
                    kind, m, n, a=a, b=b, accumulator=accumulator, a_mn_major=a_major, b_mn_major=b_major,
                    negate_a=negate_a, negate_b=negate_b,
                )
                got = fields(word, BLOCK_SCALED if scaled else PLAIN)
                common = (got["a"], got["b"], got["negate_a"], got["negate_b"], got["a_mn_major"], got["b_mn_major"])
                assert common == (a_code, b_code, negate_a, negate_b, a_major, b_major)
                assert got["n"] == n // 8
                if scaled:
                    assert got["m"] == m // 128 and got["ue8m0"] == (kind != "mxf4nvf4")
                else:
                    assert got["m"] == m // 16 and got["accumulator"] == {"f32": 1, "s32": 2}[accumulator]


def test_options_of_single_kinds():
    assert fields(instruction_descriptor("i8", 64, 16, a="u8", accumulator="s32", saturate=True), PLAIN)["saturate"] == 1
    assert fields(instruction_descriptor("f16", 64, 16, a="f16", accumulator="f16"), PLAIN)["accumulator"] == 0
    scaled = fields(instruction_descriptor("mxf8f6f4", 128, 16, a="e4m3", a_scale_id=3, b_scale_id=2), BLOCK_SCALED)
    assert (scaled["a_scale_id"], scaled["b_scale_id"]) == (3, 2)
    assert fields(instruction_descriptor("mxf4nvf4", 128, 16, a="e2m1", scale_type="ue8m0"), BLOCK_SCALED)["ue8m0"] == 1


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        (("fp16", 128, 16), {"a": "f16"}, "kind"),
        (("f16", 100, 16), {"a": "f16"}, "m"),
        (("mxf4", 64, 16), {"a": "e2m1"}, "m"),
        (("f16", 128, 12), {"a": "f16"}, "n"),
        (("f16", 128, 264), {"a": "f16"}, "n"),
        (("f16", 128, 16), {"a": "e4m3"}, "a"),
        (("f16", 128, 16), {"a": "f16", "b": "bf16"}, "b"),
        (("f16", 128, 16), {"a": "bf16", "accumulator": "f16"}, "accumulator"),
        (("mxf4nvf4", 128, 16), {"a": "e2m1", "b_mn_major": True}, "K-major"),
        (("mxf4", 128, 16), {"a": "e2m1", "scale_type": "ue4m3"}, "scale_type"),
        (("i8", 128, 16), {"a": "s8", "accumulator": "s32", "negate_a": True}, "negation"),
        (("f16", 128, 16), {"a": "f16", "saturate": True}, "saturate"),
        (("f16", 128, 16), {"a": "f16", "a_scale_id": 1}, "scales"),
    ],
)
def test_undefined_instruction_descriptors_are_refused(arguments, options, named):
    with pytest.raises(ValueError, match=named):
        instruction_descriptor(*arguments, **options)


# PTX ISA, table of the shared-memory descriptor.
MATRIX = {"address": (13, 0), "leading": (29, 16), "stride": (45, 32), "version": (48, 46), "base": (51, 49), "swizzle": (63, 61)}


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_every_field_of_the_matrix_descriptor_is_where_the_isa_has_it(swizzle):
    word = matrix_descriptor(0x2A470, swizzle, stride_bytes=0x3FFF0, leading_bytes=0x1230)
    assert fields(word, MATRIX) == {
        "address": 0x2A47, "leading": 0x123, "stride": 0x3FFF, "version": 1, "base": 0,
        "swizzle": {"none": 0, "128B_ATOM_32B": 1, "128B": 2, "64B": 4, "32B": 6}[swizzle],
    }


def test_undefined_matrix_descriptors_are_refused():
    with pytest.raises(ValueError, match="address"):
        matrix_descriptor(8, "none", stride_bytes=128)
    with pytest.raises(ValueError, match="address"):
        matrix_descriptor(1 << 18, "none", stride_bytes=128)
    with pytest.raises(ValueError, match="stride_bytes"):
        matrix_descriptor(0, "none", stride_bytes=100)
    with pytest.raises(ValueError, match="swizzle"):
        matrix_descriptor(0, "256B", stride_bytes=128)


def test_the_kernel_composes_the_same_descriptors():
    """The constants of the kernel, computed by NVRTC, against the encoders here."""
    from msa_cudacore.blackwell import Configuration, source
    from msa_cudacore.ptx.nvrtc import compile_ptx

    names = ("KEYS_DESCRIPTOR", "WEIGHTS_DESCRIPTOR", "SCORES_INSTRUCTION", "OUTPUT_INSTRUCTION")
    exported = "".join(f'extern "C" __device__ unsigned long long value_{name} = {name};\n' for name in names)
    ptx = compile_ptx(source(Configuration(1, 10, False, 1, 0).constants) + exported, "sm_100a")
    values = {name: int(re.search(rf"value_{name} = (-?\d+)", ptx).group(1)) % 2**64 for name in names}
    assert values == {
        "KEYS_DESCRIPTOR": matrix_descriptor(0, "64B", stride_bytes=512),
        "WEIGHTS_DESCRIPTOR": matrix_descriptor(0, "32B", stride_bytes=256),
        "SCORES_INSTRUCTION": instruction_descriptor("mxf4nvf4", 128, 48, a="e2m1"),
        "OUTPUT_INSTRUCTION": instruction_descriptor("f16", 128, 16, a="f16", b_mn_major=True),
    }


def test_strides_of_single_dimensions_are_replaced():
    tiles = TiledMap(0x1000, (1, 1, 128, 64), (7, 3, 64, 1), (1, 1, 128, 64), "64B")
    assert tiles.filled_strides == (8192, 8192, 64, 1)
    assert tiles.box_bytes == 8192
    tiles = TiledMap(0x1000, (5, 4, 128, 64), (73728, 8192, 64, 1), (1, 1, 128, 64), "64B")
    assert tiles.filled_strides == (73728, 8192, 64, 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pointer": 0x1008}, "pointer"),
        ({"shape": (0, 4, 128, 64)}, "shape"),
        ({"strides": (73729, 8192, 64, 1)}, "strides"),
        ({"strides": (1 << 40, 8192, 64, 1)}, "strides"),
        ({"strides": (-73728, 8192, 64, 1)}, "strides"),
        ({"strides": (73728, 8192, 64, 2)}, "innermost"),
        ({"box": (1, 1, 257, 64)}, "box"),
        ({"box": (1, 1, 128, 60)}, "box"),
        ({"swizzle": "32B"}, "swizzle"),
        ({"swizzle": "64"}, "swizzle"),
        ({"box": (1, 128, 64)}, "rank"),
    ],
)
def test_impossible_maps_are_refused(change, named):
    legal = {"pointer": 0x1000, "shape": (5, 4, 128, 64), "strides": (73728, 8192, 64, 1), "box": (1, 1, 128, 64), "swizzle": "64B"}
    TiledMap(**legal)
    with pytest.raises(ValueError, match=named):
        TiledMap(**{**legal, **change})


def swizzled_box(rows: np.ndarray, width: int) -> np.ndarray:
    """Shared-memory image of a box of `width`-byte rows: 16-byte chunk c of line y lies at c ^ (y mod width/16), where
    lines have 128 bytes (CUDA programming guide, tensor memory access swizzle)."""
    flat = rows.reshape(-1)
    image = np.empty_like(flat)
    offsets = np.arange(flat.size)
    shifted = {32: offsets >> 7 & 1, 64: offsets >> 7 & 3, 128: offsets >> 7 & 7}[width]
    image[offsets ^ shifted << 4] = flat
    return image


COPY_KERNEL = """
#include "cp_async_bulk_tensor.cuh"
#include "mbarrier.cuh"
extern "C" __global__ void copy_box(const __grid_constant__ ptx::TensorMap map, u8* image, i32 head, i32 page) {
  extern __shared__ __align__(1024) u8 box[];
  __shared__ u64 barrier;
  const ptx::SharedAddress full = ptx::shared_address(&barrier);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_arrive_expect_tx(full, 8192);
    ptx::cp_async_bulk_tensor_4d(ptx::shared_address(box), map, 0, 0, head, page, full, 0x12F0000000000000ull);
  }
  __syncthreads();
  ptx::mbarrier_wait_parity(full, 0);
  for (u32 i = threadIdx.x; i < 8192; i += blockDim.x) image[i] = box[i];
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("row_bytes", [64, 128])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_device_copies_the_box_that_the_map_describes(rng, row_bytes, heads):
    torch = pytest.importorskip("torch")
    from msa_cudacore.launch import device
    from msa_cudacore.launch.compile import compile_cubin

    if device.facts(0).compute_capability < (9, 0):
        pytest.skip("tensor copies need compute capability 9.0")
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    Device(0).set_current()
    pool = torch.as_tensor(rng.integers(0, 256, (6, heads * 128 * 144), np.uint8)).cuda()
    tiles = TiledMap(
        pool.data_ptr(), (6, heads, 8192 // row_bytes, row_bytes), (heads * 128 * 144, 8192, row_bytes, 1),
        (1, 1, 8192 // row_bytes, row_bytes), f"{row_bytes}B",
    )
    image = torch.empty(8192, dtype=torch.uint8, device="cuda")
    capability = device.facts(0).compute_capability
    code = compile_cubin(load_text(COPY_KERNEL), f"sm_{capability[0]}{capability[1]}", name="copy_box.cu").code
    kernel = ObjectCode.from_cubin(code).get_kernel("copy_box")
    stream = Device(0).create_stream()
    for page, head in itertools.product((0, 3, 5), range(heads)):
        image.fill_(0xA5)
        torch.cuda.synchronize()
        launch(
            stream, LaunchConfig(grid=1, block=128, shmem_size=8192), kernel, tiles.for_device(),
            np.uint64(image.data_ptr()), np.int32(head), np.int32(page),
        )
        stream.sync()
        rows = pool[page, head * 8192 : (head + 1) * 8192].cpu().numpy()
        np.testing.assert_array_equal(image.cpu().numpy(), swizzled_box(rows, row_bytes))
