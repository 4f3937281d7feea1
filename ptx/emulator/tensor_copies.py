"""Copies through a tensor map: cp.async.bulk.tensor, its reductions and prefetches, and tensormap.replace."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .async_copies import global_address, load, multicast_targets, reduce_bytes, start, update_global
from .forms import operation, row
from .places import shared_address
from .tensor_map import (BYTES, TensorMapError, box_at, box_gather4, decode, flip_halves, load_image,
                         replace_field, store_rows, unit_addresses)

_DIMENSIONS = "1d|2d|3d|4d|5d"


def read_map(warp, ins, index, lane):
    """(TileMap, coordinates) of a ``[map, {coordinates}]`` operand in one lane."""
    address = int(warp.address(index)[lane])
    if address % 64:
        warp.fault("misaligned", f"tensor map at {address:#x}: it must be a multiple of 64", lane=lane,
                   address=address)
    if len(ins.operands[index].extra) != 1:
        warp.fault("operand", "a tensor copy needs [map, {coordinates}]", lane=lane)
    coordinates = [int(c) for c in warp.coordinates(index)[:, lane]]
    try:
        data = warp.machine.memory.view(address, BYTES).tobytes()
        tile = decode(data)
    except ValueError as error:
        warp.fault("tensor-map", f"{error} (at {address:#x})", lane=lane, address=address)
    return tile, coordinates


def find_box(warp, ins, tile, coordinates, lane, *, store=False):
    gathered = ins.has("tile::gather4") or ins.has("tile::scatter4")
    wanted = 2 if gathered else int(ins.one_of(*_DIMENSIONS.split("|"))[0])
    if tile.rank != wanted:
        warp.fault("tensor-map", f"a tensor map of rank {tile.rank} in a .{wanted}d copy", lane=lane)
    try:
        if gathered:
            if len(coordinates) != 5:
                raise TensorMapError(f"{len(coordinates)} coordinates: gather4 and scatter4 take a column "
                                     f"and four rows")
            return box_gather4(tile, coordinates[0], coordinates[1:], store=store)
        return box_at(tile, coordinates, store=store)
    except TensorMapError as error:
        warp.fault("tensor-map", str(error), lane=lane)


def find_units(warp, tile, box, offset, lane):
    """Shared-memory offsets of the 16-byte units of the image; faults where they leave shared memory."""
    try:
        addresses = unit_addresses(tile, box.total, offset)
    except TensorMapError as error:
        warp.fault("misaligned", str(error), lane=lane, address=offset)
    end = int(addresses.max()) + 16
    if end > len(warp.cta.shared.bytes):
        warp.fault("out-of-bounds", f"the box at shared offset {offset:#x} ends at {end:#x}, outside the "
                   f"{len(warp.cta.shared.bytes)} bytes of shared memory", lane=lane, address=offset)
    return addresses


def ranges_of(tile, addresses):
    """Shared ranges [(offset, size)] that an image covers, to be claimed."""
    flat = np.sort(addresses.ravel())
    breaks = np.flatnonzero(np.diff(flat) != 16)
    starts = np.concatenate([[0], breaks + 1])
    ends = np.concatenate([breaks, [len(flat) - 1]])
    return [(int(flat[s]), int(flat[e] - flat[s]) + 16) for s, e in zip(starts, ends)]


def _gather(machine, agent, box):
    if len(box.addresses) == 0 or box.high == box.low:
        return np.zeros((len(box.rows), box.high - box.low), np.uint8)
    return machine.access.gather_global(agent, box.addresses, box.high - box.low)


@operation("cp.async.bulk.tensor",
           f"{_DIMENSIONS} shared::cluster|shared::cta global tile|tile::gather4? "
           f"mbarrier::complete_tx::bytes "
           "multicast::cluster? cta_group::1|cta_group::2? L2::cache_hint?", "[a], [t], [m], x?, y?")
def tensor_load(warp, ins):
    machine = warp.machine
    pair = ins.has("cta_group::2")
    mask_index = 3 if ins.has("multicast::cluster") else None
    for lane in warp.lanes:
        tile, coordinates = read_map(warp, ins, 1, lane)
        box = find_box(warp, ins, tile, coordinates, lane)
        cluster = ins.has("shared::cluster")
        cta, offset = shared_address(warp, warp.address(0)[lane], lane, generic=False, cluster=cluster,
                                     what="destination")
        barrier = shared_address(warp, warp.address(2)[lane], lane, generic=False, cluster=cluster, size=8,
                                 align=8, what="mbarrier address")
        units = find_units(warp, tile, box, offset, lane)
        tx = tile.row_bytes * box.total
        # The hardware leaves the padding of the padded types undefined: a fresh value for each copy.
        pad = machine.rng.randrange(256)

        def read(agent, box=box):
            return _gather(machine, agent, box)

        def write(agent, target, data, tile=tile, box=box, units=units, pad=pad):
            image = load_image(tile, box, data, pad).reshape(box.total, -1, 16)
            image = flip_halves(tile, units, image)
            machine.access.scatter_shared(agent, target.rank, units.ravel(), image.reshape(-1, 16))

        ranges = ranges_of(tile, units)
        targets = multicast_targets(warp, ins, mask_index, (cta, offset), barrier, lane, pair=pair)
        load(warp, ins, tx, read, [(t, ranges, b, o) for t, _, b, o in targets], write, tx, "tma load")


@operation("cp.async.bulk.tensor", f"{_DIMENSIONS} global shared::cta tile|tile::scatter4? bulk_group "
                                   f"L2::cache_hint?",
           "[t], [a], x?")
def tensor_store(warp, ins):
    _store(warp, ins, None, "tma store")


_OPERATIONS = "add|min|max|inc|dec|and|or|xor"


@operation("cp.reduce.async.bulk.tensor", f"{_DIMENSIONS} global shared::cta {_OPERATIONS} tile? bulk_group "
                                          "L2::cache_hint?", "[t], [a], x?")
def tensor_reduce(warp, ins):
    _store(warp, ins, ins.one_of(*_OPERATIONS.split("|")), "tma reduction")


# Element types of a tensor map that a reduction knows, by CUtensorMapDataType.
_REDUCED = {1: np.uint16, 2: np.uint32, 3: np.int32, 4: np.uint64, 5: np.int64, 6: np.float16, 7: np.float32,
            8: np.float64, 9: ml_dtypes.bfloat16, 10: np.float32}


def _store(warp, ins, reduction, report):
    machine = warp.machine
    access = machine.access
    for lane in warp.lanes:
        tile, coordinates = read_map(warp, ins, 0, lane)
        box = find_box(warp, ins, tile, coordinates, lane, store=True)
        own, offset = shared_address(warp, warp.address(1)[lane], lane, generic=False, cluster=False,
                                     what="source")
        units = find_units(warp, tile, box, offset, lane)
        dtype = _REDUCED.get(tile.data_type)
        if reduction is not None and dtype is None:
            warp.fault("tensor-map", f"no reduction for element type {tile.data_type} of the tensor map",
                       lane=lane)

        def read(agent, tile=tile, box=box, units=units):
            image = access.gather_shared(agent, own.rank, units.ravel(), 16).reshape(*units.shape, 16)
            image = flip_halves(tile, units, image)
            return store_rows(tile, box, image.reshape(box.total, -1))

        def write(agent, data, box=box, dtype=dtype):
            if reduction is None:
                if data.size:
                    access.scatter_global(agent, box.addresses, data)
                return
            for address, piece in zip(box.addresses, data):
                new = np.ascontiguousarray(piece)
                update_global(agent, int(address), piece.size,
                              lambda old, new=new: reduce_bytes(old, new, reduction, dtype))

        start(warp, 1 << int(lane), ins.text, read, write, proxy="async",
              sources=[(own, o, n) for o, n in ranges_of(tile, units)],
              nbytes=len(box.rows) * (box.high - box.low), report=report)


@operation("cp.async.bulk.prefetch.tensor", f"{_DIMENSIONS} L2 global tile|tile::gather4? L2::cache_hint?",
           "[t], x?")
def tensor_prefetch(warp, ins):
    for lane in warp.lanes:
        tile, coordinates = read_map(warp, ins, 0, lane)
        find_box(warp, ins, tile, coordinates, lane)


@row("cp.async.bulk.tensor", f"{_DIMENSIONS} shared::cluster|shared::cta? global? "
                             f"im2col|im2col::w|im2col::w::128|"
                             "im2col_no_offs mbarrier::complete_tx::bytes? bulk_group? multicast::cluster? "
                             "cta_group::1|cta_group::2? L2::cache_hint?", None)
def tensor_im2col(builder, ins):
    raise builder.error("im2col tensor copies are not modelled; tile, tile::gather4 and tile::scatter4 are")


# --- tensormap ----------------------------------------------------------------------------------------------

_FIELDS = ("global_address|rank|box_dim|global_dim|global_stride|element_stride|elemtype|interleave_layout|"
           "swizzle_mode|swizzle_atomicity|fill_mode")


def _map_bytes(warp, ins, address, lane):
    """A writable view of the 128 bytes of a map in shared or global memory."""
    if ins.has("shared::cta"):
        cta, offset = shared_address(warp, address, lane, generic=False, cluster=False, size=BYTES, align=64)
        return cta.shared.bytes[offset:offset + BYTES]
    try:
        return warp.machine.memory.view(int(address), BYTES)
    except ValueError as error:
        warp.fault("out-of-bounds", str(error), lane=lane, address=int(address))


@operation("tensormap.replace", f"tile {_FIELDS} shared::cta|global? b1024 b32|b64", "[a], b, c?")
def tensormap_replace(warp, ins):
    field = ins.one_of(*_FIELDS.split("|"))
    indexed = len(ins.operands) == 3
    for lane in warp.lanes:
        view = _map_bytes(warp, ins, warp.address(0)[lane], lane)
        index = int(warp.u32(1)[lane]) if indexed else 0
        value = int(warp.values(2 if indexed else 1)[lane])
        if ins.has("b32"):
            value &= 0xFFFFFFFF
        try:
            view[:] = np.frombuffer(replace_field(view.tobytes(), field, value, index), np.uint8)
        except TensorMapError as error:
            warp.fault("tensor-map", str(error), lane=lane)


@operation("tensormap.cp_fenceproxy", "global shared::cta tensormap::generic release cta|cluster|gpu|sys "
                                      "sync aligned",
           "[a], [b], c")
def tensormap_copy(warp, ins):
    """Copy a map from shared to global memory, then fence: the lanes act together."""
    access = warp.machine.access
    target = global_address(warp, ins, warp.same(warp.address(0), "operand 1"), warp.first)
    source = warp.same(warp.address(1), "operand 2")
    own, offset = shared_address(warp, source, warp.first, generic=False, cluster=False, size=BYTES, align=16)
    access.write_global(warp.agent, target, access.read_shared(warp.agent, own.rank, offset, BYTES))
    warp.machine.clocks.fence(warp.slot)


