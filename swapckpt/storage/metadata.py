"""DCP's ``.metadata``: written as stock torch reads it; read without running code, every record checked.

[Note: shared records]
A checkpoint of 20,000 equal tensors has 20,000 equal sizes, properties and offsets. Pickle writes an object
once and refers to it afterwards, so equal records are replaced by one before they are written: a third of the
bytes, half the time, on both sides, in the same format.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from swapckpt._torch import MemoryFormatEncoding, StorageInfo
from swapckpt.collector import collector_paused
from swapckpt.errors import CorruptCheckpointError
from swapckpt.storage.safe_pickle import AllowList, Call, maker, unpickle

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

NAME = ".metadata"
PROTOCOL = 4
VERSION = "1.0.0"  # of the stock format, as torch 2.11 to 2.14 write it

T = TypeVar("T", bound="Hashable")


def _dtypes() -> dict[str, object]:
    return {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _layout(name: object) -> object:
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}[str(name)]


def _path(*parts: object) -> object:
    return str(pathlib.PurePosixPath(*map(str, parts)))


DTYPES = _dtypes()

_MODULE = "torch.distributed.checkpoint.metadata"
ALLOWED = AllowList(
    {
        **DTYPES,
        **{
            f"{_MODULE}.{made.__name__}": maker(made)
            for made in (
                BytesStorageMetadata,
                ChunkStorageMetadata,
                Metadata,
                MetadataIndex,
                StorageMeta,
                TensorProperties,
                TensorStorageMetadata,
            )
        },
        f"{_MODULE}._MEM_FORMAT_ENCODING": Call(MemoryFormatEncoding),
        "torch.distributed.checkpoint.filesystem._StorageInfo": maker(StorageInfo),
        "torch.Size": Call(torch.Size),
        "torch.serialization._get_layout": Call(_layout),
        "builtins.set": Call(set),
        **{
            f"pathlib.{prefix}{kind}Path": Call(_path)
            for prefix in ("", "_local.")
            for kind in ("Posix", "Windows")
        },
    }
)
"""What stands in the metadata of stock checkpoints; a custom planner's own data may need more."""


# -------------------------------------------------------------------------------------------------- reading


def load_metadata(data: bytes, *, origin: str, allowed: AllowList = ALLOWED) -> Metadata:
    """The metadata in ``data``, with every record of the type and range that readers rely on.

    Raises:
        UnsafePickleError: It names a global that is not in ``allowed``.
        CorruptCheckpointError: It is damaged, or points outside its checkpoint.
    """
    with collector_paused():
        metadata = unpickle(data, allowed, origin=origin)
        return _checked_or_corrupt(metadata, origin=origin)


def _checked_or_corrupt(metadata: object, *, origin: str) -> Metadata:
    try:
        return _checked(metadata)
    # A pickle can leave out or retype any attribute of any record.
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{origin} is not the metadata of a checkpoint: {error}.") from error


def _checked(metadata: object) -> Metadata:
    _require(metadata, Metadata)
    assert isinstance(metadata, Metadata)
    _check_tensors(metadata.state_dict_metadata)
    _check_places(metadata.storage_data)
    if metadata.storage_meta is not None:
        _require(metadata.storage_meta, StorageMeta)
    return metadata


def _check_tensors(tensors: Mapping[str, object]) -> None:
    # Tens of thousands of tensors have a few geometries between them: each is looked at once.
    fitting: set[tuple[torch.Size, ...]] = set()
    _require(tensors, dict)
    for fqn, entry in tensors.items():
        _require(fqn, str)
        if type(entry) is not TensorStorageMetadata:
            _require(entry, BytesStorageMetadata)
            continue
        _require(entry.properties, TensorProperties)
        _require(entry.properties.dtype, torch.dtype)
        _require(entry.size, torch.Size)
        _require(entry.chunks, list)
        for chunk in entry.chunks or [_whole(entry.size)]:
            _require(chunk, ChunkStorageMetadata)
            geometry = (chunk.offsets, chunk.sizes, entry.size)
            # The types by themselves: a tuple is equal to the torch.Size that readers rely on.
            for sizes in geometry:
                _require(sizes, torch.Size)
            if geometry not in fitting:
                _check_chunk(*geometry, fqn=fqn)
                fitting.add(geometry)


def _whole(size: torch.Size) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(size)), size)


