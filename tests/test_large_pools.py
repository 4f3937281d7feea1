"""Pools over 2 GiB and over 4 GiB, on the host and on a GPU: no offset into one is kept in 32 bits."""

from __future__ import annotations

import numpy as np
import pytest

from msa_cudacore import prepare_msa_nvfp4_sparse_decode
from msa_cudacore.exact_cases import fixture
from msa_cudacore.pool import page_bytes, pool_views
from msa_cudacore.transfer import BF16, to_numpy


def far_pages(page_stride: int) -> list[int]:
    """The last page that ends within, and the first that begins beyond, 2**31 and 2**32 bytes."""
    return sorted(
        {page for limit in (2**31, 2**32) for page in (limit // page_stride - 1, limit // page_stride + 1)}
    )


@pytest.mark.parametrize(
    ("heads", "page_stride"), [(4, page_bytes(4)), (1, page_bytes(1)), (4, 60 * page_bytes(4))]
)
@pytest.mark.parametrize("place", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pools_beyond_32_bit_offsets(place, heads, page_stride):
    """Only far pages hold data; a wrapped offset reads a page of zeros. The third stride is a pool of 60
    layers."""
    pages = far_pages(page_stride)
    total = (pages[-1] + 2) * page_stride
    if place == "cuda":
        torch = pytest.importorskip("torch")
        if torch.cuda.mem_get_info()[0] < total + 2**30:
            pytest.skip("too little GPU memory is free")
        raw = torch.zeros(total, dtype=torch.uint8, device="cuda")
    else:
        try:
            raw = np.zeros(total, np.uint8)  # untouched pages of it cost no memory
        except MemoryError:
            pytest.skip(f"this machine does not promise {total / 2**30:.1f} GiB of address space")
    pool = raw.reshape(-1, page_stride)[:, : page_bytes(heads)]
    views = pool_views(pool, heads)
    elements = {1.0: 0x22, 2.0: 0x44, 3.0: 0x55, 4.0: 0x66}
    for value, page in zip(elements, pages):
        views.k_scale[page] = views.v_scale[page] = 0x38
        views.v[page] = elements[value]
        views.k[page] = 0x22
    for values, chosen in (([1, 2, 3, 4], pages), ([3], pages[2:3]), ([4], pages[3:]), ([2], pages[1:2])):
        case = fixture(
            seqused=(128 * len(chosen),),
            rows=[list(range(len(chosen)))],
            num_kv_heads=heads,
            num_q_heads=16 * heads,
        )
        case.q[...] = 1.0
        small = dict(
            q=case.q,
            q2k_indices=case.q2k_indices,
            page_table=np.array([chosen], np.int32),
            seqused_k=case.seqused_k,
        )
        if place == "cuda":
            small = {name: _to_torch(array) for name, array in small.items()}
        runner = prepare_msa_nvfp4_sparse_decode(
            **small, **views._asdict(), k_global_scale=1.0, v_global_scale=1.0, softmax_scale=1 / 128
        )
        out, lse = to_numpy(runner()), to_numpy(runner.lse)
        assert (out.astype(float) == np.mean(values)).all()
        np.testing.assert_allclose(lse, 1 + np.log(128 * len(chosen)), rtol=1e-5)


def _to_torch(array: np.ndarray):
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()
