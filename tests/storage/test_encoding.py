"""Values of NumPy are saved by public names, or refused where something else would come back."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from swapckpt.errors import CheckpointError, UnsafePickleError
from swapckpt.storage.encoding import encoded
from swapckpt.storage.values import ALLOWED, load_item


class Own(np.ndarray):
    """A kind of array that a checkpoint would not keep."""


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.arange(6, dtype=">i4").reshape(3, 2).T, np.array(1.5)],
    ids=["rows", "big-endian columns", "scalar"],
)
def test_arrays_of_numbers_keep_shape_and_values(array: Any) -> None:
    found = load_item(encoded(array, ALLOWED, name="v"), origin="v")
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    "value",
    [np.zeros(2).view(Own), np.zeros(2, [("a", "<i4")]), np.array(["a"]), np.longdouble(1)],
    ids=["subclass", "records", "strings", "long double"],
)
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    with pytest.raises(UnsafePickleError, match=r"^v cannot be saved: a load would refuse numpy\."):
        encoded(value, ALLOWED, name="v")


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"^v cannot be saved: TypeError: cannot pickle '_thread.lock'"):
        encoded(threading.Lock(), ALLOWED, name="v")