def _check_chunk(offsets: torch.Size, sizes: torch.Size, size: torch.Size, *, fqn: str) -> None:
    for each in (offsets, sizes, size):
        _check_sizes(each)
    if any(offset + length > whole for offset, length, whole in zip(offsets, sizes, size, strict=True)):
        raise ValueError(f"a chunk of {fqn!r} reaches beyond the tensor's size {tuple(size)}")


def _check_sizes(sizes: torch.Size) -> None:
    _require(sizes, torch.Size)
    if any(size < 0 for size in sizes):
        raise ValueError(f"a size is negative: {tuple(sizes)}")


def _check_places(places: Mapping[MetadataIndex, StorageInfo]) -> None:
    offsets: set[torch.Size] = set()  # each is looked at once, as each name of a file
    names: set[str] = set()
    _require(places, dict)
    for index, place in places.items():
        _require(index, MetadataIndex)
        _require(index.fqn, str)
        if index.offset is not None:
            _require(index.offset, torch.Size)
            if index.offset not in offsets:
                _check_sizes(index.offset)
                offsets.add(index.offset)
        _require(place, StorageInfo)
        for value in (place.offset, place.length):
            _require(value, int)
            if value < 0:
                raise ValueError(f"{index.fqn!r} lies at a negative offset or length")
        _require(place.relative_path, str)
        if place.relative_path not in names:
            check_name(place.relative_path)
            names.add(place.relative_path)


def check_name(name: str) -> None:
    """Raise ValueError unless ``name`` is a path that stays inside the checkpoint's folder."""
    _require(name, str)
    parts = name.split("/")
    if any(part in {"", ".", ".."} for part in parts) or "\0" in name or "\\" in name:
        raise ValueError(f"{name!r} is not a path inside the checkpoint")


def _require(value: object, kind: type) -> None:
    if type(value) is not kind:
        raise TypeError(f"found a {type(value).__name__} where a {kind.__name__} belongs")


# -------------------------------------------------------------------------------------------------- writing


def dump_metadata(metadata: Metadata) -> bytes:
    """``metadata`` as stock torch reads it, with equal records shared (see the note at the top)."""
    share = _Shared()
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    shared = Metadata(
        state_dict_metadata={share(fqn): share.entry(entry) for fqn, entry in entries.items()},
        planner_data=share.planner_data(metadata.planner_data),
        storage_data={share.index(index): share.place(place) for index, place in places.items()},
        storage_meta=metadata.storage_meta,
        version=metadata.version,
    )
    return pickle.dumps(shared, protocol=PROTOCOL)


class _Shared:
    """Gives the first of all equal values."""

    def __init__(self) -> None:
        self._first: dict[Hashable, Hashable] = {}
        self._bytes = BytesStorageMetadata()
        self._records: dict[Hashable, object] = {}

    def __call__(self, value: T) -> T:
        # The type belongs to the key: (1, 0) equals torch.Size([1, 0]), and 1 equals True.
        return self._first.setdefault((type(value), value), value)  # type: ignore[return-value]

    def entry(self, entry: object) -> TensorStorageMetadata | BytesStorageMetadata:
        if not isinstance(entry, TensorStorageMetadata):
            return self._bytes
        properties = entry.properties
        key = (
            *(properties.dtype, properties.layout, properties.requires_grad),
            *(properties.memory_format, properties.pin_memory),
        )
        first = self._records.setdefault(key, properties)
        assert isinstance(first, TensorProperties)
        return TensorStorageMetadata(first, self(entry.size), [self.chunk(chunk) for chunk in entry.chunks])

    def chunk(self, chunk: ChunkStorageMetadata) -> ChunkStorageMetadata:
        offsets, sizes = self(chunk.offsets), self(chunk.sizes)
        first = self._records.setdefault((offsets, sizes), ChunkStorageMetadata(offsets, sizes))
        assert isinstance(first, ChunkStorageMetadata)
        return first

    def index(self, index: MetadataIndex) -> MetadataIndex:
        return MetadataIndex(
            self(index.fqn), None if index.offset is None else self(index.offset), index.index
        )

    def place(self, place: StorageInfo) -> StorageInfo:
        return StorageInfo(self(place.relative_path), place.offset, place.length)

    def planner_data(self, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {self(key): self._path(value) for key, value in data.items()}

    def _path(self, value: object) -> object:
        return tuple(self(part) for part in value) if type(value) is tuple else value
