"""The content of a DCP checkpoint, ours or stock torch's, with the shards of each tensor put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from swapckpt.errors import CorruptCheckpointError, SchemaError
from swapckpt.storage.fetch import Box, SavedItem, fetch, whole_item
from swapckpt.storage.values import load_item
from swapckpt.tools.content import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from swapckpt._torch import StorageInfo
    from swapckpt.storage import OpenCheckpoint
    from swapckpt.storage.files import FileReader
    from swapckpt.tools.content import Path


class DcpContent:
    """A :class:`~swapckpt.tools.content.Content`. Every byte that is read is verified, in checkpoints of
    stock torch where all of an item is read."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._readers: dict[str, FileReader] = {}
        entries = checkpoint.metadata.state_dict_metadata
        self.where = checkpoint.where("").rstrip("/")
        self.paths: Mapping[str, Path] = {fqn: _path(checkpoint, fqn) for fqn in entries}
        self.tensors: Mapping[str, TensorInfo] = {
            fqn: TensorInfo(entry.properties.dtype, tuple(entry.size))
            for fqn, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, fqn: str, box: Box, target: Tensor) -> None:
        entry = self._checkpoint.metadata.state_dict_metadata[fqn]
        assert isinstance(entry, TensorStorageMetadata)
        if entry.properties.layout is not torch.strided or str(entry.properties.dtype).startswith("torch.q"):
            raise SchemaError(f"{self.where}: {fqn!r} is no dense tensor ({entry.properties.layout}).")
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise CorruptCheckpointError(f"{self.where}: only parts of {fqn!r} are saved.")
        for chunk in entry.chunks:
            shared = _shared(box, Box(tuple(chunk.offsets), tuple(chunk.sizes)))
            if shared is None:
                continue
            part = target
            for dim, (at, origin) in enumerate(zip(shared.offsets, box.offsets, strict=True)):
                part = part.narrow(dim, at - origin, shared.lengths[dim])
            item = self._item(MetadataIndex(fqn, chunk.offsets), entry.properties.dtype, tuple(chunk.sizes))
            inner = tuple(at - origin for at, origin in zip(shared.offsets, chunk.offsets, strict=True))
            fetch(item, Box(inner, shared.lengths), part, verify=True)

    def value(self, fqn: str) -> object:
        item = self._item(MetadataIndex(fqn), torch.uint8, ())
        return load_item(whole_item(item, verify=True), origin=item.name)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _item(self, index: MetadataIndex, dtype: torch.dtype, shape: tuple[int, ...]) -> SavedItem:
        place = self._place(index)
        name = self._checkpoint.where_item(index, place)
        if place.transform_descriptors:
            raise SchemaError(f"{name} went through stream extensions: only stock torch with these reads it.")
        sums = self._checkpoint.sums(index, place)
        source = self._reader(place.relative_path)
        return SavedItem(source, place.offset, place.length, dtype, shape, sums, name)

    def _place(self, index: MetadataIndex) -> StorageInfo:
        places: Mapping[MetadataIndex, StorageInfo] = self._checkpoint.metadata.storage_data
        place = places.get(index) or places.get(MetadataIndex(index.fqn))
        if place is None:
            raise CorruptCheckpointError(f"{self.where}: the metadata places {index.fqn!r} nowhere.")
        return place

    def _reader(self, name: str) -> FileReader:
        if name not in self._readers:
            self._readers[name] = self._checkpoint.open(name)
        return self._readers[name]


def _shared(a: Box, b: Box) -> Box | None:
    """Where two boxes of a tensor overlap, None where they do not."""
    starts, lengths = [], []
    for a_start, a_length, b_start, b_length in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True):
        start = max(a_start, b_start)
        end = min(a_start + a_length, b_start + b_length)
        if end <= start:
            return None
        starts.append(start)
        lengths.append(end - start)
    return Box(tuple(starts), tuple(lengths))


def _path(checkpoint: OpenCheckpoint, fqn: str) -> Path:
    """Place of an entry in the state dict that was saved, as far as the planner recorded it."""
    recorded = checkpoint.metadata.planner_data
    path = recorded.get(fqn) if isinstance(recorded, dict) else None
    if isinstance(path, tuple) and path and all(type(key) in {str, int} for key in path):
        return path
    return (fqn,)
