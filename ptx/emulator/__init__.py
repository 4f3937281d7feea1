"""Runs PTX on the CPU and reports what would go wrong on the GPU."""
