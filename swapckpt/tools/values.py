"""Values that are no tensors: whether two are the same, how one is shown, whether JSON can hold it."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping

import torch

_SHOWN = 60


def same_value(a: object, b: object) -> bool:
    """True when two values have the same types and contents throughout; NaN is the same as NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    return _same_leaf(a, b)


def _same_leaf(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensor(a, b)
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()  # tells -0.0 from 0.0
    return bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(left, right)


def holds(value: object, kinds: tuple[type, ...]) -> bool:
    """True when a value is, or has in its containers at any depth, an instance of ``kinds``."""
    if isinstance(value, kinds):
        return True
    if isinstance(value, Mapping):
        return any(holds(inner, kinds) for inner in value.values())
    containers = (list, tuple, deque, set, frozenset)
    return isinstance(value, containers) and any(holds(inner, kinds) for inner in value)


def shown(value: object) -> str:
    """A value on one line, shortened."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def as_json(value: object) -> str | None:
    """``value`` in JSON, or None where what comes back would not be the same."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if same_value(json.loads(text), value) else None


def json_number(number: float | None) -> float | str | None:
    """A number for JSON, which has no infinity: that becomes a string."""
    return number if number is None or math.isfinite(number) else str(number)
