"""docs/integration.md: its code runs, its figures are what the programs choose, and the example's cache writer in
torch writes the bytes of the host writer."""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore import prepare_msa_nvfp4_sparse_decode
from msa_cudacore.contract import Problem
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.pool import empty_pool, page_bytes, page_regions, pool_views, write_tokens
from msa_cudacore.programs import PROGRAMS
from msa_cudacore.reference import decode
from msa_cudacore.transfer import BF16, to_numpy

ROOT = Path(__file__).resolve().parent.parent
HEADS, PAGES, SCRATCH = 3, 5, 0


@pytest.fixture(scope="module")
def cache_writer():
    pytest.importorskip("torch")
    return runpy.run_path(str(ROOT / "examples" / "torch_engine.py"))["CacheWriter"]


def spread(rng, tokens: int, global_scale: float) -> np.ndarray:
    """Blocks whose largest values lie anywhere in float32, subnormal numbers included."""
    size = np.ldexp(1.0, rng.integers(-149, 127, (tokens, HEADS, 8, 1)))
    return (rng.normal(size=(tokens, HEADS, 8, 16)) * size).reshape(tokens, HEADS, 128).clip(-3e38, 3e38)


def outliers(rng, tokens: int, global_scale: float) -> np.ndarray:
    values = rng.normal(size=(tokens, HEADS, 128))
    values[rng.random(values.shape) < 0.02] *= 1e4
    return values


def zeros(rng, tokens: int, global_scale: float) -> np.ndarray:
    """Zeros of both signs, whole blocks of them, and blocks too small for any scale."""
    values = np.copysign(0.0, rng.normal(size=(tokens, HEADS, 128)))
    values[::3, :, ::16] = 1.0
    values[1::3] *= 1e-30
    return values


def code_ties(rng, tokens: int, global_scale: float) -> np.ndarray:
    """Quarters of a step up to 6: half of them lie in the middle between two codes, or a rounding beside it."""
    values = rng.integers(-24, 25, (tokens, HEADS, 128)) / 4
    values[..., ::16] = 6.0
    return values * global_scale


def scale_ties(rng, tokens: int, global_scale: float) -> np.ndarray:
    """Largest values in the middle between two scales, beyond the last one, and a bit beside the middle."""
    from msa_cudacore import nvfp4

    scales = nvfp4.decode_e4m3(np.arange(127, dtype=np.uint8))
    largest = rng.choice(np.concatenate([(scales[:-1] + scales[1:]) / 2, [448, 460, 500]]), (tokens, HEADS, 8, 1))
    largest *= 6 * global_scale * rng.choice([1, 1 - 2.0**-40, 1 + 2.0**-40], largest.shape)
    values = rng.uniform(-1, 1, (tokens, HEADS, 8, 16))
    values[..., :1] = 1
    return (values * largest).reshape(tokens, HEADS, 128)


KINDS = {kind.__name__: kind for kind in (spread, outliers, zeros, code_ties, scale_ties)}


def assert_same_bytes(cache_writer, device, k, v, slots, rng, **global_scales):
    """Both writers, on the same dirty pool; k and v in an accepted NumPy dtype."""
    import torch

    def to_torch(array):
        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(array).to(device)

    pool = empty_pool(PAGES, HEADS)
    pool[...] = rng.integers(0, 256, pool.shape, dtype=np.uint8)
    ours = torch.from_numpy(pool.copy()).to(device)
    writer = cache_writer(pool_views(ours, HEADS), **global_scales, scratch_page=SCRATCH)
    arrays = to_torch(k), to_torch(v), torch.from_numpy(slots).to(device)
    if device == "cuda":
        writer(*(array[:0] for array in arrays))  # loads what torch loads late, and writes nothing
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            writer(*arrays)
        graph.replay()
    else:
        writer(*arrays)
    write_tokens(pool_views(pool, HEADS), k, v, slots, **global_scales)
    np.testing.assert_array_equal(ours[SCRATCH + 1 :].cpu().numpy(), pool[SCRATCH + 1 :])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("kind", KINDS)
