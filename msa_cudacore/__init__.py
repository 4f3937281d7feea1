"""Sparse decode attention over a paged NVFP4 KV cache."""
