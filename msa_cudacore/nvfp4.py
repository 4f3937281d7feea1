"""NVFP4 on the host: E2M1 codes, E4M3 block scales, nibble packing and the V-scale swizzle.

An NVFP4 value is ``e2m1 * float(e4m3) * global_scale``: a 4-bit code, one E4M3 byte for every 16 consecutive
values, one positive float for the whole tensor. Everything here is NumPy, rounds to nearest even and
saturates; every rounding is done once, from float64, so no result depends on an intermediate format.

Formats: OCP Microscaling Formats (MX) v1.0, section 5.3.3 (E2M1), and the OCP 8-bit floating point
specification 1.0 (E4M3, "fn": no infinities, 0x7F and 0xFF are NaN).
"""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np

from msa_cudacore.checks import check_positive

SCALE_GROUP = 16
"""Consecutive values of the head dimension that share one block scale."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN = 0x7F

_E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_VALUES = np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
_E4M3_MAGNITUDES = _E4M3_VALUES[:E4M3_NAN]
_SMALL_FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn))
# One packed byte -> its two values, the even element (low nibble) first.
_E2M1_PAIRS = np.stack([np.tile(_E2M1_VALUES, 16), np.repeat(_E2M1_VALUES, 16)], axis=1)


def decode_e2m1(codes: np.ndarray) -> np.ndarray:
    """Values (float64) of E2M1 codes 0..15, one code an element."""
    return _E2M1_VALUES[_integers("codes", codes, "E2M1 codes", 15)]


def encode_e2m1(values: np.ndarray) -> np.ndarray:
    """E2M1 codes (uint8, 0..15) of real values: nearest, ties to even, saturating at 6.

    The sign of zero is kept. NaN becomes +6, as the PTX conversion ``cvt.rn.satfinite.e2m1x2.f32`` defines
    it.
    """
    values = _reals(values)
    code = _nearest(np.abs(values), _E2M1_MAGNITUDES) | (np.signbit(values).astype(np.uint8) << 3)
    return np.where(np.isnan(values), np.uint8(7), code)


def decode_e4m3(scales: np.ndarray) -> np.ndarray:
    """Values (float64) of E4M3 bytes, given as ``uint8`` or as ``ml_dtypes.float8_e4m3fn``; 0x7F and 0xFF
    give NaN."""
    return _E4M3_VALUES[as_bytes(scales)]


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """E4M3 bytes (uint8) of real values: nearest, ties to even, saturating at 448; NaN becomes 0x7F."""
    values = _reals(values)
    byte = _nearest(np.abs(values), _E4M3_MAGNITUDES) | (np.signbit(values).astype(np.uint8) << 7)
    return np.where(np.isnan(values), np.uint8(E4M3_NAN), byte)


def pack_e2m1(codes: np.ndarray) -> np.ndarray:
    """Two codes 0..15 a byte, the even element in the low nibble: integers [..., 2n] -> uint8 [..., n]."""
    codes = _integers("codes", codes, "E2M1 codes", 15)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes: the last axis must hold an even number of codes, got shape {codes.shape}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """The codes of packed bytes: integers 0..255 [..., n] -> uint8 [..., 2n]; inverse of :func:`pack_e2m1`."""
    packed = _integers("packed", packed, "pairs of E2M1 codes", 255)
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & 15
    codes[..., 1::2] = packed >> 4
    return codes


def quantize(values: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Quantise [..., n], n a multiple of 16, to codes uint8 [..., n/2] and scales uint8 [..., n/16].

    ``scale = e4m3(amax16 / (6 * global_scale))`` and ``code = e2m1(x / (float(scale) * global_scale))``.
    A block whose scale rounds to zero gets zero codes (keeping signs), since no code could bring it back.

    Raises ValueError when a value is not finite, or ``global_scale`` is not a positive finite number, and TypeError
    when one of them is no real number.
    """
    global_scale = check_positive("global_scale", global_scale)
    values = _reals(values)
    if values.ndim == 0 or values.shape[-1] % SCALE_GROUP:
        raise ValueError(
            f"values: the last axis must be a multiple of {SCALE_GROUP}, got shape {values.shape}"
        )
    if not np.isfinite(values).all():
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise ValueError(f"values: element {place} is {values[place]}; NVFP4 holds finite values alone")
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // SCALE_GROUP, SCALE_GROUP)
    with np.errstate(over="ignore"):  # a quotient beyond float64 saturates like any other beyond the format
        scales = encode_e4m3(np.abs(blocks).max(axis=-1, initial=0.0) / (E2M1_MAX * global_scale))
        step = _E4M3_VALUES[scales][..., None] * global_scale
        scaled = np.divide(blocks, step, out=np.copysign(np.zeros_like(blocks), blocks), where=step != 0)
    return pack_e2m1(encode_e2m1(scaled).reshape(values.shape)), scales


