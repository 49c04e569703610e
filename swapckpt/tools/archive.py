"""The content of a ``torch.save`` file: its pickle is read with an allow list, its tensors where they lie.

[Note: checksums] A storage is one record of a zip archive, with one checksum for all of it. It is compared
when all bytes of the record were read in order, which is how tensors are converted and compared.
"""

from __future__ import annotations

import io
import math
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from zlib_ng.zlib_ng import crc32

from swapckpt.errors import CorruptCheckpointError, SchemaError, listing
from swapckpt.storage.fetch import SavedItem, fetch_plain
from swapckpt.storage.items import StorageRef, bytes_of, storage_ref
from swapckpt.storage.safe_pickle import AllowList, Call, unpickle
from swapckpt.storage.values import ALLOWED
from swapckpt.tools.content import TensorInfo, fqn_of
from swapckpt.tools.values import holds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from typing_extensions import Buffer

    from swapckpt.storage.fetch import Box
    from swapckpt.storage.files import FileReader
    from swapckpt.tools.content import Path

MAX_PICKLE_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the pickle describes it: geometry over a storage, in elements."""

    storage: StorageRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def span(self) -> int:
        """Elements from the first to the last one in the storage."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def is_row_major(self) -> bool:
        """True when the elements lie one after the other, as C has them."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def describe(pickled: bytes, *, origin: str) -> object:
    """The object in a pickle of ``torch.save``, with a :class:`StoredTensor` for each tensor.

    Raises:
        UnsafePickleError: It names what is not on the allow list.
        CorruptCheckpointError: It is damaged.
    """
    return unpickle(pickled, _DESCRIBED, origin=origin, persistent_load=storage_ref)


def flattened(state: object, *, where: str) -> dict[Path, object]:
    """Leaves by path, as DCP flattens: mappings always, lists (and tuples) that hold tensors or mappings.

    Empty mappings are leaves: DCP would lose them.

    Raises:
        SchemaError: It is no mapping, or a tensor lies in what cannot be flattened.
    """
    if not isinstance(state, Mapping):
        raise SchemaError(f"{where} holds a {type(state).__name__}, not a state dict.")
    leaves = dict(_leaves((), state))
    names = [fqn_of(path) for path in leaves]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    hidden = {
        fqn_of(path) for path, leaf in leaves.items() if not isinstance(leaf, StoredTensor) and _holds(leaf)
    }
    if twice or hidden:
        problems = [f"{name}: two entries have this name" for name in twice]
        problems += [f"{name}: has tensors in what is neither dict nor list" for name in hidden]
        raise SchemaError(f"{where} cannot be named entry by entry:{listing(problems)}")
    return leaves


def _leaves(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    elif isinstance(value, list | tuple) and any(
        isinstance(inner, Mapping) or _holds(inner) for inner in value
    ):
        for number, inner in enumerate(value):
            yield from _leaves((*path, number), inner)
    elif path:
        yield path, value


def _holds(value: object) -> bool:
    return holds(value, (StoredTensor, StorageRef))


class ArchiveContent:
    """A :class:`~swapckpt.tools.content.Content`. Closes ``source``.

    Raises:
        CorruptCheckpointError: It is no archive of torch.save, or damaged.
        UnsafePickleError: It names what is not on the allow list. No code was run.
        SchemaError: It holds no state dict.
    """

    def __init__(self, source: FileReader, *, where: str) -> None:
        self.where = where
        self._source = source
        self._records = _records(source, where=where)
        pickled = self._small("data.pkl")
        if self._records.keys() & {"byteorder"} and self._small("byteorder") != sys.byteorder.encode():
            raise CorruptCheckpointError(f"{where} was saved on a machine of the other byte order.")
        leaves = flattened(describe(pickled, origin=f"{where}, data.pkl"), where=where)
        self._leaves = {fqn_of(path): leaf for path, leaf in leaves.items()}
        self.paths: Mapping[str, Path] = {fqn_of(path): path for path in leaves}
        self.tensors: Mapping[str, TensorInfo] = {
            fqn: TensorInfo(leaf.dtype, leaf.shape)
            for fqn, leaf in self._leaves.items()
            if isinstance(leaf, StoredTensor)
        }
        self._storages: dict[str, _Storage] = {}
        for fqn in self.tensors:
            self._check(fqn)

    def read(self, fqn: str, box: Box, target: Tensor) -> None:
        tensor, storage = self._tensor(fqn), self._storage(fqn)
        name, start = f"{self.where}, {fqn!r}", tensor.offset * tensor.dtype.itemsize
        nbytes = tensor.span * tensor.dtype.itemsize
        if tensor.is_row_major:
            item = SavedItem(storage, start, nbytes, tensor.dtype, tensor.shape, None, name)
            fetch_plain(item, box, target)
        elif nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8)
            storage.read_into(start, bytes_of(memory))
            part = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride)
            for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
                part = part.narrow(dim, offset, length)
            target.copy_(part)

    def value(self, fqn: str) -> object:
        return self._leaves[fqn]

    def close(self) -> None:
        self._source.close()

    def _tensor(self, fqn: str) -> StoredTensor:
        tensor = self._leaves[fqn]
        assert isinstance(tensor, StoredTensor)
        return tensor

    def _storage(self, fqn: str) -> _Storage:
        key = self._tensor(fqn).storage.key
        if key not in self._storages:
            record = self._records[f"data/{key}"]
            self._storages[key] = _Storage(self._source, record, name=f"{self.where}, data/{key}")
        return self._storages[key]

    def _check(self, fqn: str) -> None:
        """Raise unless the tensor lies inside its record."""
        tensor = self._tensor(fqn)
        record = self._records.get(f"data/{tensor.storage.key}")
        end = (tensor.offset + tensor.span) * tensor.dtype.itemsize
        if record is None or end > record.file_size:
            found = "no" if record is None else record.file_size
            raise CorruptCheckpointError(f"{self.where}, {fqn!r}: {found} bytes are saved, it needs {end}.")

    def _small(self, name: str) -> bytes:
        record = self._records.get(name)
        if record is None or record.file_size > MAX_PICKLE_NBYTES:
            raise CorruptCheckpointError(f"{self.where} is no archive of torch.save: it has no fit {name}.")
        data = bytearray(record.file_size)
        _Storage(self._source, record, name=f"{self.where}, {name}").read_into(0, memoryview(data))
        return bytes(data)


class _Storage:
    """One record of the archive, read as a file; compared with its checksum when it was read in order."""

    def __init__(self, source: FileReader, record: zipfile.ZipInfo, *, name: str) -> None:
        self.nbytes = record.file_size
        self._source = source
        self._start = _data_start(source, record, name=name)
        self._expected: int | None = record.CRC
        self._name = name
        self._running = 0
        self._read_to = 0

    def read_into(self, offset: int, view: memoryview) -> None:
        self._source.read_into(self._start + offset, view)
        if offset == 0:
            self._running = self._read_to = 0
        if offset == self._read_to:
            self._running = crc32(view, self._running)
            self._read_to += len(view)
            if self._read_to == self.nbytes and self._expected not in {None, self._running}:
                raise CorruptCheckpointError(f"{self._name} contradicts its checksum.")

    def is_cached(self, offset: int, nbytes: int) -> bool:
        return self._source.is_cached(self._start + offset, nbytes)

    def close(self) -> None: ...


def _records(source: FileReader, *, where: str) -> dict[str, zipfile.ZipInfo]:
    """All records by their name below the archive's folder."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Stream(source), 1 << 16)) as archive:
            infos = archive.infolist()
    except (MemoryError, OSError):
        raise
    # zipfile meets damage with whatever it runs into: struct.error, ValueError, NotImplementedError, ...
    except Exception as error:
        raise CorruptCheckpointError(f"{where} is not a readable archive ({error!r}).") from error
    if any(info.compress_type for info in infos):
        raise CorruptCheckpointError(f"{where} is no archive of torch.save: its records are compressed.")
    if not any(info.CRC for info in infos):  # torch was told to leave them out
        for info in infos:
            info.CRC = None  # type: ignore[assignment]
    return {info.filename.partition("/")[2]: info for info in infos}