def test_torch_writer_writes_the_bytes_of_the_host_writer(cache_writer, kind, dtype, device, rng):
    for k_global_scale, v_global_scale in ((1.0, 0.25), (0.0123, 7.7), (3e-30, 2e30)):
        slots = rng.permutation(np.arange(128, PAGES * 128))[:60]
        slots[rng.random(60) < 0.2] = -1
        k, v = (KINDS[kind](rng, 60, scale) for scale in (k_global_scale, v_global_scale))
        if dtype == np.float16:
            k, v = k.clip(-65504, 65504), v.clip(-65504, 65504)
        assert_same_bytes(
            cache_writer, device, k.astype(dtype), v.astype(dtype), slots, rng,
            k_global_scale=k_global_scale, v_global_scale=v_global_scale,
        )  # fmt: skip


def test_torch_writer_needs_nothing_from_the_host(cache_writer):
    """Meta tensors have no values to look at, and no operation takes a tensor of another device beside them."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class OnMetaAlone(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
            tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
            assert all(tensor.is_meta for tensor in tensors), operation
            return operation(*arguments, **(keywords or {}))

    views = pool_views(torch.empty(PAGES, page_bytes(HEADS), dtype=torch.uint8, device="meta"), HEADS)
    writer = cache_writer(views, k_global_scale=0.5, v_global_scale=2.0, scratch_page=SCRATCH)
    tokens = torch.empty(7, HEADS, 128, dtype=torch.bfloat16, device="meta")
    slots = torch.empty(7, dtype=torch.int64, device="meta")
    with OnMetaAlone():
        writer(tokens, tokens, slots)


def test_torch_writer_takes_slots_of_int32_and_float8_views(cache_writer, rng):
    torch = pytest.importorskip("torch")
    pools = torch.zeros(2, PAGES, page_bytes(HEADS), dtype=torch.uint8)
    tokens = torch.from_numpy(rng.normal(size=(9, HEADS, 128)))
    for pool, dtype, slot_dtype in zip(pools, (torch.uint8, torch.float8_e4m3fn), (torch.int64, torch.int32)):
        views = pool_views(pool, HEADS)
        views = views._replace(k_scale=views.k_scale.view(dtype), v_scale=views.v_scale.view(dtype))
        writer = cache_writer(views, k_global_scale=0.01, v_global_scale=0.02, scratch_page=SCRATCH)
        writer(tokens, tokens, torch.arange(100, 109, dtype=slot_dtype))
    assert pools[0].any() and torch.equal(*pools)


def test_requests_of_the_engine_attend_their_own_tokens_in_order():
    """The first layer, held against a pool in which each request's tokens lie one behind the other."""
    torch = pytest.importorskip("torch")
    example = runpy.run_path(str(ROOT / "examples" / "torch_engine.py"))
    engine, scales = example["Engine"]("cpu"), example["GLOBAL_SCALES"]
    # Far enough from zero that few keys outweigh the others, and a wrong page changes the result.
    tokens = [3 * torch.randn(length + 3, 64, dtype=torch.bfloat16) for length in (1, 254, 2400)]
    for request, mine in enumerate(tokens):
        engine.add(request, mine[:-3])
    for step in (-3, -2, -1):
        engine.step({request: tokens[request][step] for request in (0, 2, 1)})
    got = []
    engine.forward(4, lambda layer: got.append([to_numpy(a) for a in (engine.q, engine.q2k, engine.out, engine.lse)]))
    (q, q2k, out, lse), _ = got
    for row, request in enumerate((0, 2, 1)):
        _, k, v = (part.unflatten(-1, (-1, 128)) for part in (tokens[request] @ engine.to_qkv[0]).split(engine.sizes, -1))
        views = pool_views(empty_pool(20, 2), 2)
        write_tokens(views, to_numpy(k), to_numpy(v), np.arange(len(k)), **scales)
        exact = decode(
            q[row : row + 1], q2k_indices=q2k[:, row : row + 1], **views._asdict(), **scales,
            page_table=np.arange(20)[None], seqused_k=np.array([len(k)]),
        )  # fmt: skip
        # A matrix product of one row may round otherwise than that of many, so a bar, not bits.
        np.testing.assert_allclose(out[row : row + 1].astype(float), exact[0], rtol=0.01, atol=0.01)
        np.testing.assert_allclose(lse[row : row + 1], exact[1], atol=1e-3)


