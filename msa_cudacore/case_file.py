"""Decode problems as npz files.

=======================  =====================================================================================
key                      value
=======================  =====================================================================================
``q``                    [batch * seqlen_q, Hq, 128]: bfloat16 bits as uint16 with ``q_dtype`` "bfloat16", or
                         floats of any width, rounded to bfloat16 on loading
``q_dtype``              "bfloat16" when ``q`` is uint16
``k``, ``v``             uint8 [pages, Hkv, 128, 64]: packed E2M1
``k_scale``              uint8 [pages, Hkv, 128, 8]: E4M3, token-major
``v_scale``              uint8 [pages, Hkv, 128, 8]: E4M3, swizzled as in the cache
``pool``                 instead of those four: uint8 [pages, page_bytes] with ``num_kv_heads``, or
                         [pages, 2, Hkv, 128, 72]
``scale_dtype``          optional: "uint8" (default) or "float8_e4m3fn", the type of the scale views handed over
``q2k_indices``          integers of any width, in the range of int32: [Hkv, batch * seqlen_q, topk]
``page_table``           such integers: [batch, max_pages]
``seqused_k``            such integers: [batch]
``k_global_scale``       positive float
``v_global_scale``       positive float
``seqlen_q``             optional integer, 1 when left out
``softmax_scale``        optional float, 1/sqrt(128) when left out or NaN
=======================  =====================================================================================

A file with any other key is refused: a misspelled optional one would be left out in silence.
Files are read without pickle. Values are kept; strides of views are not.
"""

from __future__ import annotations

import lzma
import os
import struct
import tokenize
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np

from msa_cudacore.cases import Case
from msa_cudacore.nvfp4 import as_bytes
from msa_cudacore.pool import CODE_BYTES, PAGE_SIZE, SCALE_BYTES, PoolViews, empty_pool, pool_views
from msa_cudacore.reference import round_to_bf16
from msa_cudacore.transfer import BF16, E4M3

_PARTS = {"k": CODE_BYTES, "v": CODE_BYTES, "k_scale": SCALE_BYTES, "v_scale": SCALE_BYTES}
_INTEGERS = ("q2k_indices", "page_table", "seqused_k")
_DAMAGE = (
    # What NumPy and zipfile raise over a damaged or foreign archive: OSError is a false offset, RuntimeError an
    # encrypted entry, MemoryError and OverflowError a false shape.
    ValueError, TypeError, EOFError, KeyError, AttributeError, IndexError, OSError, RuntimeError, MemoryError,
    OverflowError, SyntaxError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)
_DIMENSIONS = {"q": 3, "q2k_indices": 3, "page_table": 2, "seqused_k": 1}
_KEYS = (
    "q", "q_dtype", *_PARTS, "pool", "num_kv_heads", "scale_dtype", *_INTEGERS, "k_global_scale", "v_global_scale",
    "seqlen_q", "softmax_scale",
)


def save(case: Case, path: str | os.PathLike) -> None:
    """Write a case of NumPy arrays to exactly ``path``."""
    with open(path, "wb") as file:
        np.savez(
            file,
            q=np.ascontiguousarray(case.q).view(np.uint16),
            q_dtype="bfloat16",
            k=case.k,
            v=case.v,
            k_scale=as_bytes(case.k_scale),
            v_scale=as_bytes(case.v_scale),
            scale_dtype=case.k_scale.dtype.name,
            **{name: getattr(case, name) for name in _INTEGERS},
            k_global_scale=case.k_global_scale,
            v_global_scale=case.v_global_scale,
            seqlen_q=case.seqlen_q,
            softmax_scale=np.nan if case.softmax_scale is None else case.softmax_scale,
        )


