"""Problems as data: random ones keep their promises, copies keep their strides, files keep their values."""

from __future__ import annotations

import sys
import zipfile

import numpy as np
import pytest

from msa_cudacore import case_file
from msa_cudacore.cases import ARRAYS, LAYOUTS, Case, random_case
from msa_cudacore.exact_cases import fixture
from msa_cudacore.nvfp4 import unswizzle_v_scales
from msa_cudacore.pool import empty_pool, pool_views, vllm_view
from msa_cudacore.transfer import BF16, E4M3, move, to_numpy


def raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def test_random_cases_are_legal_and_finite(rng):
    from msa_cudacore import prepare_msa_nvfp4_sparse_decode

    for _ in range(30):
        case = random_case(rng)
        prepare_msa_nvfp4_sparse_decode(**case.arguments(), backend="reference")
        out, lse = case.exact()
        assert np.isfinite(out).all() and not np.isnan(lse).any() and not (lse == np.inf).any(), str(case)


def test_random_cases_cover_what_they_promise():
    """Over many draws: NaN scales in dead tokens, illegal ids and pages, holes, repeats, disorder, short
    requests."""
    seen = set()
    for seed in range(150):
        case = random_case(np.random.default_rng(seed), work=200)
        ids = case.q2k_indices.astype(np.int64)
        table = case.page_table.astype(np.int64)
        lengths = case.seqused_k
        seen |= {
            f"layout {case.name}",
            f"group {case.num_q_heads // case.num_kv_heads}",
            f"scales {case.k_scale.dtype}",
        }
        seen |= {f"seqlen_q {case.seqlen_q}", f"topk {ids.shape[-1]}", f"kv heads {case.num_kv_heads}"}
        if (case.k_scale.view(np.uint8) & 0x7F == 0x7F).any() and (
            unswizzle_v_scales(case.v_scale.view(np.uint8)) & 0x7F == 0x7F
        ).any():
            seen.add("NaN scales")
        flags = {
            "id below -1": (ids < -1).any(),
            "id beyond the table": (ids >= table.shape[1]).any(),
            "hole": ((ids[..., :-1] < 0) & (ids[..., 1:] >= 0)).any(),
            "repeat": any(
                len(set(row[row >= 0])) < (row >= 0).sum() for row in ids.reshape(-1, ids.shape[-1])
            ),
            "disorder": ((ids[..., 1:] >= 0) & (ids[..., 1:] < ids[..., :-1])).any(),
            "illegal page": ((table < -1) | (table >= case.k.shape[0])).any(),
            "length 0": (lengths == 0).any(),
            "length 1": (lengths == 1).any(),
            "length below seqlen_q": (lengths < case.seqlen_q).any(),
            "length no multiple": (lengths % 128 != 0).any(),
            "strided q": not case.q.flags.c_contiguous,
            "transposed ids": case.q2k_indices.strides[0] < case.q2k_indices.strides[1],
            "negative scale": (
                (case.k_scale.view(np.uint8) > 0x80) & (case.k_scale.view(np.uint8) < 0xFF)
            ).any(),
        }
        shared = table[:, 0][(lengths > 0) & (table[:, 0] >= 0) & (table[:, 0] < case.k.shape[0])]
        flags["shared page"] = len(set(shared)) < len(shared)
        seen |= {name for name, flag in flags.items() if flag}
    expected = (
        {f"layout random {name}" for name in LAYOUTS}
        | {f"group {g}" for g in range(1, 17)}
        | {"scales uint8", "scales float8_e4m3fn"}
    )
    expected |= {f"seqlen_q {n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)} | {
        f"topk {n}" for n in (1, 16, 17, 32, 64)
    }
    expected |= {f"kv heads {n}" for n in (1, 2, 3, 4, 5, 8)} | {"NaN scales"} | set(flags)
    assert expected <= seen, expected - seen