# The guide

GUIDE = (ROOT / "docs" / "integration.md").read_text(encoding="utf-8")
PARTS = {
    "H200": DeviceFacts(0, "H200", (9, 0), 132, 227 * 1024, 228 * 1024, True),
    "A100": DeviceFacts(0, "A100", (8, 0), 108, 163 * 1024, 164 * 1024, False),
    "L40S": DeviceFacts(0, "L40S", (8, 9), 142, 99 * 1024, 100 * 1024, False),
    "B200": DeviceFacts(0, "B200", (10, 0), 148, 227 * 1024, 228 * 1024, True),
}


def table_under(text: str) -> list[list[str]]:
    """The rows of the first table behind a text, its heading first."""
    lines = GUIDE[GUIDE.index(text) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    heading, _, *body = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [heading, *body]


def program_of(part: DeviceFacts):
    return next(program for program in PROGRAMS if program.place == "cuda" and program.refusal(part) is None)


def test_the_guides_code_runs(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL):
        exec(compile(block, "docs/integration.md", "exec"), scope)
    views, codes, scales = scope["views"][0], scope["codes"], scope["scales"]
    assert [tuple(c.shape[1:]) for c in codes] == [tuple(views.k.shape[1:])] * 2
    arguments = dict(
        page_table=scope["page_table"], seqused_k=scope["seqused_k"], k_global_scale=1.0, v_global_scale=1.0
    )
    apart = prepare_msa_nvfp4_sparse_decode(
        scope["q"], *codes, scope["q2k"], k_scale=scales[0], v_scale=scales[1], **arguments
    )
    assert not apart().any()
    interleaved = torch.zeros(4, 2, 2, 128, 72, dtype=torch.uint8, device=scope["device"])
    with pytest.raises(ValueError, match="dense"):
        prepare_msa_nvfp4_sparse_decode(
            scope["q"], *interleaved[..., :64].unbind(1), scope["q2k"], **arguments,
            k_scale=interleaved[:, 0, ..., 64:], v_scale=interleaved[:, 1, ..., 64:],
        )  # fmt: skip


def test_the_guides_byte_map_is_that_of_the_pool():
    ends = [int(number) for number in re.findall(r"Hkv\*(\d+)", GUIDE[: GUIDE.index("| K codes")])]
    begins = [page_regions(1)[name].offset for name in ("k", "k_scale", "v", "v_scale")]
    assert [0, *ends] == [*begins, page_bytes(1)]


def test_the_guides_numbers_of_configurations():
    """Bounds with some room, for a choice that is tuned now and then."""
    heading, *rows = table_under("items = batch *")
    limits = [int(title.split()[2].replace(",", "")) for title in heading[1:]]
    assert [row[0] for row in rows] == list(PARTS)
    for part, *stated in rows:
        program, kinds, counted = program_of(PARTS[part]), set(), []
        for items in range(1, limits[-1] + 1):
            choice = program.plan(Problem(items, 1, 16, 1, 16, 1000, 1000), PARTS[part], None).configuration
            kinds.add(choice.constants)
            if items in limits:
                counted.append(len(kinds))
        bounds = [int(bound) for bound in stated]
        assert all(count <= bound <= 1.5 * count for count, bound in zip(counted, bounds)), (part, bounds, counted)


def test_the_guides_sizes_of_workspaces():
    heading, *rows = table_under("Bytes, for 4 KV heads")
    batches = [int(title.split()[1]) for title in heading[2:]]
    assert len(rows) == 4
    for part, splits, *sizes in rows:
        forced = None if splits == "automatic" else int(splits)
        most = [
            program_of(PARTS[part]).most_workspace_bytes(Problem(n, 1, 64, 4, 16, 16, 1), PARTS[part], forced)
            for n in batches
        ]
        assert sizes == [f"{size:,}" for size in most], (part, splits)


def test_the_guides_links_point_to_files():
    prose = re.sub(r"```.*?```", "", GUIDE, flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", prose):
        assert (ROOT / "docs" / target).exists(), target
