"""Tensor maps: encoding, limits, and the images of boxes against a per-element model."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import tensor_map as tmap

BASE = 0x5000_0000_0000


def read(array, box):
    """The bytes of a Box from a flat uint8 array that stands at BASE."""
    at = (box.addresses - BASE)[:, None] + np.arange(box.high - box.low)
    return array[at]


def load(tile, array, coordinates, destination=0):
    """Shared memory (1 KiB spare on each side are 0xEE) after a tiled load."""
    box = tmap.box_at(tile, coordinates)
    units = tmap.load_image(tile, box, read(array, box)).reshape(box.total, -1, 16)
    addresses = tmap.unit_addresses(tile, box.total, destination)
    shared = np.full(max(destination + box.total * tile.pitch + 1024, 8192), 0xEE, np.uint8)
    shared[addresses[..., None] + np.arange(16)] = tmap.flip_halves(tile, addresses, units)
    return shared


COPIES = json.loads((Path(__file__).parent / "data" / "h200_tensor_copies.json").read_text())["copies"]


def recorded_map(copy):
    names = ("global_dim", "global_strides", "box_dim", "element_strides")
    return tmap.TensorMap(
        copy["data_type"],
        len(copy["global_dim"]),
        np.zeros(1, np.uint8),
        *(copy[n] for n in names),
        swizzle=copy["swizzle"],
        oob_fill=copy["oob_fill"],
        l2_promotion=copy["l2_promotion"],
    )


def test_the_fields_lie_where_the_driver_puts_them():
    for copy in COPIES:
        words = np.frombuffer(recorded_map(copy).encode(BASE), np.uint32)[2:15]
        assert words.tolist() == copy["words"], copy


def test_loads_agree_with_an_h200():
    i = np.arange(1 << 20, dtype=np.uint64)
    source = ((i * np.uint64(2654435761) >> np.uint64(13) ^ i >> np.uint64(7)) & np.uint64(255)).astype(
        np.uint8
    )
    for copy in COPIES:
        if not copy["store"]:
            tile = tmap.decode(recorded_map(copy).encode(BASE))
            shared = load(tile, source, copy["coordinates"], copy["destination"])[:8192]
            assert hashlib.sha256(shared.tobytes()).hexdigest()[:16] == copy["digest"], copy


def test_stores_agree_with_an_h200():
    i = np.arange(32768)
    shared = (i * 7 + (i >> 8) & 255).astype(np.uint8)
    for copy in COPIES:
        if not copy["store"]:
            continue
        tile = tmap.decode(recorded_map(copy).encode(BASE))
        if copy["digest"] is None:
            with pytest.raises(tmap.TensorMapError, match="negative"):
                tmap.box_at(tile, copy["coordinates"], store=True)
            continue
        box = tmap.box_at(tile, copy["coordinates"], store=True)
        addresses = tmap.unit_addresses(tile, box.total, copy["destination"])
        image = shared[addresses[..., None] + np.arange(16)].reshape(box.total, -1)
        written = np.full(65536, 0x55, np.uint8)
        for address, row in zip(box.addresses - BASE, tmap.store_rows(tile, box, image)):
            written[address : address + row.size] = row
        assert hashlib.sha256(written.tobytes()).hexdigest()[:16] == copy["digest"], copy


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_every_element_of_a_box_arrives_and_the_outside_is_zero(rank):
    rng = np.random.default_rng()
    for _ in range(20):
        dims = tuple(int(d) for d in rng.integers(1, 9, rank))
        box = (8, *(int(b) for b in rng.integers(1, 5, rank - 1)))
        steps = (1, *(int(s) for s in rng.integers(1, 4, rank - 1)))
        strides, size = [], dims[0] * 2
        for d in dims[1:]:
            strides.append(-(-size // 16) * 16 + 16 * int(rng.integers(0, 3)))
            size = strides[-1] * d
        data = rng.integers(0, 256, size + 64).astype(np.uint8)
        tile = tmap.decode(tmap.TensorMap("uint16", rank, data, dims, strides, box, steps).encode(BASE))
        at = (int(rng.integers(-1, 3)) * 8, *(int(c) for c in rng.integers(-6, 8, rank - 1)))
        shared = load(tile, data, at)
        counts = [box[0]] + [-(-b // s) for b, s in zip(box[1:], steps[1:])]
        for place, index in enumerate(itertools.product(*(range(c) for c in reversed(counts)))):
            index = index[::-1]
            point = [a + i * s for a, i, s in zip(at, index, steps)]
            expected = b"\0\0"
            if all(0 <= p < d for p, d in zip(point, dims)):
                start = point[0] * 2 + sum(p * s for p, s in zip(point[1:], strides))
                expected = data[start : start + 2].tobytes()
            assert shared[2 * place : 2 * place + 2].tobytes() == expected
        assert tile.transaction_bytes == 2 * int(np.prod(counts))


def test_128_byte_swizzle_permutes_the_chunks_of_each_line():
    data = np.random.default_rng().integers(0, 256, 16 * 128).astype(np.uint8)
    tile = tmap.decode(
        tmap.TensorMap("uint8", 2, data, (128, 16), (128,), (128, 16), swizzle="128B").encode(BASE)
    )
    for destination in (1024, 1024 + 384):
        shared = load(tile, data, (0, 0), destination)[destination : destination + 2048].reshape(16, 8, 16)
        for line in range(16):
            for chunk in range(8):
                moved = chunk ^ ((line + destination // 128) % 8)
                np.testing.assert_array_equal(shared[line, moved], data.reshape(16, 8, 16)[line, chunk])


@pytest.mark.parametrize("mode, width, lines", [("64B", 64, 4), ("32B", 32, 2)])
def test_narrow_swizzles_permute_within_their_width(mode, width, lines):
    rows = 32
    data = np.random.default_rng().integers(0, 256, rows * width).astype(np.uint8)
    tile = tmap.decode(
        tmap.TensorMap("uint8", 2, data, (width, rows), (width,), (width, rows), swizzle=mode).encode(BASE)
    )
    shared = load(tile, data, (0, 0))[: rows * width]
    for row in range(rows):
        for chunk in range(width // 16):
            line = row * width // 128
            moved = row * width + 16 * (chunk ^ (line % lines))
            np.testing.assert_array_equal(shared[moved : moved + 16], data[row * width + 16 * chunk :][:16])


def test_flipped_atoms_swap_the_halves_of_odd_lines():
    data = np.random.default_rng().integers(0, 256, 8 * 128).astype(np.uint8)
    plain, flipped = (
        load(
            tmap.decode(tmap.TensorMap("uint8", 2, data, (128, 8), (128,), (128, 8), swizzle=s).encode(BASE)),
            data,
            (0, 0),
        )[:1024]
        for s in ("128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B")
    )
    plain, flipped = plain.reshape(8, 16, 8), flipped.reshape(8, 16, 8)
    np.testing.assert_array_equal(plain[::2], flipped[::2])
    np.testing.assert_array_equal(plain[1::2, 0::2], flipped[1::2, 1::2])


@pytest.mark.parametrize("data_type, bits", [("16u4_align16b", 4), ("16u6_align16b", 6)])
def test_padded_types_spread_sixteen_elements_over_sixteen_bytes(data_type, bits):
    data = np.random.default_rng().integers(0, 256, 3 * 256 * bits // 8 + 64).astype(np.uint8)
    pitch = 256 * bits // 8
    tile = tmap.decode(tmap.TensorMap(data_type, 2, data, (256, 3), (pitch,), (128, 2)).encode(BASE))
    shared = load(tile, data, (128, 2))[:256].reshape(2, 8, 16)
    row = data[2 * pitch + pitch // 2 : 3 * pitch].reshape(8, 2 * bits)
    np.testing.assert_array_equal(shared[0, :, : 2 * bits], row)
    assert (shared[0, :, 2 * bits :] == 0xA5).all()
    assert (shared[1, :, : 2 * bits] == 0).all()
    assert tile.transaction_bytes == 2 * 128 * bits // 8
    with pytest.raises(tmap.TensorMapError, match="multiple of 128"):
        tmap.box_at(tile, (64, 0))


def test_outside_elements_can_be_filled_with_nan():
    data = np.ones(64, np.float16)
    tile = tmap.decode(
        tmap.TensorMap("float16", 1, data, (10,), (), (16,), oob_fill="nan_request_zero_fma").encode(BASE)
    )
    values = load(tile, data.view(np.uint8), (0,))[:32].view(np.float16)
    assert (values[:10] == 1).all() and np.isnan(values[10:]).all()


def test_a_store_skips_rows_outside_and_cuts_in_whole_units():
    rng = np.random.default_rng()
    data = rng.integers(0, 256, 20 * 48).astype(np.uint8)
    tile = tmap.decode(tmap.TensorMap("uint8", 2, data, (40, 20), (48,), (16, 8), swizzle="32B").encode(BASE))
    box = tmap.box_at(tile, (32, 16), store=True)
    image = rng.integers(0, 256, (8, 16)).astype(np.uint8)
    np.testing.assert_array_equal(tmap.store_rows(tile, box, image), image[:4])
    assert (box.low, box.high, len(box.rows), box.total) == (0, 16, 4, 8)


def test_coordinates_that_hardware_refuses_are_refused():
    data = np.zeros(20 * 48, np.uint8)
    tile = tmap.decode(tmap.TensorMap("uint8", 2, data, (40, 20), (48,), (16, 8)).encode(BASE))
    with pytest.raises(tmap.TensorMapError, match="16 bytes"):
        tmap.box_at(tile, (8, 0))
    with pytest.raises(tmap.TensorMapError, match="negative"):
        tmap.box_at(tile, (0, -1), store=True)
    with pytest.raises(tmap.TensorMapError, match="rank 2"):
        tmap.box_at(tile, (0, 0, 0))


def test_gather_reads_four_rows_from_one_column():
    data = np.random.default_rng().integers(0, 256, 10 * 64).astype(np.uint8)
    tile = tmap.decode(tmap.TensorMap("uint8", 2, data, (64, 10), (64,), (32, 1)).encode(BASE))
    box = tmap.box_gather4(tile, 16, (9, 2, 10, 2))
    image = tmap.load_image(tile, box, read(data, box))
    rows = data.reshape(10, 64)[:, 16:48]
    np.testing.assert_array_equal(image, [rows[9], rows[2], rows[2] * 0, rows[2]])
    with pytest.raises(tmap.TensorMapError, match="box_dim"):
        tmap.box_gather4(
            tmap.decode(tmap.TensorMap("uint8", 2, data, (64, 10), (64,), (32, 2)).encode(BASE)),
            0,
            (0, 1, 2, 3),
        )


def test_the_array_form_takes_shapes_outermost_first():
    array = np.zeros((6, 40, 64), np.float32)
    made = tmap.TensorMap.from_array(array, (1, 8, 32), swizzle="128B").fields
    assert (made.dims, made.strides, made.box) == ((64, 40, 6), (256, 10240), (32, 8, 1))
    with pytest.raises(tmap.TensorMapError, match="contiguous"):
        tmap.TensorMap.from_array(array.transpose(0, 2, 1))


def test_encoding_is_undone_by_decoding():
    rng = np.random.default_rng()
    for _ in range(50):
        rank = int(rng.integers(1, 6))
        data_type = int(rng.integers(0, 13))
        bits = tmap.DATA_TYPES[data_type][1]
        fields = tmap.TileMap(
            data_type,
            BASE + 4096,
            tuple(int(x) for x in rng.integers(1, 1 << 32, rank)),
            tuple(int(x) * 16 for x in rng.integers(0, 1 << 36, rank - 1)),
            (128 // bits, *(int(x) for x in rng.integers(1, 257, rank - 1))),
            tuple(int(x) for x in rng.integers(1, 9, rank)),
            int(rng.integers(0, 7)),
            False,
            int(rng.integers(0, 4)),
        )
        assert tmap.decode(fields.encode()) == fields


def test_foreign_bytes_are_refused():
    with pytest.raises(tmap.TensorMapError, match="no tensor map"):
        tmap.decode(bytes([7] * 128))
    with pytest.raises(tmap.TensorMapError, match="16 bytes"):
        tmap.decode(bytes(128))


def test_a_map_can_be_built_from_zeros_field_by_field():
    wanted = tmap.TileMap(6, BASE + 512, (100, 7, 3), (256, 1 << 37), (64, 5, 1), (1, 2, 3), 4, True)
    data = bytes(128)
    fields = [
        ("global_address", BASE + 512),
        ("rank", 2),
        ("elemtype", 6),
        ("swizzle_mode", 3),
        ("swizzle_atomicity", 1),
        ("fill_mode", 1),
        ("interleave_layout", 0),
    ]
    for i in range(3):
        fields += [
            ("global_dim", wanted.dims[i], i),
            ("box_dim", wanted.box[i], i),
            ("element_stride", wanted.element_strides[i], i),
        ]
    fields += [("global_stride", wanted.strides[i], i) for i in range(2)]
    for field in fields:
        data = tmap.replace_field(data, *field)
    assert tmap.decode(data) == wanted
    for field in (
        ("box_dim", 300, 0),
        ("elemtype", 16),
        ("colour", 1),
        ("global_stride", 16, 4),
        ("rank", 9),
    ):
        with pytest.raises(tmap.TensorMapError, match=field[0]):
            tmap.replace_field(data, *field)


ARRAY = np.zeros(4096, np.uint8)
GOOD = dict(data_type="uint8", rank=2, array=ARRAY, global_dim=(64, 8), global_strides=(64,), box_dim=(32, 8))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rank=6), "rank=6"),
        (dict(global_dim=(64,)), "needs 2 values"),
        (dict(global_dim=(64, 0)), "global_dim"),
        (dict(global_strides=(72,)), "multiple of 16"),
        (dict(box_dim=(32, 257)), "box_dim"),
        (dict(box_dim=(24, 8)), "multiple of 16 bytes"),
        (dict(box_dim=(64, 8), swizzle="32B"), "at most 32 bytes"),
        (dict(element_strides=(1, 9)), "element_strides"),
        (dict(swizzle="256B"), "accepted are"),
        (dict(interleave="32B"), "interleave"),
        (dict(oob_fill=1), "floating-point"),
        (dict(data_type="int3"), "data_type"),
        (dict(data_type="16u4_align16b", box_dim=(64, 8)), "needs 128"),
        (dict(data_type="16u4_align16b", box_dim=(128, 8)), "multiple of 128"),
        (
            dict(data_type="16u4_align16b", box_dim=(128, 8), global_dim=(128, 8), global_strides=(48,)),
            "multiple of 32",
        ),
        (
            dict(data_type="16u4_align16b", box_dim=(128, 8), global_dim=(128, 8), swizzle="64B"),
            "takes none, 128B",
        ),
        (dict(data_type="16u4_align8b", global_dim=(63, 8)), "even"),
    ],
)
def test_what_the_driver_refuses_is_refused_by_name(change, message):
    tmap.TensorMap(**GOOD)
    with pytest.raises(tmap.TensorMapError, match=message):
        tmap.TensorMap(**{**GOOD, **change})


def test_misaligned_addresses_are_refused():
    made = tmap.TensorMap(**GOOD)
    with pytest.raises(tmap.TensorMapError, match="multiple of 16"):
        made.encode(BASE + 8)
    with pytest.raises(tmap.TensorMapError, match="multiple of 128"):
        tmap.unit_addresses(tmap.decode(made.encode(BASE)), 8, 64)


@pytest.mark.parametrize(
    "operation, old, new, expected",
    [
        ("add", [1, 4294967295], [2, 2], [3, 1]),
        ("min", [5, 1], [3, 3], [3, 1]),
        ("max", [5, 1], [3, 3], [5, 3]),
        ("inc", [2, 3], [3, 3], [3, 0]),
        ("dec", [0, 9], [3, 3], [3, 3]),
        ("xor", [6, 1], [3, 3], [5, 2]),
    ],
)
def test_reductions(operation, old, new, expected):
    got = tmap.reduce_values(operation, np.array(old, np.uint32), np.array(new, np.uint32))
    assert got.tolist() == expected
    with pytest.raises(ValueError, match="reduction"):
        tmap.reduce_values("mul", got, got)
