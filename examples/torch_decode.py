"""Decode one step from torch; on a GPU, capture it in a CUDA graph and replay it with new queries."""

import torch

from msa_cudacore import prepare_msa_nvfp4_sparse_decode
from msa_cudacore.pool import page_bytes, pool_views

device = "cuda" if torch.cuda.is_available() else "cpu"
pool = torch.zeros(64, page_bytes(num_kv_heads=4), dtype=torch.uint8, device=device)
views = pool_views(pool, num_kv_heads=4)
q = torch.randn(2, 64, 128, dtype=torch.bfloat16, device=device)
q2k = torch.full((4, 2, 16), -1, dtype=torch.int32, device=device)
q2k[:, :, 0] = 0
runner = prepare_msa_nvfp4_sparse_decode(
    q, views.k, views.v, q2k, k_scale=views.k_scale, v_scale=views.v_scale,
    page_table=torch.arange(64, dtype=torch.int32, device=device).reshape(2, 32),
    seqused_k=torch.tensor([100, 4000], dtype=torch.int32, device=device),
    k_global_scale=1.0, v_global_scale=1.0,
)  # fmt: skip
if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner()
    q.normal_()
    graph.replay()
else:
    runner()
out, lse = runner.out, runner.lse
print(f"{runner.program}: out {list(out.shape)}, lse {lse.min().item():.3f} to {lse.max().item():.3f}")
