"""Tensor arguments of any array library, described by pointer, shape, byte strides, dtype and device.

torch and CuPy tensors are read directly (torch refuses, or mis-exports, float8 through some DLPack paths);
anything else goes through DLPack. No library is imported that the caller did not bring, nothing is copied and
nothing is synchronised. A :class:`Tensor` keeps the caller's object alive.
"""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["DTYPE_BYTES", "Tensor", "allocate_like", "describe"]

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}

_ACCEPTED = {
    **dict.fromkeys(("q", "out"), "bfloat16"),
    **dict.fromkeys(("k", "v"), "uint8"),
    **dict.fromkeys(("k_scale", "v_scale"), "uint8 or float8_e4m3fn"),
    **dict.fromkeys(("q2k_indices", "page_table", "seqused_k"), "int32"),
    "lse": "float32",
    "workspace_buffer": "uint8, or any other of plain numbers",
}
"""What a message names as accepted for an argument of a dtype that none takes."""

_NUMPY_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass(frozen=True)
class Tensor:
    """Where an argument's elements lie. `strides` are in bytes; those of size-1 dimensions mean nothing."""

    name: str
    framework: str
    """`torch`, `cupy`, `numpy` or `dlpack`."""
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    """`cpu` or `cuda`."""
    ordinal: int
    writable: bool
    owner: Any = field(repr=False, compare=False)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> str:
        return "cpu" if self.device == "cpu" else f"cuda:{self.ordinal}"

    @property
    def extent(self) -> tuple[int, int]:
        """First byte and one past the last byte that an element occupies; empty tensors occupy none."""
        if self.elements == 0:
            return self.pointer, self.pointer
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True) if size > 1)
        return self.pointer, self.pointer + last + self.element_bytes

    def canonical_strides(self) -> tuple[int, ...]:
        """Byte strides with 0 for size-1 dimensions, whose stride frameworks fill in as they like."""
        return tuple(0 if size == 1 else stride for size, stride in zip(self.shape, self.strides, strict=True))

    def retyped(self, dtype: str) -> Tensor:
        """The same bytes under another dtype of the same width."""
        assert DTYPE_BYTES[dtype] == self.element_bytes
        return Tensor(
            self.name, self.framework, self.pointer, self.shape, self.strides, dtype, self.device, self.ordinal,
            self.writable, self.owner,
        )

    def to_numpy(self) -> np.ndarray:
        """A zero-copy NumPy view of a host tensor."""
        if self.device != "cpu":
            raise ValueError(f"{self.name} lies on {self.place}, not in host memory")
        raw = np.asarray(_HostBuffer(self))
        return raw.view(_NUMPY_DTYPES.get(self.dtype, self.dtype))

    def overlaps(self, other: Tensor) -> bool:
        """Whether two tensors share a byte; decided exactly, or by their extents where that is too hard."""
        a, b = self.extent, other.extent
        if self.place != other.place or a[1] <= b[0] or b[1] <= a[0]:
            return False
        # NumPy solves the Diophantine problem from addresses and strides alone; no memory is touched.
        try:
            return bool(np.shares_memory(np.asarray(_HostBuffer(self)), np.asarray(_HostBuffer(other)), max_work=10**5))
        except np.exceptions.TooHardError:
            return True


class _HostBuffer:
    """Presents a tensor's address range through NumPy's array interface, as unsigned integers."""

    def __init__(self, tensor: Tensor) -> None:
        self._owner = tensor.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.pointer, not tensor.writable),
            "typestr": f"<u{tensor.element_bytes}" if tensor.element_bytes > 1 else "|u1",
            "shape": tensor.shape,
            "strides": tensor.canonical_strides(),
        }


