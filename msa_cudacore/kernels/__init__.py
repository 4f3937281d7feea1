"""CUDA C++ sources of the attention programs."""
