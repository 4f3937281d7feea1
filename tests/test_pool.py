"""The page pool: where bytes lie, views of them in array libraries, and the host cache writer."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from msa_cudacore import nvfp4
from msa_cudacore.pool import (
    PoolViews,
    empty_pool,
    page_bytes,
    page_regions,
    pool_views,
    slot_mapping,
    vllm_view,
    write_tokens,
)


def test_page_map_of_four_heads():
    assert page_bytes(4) == 73_728
    assert {name: tuple(region) for name, region in page_regions(4).items()} == {
        "k": (0, 64),
        "k_scale": (4 * 128 * 64, 8),
        "v": (4 * 128 * 72, 64),
        "v_scale": (4 * 128 * 136, 8),
    }


def test_pools_begin_where_a_gpu_allocation_would():
    pools = [empty_pool(1, 1, fill=i % 2) for i in range(20)]
    assert all(pool.ctypes.data % 256 == 0 for pool in pools)


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_views_address_the_documented_bytes(heads, rng):
    pool = empty_pool(3, heads)
    pool[...] = rng.integers(0, 256, pool.shape, dtype=np.uint8)
    views = pool_views(pool, heads)
    base = {"k": 0, "k_scale": heads * 128 * 64, "v": heads * 128 * 72, "v_scale": heads * 128 * 136}
    for name, view in views._asdict().items():
        inner = 8 if name.endswith("scale") else 64
        assert view.shape == (3, heads, 128, inner) and np.shares_memory(view, pool)
        assert view.ctypes.data % 16 == 0 and view.strides == (page_bytes(heads), 128 * inner, inner, 1)
        for _ in range(50):
            p, h, t, i = (int(rng.integers(n)) for n in view.shape)
            assert view[p, h, t, i] == pool[p, base[name] + (h * 128 + t) * inner + i]


def test_views_tile_the_page_without_overlap():
    pool = empty_pool(2, 3)
    for view in pool_views(pool, 3):
        view += 1
    assert (pool == 1).all()


def test_vllm_spelling_is_the_same_bytes():
    pool = empty_pool(5, 2)
    spelled = vllm_view(pool, 2)
    assert spelled.shape == (5, 2, 2, 128, 72) and np.shares_memory(spelled, pool)
    for a, b in zip(pool_views(spelled), pool_views(pool, 2)):
        assert a.ctypes.data == b.ctypes.data and a.strides == b.strides and a.shape == b.shape


def test_views_of_a_layer_of_a_larger_allocation():
    layers = np.zeros((4, 3, page_bytes(2)), np.uint8)
    views = pool_views(layers[:, 1], 2)
    for view in views:
        view[...] = 7
    assert (layers[:, 1] == 7).all() and (layers[:, 0] == 0).all() and (layers[:, 2] == 0).all()


def test_views_of_a_torch_pool():
    torch = pytest.importorskip("torch")
    pool = torch.zeros(4, 3, page_bytes(2), dtype=torch.uint8)[:, 2]
    views = pool_views(pool, 2)
    assert all(isinstance(view, torch.Tensor) for view in views)
    views.v_scale[3, 1, 127, 7] = 9
    assert pool[3, -1] == 9
    assert pool_views(vllm_view(pool, 2)).k.data_ptr() == pool.data_ptr()


@pytest.mark.parametrize(
    ("pool", "heads", "error", "words"),
    [
        (np.zeros((2, 18432), np.float32), 1, TypeError, "float32"),
        (np.zeros((2, 18432), np.uint8), None, ValueError, "num_kv_heads"),
        (np.zeros((2, 18432), np.uint8), 2, ValueError, "36864"),
        (np.zeros((2, 18432), np.uint8), 0, ValueError, "num_kv_heads"),
        (np.zeros((2, 2, 1, 128, 70), np.uint8), None, ValueError, r"\(2, 2, 1, 128, 70\)"),
        (np.zeros((2, 2, 1, 128, 72), np.uint8), 4, ValueError, "num_kv_heads: 4"),
        (np.zeros(18432, np.uint8), 1, ValueError, "pool"),
        (np.zeros((2, 18432), np.uint8), 1.5, TypeError, "num_kv_heads is 1.5"),
        (np.zeros((2, 18432), np.uint8), True, TypeError, "num_kv_heads is True"),
        (np.zeros((2, 2, 1, 128, 72), np.uint8), "1", TypeError, "num_kv_heads is '1'"),
        (None, 1, TypeError, "pool: .*NoneType"),
        ([[0] * 18432], 1, TypeError, "pool: .*list"),
        (np.zeros((2, 36864), np.uint8)[:, ::2], 1, ValueError, "dense"),
        (np.zeros((2, 2, 2, 128, 144), np.uint8)[..., :72], None, ValueError, "dense"),
        (np.zeros((2, 3, 1, 128, 72), np.uint8)[:, ::2], None, ValueError, "dense"),
    ],
)
def test_pools_that_do_not_fit_are_refused(pool, heads, error, words):
    with pytest.raises(error, match=words):
        pool_views(pool, heads)


def test_slots_follow_the_page_table():
    table = np.array([[7, 2, -1], [5, 0, 3]])
    assert slot_mapping(table, 0, np.array([0, 127, 128])).tolist() == [7 * 128, 7 * 128 + 127, 2 * 128]
    assert slot_mapping(table, np.array([0, 1]), np.array([1, 256])).tolist() == [7 * 128 + 1, 3 * 128]
    with pytest.raises(ValueError, match="0..383.*got -1..5"):
        slot_mapping(table, 0, np.array([5, -1]))
    with pytest.raises(ValueError, match="0..383"):
        slot_mapping(table, 0, np.array([384]))
    assert slot_mapping(table.tolist(), 0, []).tolist() == []
    last = slot_mapping(table.astype(np.int32), np.uint8(1), np.array([256], np.uint16))
    assert last.tolist() == [3 * 128] and last.dtype == np.int64


@pytest.mark.parametrize(
    ("table", "request_id", "positions", "error", "words"),
    [
        ([[7, 2, -1], [5, 0, 3]], 0, [5, 300], ValueError, "request 0 has page -1 at position 300"),
        ([[7, 2, -1], [5, 0, 3]], 2, [5], ValueError, r"request: must lie in 0..1 .*got 2..2"),
        ([[7, 2, -1], [5, 0, 3]], -1, [5], ValueError, r"request: must lie in 0..1 .*got -1..-1"),
        ([[7.0, 2.0]], 0, [5], TypeError, "page_table: .*float64"),
        ([7, 2], 0, [5], ValueError, r"page_table: .*\(2,\)"),
        ([[7, 2]], None, [5], TypeError, "request: .*object"),
        ([[7, 2]], True, [5], TypeError, "request: .*bool"),
        ([[7, 2]], 0, [0.5], TypeError, "positions: .*float64"),
        ([[7, 2]], [0, 0, 0], [0, 1], ValueError, r"request and positions: .*\(3,\) and \(2,\)"),
    ],
)
def test_slots_that_no_token_has_are_refused(table, request_id, positions, error, words):
    with pytest.raises(error, match=words):
        slot_mapping(np.array(table), request_id, positions)


@pytest.fixture
def written(rng):
    """A pool of 0xEE with 40 tokens written to random slots, and what was written."""
    pool = empty_pool(6, 3, fill=0xEE)
    views = pool_views(pool, 3)
    slots = rng.permutation(6 * 128)[:40]
    k, v = rng.normal(size=(2, 40, 3, 128)).astype(np.float32)
    write_tokens(views, k, v, slots, k_global_scale=0.25, v_global_scale=2.0)
    return pool, views, slots, k, v


def test_written_tokens_read_back(written):
    _, views, slots, k, v = written
    for slot, k_token, v_token in zip(slots, k, v):
        page, offset = divmod(int(slot), 128)
        for head in range(3):
            codes, scales = nvfp4.quantize(k_token[head], 0.25)
            assert views.k[page, head, offset].tolist() == codes.tolist()
            assert views.k_scale[page, head, offset].tolist() == scales.tolist()
            codes, scales = nvfp4.quantize(v_token[head], 2.0)
            assert views.v[page, head, offset].tolist() == codes.tolist()
            tile = views.v_scale[page, head].reshape(-1)
            assert [tile[(offset // 4) * 32 + s * 4 + offset % 4] for s in range(8)] == scales.tolist()


def test_other_bytes_are_left_alone(written):
    pool, views, slots, *_ = written
    before = np.full_like(pool, 0xEE)
    untouched = pool_views(before, 3)
    for slot in slots:
        page, offset = divmod(int(slot), 128)
        for new, old in ((views.k, untouched.k), (views.v, untouched.v), (views.k_scale, untouched.k_scale)):
            old[page, :, offset] = new[page, :, offset]
        flat = (offset // 4) * 32 + np.arange(8) * 4 + offset % 4
        for head in range(3):
            old_tile, new_tile = (
                untouched.v_scale[page, head].reshape(-1),
                views.v_scale[page, head].reshape(-1),
            )
            old_tile[flat] = new_tile[flat]
    np.testing.assert_array_equal(pool, before)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_writer_takes_other_floats(rng, dtype):
    k = rng.normal(size=(5, 2, 128)).astype(dtype)
    a, b = (pool_views(empty_pool(2, 2), 2) for _ in range(2))
    write_tokens(a, k, k, np.arange(5), k_global_scale=1.0, v_global_scale=1.0)
    write_tokens(
        b, k.astype(np.float64), k.astype(np.float64), np.arange(5), k_global_scale=1.0, v_global_scale=1.0
    )
    for x, y in zip(a, b):
        np.testing.assert_array_equal(x, y)


def test_negative_slots_are_padding(rng):
    k = rng.normal(size=(3, 1, 128))
    k[1] = np.nan
    pool = empty_pool(1, 1)
    write_tokens(pool_views(pool, 1), k, k, np.array([0, -1, 5]), k_global_scale=1.0, v_global_scale=1.0)
    views = pool_views(pool, 1)
    assert views.k[0, 0, [0, 5]].any(axis=-1).all() and not np.delete(views.k[0, 0], [0, 5], axis=0).any()


def test_writer_fills_separate_allocations_and_float8_scales(rng):
    k = rng.normal(size=(2, 2, 128))
    pool = pool_views(empty_pool(3, 2), 2)
    loose = PoolViews(*(np.zeros((3, 4, *view.shape[2:]), np.uint8)[:, 1:3] for view in pool))
    loose = loose._replace(v_scale=loose.v_scale.view(ml_dtypes.float8_e4m3fn))
    for views in (pool, loose):
        write_tokens(views, k, k, np.array([130, 5]), k_global_scale=1.0, v_global_scale=1.0)
    for a, b in zip(pool, loose):
        np.testing.assert_array_equal(a, b.view(np.uint8))


def test_writer_of_no_tokens_writes_nothing():
    pool = empty_pool(1, 1, fill=3)
    write_tokens(
        pool_views(pool, 1),
        np.zeros((0, 1, 128)),
        np.zeros((0, 1, 128)),
        np.zeros(0, int),
        k_global_scale=1.0,
        v_global_scale=1.0,
    )
    assert (pool == 3).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(k=np.zeros((2, 2, 64))), ValueError, r"k: .*\(2, 2, 64\)"),
        (dict(v=np.zeros((3, 2, 128))), ValueError, "v: "),
        (dict(k=np.zeros((2, 2, 128), np.int32)), TypeError, "k: .*int32"),
        (dict(k=np.ones((2, 2, 128)).tolist()), TypeError, "k: the host writer takes NumPy arrays, got builtins.list"),
        (dict(v=np.full((2, 2, 128), np.nan)), ValueError, "v: .*nan"),
        (dict(slots=np.array([1, 512])), ValueError, "slots: 512"),
        (dict(slots=np.array([5, 5])), ValueError, "slots: slot 5 is named 2 times"),
        (dict(slots=np.array([0.0, 1.0])), TypeError, "slots"),
        (dict(k_global_scale=0.0), ValueError, "k_global_scale"),
        (dict(v_global_scale=float("nan")), ValueError, "v_global_scale"),
        (dict(k_global_scale="1"), TypeError, "k_global_scale is '1'"),
        (dict(v_global_scale=None), TypeError, "v_global_scale is None"),
        (dict(v_global_scale=True), TypeError, "v_global_scale is True"),
        (dict(slots=np.array([0, 2**64 - 1], np.uint64)), ValueError, f"slots: {2**64 - 1}"),
        (dict(views=None), TypeError, "views: .*NoneType"),
        (dict(views=(1, 2, 3)), TypeError, "views: k, v, k_scale, v_scale"),
    ],
)
def test_writer_refuses_and_writes_nothing(change, error, words):
    pool = empty_pool(4, 2, fill=5)
    arguments = (
        dict(
            k=np.ones((2, 2, 128)),
            v=np.ones((2, 2, 128)),
            slots=np.array([0, 1]),
            k_global_scale=1.0,
            v_global_scale=1.0,
        )
        | change
    )
    with pytest.raises(error, match=words):
        write_tokens(**{"views": pool_views(pool, 2), **arguments})
    assert (pool == 5).all()


@pytest.mark.parametrize("name", ["k", "v"])
def test_writer_refuses_tokens_of_another_library(name):
    torch = pytest.importorskip("torch")
    tokens = dict(k=np.ones((1, 2, 128)), v=np.ones((1, 2, 128))) | {name: torch.ones(1, 2, 128)}
    pool = empty_pool(4, 2, fill=5)
    with pytest.raises(TypeError, match=f"{name}: the host writer takes NumPy arrays, got torch.Tensor"):
        write_tokens(pool_views(pool, 2), **tokens, slots=np.array([0]), k_global_scale=1.0, v_global_scale=1.0)
    assert (pool == 5).all()


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e5m2])
def test_writer_refuses_other_scales_before_it_writes_codes(name, dtype):
    pool = empty_pool(4, 2, fill=5)
    views = pool_views(pool, 2)
    views = views._replace(**{name: getattr(views, name).view(dtype)})
    tokens = np.ones((1, 2, 128))
    with pytest.raises(TypeError, match=f"{name}: .*{np.dtype(dtype).name}"):
        write_tokens(views, tokens, tokens, np.array([0]), k_global_scale=1.0, v_global_scale=1.0)
    assert (pool == 5).all()


def test_writer_refuses_views_that_share_memory():
    pool = empty_pool(4, 2, fill=5)
    views, tokens = pool_views(pool, 2), np.ones((1, 2, 128))
    for wrong, words in ((views._replace(v=views.k), "v: .*overlaps k"),
                         (views._replace(v_scale=views.k_scale), "v_scale: .*overlaps k_scale")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            write_tokens(wrong, tokens, tokens, np.array([0]), k_global_scale=1.0, v_global_scale=1.0)
    assert (pool == 5).all()


def test_writer_refuses_views_it_cannot_write():
    views = pool_views(empty_pool(1, 1), 1)
    arguments = dict(
        k=np.ones((1, 1, 128)),
        v=np.ones((1, 1, 128)),
        slots=np.array([0]),
        k_global_scale=1.0,
        v_global_scale=1.0,
    )
    with pytest.raises(TypeError, match="v: .*list"):
        write_tokens(views._replace(v=[1]), **arguments)
    with pytest.raises(ValueError, match="k_scale: shape"):
        write_tokens(views._replace(k_scale=views.k_scale[..., :4]), **arguments)
    with pytest.raises(TypeError, match="k: .*uint8, got int8"):
        write_tokens(views._replace(k=views.k.view(np.int8)), **arguments)
    frozen = views.v_scale.copy()
    frozen.setflags(write=False)
    with pytest.raises(ValueError, match="v_scale: .*read-only"):
        write_tokens(views._replace(v_scale=frozen), **arguments)


@pytest.mark.parametrize(("pages", "heads"), [(0, 1), (1, 0), (-1, 2)])
def test_empty_pool_refuses_nothing_to_hold(pages, heads):
    with pytest.raises(ValueError, match="num_(pages|kv_heads) is (0|-1); accepted are integers from 1"):
        empty_pool(pages, heads)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(num_pages=1.5, num_kv_heads=1), TypeError, "num_pages is 1.5"),
        (dict(num_pages=True, num_kv_heads=1), TypeError, "num_pages is True"),
        (dict(num_pages=2**50, num_kv_heads=1), ValueError, "num_pages is "),
        (dict(num_pages=2**31 - 1, num_kv_heads=2**31 - 1), ValueError, "num_pages and num_kv_heads are .* make 8[0-9]* bytes"),
        (dict(num_pages=1, num_kv_heads=None), TypeError, "num_kv_heads is None"),
        (dict(num_pages=1, num_kv_heads=2.0), TypeError, "num_kv_heads is 2.0"),
        (dict(num_pages=1, num_kv_heads=1, fill=256), ValueError, "fill is 256"),
        (dict(num_pages=1, num_kv_heads=1, fill=None), TypeError, "fill is None"),
    ],
)
def test_empty_pool_refuses_what_is_no_count(arguments, error, words):
    with pytest.raises(error, match=words):
        empty_pool(**arguments)


def test_page_bytes_refuses_what_is_no_count():
    with pytest.raises(TypeError, match="num_kv_heads is 1.5"):
        page_bytes(1.5)
    assert page_bytes(np.int64(4)) == 73728
