"""Compile, cache and launch CUDA C++ through `cuda.core`.

The steps, in the order a launch takes them: `compile` turns text into a cubin and keeps it on disk, `kernel` loads it
once for the life of the process and binds arguments to a launch that can be repeated or captured, and `stream` finds
the stream a caller means. `device` has the facts that a choice of kernel depends on and makes a device's context
current, `memory` the words that a kernel keeps for itself.

Importing this package touches no CUDA driver.
"""