def _data_start(source: FileReader, record: zipfile.ZipInfo, *, name: str) -> int:
    """Where the bytes of a record start: the lengths in front of them are not those of the directory."""
    head = bytearray(30)
    source.read_into(record.header_offset, memoryview(head))
    if head[:4] != b"PK\x03\x04":
        raise CorruptCheckpointError(f"{name}: there is no record where the directory says.")
    lengths = [int.from_bytes(head[at : at + 2], "little") for at in (26, 28)]
    start = record.header_offset + len(head) + sum(lengths)
    if start + record.file_size > source.nbytes:
        raise CorruptCheckpointError(f"{name} ends behind the end of its file.")
    return start


class _Stream(io.RawIOBase):
    """A reader at any position, as the seekable stream that ``zipfile`` wants."""

    def __init__(self, source: FileReader) -> None:
        super().__init__()
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.nbytes}[whence]
        if origin + offset < 0:
            raise ValueError("a position before the start of the file")
        self._at = origin + offset
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._source.nbytes - self._at))
        self._source.read_into(self._at, view[:count])
        self._at += count
        return count


# ------------------------------------------------------------------------------------------------ the pickle


def _stored(*args: object) -> StoredTensor:
    """Stands for ``_rebuild_tensor_v2`` and ``_v3`` (which has the dtype at the end)."""
    storage, offset, size, stride = args[:4]
    if type(storage) is not StorageRef:
        raise TypeError("a tensor without a storage")
    dtype = next((arg for arg in args[6:] if isinstance(arg, torch.dtype)), storage.dtype)
    sizes, strides = _ints(size), _ints(stride)
    if type(offset) is not int or min((offset, *sizes, *strides)) < 0 or len(sizes) != len(strides):
        raise ValueError("not a geometry")
    if math.prod(sizes) * dtype.itemsize > 1 << 60:
        raise ValueError("not a size")
    return StoredTensor(storage, dtype, sizes, strides, offset)


def _ints(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(value) is not int for value in values):
        raise TypeError("not a tuple of numbers")
    return tuple(values)


def _parameter(*args: object) -> object:
    return args[0]


_DESCRIBED = AllowList(
    {
        **ALLOWED.entries,
        "torch._utils._rebuild_tensor_v2": Call(_stored),
        "torch._utils._rebuild_tensor_v3": Call(_stored),
        "torch._utils._rebuild_parameter": Call(_parameter),
    }
)
