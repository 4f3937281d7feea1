"""Checks of plain numbers, whose messages name the argument, what it was, and what is accepted."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

__all__ = ["check_integer", "check_positive", "shown"]

_LONGEST = 100
"""Characters of a value that a message repeats."""


def shown(value: Any) -> str:
    """A value as a message repeats it: in one line, and cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 3 * _LONGEST:
        # Python writes no integer of more than 4300 digits, and raises an error that names no argument.
        return f"{'a negative' if value < 0 else 'an'} integer of {value.bit_length()} bits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of foreign code, or of an integer inside the value
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def check_integer(name: str, value: Any, low: int, high: int, accepted: str = "") -> int:
    """Return an integer argument in [low, high]; raises TypeError or ValueError naming it and what is `accepted`."""
    accepted = accepted or f"integers from {low} to {high}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); accepted are {accepted}")
    if not low <= value <= high:
        raise ValueError(f"{name} is {shown(int(value))}; accepted are {accepted}")
    return int(value)


def check_positive(name: str, value: Any) -> float:
    """Return a positive finite number as a float; raises TypeError or ValueError naming it."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        if hasattr(value, "__dlpack__"):
            hint = f"a tensor would need a synchronisation here, so pass float({name})"
            kind = type(value).__name__
            raise TypeError(f"{name} is a {kind}; accepted are positive finite floats; {hint}")
        raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); accepted are positive finite floats")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} is {shown(value)}; accepted are positive finite floats, as float64 holds them") from None
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} is {number!r}; accepted are positive finite floats")
    return number
