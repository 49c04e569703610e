"""Byte items: Python values that DCP saves with ``torch.save``, loaded without running code.

DCP's planners unpickle what a reader hands them without looking. Our reader therefore opens each byte item
with an allow list first and hands over an archive of its own making, from the value it got: whatever was odd
about the one in the file (a second pickle, a TorchScript archive, overlapping records) reaches no planner.
"""

from __future__ import annotations

import io
import pathlib
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, cast
from uuid import UUID

import numpy as np
import torch
from torch.nn import Parameter

from swapckpt.errors import CorruptCheckpointError
from swapckpt.storage.items import STORAGES, StorageRef, storage_ref
from swapckpt.storage.metadata import ALLOWED as METADATA
from swapckpt.storage.metadata import DTYPES
from swapckpt.storage.safe_pickle import AllowList, Call, maker, unpickle

if TYPE_CHECKING:
    from torch import Tensor

CACHED_NBYTES = 4096
"""Items up to this size are remembered: an optimizer's settings are the same value for thousands of FQNs."""
MAX_CACHED = 1024


def load_item(data: bytes, *, origin: str, allowed: AllowList | None = None) -> object:
    """The value of an item that ``torch.save`` made, with tensors on the host.

    Args:
        data: The whole item.
        origin: File and item, for messages.
        allowed: What it may name, or None for :data:`ALLOWED`.

    Raises:
        UnsafePickleError: It names something else.
        CorruptCheckpointError: It is damaged, or no archive of ``torch.save``.
    """
    records = _records(data, origin=origin)
    if "data.pkl" not in records or records.get("byteorder", b"little") != b"little":
        raise CorruptCheckpointError(f"{origin} is not an archive of torch.save on a machine like this one.")
    storages: dict[str, Tensor] = {}

    def load_storage(pid: object) -> _Storage:
        ref = storage_ref(pid)
        if ref.key not in storages:
            storages[ref.key] = _memory(records[f"data/{ref.key}"])
        return _Storage(ref, storages[ref.key])

    return unpickle(records["data.pkl"], allowed or ALLOWED, origin=origin, persistent_load=load_storage)


def _records(data: bytes, *, origin: str) -> dict[str, bytes]:
    """All records of an archive by their name below its folder, each checked against its CRC-32."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = _bounded(archive, len(data))
            return {info.filename.partition("/")[2]: archive.read(info) for info in infos}
    except MemoryError:
        raise
    # zipfile meets damage with whatever it runs into: struct.error, OSError, NotImplementedError, ...
    except Exception as error:
        raise CorruptCheckpointError(f"{origin} is not a readable archive ({error!r}).") from error


def check_archive(data: bytes, *, origin: str) -> None:
    """Raise CorruptCheckpointError unless ``data`` is an archive that fits its own checksums."""
    _records(data, origin=origin)


def _bounded(archive: zipfile.ZipFile, nbytes: int) -> list[zipfile.ZipInfo]:
    """The entries, unless they would unfold to more than ``nbytes`` (compressed, or over the same bytes)."""
    infos = archive.infolist()
    if not any(info.CRC for info in infos):  # torch was told to leave them out
        for info in infos:
            info.CRC = None  # type: ignore[assignment]
    if sum(info.file_size for info in infos) > nbytes:
        raise zipfile.BadZipFile("its records are larger than it is")
    return infos


class ByteItems:
    """Makes byte items safe to hand to a planner, and remembers small ones.

    Args:
        allowed: What they may name.
    """

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._made: dict[bytes, bytes] = {}

    def safe(self, data: bytes, *, origin: str) -> io.BytesIO:
        """An archive of our own with the same value. Raises as :func:`load_item`."""
        made = self._made.get(data)
        if made is None:
            stream = io.BytesIO()
            value = load_item(data, origin=origin, allowed=self._allowed)
            try:
                torch.save(value, stream)
            except RecursionError as error:
                raise CorruptCheckpointError(f"{origin} is nested too deeply to be a value.") from error
            made = stream.getvalue()
            if len(data) <= CACHED_NBYTES and len(self._made) < MAX_CACHED:
                self._made[data] = made
        return io.BytesIO(made)


# -------------------------------------------------------------------------------------------------- tensors


class _Storage:
    """What a persistent id stands for while an item is unpickled."""

    __slots__ = ("memory", "ref")

    def __init__(self, ref: StorageRef, memory: Tensor) -> None:
        self.ref = ref
        self.memory = memory  # bytes; one tensor for all that share the storage


def _memory(record: bytes) -> Tensor:
    # frombuffer refuses an empty buffer.
    return (
        torch.frombuffer(bytearray(record), dtype=torch.uint8)
        if record
        else torch.empty(0, dtype=torch.uint8)
    )


def _tensor(*args: object) -> Tensor:
    """Stands for ``torch._utils._rebuild_tensor_v2`` and ``_v3`` (which has the dtype at the end)."""
    storage, offset, size, stride, requires_grad = args[:5]
    if type(storage) is not _Storage:
        raise TypeError("a tensor without a storage")
    dtype = next((arg for arg in args[6:] if isinstance(arg, torch.dtype)), storage.ref.dtype)
    shape, strides = cast("tuple[int, ...]", size), cast("tuple[int, ...]", stride)
    flat = storage.memory.view(dtype)
    return flat.as_strided(shape, strides, cast("int", offset)).requires_grad_(bool(requires_grad))


def _parameter(*args: object) -> Parameter:
    data, requires_grad = args[:2]
    return Parameter(cast("Tensor", data), requires_grad=bool(requires_grad))


def _encode(*args: object) -> bytes:
    """Stands for ``_codecs.encode``, by which protocol 2 writes bytes."""
    text, encoding = args
    if encoding != "latin1":
        raise ValueError(f"bytes encoded as {encoding!r}")
    return cast("str", text).encode("latin1")


def _bytearray(*args: object) -> bytearray:
    """Protocol 2 writes text and an encoding, later ones bytes; a number would be a length."""
    content = _encode(*args) if len(args) > 1 else (*args, b"")[0]
    return bytearray(memoryview(cast("bytes", content)))


_NUMBERS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
NUMBERS: tuple[type, ...] = tuple(np.dtype(each).type for each in _NUMBERS)
"""Scalars of NumPy that are saved."""
NUMBER_DTYPES = frozenset(np.dtype(each).newbyteorder("<").str for each in _NUMBERS)
"""What arrays may hold, in NumPy's spelling: nothing that refers to objects."""