def load(path: str | os.PathLike) -> Case:
    """Read a case; its pool is one planar allocation.

    Raises ValueError or TypeError, naming the file and the key, for a file that is no npz, a missing or an unknown key, a
    wrong dtype or shape; OSError when the file cannot be opened.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:
        try:
            data = _arrays(file)
        except _DAMAGE as error:
            raise ValueError(f"{path}: not a readable npz file ({error})") from error
    try:
        return _case(data, os.path.basename(path))
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _arrays(file: BinaryIO) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no zip archive")
    file.seek(0)
    archive = np.load(file, allow_pickle=False)
    data = {key: archive[key] for key in archive.files}
    for key, value in data.items():
        if not isinstance(value, np.ndarray):
            raise ValueError(f"{key} is no array")
    return data


def _case(data: dict[str, np.ndarray], name: str) -> Case:
    storage = ("pool",) if "pool" in data else tuple(_PARTS)
    needed = ("q", *storage, *_INTEGERS, "k_global_scale", "v_global_scale")
    missing = [key for key in needed if key not in data]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}; the file holds {', '.join(sorted(data)) or 'nothing'}")
    if unknown := sorted(set(data) - set(_KEYS)):
        raise ValueError(f"unknown {', '.join(unknown)}; accepted are {', '.join(_KEYS)}")
    for key, dimensions in _DIMENSIONS.items():
        if data[key].ndim != dimensions:
            raise ValueError(f"{key} has shape {data[key].shape}; accepted are {dimensions} dimensions")
    views = _pool(data) if storage == ("pool",) else _parts(data)
    scale_dtype = str(data.get("scale_dtype", "uint8"))
    if scale_dtype not in ("uint8", "float8_e4m3fn"):
        raise ValueError(f"scale_dtype is {scale_dtype!r}; accepted are 'uint8' and 'float8_e4m3fn'")
    if scale_dtype != "uint8":
        views = views._replace(k_scale=views.k_scale.view(E4M3), v_scale=views.v_scale.view(E4M3))
    for key in _INTEGERS:
        array, limits = data[key], np.iinfo(np.int32)
        if array.dtype.kind not in "iu":
            raise TypeError(f"{key} has dtype {array.dtype}; accepted are integers")
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise ValueError(f"{key} spans {array.min()}..{array.max()}; accepted is the range of int32")
    softmax_scale = _number(data, "softmax_scale") if "softmax_scale" in data else np.nan
    return Case(
        q=_q(data["q"], str(data.get("q_dtype", ""))),
        **views._asdict(),
        **{key: data[key].astype(np.int32) for key in _INTEGERS},
        k_global_scale=_number(data, "k_global_scale"),
        v_global_scale=_number(data, "v_global_scale"),
        seqlen_q=_integer(data, "seqlen_q") if "seqlen_q" in data else 1,
        softmax_scale=None if np.isnan(softmax_scale) else softmax_scale,
        name=name,
    )


def _pool(data: dict[str, np.ndarray]) -> PoolViews:
    pool, num_kv_heads = data["pool"], _integer(data, "num_kv_heads") if "num_kv_heads" in data else None
    if pool.size == 0:
        raise ValueError(f"pool has shape {pool.shape}; accepted is at least one page")
    return pool_views(pool, num_kv_heads)


def _parts(data: dict[str, np.ndarray]) -> PoolViews:
    """The four dense arrays of the file, copied into one planar pool."""
    for key, inner in _PARTS.items():
        if data[key].dtype != np.uint8:
            raise TypeError(f"{key} has dtype {data[key].dtype}; accepted is uint8 (bytes)")
        expected = (*data["k"].shape[:2], PAGE_SIZE, inner)
        if data["k"].ndim != 4 or data[key].shape != expected or 0 in expected:
            accepted = f"[pages, Hkv, {PAGE_SIZE}, {inner}], alike in all four"
            raise ValueError(f"{key} has shape {data[key].shape}; accepted is {accepted}")
    views = pool_views(empty_pool(*data["k"].shape[:2]), data["k"].shape[1])
    for key, view in views._asdict().items():
        view[...] = data[key]
    return views


def _q(q: np.ndarray, q_dtype: str) -> np.ndarray:
    if q.dtype == np.uint16 and q_dtype == "bfloat16":
        return q.view(BF16)
    if q.dtype.kind != "f":
        accepted = "floats, or bfloat16 bits as uint16 with q_dtype 'bfloat16'"
        raise TypeError(f"q has dtype {q.dtype}; accepted are {accepted}")
    return round_to_bf16(q)


def _number(data: dict[str, Any], key: str) -> float:
    value = data[key]
    if value.size != 1 or value.dtype.kind not in "fiu":
        raise TypeError(f"{key} is {value.dtype} of shape {value.shape}; accepted is one number")
    return float(value.reshape(()))


def _integer(data: dict[str, Any], key: str) -> int:
    number = _number(data, key)
    if not (number.is_integer() and abs(number) <= np.iinfo(np.int32).max):
        raise ValueError(f"{key} is {number:g}; accepted is an integer")
    return int(number)
