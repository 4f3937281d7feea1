"""Tensors of every array library come out as the same pointer, shape, byte strides and dtype."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from msa_cudacore import arguments
from msa_cudacore.arguments import allocate_like, describe


class Producer:
    """An object that is known through DLPack alone."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, **keywords):
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._device


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_dlpack_producer_matches_numpy(dtype):
    array = np.zeros((5, 4, 6), dtype)[1:, ::2]
    direct, exported = describe("x", array), describe("x", Producer(array))
    for field in ("pointer", "shape", "strides", "dtype", "device", "ordinal"):
        assert getattr(direct, field) == getattr(exported, field), field
    assert exported.framework == "dlpack"


def test_dlpack_producer_on_another_kind_of_device_is_refused():
    with pytest.raises(ValueError, match="q has DLPack device type 7"):
        describe("q", Producer(np.zeros(3, np.float32), device=(7, 0)))


def test_broken_dlpack_export_is_refused_by_name():
    class Broken(Producer):
        def __dlpack__(self, **keywords):
            raise RuntimeError("no export today")

    with pytest.raises(TypeError, match="q is a Broken whose DLPack export failed: .*no export today"):
        describe("q", Broken(np.zeros(3, np.float32)))


@pytest.mark.parametrize("name", ["uint8", "int32", "int64", "float16", "float32", "bfloat16", "float8_e4m3fn"])
def test_every_dtype_comes_through_dlpack(name):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 6, dtype=torch.uint8).to(getattr(torch, name))[1:, ::2]
    described = describe("x", Producer(tensor))
    assert (described.dtype, described.pointer) == (name, tensor.data_ptr())
    assert described.strides == (6 * tensor.element_size(), 2 * tensor.element_size())


def test_contiguous_export_without_strides():
    """DLPack before 1.2 lets a C-contiguous tensor have no strides; NumPy writes them, so they are struck out here."""

    class Strideless(Producer):
        def __dlpack__(self, stream=None):
            capsule = self._array.__dlpack__()
            strides_offset = 32  # in a DLTensor: data 8, device 8, ndim 4, dtype 4, shape 8
            ctypes.c_void_p.from_address(arguments._capsule_pointer(capsule, b"dltensor") + strides_offset).value = None
            return capsule

    array = np.zeros((5, 4, 6), np.int32)
    assert describe("x", Strideless(array)).strides == describe("x", Producer(array)).strides == (96, 24, 4)


def test_read_only_export_is_not_writable():
    array = np.zeros(3, np.float32)
    assert describe("x", Producer(array)).writable
    array.flags.writeable = False
    assert not describe("x", Producer(array)).writable


def test_managed_memory_is_a_kind_of_device_memory():
    class Managed(Producer):
        def __dlpack__(self, **keywords):
            return self._array.__dlpack__()

    with pytest.raises(TypeError, match="__dlpack_device__ says 13, the capsule 1"):
        describe("q", Managed(np.zeros(3, np.float32), device=(13, 0)))


def test_old_unversioned_export():
    class Old(Producer):
        def __dlpack__(self, stream=None):
            return self._array.__dlpack__()

    array = np.arange(6, dtype=np.int32)
    assert describe("x", Old(array)).dtype == "int32"


@pytest.mark.parametrize("device", [None, "cpu", (1,), (1, 0, 0), ("x", "y")])
def test_device_that_is_no_pair_is_refused_by_name(device):
    with pytest.raises(TypeError, match="^q is a Producer whose __dlpack_device__ failed: ."):
        describe("q", Producer(np.zeros(3, np.float32), device=device))


@pytest.mark.parametrize("capsule", [3, "x", None])
def test_export_that_is_no_capsule_is_refused_by_name(capsule):
    class Broken(Producer):
        def __dlpack__(self, **keywords):
            return capsule

    with pytest.raises(TypeError, match="^q is a Broken whose DLPack export failed: ."):
        describe("q", Broken(np.zeros(3, np.float32)))


def test_device_that_differs_from_the_export_is_refused():
    class Lying(Producer):
        def __dlpack__(self, **keywords):
            return self._array.__dlpack__()

    with pytest.raises(TypeError, match="q is a Lying .*says 2, the capsule 1"):
        describe("q", Lying(np.zeros(3, np.float32), device=(2, 0)))


def test_dlpack_dtypes_without_a_name_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="q has dtype DLPack code 5 of 64 bits"):
        describe("q", Producer(torch.zeros(3, dtype=torch.complex64)))


def test_a_type_is_no_array():
    with pytest.raises(TypeError, match="^q is a type"):
        describe("q", np.ndarray)