def test_constraints_are_kept(rng):
    case = random_case(
        rng,
        group=7,
        num_kv_heads=3,
        seqlen_q=5,
        topk=9,
        lengths=np.array([300, 2]),
        layout="separate",
        scale_dtype=E4M3,
    )
    assert (
        case.q.shape == (10, 21, 128) and case.q2k_indices.shape == (3, 10, 9) and case.k_scale.dtype == E4M3
    )
    assert case.seqused_k.tolist() == [300, 2]
    with pytest.raises(ValueError, match="layout"):
        random_case(rng, layout="other")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_keeps_values_strides_and_sharing(rng, layout):
    case = random_case(rng, layout=layout, strided_inputs=True, batch=3)
    copy = case.to("numpy")
    for name in ARRAYS:
        a, b = getattr(case, name), getattr(copy, name)
        assert a.strides == b.strides and a.dtype == b.dtype and a.ctypes.data % 16 == b.ctypes.data % 16
        np.testing.assert_array_equal(raw(a), raw(b))
        assert not np.shares_memory(a, b)
    apart = [copy.k.ctypes.data - copy.v.ctypes.data, case.k.ctypes.data - case.v.ctypes.data]
    assert layout not in ("planar", "interleaved") or apart[0] == apart[1]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_copy_keeps_odd_addresses(framework):
    """An allocation that begins at any address modulo 16; alignment is part of what a problem tests."""
    memory = bytearray(128)
    for start in range(16):
        array = np.frombuffer(memory, np.uint8, 40, start)
        if framework == "torch":
            pytest.importorskip("torch")
        copy = move({"x": array}, framework, "cpu")["x"]
        address = copy.ctypes.data if framework == "numpy" else copy.data_ptr()
        assert address % 16 == array.ctypes.data % 16