def describe(name: str, value: Any) -> Tensor:
    """Describe one argument.

    Parameters
    ----------
    name
        The argument's name, for messages.
    value
        A torch tensor, CuPy or NumPy array, or an object with `__dlpack__` on the CPU or a CUDA device.

    Raises
    ------
    TypeError
        `value` is none of these, or its dtype is none of `DTYPE_BYTES`.
    ValueError
        It lies on a device that is neither a CPU nor CUDA, has no storage or too little for its shape and strides, is
        sparse, nested, lazily negated or masked, or has a negative stride.
    """
    torch = sys.modules.get("torch")
    cupy = sys.modules.get("cupy")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = _describe_torch(name, value, torch)
    elif cupy is not None and isinstance(value, cupy.ndarray):
        tensor = _describe_cupy(name, value)
    elif isinstance(value, np.ndarray):
        tensor = _describe_numpy(name, value)
    elif hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        tensor = _describe_dlpack(name, value)
    else:
        raise TypeError(
            f"{name} is a {type(value).__name__}; accepted are torch tensors, CuPy and NumPy arrays, "
            f"and objects with __dlpack__"
        )
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        if size > 1 and stride < 0:
            raise ValueError(f"{name} has byte strides {tensor.strides}; negative strides are not accepted")
    if tensor.elements and not tensor.pointer:
        raise ValueError(f"{name} has {tensor.elements} elements and no storage; accepted are tensors with memory")
    return tensor


def _check_dtype(name: str, dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise TypeError(f"{name} has dtype {dtype}; accepted is {_ACCEPTED.get(name, ', '.join(DTYPE_BYTES))}")
    return dtype


def _describe_torch(name: str, value: Any, torch: Any) -> Tensor:
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        raise ValueError(f"{name} has layout {layout}; accepted is torch.strided")
    if value.is_neg():
        # The sign bit is flipped when torch reads the tensor; its memory holds the opposite values.
        raise ValueError(f"{name} is lazily negated; accepted is memory that holds its values, {name}.resolve_neg()")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} lies on {value.device}; accepted are the CPU and CUDA devices")
    dtype = _check_dtype(name, str(value.dtype).removeprefix("torch."))
    size = value.element_size()
    try:
        pointer, held = value.data_ptr(), value.untyped_storage().nbytes()
    except RuntimeError as error:  # inside torch.vmap, torch.func.grad and the like
        raise ValueError(f"{name} is a torch tensor without storage of its own; accepted are plain tensors") from error
    tensor = Tensor(
        name, "torch", pointer, tuple(value.shape), tuple(stride * size for stride in value.stride()),
        dtype, value.device.type, value.device.index or 0, True, value,
    )
    # A storage may be resized under its views, which torch notices as little as a kernel would.
    needed = value.storage_offset() * size + tensor.extent[1] - pointer
    if pointer and tensor.elements and needed > held:
        raise ValueError(
            f"{name} reaches over {needed} bytes of a storage of {held}; accepted are tensors whose storage holds them"
        )
    return tensor


def _describe_cupy(name: str, value: Any) -> Tensor:
    return Tensor(
        name, "cupy", value.data.ptr, tuple(value.shape), tuple(value.strides),
        _check_dtype(name, value.dtype.name), "cuda", value.device.id, True, value,
    )


def _describe_numpy(name: str, value: np.ndarray) -> Tensor:
    dtype = _check_dtype(name, value.dtype.name)
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array; accepted are arrays without a mask (ids are masked by -1)")
    if not value.dtype.isnative:
        raise TypeError(f"{name} has byte order {value.dtype.byteorder!r}; accepted is the machine's own")
    return Tensor(
        name, "numpy", value.ctypes.data, value.shape, value.strides, dtype, "cpu", 0, value.flags.writeable, value,
    )


# DLPack device types of memory that a CUDA kernel can read and write in place: kDLCUDA, kDLCUDAManaged.
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_MANAGED = 1, 2, 13

# DLDataTypeCode: kDLInt, kDLUInt, kDLFloat, kDLBfloat, kDLFloat8_e4m3fn.
_DLPACK_KINDS = {0: "int{}", 1: "uint{}", 2: "float{}", 4: "bfloat{}", 10: "float{}_e4m3fn"}


