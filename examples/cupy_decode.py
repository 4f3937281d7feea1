"""Decode one step from CuPy on a stream of its own; queries are bfloat16 as bits, so no bfloat16 type is
needed.
"""

import cupy

from msa_cudacore import prepare_msa_nvfp4_sparse_decode
from msa_cudacore.pool import page_bytes, pool_views

views = pool_views(cupy.zeros((64, page_bytes(num_kv_heads=4)), cupy.uint8), num_kv_heads=4)
q = (cupy.random.standard_normal((2, 64, 128), dtype=cupy.float32).view(cupy.uint32) >> 16).astype(
    cupy.uint16
)
q2k = cupy.full((4, 2, 16), -1, cupy.int32)
q2k[:, :, 0] = 0
runner = prepare_msa_nvfp4_sparse_decode(
    q, views.k, views.v, q2k, k_scale=views.k_scale, v_scale=views.v_scale,
    page_table=cupy.arange(64, dtype=cupy.int32).reshape(2, 32),
    seqused_k=cupy.array([100, 4000], cupy.int32),
    k_global_scale=1.0, v_global_scale=1.0, bf16_as_uint16=True,
)  # fmt: skip
cupy.cuda.get_current_stream().synchronize()
stream = cupy.cuda.Stream(non_blocking=True)
out = runner.launch(stream)
stream.synchronize()
print(
    f"{runner.program}: out {list(out.shape)}, "
    f"lse {float(runner.lse.min()):.3f} to {float(runner.lse.max()):.3f}"
)
