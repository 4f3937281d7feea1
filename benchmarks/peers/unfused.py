"""The step in separate operations of framework-neutral libraries: CuPy and nvmath-python's cuBLASLt.

Gather and dequantise the selected pages into fp16 (exact for NVFP4 with scales of this size), multiply, mask
and exponentiate, multiply. What an array library gives without a kernel for the purpose.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from ..candidates import Bench, Candidate, Prepared, Unavailable
from ..rows import TOPK
from ..workload import Step, Workload

__all__ = ["candidates"]

_KEYS = TOPK * 128


def candidates() -> list[Candidate]:
    for package in ("cupy", "nvmath"):
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"{package} is not installed")
    try:
        import nvmath.linalg.advanced  # noqa: F401
    except Exception as error:  # a missing cuBLASLt shows as one of several types
        raise Unavailable(
            f"nvmath.linalg.advanced cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return [_Unfused()]


@functools.cache
def _kernels() -> dict[str, Any]:
    import cupy

    dequantize = cupy.ElementwiseKernel(
        "raw uint8 codes, raw uint8 scales, raw int64 tiles, int64 heads, int64 page_stride, "
        "int64 code_stride, int64 scale_stride, bool swizzled",
        "float16 value",
        """
        const long long tile = tiles[i >> 14]; const int token = (i >> 7) & 127, element = i & 127, block =
        element >> 4; const long long page = tile / heads, head = tile % heads; const int position = swizzled
        ? (token >> 2) * 32 + block * 4 + (token & 3) : token * 8 + block; const unsigned byte = codes[page *
        page_stride + head * code_stride + token * 64 + (element >> 1)]; const unsigned code = element & 1 ?
        byte >> 4 : byte & 15; const unsigned scale = scales[page * page_stride + head * scale_stride +
        position]; const int exponent = (code >> 1) & 3; const float magnitude = exponent ? (1 + 0.5f * (code
        & 1)) * (1 << exponent) * 0.5f : 0.5f * (code & 1); const int power = (scale >> 3) & 15; const float
        factor = power ? ldexpf(8 + (scale & 7), power - 10) : ldexpf(scale & 7, -9); value = (code & 8 ?
        -magnitude : magnitude) * factor; """,
        "dequantize_selected",
    )
    mask = cupy.ElementwiseKernel(
        "float16 score, raw int32 seen, int64 group, int64 keys, float32 scale",
        "float32 masked",
        "const bool is_seen = seen[i / (group * keys) * keys + i % keys];"
        "masked = is_seen ? (float)score * scale : __int_as_float(0xff800000);",
        "mask_scores",
    )
    weigh = cupy.ElementwiseKernel(
        "float32 masked, float32 top", "float32 weight", "weight = expf(masked - top)", "weigh"
    )
    norm = cupy.ElementwiseKernel(
        "float32 weight, float32 total", "float16 share", "share = weight / total", "normalize"
    )
    return {"dequantize": dequantize, "mask": mask, "weigh": weigh, "norm": norm}


class _Unfused:
    name, title, format, kind = (
        "unfused_nvmath",
        "CuPy dequantise + nvmath-python matmul, softmax, matmul",
        "nvfp4",
        "peer",
    )

    def variants(self, workload: Workload, bench: Bench) -> dict[str, Callable[[Step], Prepared]]:
        return {"": lambda step: self._prepare(workload, bench, step)}

    def _prepare(self, workload: Workload, bench: Bench, step: Step) -> Prepared:
        import cupy
        from nvmath.linalg.advanced import Matmul, MatmulOptions

        row, views, kernels = workload.row, workload.views, _kernels()
        items, group, heads = row.items, row.group, row.num_kv_heads
        tiles = step.host.tiles.reshape(items, TOPK)
        blocks = step.host.q2k_indices.transpose(1, 0, 2).astype(np.int64)
        seen = (blocks[..., None] * 128 + np.arange(128) < step.host.visible[:, None, None, None]) & (
            blocks >= 0
        )[..., None]
        listed = cupy.asarray(np.maximum(tiles, 0).reshape(-1))
        visible = cupy.asarray(seen.reshape(-1).astype(np.int32))
        # bfloat16 queries as float16: 8 significant bits fit into 11, and a standard normal is far from the
        # range's ends.
        q = cupy.asarray(step.host.q.astype(np.float16).reshape(items, group, 128))
        keys, values = (cupy.empty((items, _KEYS, 128), cupy.float16) for _ in "kv")
        scores = cupy.empty((items, group, _KEYS), cupy.float16)
        masked = cupy.empty((items, group, _KEYS), cupy.float32)
        top, total = (cupy.empty((items, group, 1), cupy.float32) for _ in range(2))
        out = cupy.empty((items, group, 128), cupy.float16)
        in_place = MatmulOptions(inplace=True)
        first = Matmul(q, keys.transpose(0, 2, 1), scores, beta=0.0, options=in_place)
        second = Matmul(scores, values, out, beta=0.0, options=in_place)
        first.plan()
        second.plan()
        # The views of one pool, as one flat array that starts at the K codes, and as others that start at the
        # rest.
        flat = {name: _flat(view) for name, view in views._asdict().items()}
        page_stride = views.k.strides[0]

        def compute(stream: Any) -> None:
            with stream:
                for target, codes, scales, swizzled in (
                    (keys, "k", "k_scale", False),
                    (values, "v", "v_scale", True),
                ):
                    kernels["dequantize"](
                        flat[codes],
                        flat[scales],
                        listed,
                        heads,
                        page_stride,
                        getattr(views, codes).strides[1],
                        getattr(views, scales).strides[1],
                        swizzled,
                        target,
                    )
                first.execute(stream=stream)
                kernels["mask"](scores, visible, group, _KEYS, np.float32(128**-0.5), masked)
                cupy.amax(masked, axis=-1, keepdims=True, out=top)
                kernels["weigh"](masked, top, masked)
                cupy.sum(masked, axis=-1, keepdims=True, out=total)
                kernels["norm"](masked, total, scores)
                second.execute(stream=stream)

        bench.arrays.finish()
        compute(cupy.cuda.ExternalStream(int(bench.stopwatch.stream.handle)))
        bench.stopwatch.stream.sync()
        replay = bench.stopwatch.capture(
            lambda builder: compute(cupy.cuda.ExternalStream(int(builder.stream.handle)))
        )
        return Prepared(replay, out, keep=(compute, first, second))


def _flat(view: Any) -> Any:
    """All bytes from a strided view's first to its last, as one dimension."""
    import cupy

    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    return cupy.ndarray((last + 1,), cupy.uint8, view.data)