@pytest.mark.parametrize("scale_dtype", [np.uint8, E4M3])
def test_a_copy_in_torch_keeps_values_and_strides(rng, scale_dtype):
    torch = pytest.importorskip("torch")
    case = random_case(rng, strided_inputs=True, scale_dtype=scale_dtype)
    moved = case.to("torch", "cpu")
    assert moved.q.dtype == torch.bfloat16
    for name in ARRAYS:
        a, b = getattr(case, name), getattr(moved, name)
        assert tuple(s // a.itemsize for s in a.strides) == b.stride()
        np.testing.assert_array_equal(raw(a), raw(to_numpy(b)))
        assert to_numpy(b).dtype == a.dtype
    assert case.to("torch", "cpu", bf16_as_uint16=True).q.dtype == torch.uint16


def test_other_frameworks_are_refused():
    with pytest.raises(ValueError, match="numpy, torch, cupy"):
        fixture().to("jax")
    with pytest.raises(ValueError, match="device"):
        fixture().to("numpy", "cuda")


def test_importing_cases_brings_no_framework():
    import subprocess

    code = (
        "import sys, msa_cudacore.cases, msa_cudacore.exact_cases\n"
        "sys.exit('torch' in sys.modules or 'cupy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Files


@pytest.fixture
def path(tmp_path):
    return tmp_path / "case.npz"


@pytest.mark.parametrize("scale_dtype", [np.uint8, E4M3])
@pytest.mark.parametrize("softmax_scale", [None, 0.25])
def test_a_saved_case_loads_with_the_same_values(rng, path, scale_dtype, softmax_scale):
    from dataclasses import replace

    case = replace(
        random_case(rng, scale_dtype=scale_dtype, strided_inputs=True), softmax_scale=softmax_scale
    )
    case.save(path)
    loaded = Case.load(path)
    for name in ARRAYS:
        assert getattr(loaded, name).dtype == getattr(case, name).dtype
        np.testing.assert_array_equal(raw(getattr(loaded, name)), raw(getattr(case, name)))
    assert (loaded.k_global_scale, loaded.v_global_scale, loaded.seqlen_q, loaded.softmax_scale) == (
        case.k_global_scale,
        case.v_global_scale,
        case.seqlen_q,
        softmax_scale,
    )
    for a, b in zip(case.exact(), loaded.exact()):
        np.testing.assert_array_equal(a, b)


def plain(**changes) -> dict:
    case = fixture()
    data = {name: getattr(case, name) for name in ARRAYS if name != "q"} | {
        "q": case.q.astype(np.float32),
        "k_global_scale": 1.0,
        "v_global_scale": 1.0,
    }
    data |= changes
    return {name: value for name, value in data.items() if value is not None}


def test_a_file_written_by_hand_loads(path):
    """float32 q, int64 ids, no optional key."""
    np.savez(path, **plain(q2k_indices=fixture().q2k_indices.astype(np.int64)))
    case = case_file.load(path)
    assert (
        case.q.dtype == BF16
        and case.q2k_indices.dtype == np.int32
        and case.seqlen_q == 1
        and case.softmax_scale is None
    )
    np.testing.assert_allclose(case.exact()[1], np.log(4))


@pytest.mark.parametrize("spelling", ["planar", "vllm"])
def test_a_pool_replaces_the_four_views(path, spelling):
    pool = empty_pool(4, 4, fill=0x22)
    views = pool_views(pool, 4)
    views.k_scale[...] = views.v_scale[...] = 0x38
    parts = dict(k=None, v=None, k_scale=None, v_scale=None)
    if spelling == "planar":
        np.savez(path, **plain(**parts, pool=pool, num_kv_heads=4))
    else:
        np.savez(path, **plain(**parts, pool=vllm_view(pool, 4)))
    out, lse = case_file.load(path).exact()
    assert (out == 1.0).all() and np.allclose(lse, np.log(4))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(q=None), ValueError, "missing q;"),
        (dict(k_scale=None, seqused_k=None), ValueError, "missing k_scale, seqused_k"),
        (dict(softmax_scal=1.0, seqlen=2), ValueError, "unknown seqlen, softmax_scal; accepted are q, .*softmax_scale"),
        (dict(q=np.zeros((1, 64, 128), np.uint16)), TypeError, "q has dtype uint16.*q_dtype"),
        (dict(q=np.zeros((64, 128), np.float32)), ValueError, r"q has shape \(64, 128\)"),
        (dict(k=np.zeros((4, 4, 128, 64), np.int8)), TypeError, "k has dtype int8"),
        (dict(v=np.zeros((3, 4, 128, 64), np.uint8)), ValueError, "v has shape"),
        (dict(k_scale=np.zeros((4, 4, 128, 16), np.uint8)), ValueError, "k_scale has shape"),
        (dict(page_table=np.zeros((1, 4), np.float32)), TypeError, "page_table has dtype float32"),
        (dict(page_table=np.array([[0, 2**31, 0, 0]])), ValueError, "page_table spans"),
        (dict(seqused_k=np.int32(4)), ValueError, "seqused_k has shape"),
        (dict(k_global_scale=np.ones(2)), TypeError, "k_global_scale"),
        (dict(k_global_scale="x"), TypeError, "k_global_scale"),
        (dict(seqlen_q=1.5), ValueError, "seqlen_q is 1.5"),
        (dict(seqlen_q=np.nan), ValueError, "seqlen_q is nan"),
        (dict(seqlen_q=np.inf), ValueError, "seqlen_q is inf"),
        (dict(seqlen_q=1e300), ValueError, r"seqlen_q is 1e\+300"),
        (dict(pool=np.zeros((0, 73728), np.uint8), num_kv_heads=4), ValueError, "pool has shape"),
        (dict(pool=np.zeros((4, 73728), np.uint8), num_kv_heads=2.5), ValueError, "num_kv_heads is 2.5"),
        (dict(scale_dtype="float32"), ValueError, "scale_dtype is 'float32'"),
        (dict(pool=np.zeros((4, 7), np.uint8)), ValueError, "num_kv_heads"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_key(path, changes, error, words):
    np.savez(path, **plain(**changes))
    with pytest.raises(error, match=f"case.npz: .*{words}"):
        case_file.load(path)


@pytest.mark.parametrize("damage", ["empty", "truncated", "text", "one array", "pickle", "flipped"])
def test_damaged_files_are_refused(path, damage, rng):
    np.savez(path, **plain())
    content = path.read_bytes()
    if damage == "one array":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    elif damage == "pickle":
        np.savez(path, **plain(q=np.array([{"not": "an array"}], dtype=object)))
    else:
        flipped = bytearray(content)
        flipped[len(content) // 3] ^= 0xFF  # amid the codes; the archive's checksum tells
        path.write_bytes(
            {
                "empty": b"",
                "truncated": content[: len(content) // 2],
                "text": b"hello",
                "flipped": bytes(flipped),
            }[damage]
        )
    with pytest.raises(ValueError, match="not a readable npz"):
        case_file.load(path)


def test_entries_that_are_no_arrays_are_refused(path):
    np.savez(path, **plain())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("pool", b"bytes")
    with pytest.raises(ValueError, match="not a readable npz file .pool is no array"):
        case_file.load(path)


@pytest.mark.parametrize(
    "header",
    [
        "((((",
        "{'descr': 'zz', 'fortran_order': False, 'shape': (1,), }",
        "{}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (1 << 40, 1 << 20), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (1099511627776, 4, 128), }",
    ],
)
def test_damaged_array_headers_are_refused(path, header):
    np.savez(path, **plain(q=None))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("q.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    with pytest.raises(ValueError, match="case.npz: not a readable npz file"):
        case_file.load(path)


def test_random_damage_is_refused_or_harmless(path, rng):
    """Bytes of the directory and the array headers changed at random: a refusal that names the file, or a
    case."""
    case = fixture(num_q_heads=1, num_kv_heads=1)
    np.savez_compressed(
        path,
        **plain(**{name: getattr(case, name) for name in ARRAYS if name != "q"}, q=np.zeros((1, 1, 128))),
    )
    content = path.read_bytes()
    for _ in range(100):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 3):
            damaged[place] = rng.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            case_file.load(path)
        except (ValueError, TypeError) as error:
            assert str(error).startswith(str(path))


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        case_file.load(tmp_path / "nothing.npz")
