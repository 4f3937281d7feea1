"""Small problems whose exact answers follow by hand. Each guards against a fault seen in real readers.

They grow out of one fixture: batch 1, one query token, 64/4 heads, four pages, page table [[2, 0, 3, 1]],
every element of K and V +1.0 (byte 0x22), every block scale 1.0 (byte 0x38), q = 0, softmax_scale 1/128. With
q = 0 the result is the mean of the visible V rows and lse is the logarithm of their number.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from msa_cudacore.cases import INT32_MAX, INT32_MIN, Case
from msa_cudacore.nvfp4 import E4M3_NAN, swizzle_v_scales
from msa_cudacore.pool import (
    HEAD_DIM,
    PAGE_SIZE,
    SCALE_BYTES,
    aligned_bytes,
    empty_pool,
    page_bytes,
    pool_views,
)
from msa_cudacore.transfer import BF16

ONES = 0x22
"""Two E2M1 codes of 1.0."""
UNIT_SCALE = 0x38
TABLE = (2, 0, 3, 1)
V_ELEMENTS = {1.0: 0x22, 1.5: 0x33, 2.0: 0x44, 3.0: 0x55, 4.0: 0x66}
"""Packed bytes of two equal elements."""


def fixture(
    *,
    seqused: tuple[int, ...] = (4,),
    rows: list[list[int]] | None = None,
    seqlen_q: int = 1,
    v_by_block: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    topk: int = 16,
    num_q_heads: int = 64,
    num_kv_heads: int = 4,
) -> Case:
    """The fixture, with other lengths, ids or V values.

    ``rows`` are the ids of each query token, the same for every head ([0] when left out); ``v_by_block``
    gives the V element of each logical block of every request.
    """
    pool = empty_pool(4, num_kv_heads, fill=ONES)
    views = pool_views(pool, num_kv_heads)
    views.k_scale[...] = UNIT_SCALE
    views.v_scale[...] = UNIT_SCALE
    for block, value in enumerate(v_by_block):
        views.v[TABLE[block]] = V_ELEMENTS[value]
    tokens = len(seqused) * seqlen_q
    rows = rows or [[0]] * tokens
    indices = np.full((num_kv_heads, tokens, topk), -1, np.int32)
    for row, ids in enumerate(rows):
        indices[:, row, : len(ids)] = ids
    return Case(
        q=np.zeros((tokens, num_q_heads, HEAD_DIM), BF16),
        **views._asdict(),
        q2k_indices=indices,
        page_table=np.tile(np.array(TABLE, np.int32), (len(seqused), 1)),
        seqused_k=np.array(seqused, np.int32),
        seqlen_q=seqlen_q,
        softmax_scale=1 / 128,
    )


def expect(case: Case, name: str, out: object, lse: object) -> Case:
    """The case with its name and answers. ``out`` broadcasts to [rows, Hq, 128]; ``lse`` is one number or one
    a row."""
    rows, heads = case.q.shape[:2]
    lse = np.asarray(lse, np.float64)
    return replace(
        case,
        name=name,
        expected_out=np.broadcast_to(np.asarray(out, np.float64), case.q.shape).copy(),
        expected_lse=np.broadcast_to(lse[:, None] if lse.ndim == 1 else lse, (rows, heads)).copy(),
    )


def exact_cases() -> list[Case]:
    """Every problem of this module, freshly built, with distinct names."""
    return [
        expect(fixture(), "mean of four ones", 1.0, np.log(4)),
        _v_scale_order(),
        _k_scale_order(),
        _nibble_order(),
        _k_global_scale(),
        expect(replace(fixture(seqused=(1,)), v_global_scale=0.5), "v global scale multiplies", 0.5, 0.0),
        expect(
            fixture(seqused=(0, 130), rows=[[0], [0, 1]]),
            "an empty request beside a full one",
            _by_row(0.0, 1.0),
            [-np.inf, np.log(130)],
        ),
        expect(
            fixture(seqused=(300, 130), rows=[[], [0, 1]]),
            "a row that selects nothing",
            _by_row(0.0, 1.0),
            [-np.inf, np.log(130)],
        ),
        *(_nan_tail(length) for length in (1, 3, 4, 127, 128, 129)),
        *(
            expect(
                fixture(seqused=(512,), rows=[ids]), name, 1.0, np.log(PAGE_SIZE * sum(i >= 0 for i in ids))
            )
            for name, ids in (
                ("a hole after every id", [0, -1, 1, -1, 2, -1, 3, -1]),
                ("a hole first", [-1, 0]),
                ("the last place alone", [-1] * 15 + [0]),
            )
        ),
        *(_illegal_id(bad) for bad in (4, 5, INT32_MAX, -2, INT32_MIN)),
        *(_illegal_page(bad) for bad in (-1, 4, INT32_MAX, INT32_MIN)),
        _head_major_selection(),
        expect(
            fixture(seqused=(130,), seqlen_q=4, rows=[[0, 1]] * 4, v_by_block=(1, 4, 1, 1)),
            "causal edge inside a page",
            _by_row(1.0, 1.0, 132 / 129, 136 / 130),
            np.log([127, 128, 129, 130]),
        ),
        expect(
            fixture(seqused=(2,), seqlen_q=4, rows=[[0]] * 4),
            "fewer keys than query tokens",
            _by_row(0.0, 0.0, 1.0, 1.0),
            [-np.inf, -np.inf, 0.0, np.log(2)],
        ),
        expect(fixture(seqused=(1,), rows=[list(range(16))]), "sixteen ids for one key", 1.0, 0.0),
        expect(
            fixture(seqused=(512,), rows=[[3, 0, 2, 1]], v_by_block=(1, 1.5, 2, 3)),
            "unsorted ids",
            1.875,
            np.log(512),
        ),
        expect(
            fixture(seqused=(512,), rows=[[0, 0, 1]], v_by_block=(1, 4, 1, 1)),
            "a repeated id counts twice",
            2.0,
            np.log(3 * PAGE_SIZE),
        ),
        expect(
            fixture(seqused=(4096,), rows=[list(range(16))]),
            "a length beyond the page table",
            1.0,
            np.log(512),
        ),
        *(
            expect(
                fixture(seqused=(512,), rows=[[3, 1]], topk=topk, v_by_block=(1, 2, 1, 4)),
                f"top-k {topk}",
                3.0,
                np.log(256),
            )
            for topk in (2, 8, 15, 17, 32, 64)
        ),
        _layer_slice(),
        _four_allocations(),
    ]


def odd_stride_cases() -> list[Case]:
    """The fixture with one KV head, or one page, whose size-1 dimension carries an arbitrary stride."""
    cases = []
    for stride in (1, 64, 8192, 0):
        case = fixture(num_kv_heads=1, num_q_heads=16)
        views = {}
        for name in ("k", "v", "k_scale", "v_scale"):
            view = getattr(case, name)
            strides = (view.strides[0], stride, *view.strides[2:])
            views[name] = np.ndarray(view.shape, view.dtype, view.base, _offset(view), strides)
        cases.append(expect(replace(case, **views), f"head stride {stride} of one head", 1.0, np.log(4)))
    case = replace(fixture(num_kv_heads=1, num_q_heads=16), page_table=np.array([[0, -1]], np.int32))
    views = {}
    for name in ("k", "v", "k_scale", "v_scale"):
        view = getattr(case, name)[:1]
        views[name] = np.ndarray(view.shape, view.dtype, view.base, _offset(view), (1, *view.strides[1:]))
    return [*cases, expect(replace(case, **views), "page stride 1 of one page", 1.0, np.log(4))]


def _offset(view: np.ndarray) -> int:
    return view.ctypes.data - view.base.ctypes.data


def _by_row(*values: float) -> np.ndarray:
    return np.array(values)[:, None, None]


def _ramp_scales(view: np.ndarray) -> np.ndarray:
    """Scales [Hkv, 128, 8] that differ for each of the first four tokens and each group: 2**(s-4) * (1 +
    t/8)."""
    scales = np.full(view.shape[1:], UNIT_SCALE, np.uint8)
    token, group = np.ogrid[:4, :SCALE_BYTES]
    scales[:, :4] = ((group + 3) << 3) | token
    return scales


def _v_scale_order() -> Case:
    case = fixture()
    case.v_scale[TABLE[0]] = swizzle_v_scales(_ramp_scales(case.v_scale))
    # The mean of 1, 1 1/8, 1 2/8 and 1 3/8 is 1.1875.
    return expect(case, "v scales are swizzled", 1.1875 * 2.0 ** (np.arange(HEAD_DIM) // 16 - 4), np.log(4))


def _k_scale_order() -> Case:
    case = fixture(seqused=(1,))
    case.q[..., 48:64] = 1.0
    case.k_scale[TABLE[0]] = _ramp_scales(case.k_scale)
    return expect(replace(case, softmax_scale=1 / 8), "k scales are token-major", 1.0, 16 * 0.5 / 8)


def _nibble_order() -> Case:
    case = fixture()
    case.v[...] = 0x42
    return expect(
        replace(case, v_global_scale=0.5),
        "the even element is the low nibble",
        np.tile([0.5, 1.0], 64),
        np.log(4),
    )


def _k_global_scale() -> Case:
    case = fixture(seqused=(1,))
    case.q[...] = 1.0
    return expect(replace(case, k_global_scale=0.75), "k global scale multiplies the scores", 1.0, 0.75)


def _nan_tail(length: int) -> Case:
    case = fixture(seqused=(length,), rows=[[0, 1]])
    dead = np.full((PAGE_SIZE, SCALE_BYTES), UNIT_SCALE, np.uint8)
    dead[length % PAGE_SIZE or PAGE_SIZE :] = E4M3_NAN
    last = (length - 1) // PAGE_SIZE
    case.k_scale[TABLE[last]] = dead
    case.v_scale[TABLE[last]] = swizzle_v_scales(dead)
    for unselected in TABLE[last + 1 :]:
        for part in (case.k, case.v, case.k_scale, case.v_scale):
            part[unselected] = 0xFF
    return expect(case, f"NaN scales after {length} tokens", 1.0, np.log(length))


def _illegal_id(bad: int) -> Case:
    case = fixture(seqused=(512,), rows=[[bad, 1, bad, 2] + [bad] * 12], v_by_block=(4, 1, 3, 4))
    return expect(case, f"illegal id {bad}", 2.0, np.log(256))


def _illegal_page(bad: int) -> Case:
    case = fixture(seqused=(512,), rows=[[0, 1, 2, 3]], v_by_block=(4, 1, 3, 4))
    case.page_table[:, (0, 3)] = bad
    return expect(case, f"illegal page {bad}", 2.0, np.log(256))


def _head_major_selection() -> Case:
    """As many requests as KV heads, so that a token-major reading has the same shape and other answers."""
    values = (1.0, 1.5, 2.0, 3.0)
    case = fixture(seqused=(512,) * 4, v_by_block=values)
    case.q2k_indices[..., 0] = np.arange(4)[:, None]
    return expect(
        case, "each head reads its own selection", np.repeat(values, 16)[None, :, None], np.log(PAGE_SIZE)
    )


def _layer_slice() -> Case:
    """One layer of a pool whose allocation holds three for each page; the other layers are 0xFF."""
    case = fixture(v_by_block=(3, 1, 1, 1))
    pool = aligned_bytes((4, 3, page_bytes(4)), 0xFF)
    views = pool_views(pool[:, 1], 4)
    for name, view in views._asdict().items():
        view[...] = getattr(case, name)
    return expect(replace(case, **views._asdict()), "a layer of a larger pool", 3.0, np.log(4))


def _four_allocations() -> Case:
    case = fixture(v_by_block=(3, 1, 1, 1))
    views = {}
    for index, name in enumerate(("k", "v", "k_scale", "v_scale")):
        part = getattr(case, name)
        tiles = aligned_bytes((4, 4 + index, PAGE_SIZE, part.shape[-1]), 0xFF)
        views[name] = tiles[:, index : index + 4]
        views[name][...] = part
    return expect(replace(case, **views), "four allocations with their own strides", 3.0, np.log(4))
