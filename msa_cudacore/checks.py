"""Checks of plain numbers, whose messages name the argument, what it was, and what is accepted."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

__all__ = ["check_integer", "check_positive"]


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """Return an integer argument in [low, high]; raises TypeError or ValueError naming it."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        given = f"{value!r} ({type(value).__name__})"
        raise TypeError(f"{name} is {given}; accepted are integers from {low} to {high}")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; accepted are integers from {low} to {high}")
    return int(value)


def check_positive(name: str, value: Any) -> float:
    """Return a positive finite number as a float; raises TypeError or ValueError naming it."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        if hasattr(value, "__dlpack__"):
            hint = f"a tensor would need a synchronisation here, so pass float({name})"
            kind = type(value).__name__
            raise TypeError(f"{name} is a {kind}; accepted are positive finite floats; {hint}")
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); accepted are positive finite floats")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} is {number!r}; accepted are positive finite floats")
    return number
