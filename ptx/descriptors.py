"""Host-side encoders of the descriptors that tensor-core and tensor-copy instructions read.

Three kinds: the 32-bit instruction descriptor of `tcgen05.mma`, its 64-bit shared-memory matrix descriptor, and tensor
maps. Field positions follow the PTX ISA ("tcgen05 instruction descriptor", "tcgen05 shared memory descriptor";
https://docs.nvidia.com/cuda/parallel-thread-execution/) and the driver API's `cuTensorMapEncodeTiled`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["FORMATS", "KINDS", "SWIZZLES", "TiledMap", "instruction_descriptor", "matrix_descriptor"]

FORMATS = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "i8": {"u8": 0, "s8": 1},
    "mxf8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf4": {"e2m1": 1},
    "mxf4nvf4": {"e2m1": 1},
}
"""Element formats of A and B by kind, with their codes."""

KINDS = tuple(FORMATS)

_ACCUMULATORS = {"f16": 0, "f32": 1, "s32": 2}
_SCALE_TYPES = {"mxf8f6f4": ("ue8m0",), "mxf4": ("ue8m0",), "mxf4nvf4": ("ue4m3", "ue8m0")}

SWIZZLES = {"none": 0, "128B_ATOM_32B": 1, "128B": 2, "64B": 4, "32B": 6}
"""Swizzle modes of a matrix descriptor, with their codes."""

_SWIZZLE_WIDTH = {"none": None, "32B": 32, "64B": 64, "128B": 128}


def _choice(name: str, value: Any, accepted: Any) -> Any:
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}; accepted are {', '.join(map(repr, accepted))}")
    return value


def instruction_descriptor(
    kind: str,
    m: int,
    n: int,
    *,
    a: str,
    b: str | None = None,
    accumulator: str = "f32",
    a_mn_major: bool = False,
    b_mn_major: bool = False,
    negate_a: bool = False,
    negate_b: bool = False,
    saturate: bool = False,
    scale_type: str | None = None,
    a_scale_id: int = 0,
    b_scale_id: int = 0,
) -> int:
    """The instruction descriptor of a dense `tcgen05.mma` of one `kind`.

    Parameters
    ----------
    kind
        A key of `FORMATS`: the `.kind::` qualifier.
    m, n
        Shape of D. Which pairs an instruction takes also depends on `cta_group` and `.ws`; here only the fields' ranges
        are checked: m a multiple of 16 up to 256 (128 or 256 for block-scaled kinds), n a multiple of 8 up to 256.
    a, b
        Element formats; b defaults to a.
    accumulator
        "f32", "f16" (kind f16 with f16 operands, f8f6f4) or "s32" (kind i8).
    a_mn_major, b_mn_major
        The operand is stored with M (N) contiguous instead of K. Not for mxf4 and mxf4nvf4.
    negate_a, negate_b, saturate
        Negation is not for kind i8; saturation is for kind i8 alone.
    scale_type
        Block-scaled kinds: "ue8m0", or "ue4m3" (mxf4nvf4, its default).
    a_scale_id, b_scale_id
        First byte of the scales within their 32-bit word.

    Raises
    ------
    ValueError
        A value is not defined for the kind; the message names it and what is accepted.
    """
    formats = FORMATS[_choice("kind", kind, KINDS)]
    a_code = formats[_choice("a", a, formats)]
    b_code = formats[_choice("b", a if b is None else b, formats)]
    if kind == "f16" and a_code != b_code:
        raise ValueError(f"b is {b!r}; kind 'f16' accepts the format of a, {a!r}")
    scaled = kind in _SCALE_TYPES
    _choice("m", m, (128, 256) if scaled else range(16, 257, 16))
    _choice("n", n, range(8, 257, 8))
    packed = kind in ("mxf4", "mxf4nvf4")
    if packed and (a_mn_major or b_mn_major):
        raise ValueError(f"kind {kind!r} accepts K-major operands only")
    if kind == "i8" and (negate_a or negate_b):
        raise ValueError("kind 'i8' has no negation")
    if saturate and kind != "i8":
        raise ValueError(f"saturate is for kind 'i8', not {kind!r}")

    word = a_code << 7 | b_code << 10 | negate_a << 13 | negate_b << 14 | a_mn_major << 15 | b_mn_major << 16
    word |= n >> 3 << 17
    if scaled:
        if accumulator != "f32":
            raise ValueError(f"accumulator is {accumulator!r}; kind {kind!r} accepts 'f32'")
        types = _SCALE_TYPES[kind]
        scale = _choice("scale_type", types[0] if scale_type is None else scale_type, types)
        _choice("a_scale_id", a_scale_id, range(4))
        _choice("b_scale_id", b_scale_id, range(4))
        return word | b_scale_id << 4 | (scale == "ue8m0") << 23 | m >> 7 << 27 | a_scale_id << 29
    if scale_type is not None or a_scale_id or b_scale_id:
        raise ValueError(f"kind {kind!r} has no block scales")
    accepted = {"i8": ("s32",), "f16": ("f32", "f16") if a == "f16" else ("f32",), "f8f6f4": ("f32", "f16")}
    _choice("accumulator", accumulator, accepted.get(kind, ("f32",)))
    return word | saturate << 3 | _ACCUMULATORS[accumulator] << 4 | m >> 4 << 24


def matrix_descriptor(address: int, swizzle: str, *, stride_bytes: int, leading_bytes: int = 16) -> int:
    """The shared-memory descriptor of a matrix operand (`tcgen05.mma`, `tcgen05.cp`).

    Parameters
    ----------
    address
        Shared address of the operand, a multiple of 16. The pattern of a swizzle counts absolute addresses: it starts
        with the operand when that is a multiple of 256 (32B), 512 (64B) or 1024 (128B).
    swizzle
        A key of `SWIZZLES`.
    stride_bytes
        K-major: bytes from one group of eight rows to the next. MN-major with a swizzle: from one group of eight along K
        to the next.
    leading_bytes
        MN-major with a swizzle: bytes between blocks of one swizzle width along M or N. Without swizzle: between 16-byte
        chunks. Ignored by swizzled K-major operands.

    Raises
    ------
    ValueError
        An offset is no multiple of 16 or does not fit 18 bits, or the swizzle is unknown.
    """
    code = SWIZZLES[_choice("swizzle", swizzle, SWIZZLES)]
    for name, value in (("address", address), ("stride_bytes", stride_bytes), ("leading_bytes", leading_bytes)):
        if value % 16 or not 0 <= value < 1 << 18:
            raise ValueError(f"{name} is {value}; accepted are multiples of 16 below {1 << 18}")
    version = 1  # of tcgen05; 0 is the descriptor of wgmma
    return address >> 4 | leading_bytes >> 4 << 16 | stride_bytes >> 4 << 32 | version << 46 | code << 61


@dataclass(frozen=True)
class TiledMap:
    """What a tensor map describes: a strided tensor of bytes in global memory, and the box that one copy moves.

    Dimensions are in the order of array libraries, outermost first; the innermost is contiguous.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes. Those of size-1 dimensions mean nothing."""
    box: tuple[int, ...]
    swizzle: str
    """"none", "32B", "64B" or "128B": how the box is permuted in shared memory."""

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not 1 <= rank <= 5 or len(self.strides) != rank or len(self.box) != rank:
            raise ValueError(f"shape {self.shape}, strides {self.strides} and box {self.box} must have one rank, 1 to 5")
        width = _SWIZZLE_WIDTH[_choice("swizzle", self.swizzle, _SWIZZLE_WIDTH)]
        if self.pointer % 16:
            raise ValueError(f"pointer is {self.pointer:#x}; accepted are multiples of 16")
        if any(not 1 <= size <= 1 << 32 for size in self.shape):
            raise ValueError(f"shape is {self.shape}; accepted are sizes from 1 to {1 << 32}")
        if any(not 1 <= size <= 256 for size in self.box) or self.box[-1] % 16:
            raise ValueError(f"box is {self.box}; accepted are sizes from 1 to 256, the innermost a multiple of 16")
        if width is not None and self.box[-1] > width:
            raise ValueError(f"box is {self.box}; swizzle {self.swizzle!r} accepts at most {width} bytes innermost")
        for stride in self.filled_strides[:-1]:
            if stride % 16 or not 0 < stride < 1 << 40:
                raise ValueError(f"strides are {self.strides}; accepted are multiples of 16 from 16 to {(1 << 40) - 16}")
        if self.filled_strides[-1] != 1:
            raise ValueError(f"strides are {self.strides}; the innermost must be 1")

    @property
    def filled_strides(self) -> tuple[int, ...]:
        """Strides with those of size-1 dimensions replaced by ones that every rule accepts."""
        filled: list[int] = []
        extent = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            used = (stride if size > 1 else math.ceil(extent / 16) * 16) if filled else 1 if size == 1 else stride
            filled.append(used)
            extent = max(extent, used * size)
        return tuple(reversed(filled))

    @property
    def box_bytes(self) -> int:
        """What a copy of one box adds to its mbarrier."""
        return math.prod(self.box)

    def for_device(self) -> Any:
        """The tensor map as a kernel argument, encoded by the driver through `cuda.core`."""
        from cuda.core import TensorMapDescriptorOptions
        from cuda.core.utils import StridedMemoryView

        # The enumeration is not exported by name; the options' default is one of its members.
        modes = type(TensorMapDescriptorOptions(self.box).swizzle)
        swizzle = modes["NONE" if self.swizzle == "none" else f"SWIZZLE_{self.swizzle}"]
        view = StridedMemoryView.from_cuda_array_interface(_DeviceBytes(self), stream_ptr=-1)
        return view.as_tensor_map(self.box, swizzle=swizzle)

    def for_emulator(self, array: Any) -> Any:
        """The same map for the emulator. `array`: the NumPy view whose first byte is the tensor's."""
        from .emulator.tensor_map import TensorMap

        return TensorMap(
            "uint8", len(self.shape), array, self.shape[::-1], self.filled_strides[-2::-1], self.box[::-1],
            swizzle=self.swizzle,
        )


class _DeviceBytes:
    """Presents device bytes through the CUDA array interface."""

    def __init__(self, tiles: TiledMap) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (tiles.pointer, False),
            "typestr": "|u1",
            "shape": tiles.shape,
            "strides": tiles.filled_strides,
            "stream": None,
        }