def _array(*args: object) -> object:
    """An array of numbers over the bytes that come with it: the form that :mod:`encoding` writes."""
    shape, dtype, buffer = cast("tuple[tuple[int, ...], str, bytearray]", args)
    if type(dtype) is not str or dtype not in NUMBER_DTYPES or type(buffer) is not bytearray:
        raise ValueError(f"an array of {dtype!r}")
    return np.ndarray(shape, dtype, buffer)


FACTORIES = (None, int, float, bool, str, list, dict, set)
"""What a defaultdict may call."""


def _defaultdict(*args: object) -> object:
    named = {f"builtins.{made.__name__}": made for made in FACTORIES if made is not None}
    factory = args[0] if args else None
    if factory is not None and not isinstance(factory, _Factory):
        raise TypeError("a defaultdict that calls something else")
    return defaultdict(named[factory.name] if factory else None)


@dataclass(frozen=True, slots=True)
class _Factory:
    """Stands for a builtin class that a defaultdict calls: nothing else in a pickle can do so."""

    name: str

    def __setstate__(self, state: object) -> None:
        raise AttributeError(f"{self.name} cannot be set by a pickle.")


_SHARED = ("torch.Size", "torch.serialization._get_layout")

ALLOWED = AllowList(
    {
        **{name: METADATA.entries[name] for name in _SHARED},
        **DTYPES,
        **STORAGES,
        "torch._utils._rebuild_tensor_v2": Call(_tensor),
        "torch._utils._rebuild_tensor_v3": Call(_tensor),
        "torch._utils._rebuild_parameter": Call(_parameter),
        "torch.device": Call(torch.device),
        "_codecs.encode": Call(_encode),
        **{f"builtins.{made.__name__}": Call(made) for made in (set, frozenset, complex, slice, range)},
        "builtins.xrange": Call(range),  # its name in protocol 2
        **{f"collections.{made.__name__}": made for made in (OrderedDict, deque)},
        "collections.Counter": Call(Counter),
        "collections.defaultdict": Call(_defaultdict),
        **{
            f"builtins.{made.__name__}": _Factory(f"builtins.{made.__name__}")
            for made in (int, float, bool, str, list, dict)
        },
        "builtins.bytearray": Call(_bytearray),
        "decimal.Decimal": Call(Decimal),
        "uuid.UUID": maker(UUID),
        "numpy.ndarray": Call(_array),
        **{f"numpy.{made.__name__}": Call(made) for made in NUMBERS},
        **{f"datetime.{made.__name__}": Call(made) for made in (date, datetime, time, timedelta, timezone)},
        **{
            f"pathlib.{module}{kind}Path": Call(pathlib.Path)
            for module in ("", "_local.")
            for kind in ("Posix", "Windows")
        },
    }
)
"""What byte items may name without being asked: values of Python and torch that run no code."""
