"""Compile, cache and launch CUDA C++ through `cuda.core`.

The steps, in the order a launch takes them: `compile` turns text into a cubin and keeps it on disk,
`module` loads it once for the life of the process, `stream` finds the stream a caller means, and
`kernel` binds arguments to a launch that can be repeated or captured.

Importing this package touches no CUDA driver.
"""
