"""Tensor maps: the checks of cuTensorMapEncodeTiled, the 128 bytes a kernel sees, and what a box copy
touches.

Rules: CUDA driver API, ``cuTensorMapEncodeTiled``.  The 128-byte object is opaque by contract.  The bytes
written here put every field that ``tensormap.replace`` can change where ptxas puts it (so the instruction
works on them; maps encoded by the driver on an H200 have the same bytes there).  The rest holds a tag, or
zeros where a kernel builds its map from zeros with ``tensormap.replace``; bytes of any other origin are
refused instead of misread.

Images, fill words, the pitch under a swizzle wider than the box, and the two coordinate rules were compared
with an H200 (tests/emulator/data/h200_tensor_copies.json).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .matrix_descriptors import (NO_SWIZZLE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_128B_ATOM_32B,
                                 SWIZZLE_128B_ATOM_64B, swizzle)

BYTES = 128
_TAG = b"msa_cudacore emulated tensor map"
_TAG_AT = 0x60

# Element types in the order of CUtensorMapDataType: name, bits in global memory.
DATA_TYPES = (
    ("uint8", 8), ("uint16", 16), ("uint32", 32), ("int32", 32), ("uint64", 64), ("int64", 64),
    ("float16", 16), ("float32", 32), ("float64", 64), ("bfloat16", 16),
    ("float32_ftz", 32), ("tfloat32", 32), ("tfloat32_ftz", 32),
    ("16u4_align8b", 4), ("16u4_align16b", 4), ("16u6_align16b", 6),
)
_NAMES = tuple(name for name, _ in DATA_TYPES)
U4_ALIGN8, U4_ALIGN16, U6_ALIGN16 = 13, 14, 15

# CUtensorMapSwizzle: name, XOR pattern, widest inner box in bytes.
SWIZZLES = (
    ("none", NO_SWIZZLE, None), ("32B", SWIZZLE_32B, 32), ("64B", SWIZZLE_64B, 64),
    ("128B", SWIZZLE_128B, 128), ("128B_ATOM_32B", SWIZZLE_128B_ATOM_32B, 128),
    ("128B_ATOM_32B_FLIP_8B", SWIZZLE_128B_ATOM_32B, 128), ("128B_ATOM_64B", SWIZZLE_128B_ATOM_64B, 128),
)
_FLIP_8B = 5
_INTERLEAVES = ("none", "16B", "32B")
_PROMOTIONS = ("none", "64B", "128B", "256B")
_FILLS = ("none", "nan_request_zero_fma")

# Element codes of the 128 bytes: CUtensorMapDataType -> (code, TF32 flag).
_CODES = {**{i: (i, 0) for i in range(8)}, 10: (8, 0), 8: (9, 0), 9: (10, 0), 11: (7, 1), 12: (8, 1),
          U4_ALIGN8: (11, 0), U4_ALIGN16: (12, 0), U6_ALIGN16: (13, 0)}
_TYPES_BY_CODE = {code: data_type for data_type, code in _CODES.items()}
_ATOMS = {3: 0, 4: 1, 5: 2, 6: 3}


class TensorMapError(ValueError):
    """A tensor map, or a copy through one, that the hardware or the driver would refuse."""


def _choice(argument, value, names):
    """Index of an enumeration value given as a name, a number, or an enumeration object."""
    if isinstance(value, str):
        for index, name in enumerate(names):
            if value.lower() == name.lower():
                return index
    else:
        try:
            index = int(value)
        except (TypeError, ValueError):
            index = -1
        if 0 <= index < len(names):
            return index
    raise TensorMapError(f"{argument}={value!r}: accepted are {', '.join(names)} or their numbers "
                         f"0..{len(names) - 1}")


def _data_type(value):
    if isinstance(value, (type, np.dtype)):
        name = np.dtype(value).name
        aliases = {"int8": "uint8", "int16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
        name = aliases.get(name, name)
        if name in _NAMES:
            return _NAMES.index(name)
    return _choice("data_type", value, _NAMES)


@dataclass(frozen=True)
class TileMap:
    """The fields of a tensor map.  Dimension 0 is the innermost; strides and addresses in bytes."""

    data_type: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    nan_fill: bool
    promotion: int = 0

    @property
    def rank(self):
        return len(self.dims)

    @property
    def element_bits(self):
        return DATA_TYPES[self.data_type][1]

    @property
    def padded(self):
        """Sixteen elements occupy 16 bytes of shared memory although they are narrower than a byte."""
        return self.data_type in (U4_ALIGN16, U6_ALIGN16)

    @property
    def counts(self):
        """Elements of a box along each dimension after the traversal strides."""
        return (self.box[0], *(-(-b // s) for b, s in zip(self.box[1:], self.element_strides[1:])))

    @property
    def row_bytes(self):
        """Global bytes of one inner row of the box."""
        return self.box[0] * self.element_bits // 8

    @property
    def inner_bytes(self):
        """Shared-memory bytes of one inner row of the box."""
        return self.box[0] if self.padded else self.row_bytes

    @property
    def pitch(self):
        """Shared-memory bytes from one inner row of the box to the next: at least the width of the swizzle.
        """
        return max(self.inner_bytes, SWIZZLES[self.swizzle][2] or 0)

    @property
    def transaction_bytes(self):
        """Bytes that a load of one box adds to its mbarrier: the whole box, padding not counted."""
        return self.row_bytes * int(np.prod(self.counts[1:], dtype=np.int64))

    def encode(self):
        """The 128 bytes."""
        data = bytearray(BYTES)
        code, tf32 = _CODES[self.data_type]
        words = np.zeros(BYTES // 4, np.uint32)
        words[0], words[1] = self.address & 0xFFFFFFFF, self.address >> 32
        words[2] = ((self.rank - 1) << 4 | code << 7 | min(self.swizzle, 3) << 13 | self.nan_fill << 15
                    | tf32 << 16
                    | self.promotion << 17 | _ATOMS.get(self.swizzle, 0) << 19)
        for i, stride in enumerate(self.strides):
            words[3 + i] = stride >> 4 & 0xFFFFFFFF
            words[7] |= (stride >> 36) << (4 * i)
        for i in range(self.rank):
            words[8 + i] = self.dims[i] - 1
            words[13] |= (self.element_strides[i] - 1) << (3 * i)
        words[13] |= (self.box[0] - 1) << 24
        for i in range(1, self.rank):
            words[14] |= (self.box[i] - 1) << (8 * (i - 1))
        data[:] = words.tobytes()
        data[_TAG_AT:_TAG_AT + len(_TAG)] = _TAG
        return bytes(data)


@lru_cache(maxsize=256)
def decode(data):
    """The TileMap in 128 bytes; TensorMapError where they are not a legal tensor map."""
    if len(data) != BYTES or data[_TAG_AT:_TAG_AT + len(_TAG)] not in (_TAG, bytes(len(_TAG))):
        raise TensorMapError(f"the {len(data)} bytes are no tensor map made by this emulator "
                             f"(emulator.TensorMap)")
    words = [int(w) for w in np.frombuffer(data, np.uint32)]
    flags = words[2]
    rank = (flags >> 4 & 7) + 1
    key = (flags >> 7 & 15, flags >> 16 & 1)
    if key not in _TYPES_BY_CODE or rank > 5:
        raise TensorMapError(f"tensor map with element code {key[0]} and rank {rank}: corrupted")
    if flags >> 11 & 3:
        raise TensorMapError("tensor map with an interleaved layout: not modelled")
    mode = flags >> 13 & 3
    if mode == 3:
        mode += flags >> 19 & 7
    if mode >= len(SWIZZLES):
        raise TensorMapError(f"tensor map with swizzle atom {flags >> 19 & 7}: not defined")
    strides = tuple((words[3 + i] << 4) | (words[7] >> (4 * i) & 15) << 36 for i in range(rank - 1))
    box = (words[13] >> 24, *(words[14] >> (8 * i) & 255 for i in range(rank - 1)))
    fields = TileMap(
        data_type=_TYPES_BY_CODE[key], address=words[0] | words[1] << 32,
        dims=tuple(words[8 + i] + 1 for i in range(rank)), strides=strides, box=tuple(b + 1 for b in box),
        element_strides=tuple((words[13] >> (3 * i) & 7) + 1 for i in range(rank)), swizzle=mode,
        nan_fill=bool(flags >> 15 & 1), promotion=flags >> 17 & 3,
    )
    _check_fields(fields)
    if fields.address % (32 if fields.padded else 16):
        raise TensorMapError(f"global address {fields.address:#x} must be a multiple of "
                             f"{32 if fields.padded else 16}")
    return fields


# tensormap.replace: element types of the instruction -> (element code, TF32 flag).
_REPLACE_TYPES = {**{i: (i, 0) for i in range(11)}, 11: (7, 1), 12: (8, 1), 13: (11, 0), 14: (12, 0),
                  15: (13, 0)}


def replace_field(data, field, value, index=0):
    """The 128 bytes after ``tensormap.replace`` of one field.

    Args:
        data: bytes [128].
        field: the name in the instruction, such as "global_address" or "box_dim".
        value: the new value, in the encoding of the instruction (rank less one, strides in bytes, ...).
        index: dimension of the fields that have one.

    Raises:
        TensorMapError: the field is not known or the value does not fit it.
    """
    words = np.frombuffer(data, np.uint32).copy()

    def insert(word, low, bits, content):
        if not 0 <= content < 1 << bits:
            raise TensorMapError(f"tensormap.replace.{field}: {value} does not fit")
        mask = ((1 << bits) - 1) << low
        words[word] = (int(words[word]) & ~mask & 0xFFFFFFFF) | content << low

    if not 0 <= index < 5:
        raise TensorMapError(f"tensormap.replace.{field}: dimension {index} is not in 0..4")
    if field == "global_address":
        insert(0, 0, 32, value & 0xFFFFFFFF)
        insert(1, 0, 32, value >> 32)
    elif field == "rank":
        insert(2, 4, 3, value)
    elif field == "box_dim":
        insert(*((13, 24, 8) if index == 0 else (14, 8 * (index - 1), 8)), value - 1)
    elif field == "global_dim":
        insert(8 + index, 0, 32, value - 1 & 0xFFFFFFFF)
    elif field == "global_stride":
        if index > 3:
            raise TensorMapError(f"tensormap.replace.{field}: dimension {index} is not in 0..3")
        insert(3 + index, 0, 32, value >> 4 & 0xFFFFFFFF)
        insert(7, 4 * index, 4, value >> 36)
    elif field == "element_stride":
        insert(13, 3 * index, 3, value - 1)
    elif field == "elemtype":
        if value not in _REPLACE_TYPES:
            raise TensorMapError(f"tensormap.replace.{field}: {value} is not in 0..15")
        code, tf32 = _REPLACE_TYPES[value]
        insert(2, 7, 4, code)
        insert(2, 16, 1, tf32)
    elif field == "interleave_layout":
        insert(2, 11, 2, value)
    elif field == "swizzle_mode":
        insert(2, 13, 2, value)
    elif field == "swizzle_atomicity":
        insert(2, 19, 3, value)
    elif field == "fill_mode":
        insert(2, 15, 1, value)
    else:
        raise TensorMapError(f"tensormap.replace.{field}: no such field")
    return words.tobytes()


class TensorMap:
    """A tensor map for a kernel parameter, described like ``cuTensorMapEncodeTiled`` describes it.

    Args:
        data_type: a name of ``DATA_TYPES``, its number (CUtensorMapDataType), or a NumPy dtype.
        rank: 1 to 5.
        array: the NumPy buffer whose first byte is the tensor's global address.
        global_dim: ``rank`` sizes in elements, innermost first.
        global_strides: ``rank - 1`` strides in bytes, of dimensions 1 and up.
        box_dim: ``rank`` box sizes in elements, 1..256.
        element_strides: ``rank`` traversal strides, 1..8 (default all 1).
        interleave: only "none" is modelled.
        swizzle: "none", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B", "128B_ATOM_64B", or a
            number.
        l2_promotion: accepted and checked; without effect on results.
        oob_fill: "none" (zeros) or "nan_request_zero_fma".

    Raises:
        TensorMapError: the driver would refuse the combination; the message names argument, value and rule.
    """

    def __init__(self, data_type, rank, array, global_dim, global_strides, box_dim, element_strides=None, *,
                 interleave="none", swizzle="none", l2_promotion="none", oob_fill="none"):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array must be a NumPy array, not {type(array).__name__}")
        rank = int(rank)
        if not 1 <= rank <= 5:
            raise TensorMapError(f"rank={rank}: accepted are 1 to 5")
        if element_strides is None:
            element_strides = (1,) * rank
        vectors = {"global_dim": (global_dim, rank), "global_strides": (global_strides, rank - 1),
                   "box_dim": (box_dim, rank), "element_strides": (element_strides, rank)}
        for name, (vector, length) in vectors.items():
            if len(tuple(vector)) != length:
                raise TensorMapError(f"{name}={tuple(vector)}: rank {rank} needs {length} values")
        if _choice("interleave", interleave, _INTERLEAVES):
            raise TensorMapError(f"interleave={interleave!r}: only 'none' is modelled")
        self.array = array
        self.fields = TileMap(
            data_type=_data_type(data_type), address=0, dims=tuple(map(int, global_dim)),
            strides=tuple(map(int, global_strides)), box=tuple(map(int, box_dim)),
            element_strides=tuple(map(int, element_strides)),
            swizzle=_choice("swizzle", swizzle, [s[0] for s in SWIZZLES]),
            nan_fill=bool(_choice("oob_fill", oob_fill, _FILLS)),
            promotion=_choice("l2_promotion", l2_promotion, _PROMOTIONS),
        )
        _check_fields(self.fields)

    @classmethod
    def from_array(cls, array, box_dim=None, *, element_strides=None, data_type=None, interleave="none",
                   swizzle="none", l2_promotion="none", oob_fill="none"):
        """A map over a NumPy array, called like ``cuda.core`` ``StridedMemoryView.as_tensor_map``.

        Shape, strides and type come from the array; ``box_dim`` and ``element_strides`` follow its shape,
        outermost dimension first.  The innermost dimension must be contiguous.
        """
        if array.ndim == 0 or array.strides[-1] != array.itemsize:
            raise TensorMapError(f"array strides {array.strides}: the last dimension must be contiguous")
        box_dim = array.shape if box_dim is None else tuple(box_dim)
        if element_strides is not None:
            element_strides = tuple(element_strides)[::-1]
        return cls(array.dtype if data_type is None else data_type, array.ndim, array, array.shape[::-1],
                   array.strides[-2::-1], box_dim[::-1], element_strides, interleave=interleave,
                   swizzle=swizzle, l2_promotion=l2_promotion, oob_fill=oob_fill)

    def encode(self, address):
        """The 128 bytes for a tensor whose first byte has this global address (TensorMapError where
        misaligned).
        """
        alignment = 32 if self.fields.padded else 16
        if address % alignment:
            raise TensorMapError(f"global address {address:#x} must be a multiple of {alignment}")
        return replace(self.fields, address=int(address)).encode()


def _check_fields(f):
    def expect(condition, argument, value, rule):
        if not condition:
            raise TensorMapError(f"{argument}={value}: {rule}")

    name = DATA_TYPES[f.data_type][0]
    unit = 32 if f.padded else 16
    expect(all(1 <= d <= 1 << 32 for d in f.dims), "global_dim", f.dims, "each from 1 to 2**32")
    expect(all(0 <= s < 1 << 40 and s % unit == 0 for s in f.strides), "global_strides", f.strides,
           f"each below 2**40 and a multiple of {unit} bytes")
    expect(all(1 <= b <= 256 for b in f.box), "box_dim", f.box, "each from 1 to 256")
    expect(all(1 <= e <= 8 for e in f.element_strides), "element_strides", f.element_strides,
           "each from 1 to 8")
    if f.padded:
        expect(f.box[0] == 128, "box_dim[0]", f.box[0], f"{name} needs 128")
        expect(f.dims[0] % 128 == 0, "global_dim[0]", f.dims[0], f"{name} needs a multiple of 128")
        allowed = (0, 3, 4) if f.data_type == U4_ALIGN16 else (0, 3, 4, 6)
        expect(f.swizzle in allowed, "swizzle", SWIZZLES[f.swizzle][0],
               f"{name} takes " + ", ".join(SWIZZLES[s][0] for s in allowed))
    elif f.data_type == U4_ALIGN8:
        expect(f.dims[0] % 2 == 0, "global_dim[0]", f.dims[0], f"{name} needs an even number")
    expect(f.box[0] * f.element_bits % 128 == 0, "box_dim[0]", f.box[0],
           f"the inner box must be a multiple of 16 bytes, not {f.box[0] * f.element_bits / 8:g}")
    widest = SWIZZLES[f.swizzle][2]
    expect(widest is None or f.inner_bytes <= widest, "box_dim[0]", f.box[0],
           f"swizzle {SWIZZLES[f.swizzle][0]} takes an inner box of at most {widest} bytes, not "
           f"{f.inner_bytes}")
    expect(not f.nan_fill or name.startswith(("float", "bfloat", "tfloat")), "oob_fill",
           "nan_request_zero_fma", f"it needs a floating-point type, not {name}")


@dataclass(frozen=True)
class Box:
    """What one copy touches.

    ``addresses`` (int64 [rows]) are the global addresses of the bytes [low, high) of each inner row that are
    read or written; ``rows`` (int64) their places in the box; ``total`` counts all rows of the box.
    """

    addresses: np.ndarray
    rows: np.ndarray
    total: int
    low: int
    high: int


def box_at(tile, coordinates, *, store=False):
    """The Box of a tiled copy at signed coordinates, innermost first.

    Raises:
        TensorMapError: wrong number of coordinates; an inner coordinate that is no multiple of 16 bytes; a
            negative coordinate of a store.  An H200 answers the last two with an illegal-instruction error.
    """
    if len(coordinates) != tile.rank:
        raise TensorMapError(f"{len(coordinates)} coordinates for a tensor map of rank {tile.rank}")
    if store and min(coordinates) < 0:
        raise TensorMapError(f"coordinates {tuple(coordinates)}: a store or reduction takes no negative ones")
    counts = tile.counts
    total = int(np.prod(counts[1:], dtype=np.int64))
    address = np.zeros(total, np.int64)
    inside = np.ones(total, np.bool_)
    repeat = 1
    for i in range(1, tile.rank):
        index = coordinates[i] + np.arange(counts[i], dtype=np.int64) * tile.element_strides[i]
        index = np.resize(np.repeat(index, repeat), total)
        repeat *= counts[i]
        inside &= (index >= 0) & (index < tile.dims[i])
        address += index * tile.strides[i - 1]
    return _clip(tile, int(coordinates[0]), address, inside, store)


def box_gather4(tile, column, rows, *, store=False):
    """The Box of a tile::gather4 or scatter4 copy: four rows of a 2-D tensor from one column."""
    if tile.rank != 2 or tile.box[1] != 1:
        raise TensorMapError(f"gather4/scatter4 through a map of rank {tile.rank} and box {tile.box}: it "
                             f"needs rank 2 "
                             "and box_dim[1] = 1")
    rows = np.asarray(rows, np.int64)
    if store and min(column, *rows) < 0:
        raise TensorMapError(f"coordinates {(column, *rows)}: a store takes no negative ones")
    return _clip(tile, int(column), rows * tile.strides[0], (rows >= 0) & (rows < tile.dims[1]), store)


def _clip(tile, first, address, inside, store):
    if (tile.padded or tile.data_type == U4_ALIGN8) and first % (128 if tile.padded else 2):
        raise TensorMapError(f"coordinate 0 is {first}: {DATA_TYPES[tile.data_type][0]} needs a multiple of "
                             f"{128 if tile.padded else 2}")
    bits = tile.element_bits
    if first * bits % 128:
        raise TensorMapError(f"coordinate 0 is {first}, byte {first * bits / 8:g} of its row: it must be a "
                             f"multiple of "
                             "16 bytes")
    low = min(max(-first, 0), tile.box[0])
    high = max(min(tile.dims[0] - first, tile.box[0]), low)
    low, high = low * bits // 8, high * bits // 8
    if store:
        # An H200 drops what lies past the end of a row in whole 16-byte units, so it may write into the
        # padding.
        high = -(-high // 16) * 16
    if low == high:
        inside = np.zeros_like(inside)
    rows = np.flatnonzero(inside)
    return Box(tile.address + address[rows] + first * bits // 8 + low, rows, len(inside), low, high)


def load_image(tile, box, data, pad_byte=0xA5):
    """Shared-memory rows of a load.

    Args:
        data: uint8 [len(box.rows), high - low], what was read from ``box.addresses``.
        pad_byte: content of the padding of the padded types, which the hardware leaves undefined.

    Returns:
        uint8 [total rows, inner_bytes], before the swizzle.
    """
    image = np.zeros((box.total, tile.row_bytes), np.uint8)
    if tile.nan_fill:
        # The word an H200 writes for every type: 0x7FF7, and 0x7FF77FF7 where elements have 32 bits.
        image.view(np.uint16)[:] = 0x7FF7
    image[box.rows, box.low:box.high] = data
    if not tile.padded:
        return image
    used = 2 * tile.element_bits
    padded = np.full((box.total, tile.inner_bytes // 16, 16), pad_byte, np.uint8)
    padded[:, :, :used] = image.reshape(box.total, -1, used)
    return padded.reshape(box.total, tile.inner_bytes)


def store_rows(tile, box, image):
    """The bytes of uint8 [total rows, inner_bytes] (unswizzled) that a store writes to ``box.addresses``."""
    if tile.padded:
        used = image.reshape(box.total, -1, 16)[:, :, :2 * tile.element_bits]
        image = used.reshape(box.total, tile.row_bytes)
    return image[box.rows, box.low:box.high]


def unit_addresses(tile, rows, destination):
    """Shared-memory addresses of each 16-byte unit of the image: int64 [rows, inner_bytes / 16]."""
    if destination % 128:
        raise TensorMapError(f"shared-memory address {destination:#x}: tensor copies need a multiple of 128")
    linear = (np.arange(rows, dtype=np.int64)[:, None] * tile.pitch
              + 16 * np.arange(tile.inner_bytes // 16, dtype=np.int64)[None, :])
    return swizzle(destination + linear, SWIZZLES[tile.swizzle][1])


def flip_halves(tile, addresses, units):
    """Swap the 8-byte halves of units on odd 128-byte lines where the swizzle asks for it; its own inverse.
    """
    if tile.swizzle != _FLIP_8B:
        return units
    odd = (addresses >> 7 & 1).astype(np.bool_)[..., None]
    return np.where(odd, np.roll(units, 8, axis=-1), units)


# --- cp.reduce.async.bulk(.tensor) --------------------------------------------------------------------------

_REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduce_values(operation, old, new):
    """Element-wise reduction of two arrays of one dtype; ``inc`` and ``dec`` wrap at ``new`` as atom.inc
    does.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if operation == "inc":
            return np.where(old >= new, 0, old + 1).astype(old.dtype)
        if operation == "dec":
            return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
        if operation not in _REDUCTIONS:
            raise ValueError(f"reduction {operation}: known are {', '.join(_REDUCTIONS)}, inc, dec")
        return _REDUCTIONS[operation](old, new)