def dequantize(packed: np.ndarray, scales: np.ndarray, global_scale: float = 1.0) -> np.ndarray:
    """Values (float64) [..., 2n] of packed codes [..., n] and their linear scale bytes [..., n/8]."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError(f"packed: pairs of E2M1 codes are uint8, got {packed.dtype}")
    values = _E2M1_PAIRS[packed].reshape(*packed.shape[:-1], packed.shape[-1] * 2 // SCALE_GROUP, SCALE_GROUP)
    values *= (decode_e4m3(scales) * global_scale)[..., None]
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


@lru_cache(maxsize=None)
def v_scale_positions(tokens: int = 128, groups: int = 8) -> np.ndarray:
    """Where the V scale of (token t, group s) lies: position[t * groups + s] = (t//4)*4*groups + s*4 + t%4.

    The four scales of four consecutive tokens for one group are adjacent, so one 32-bit word feeds four keys.
    """
    if tokens % 4:
        raise ValueError(f"tokens: the V-scale swizzle works on quads of tokens, got {tokens}")
    token, group = np.divmod(np.arange(tokens * groups), groups)
    position = (token // 4) * (4 * groups) + group * 4 + token % 4
    position.setflags(write=False)
    return position


def swizzle_v_scales(linear: np.ndarray) -> np.ndarray:
    """Token-major scales [..., tokens, groups] -> the same bytes in the cache's V order, same shape and
    dtype."""
    linear = _tiles("linear", linear)
    stored = np.empty((*linear.shape[:-2], linear.shape[-2] * linear.shape[-1]), linear.dtype)
    stored[..., v_scale_positions(*linear.shape[-2:])] = linear.reshape(stored.shape)
    return stored.reshape(linear.shape)


def unswizzle_v_scales(stored: np.ndarray) -> np.ndarray:
    """Inverse of :func:`swizzle_v_scales`: [..., tokens, groups] as stored -> token-major."""
    stored = _tiles("stored", stored)
    flat = stored.reshape(*stored.shape[:-2], stored.shape[-2] * stored.shape[-1])
    return flat[..., v_scale_positions(*stored.shape[-2:])].reshape(stored.shape)


def as_bytes(scales: np.ndarray) -> np.ndarray:
    """A ``uint8`` view of E4M3 data typed ``uint8`` or ``float8_e4m3fn``; no copy."""
    scales = np.asarray(scales)
    if scales.dtype == ml_dtypes.float8_e4m3fn:
        return scales.view(np.uint8)
    if scales.dtype != np.uint8:
        raise TypeError(f"scales: E4M3 scales are uint8 or float8_e4m3fn, got {scales.dtype}")
    return scales


def _integers(name: str, values: np.ndarray, what: str, highest: int) -> np.ndarray:
    """Integers 0..highest as uint8; a cast alone would wrap those beyond, and cut fractions off."""
    values = np.asarray(values)
    if values.dtype.kind not in "iu" and values.size:
        raise TypeError(f"{name}: {what} are integers, got {values.dtype}")
    if values.size and (values.min() < 0 or values.max() > highest):
        raise ValueError(f"{name}: {what} lie in 0..{highest}, got {values.min()}..{values.max()}")
    return values.astype(np.uint8, copy=False)


def _reals(values: np.ndarray) -> np.ndarray:
    """Real numbers as float64; a cast alone would parse strings and drop imaginary parts."""
    values = np.asarray(values)
    if values.dtype.kind not in "iuf" and values.dtype not in _SMALL_FLOATS:
        raise TypeError(f"values: real numbers are needed, got {values.dtype}")
    return values.astype(np.float64, copy=False)


def _tiles(name: str, scales: np.ndarray) -> np.ndarray:
    scales = np.asarray(scales)
    if scales.ndim < 2:
        raise ValueError(f"{name}: [..., tokens, groups] is needed, got shape {scales.shape}")
    return scales


def _nearest(magnitude: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an ascending table, ties to the even index, clamped to the last entry.

    In both formats the code of a positive value is its rank, so an even rank is an even significand.
    """
    middle = (table[:-1] + table[1:]) / 2  # exact: neighbours differ by one bit of the significand
    rank = np.searchsorted(middle, magnitude, side="left")
    tie = (rank < middle.size) & (magnitude == middle[np.minimum(rank, middle.size - 1)])
    return (rank + (tie & (rank % 2 == 1))).astype(np.uint8)
