"""Values into byte items, refused when they are saved if a load would refuse them.

[Note: NumPy] Its own pickles name private functions and rebuild a dtype from numbers, which can be made to
run code. Arrays and scalars of numbers are therefore written as calls of public names, ``numpy.ndarray(shape,
dtype, bytearray)`` and ``numpy.float64(value)``, which stock torch loads too.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import torch

from swapckpt.errors import CheckpointError, UnsafePickleError
from swapckpt.storage.values import NUMBER_DTYPES, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapckpt.storage.safe_pickle import AllowList

PROTOCOL = 2
"""That of ``torch.save``: all globals of its pickles are written out."""


class Pickler(pickle.Pickler):
    """Writes NumPy's numbers by public names. ``torch.save`` finds it here, by its name."""

    def reducer_override(self, value: object) -> object:  # type: ignore[override] # no Any, no type of ours
        """How to make ``value`` again."""
        if type(value) in NUMBERS and isinstance(value, np.generic):
            return type(value), (value.item(),)
        if type(value) is np.ndarray:
            dtype = value.dtype.newbyteorder("<")
            if dtype.str in NUMBER_DTYPES:
                return np.ndarray, (value.shape, dtype.str, bytearray(value.astype(dtype).tobytes()))
        return NotImplemented


def encoded(value: object, allowed: AllowList, *, name: str) -> bytes:
    """The byte item of ``value``.

    Args:
        value: Anything.
        allowed: What a load will accept.
        name: Its key, for messages.

    Raises:
        UnsafePickleError: A load would refuse it; says every global that is not on the list.
        CheckpointError: It cannot be pickled.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream, pickle_module=sys.modules[__name__], pickle_protocol=PROTOCOL)
    except Exception as error:  # whatever a class does when it is pickled
        raise CheckpointError(
            f"{name} cannot be saved: {type(error).__name__}: {error}. Leave it out, or save plain values "
            "that it can be made from."
        ) from error
    data = stream.getvalue()
    refused = [each for each in _globals_of(data) if each not in allowed.entries]
    if refused:
        raise UnsafePickleError(
            f"{name} cannot be saved: a load would refuse {', '.join(refused)}, not on the allow list. Save "
            "plain values, or pass these to Checkpointer(allowed_globals=[...]), here and where it is loaded."
        )
    return data


def _globals_of(data: bytes) -> Sequence[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
        opcodes = pickletools.genops(archive.read(name))
        found = {
            str(argument).replace(" ", ".", 1).replace("__builtin__.", "builtins.", 1)
            for opcode, argument, _ in opcodes
            if opcode.name == "GLOBAL"
        }
    return sorted(found)