def test_masked_arrays_are_refused():
    with pytest.raises(ValueError, match="q2k_indices is a masked array"):
        describe("q2k_indices", np.ma.masked_array(np.zeros(3, np.int32), mask=[0, 1, 0]))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_narrow_numpy_dtypes(name):
    array = np.zeros((3, 8), getattr(ml_dtypes, name))
    tensor = describe("x", array)
    assert tensor.dtype == name and tensor.to_numpy().dtype == array.dtype
    tensor.to_numpy()[1, 2] = 1.0
    assert float(array[1, 2]) == 1.0


def test_torch_tensor_with_strides_and_float8():
    torch = pytest.importorskip("torch")
    base = torch.zeros(4, 6, 128, dtype=torch.bfloat16)
    tensor = describe("q", base[:, 1:3])
    assert (tensor.framework, tensor.dtype, tensor.shape) == ("torch", "bfloat16", (4, 2, 128))
    assert tensor.strides == (6 * 256, 256, 2) and tensor.pointer == base.data_ptr() + 256
    assert tensor.owner.data_ptr() == tensor.pointer
    scales = torch.full((2, 8), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert describe("k_scale", scales).to_numpy().astype(np.float32).tolist() == [[1.0] * 8] * 2


def test_torch_tensors_that_cannot_be_read_in_place_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="q has layout torch.sparse_coo"):
        describe("q", torch.zeros(3, 3).to_sparse())
    with pytest.raises(ValueError, match="q lies on meta"):
        describe("q", torch.zeros(3, device="meta"))
    with pytest.raises(TypeError, match="q has dtype complex64"):
        describe("q", torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="q has layout nested"):
        describe("q", torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)]))
    with pytest.raises(ValueError, match=r"q is lazily negated; .*q\.resolve_neg\(\)"):
        describe("q", torch._neg_view(torch.zeros(3, dtype=torch.bfloat16)))


def test_torch_tensors_without_storage_are_refused():
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(ValueError, match="q has 3 elements and no storage"):
        describe("q", FakeTensorMode().from_tensor(torch.zeros(3)))
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="q has 3 elements and no storage"):
        describe("q", freed)

    def traced(row):
        with pytest.raises(ValueError, match="q is a torch tensor without storage"):
            describe("q", row)
        return row

    torch.vmap(traced)(torch.zeros(2, 3))


def test_torch_storage_that_is_smaller_than_its_view_is_refused():
    torch = pytest.importorskip("torch")
    base = torch.zeros(4, 6, dtype=torch.float32)
    views = base, base[1:, 2:], base[:1], base[4:]
    for view in views:
        describe("q", view)
    base.untyped_storage().resize_(64)
    for view, needed in zip(views, (96, 96, None, None)):
        if needed is None:
            describe("q", view)
            continue
        with pytest.raises(ValueError, match=f"q reaches over {needed} bytes of a storage of 64; accepted are"):
            describe("q", view)


def test_negative_stride_of_a_size_one_dimension_means_nothing():
    array = np.zeros((1, 4), np.float32)[::-1]
    assert array.strides[0] < 0 and describe("x", array).canonical_strides() == (0, 4)
    with pytest.raises(ValueError, match="x has byte strides .*; negative strides are not accepted"):
        describe("x", np.zeros((2, 4), np.float32)[::-1])


def test_overlap_is_decided_by_bytes_not_by_ranges():
    base = np.zeros((4, 2, 16), np.uint8)
    even, odd = describe("a", base[:, 0]), describe("b", base[:, 1])
    assert not even.overlaps(odd) and even.overlaps(describe("c", base[1:2, 0]))
    assert not describe("d", base[:0]).overlaps(even)


def test_overlap_that_is_too_hard_to_decide_counts_as_one(monkeypatch):
    def too_hard(*arguments, **keywords):
        raise np.exceptions.TooHardError

    base = np.zeros((4, 2, 16), np.uint8)
    monkeypatch.setattr(np, "shares_memory", too_hard)
    assert describe("a", base[:, 0]).overlaps(describe("b", base[:, 1]))
    assert not describe("a", base[0]).overlaps(describe("b", base[1])), "ranges apart need no solving"


def test_outputs_are_allocated_in_the_library_of_the_reference():
    torch = pytest.importorskip("torch")
    assert allocate_like(describe("q", torch.zeros(2)), "out", (3, 4), "bfloat16").dtype == torch.bfloat16
    assert allocate_like(describe("q", np.zeros(2, np.float32)), "out", (3,), "bfloat16").dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match="out must be given: a Producer"):
        allocate_like(describe("q", Producer(np.zeros(2, np.float32))), "out", (3,), "float32")
