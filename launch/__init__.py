"""Compile, cache and launch through cuda.core."""