class _DLTensor(ctypes.Structure):
    """The head of `DLTensor` in https://github.com/dmlc/dlpack/blob/v1.1/include/dlpack/dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
    )


# Prototypes of our own: those of `ctypes.pythonapi` belong to the whole process.
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_VERSIONED_TENSOR_OFFSET = 32
"""Bytes before the DLTensor of a DLManagedTensorVersioned: version, manager context, deleter, flags."""


class _Exporter:
    """Hands an object's DLPack export on and notes its element type, which cuda.core cannot name for float8."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.dtype = ""

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, ordinal = self._value.__dlpack_device__()
        return int(kind), int(ordinal)

    def __dlpack__(self, **keywords: Any) -> Any:
        capsule = self._value.__dlpack__(**keywords)
        versioned = _capsule_is_valid(capsule, b"dltensor_versioned")
        address = _capsule_pointer(capsule, b"dltensor_versioned" if versioned else b"dltensor")
        head = _DLTensor.from_address(address + (_VERSIONED_TENSOR_OFFSET if versioned else 0))
        if head.device_type != self.__dlpack_device__()[0]:
            raise ValueError(f"__dlpack_device__ says {self.__dlpack_device__()[0]}, the capsule {head.device_type}")
        kind = _DLPACK_KINDS.get(head.code, f"DLPack code {head.code} of {{}} bits")
        self.dtype = kind.format(head.bits) + (f" x {head.lanes}" if head.lanes != 1 else "")
        return capsule


def _describe_dlpack(name: str, value: Any) -> Tensor:
    from cuda.core.utils import StridedMemoryView

    exporter = _Exporter(value)
    try:
        kind, ordinal = exporter.__dlpack_device__()
    except Exception as error:
        raise TypeError(f"{name} is a {type(value).__name__} whose __dlpack_device__ failed: {_line(error)}") from error
    if kind not in (_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
        raise ValueError(f"{name} has DLPack device type {kind}; accepted are the CPU (1) and CUDA (2, 13)")
    try:
        # -1: no stream ordering. A cross-stream wait inserted here would break a capture in progress.
        view = StridedMemoryView.from_dlpack(exporter, stream_ptr=-1)
    except Exception as error:
        raise TypeError(f"{name} is a {type(value).__name__} whose DLPack export failed: {_line(error)}") from error
    dtype = _check_dtype(name, exporter.dtype)
    shape = tuple(view.shape)
    if view.strides is None:
        strides, step = [], DTYPE_BYTES[dtype]
        for size in reversed(shape):
            strides.append(step)
            step *= size
        strides.reverse()
    else:
        strides = [stride * DTYPE_BYTES[dtype] for stride in view.strides]
    device = "cpu" if kind == _DLPACK_CPU else "cuda"
    return Tensor(
        name, "dlpack", view.ptr, shape, tuple(strides), dtype, device, ordinal if device == "cuda" else 0,
        not view.readonly, (value, view),
    )


def _line(error: Exception) -> str:
    """An exception of foreign code in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def allocate_like(reference: Tensor, name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """A new, uninitialised array of the library and on the device of `reference`.

    Raises
    ------
    ValueError
        The library is known through DLPack alone and offers no array-API `empty` with this dtype.
    """
    if reference.framework == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=reference.owner.device)
    if reference.framework == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(reference.ordinal):
            return cupy.empty(shape, dtype=_NUMPY_DTYPES.get(dtype, dtype))
    if reference.framework == "numpy":
        return np.empty(shape, dtype=_NUMPY_DTYPES.get(dtype, dtype))
    source = reference.owner[0]
    namespace = getattr(source, "__array_namespace__", None)
    try:
        library = namespace()
        return library.empty(shape, dtype=getattr(library, dtype), device=source.device)
    except Exception as error:
        raise ValueError(
            f"{name} must be given: a {type(source).__name__} offers no way to allocate a {dtype} tensor like it"
        ) from error
