"""Reads a box of one saved tensor into a destination: only the bytes it needs, verified, without a copy where
memory allows."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from zlib_ng.zlib_ng import crc32

from swapckpt.errors import CorruptCheckpointError
from swapckpt.storage.items import (
    MAX_HEADER_NBYTES,
    SLAB_NBYTES,
    bytes_of,
    parse_header,
    slabs,
)
from swapckpt.storage.manifest import block_nbytes
from swapckpt.storage.values import check_archive, load_item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from swapckpt.storage.files import FileReader
    from swapckpt.storage.items import Header
    from swapckpt.storage.manifest import ItemSums

CHUNK_NBYTES = 16 << 20
CACHED_CHUNK_NBYTES = 1 << 20
"""What comes from the page cache is checked while the processor's own cache still has it."""
HEAD_NBYTES = 4096
"""Enough for the header of a tensor as torch writes it by default."""
LONG_RUN_NBYTES = 64 << 10
"""Runs of wanted bytes from this length on are read one by one, shorter ones with what lies between."""


TORN = " Destinations may have been overwritten in part."
"""What an error of a read into a destination adds."""


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a saved tensor that is wanted: where it begins, and its shape."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedItem:
    """One tensor in a data file, as metadata and manifest describe it.

    Attributes:
        source: The open file.
        start: First byte of the item.
        nbytes: Length of the item.
        dtype: Element type.
        shape: Of the saved chunk.
        sums: From the manifest; None for a checkpoint of stock torch.
        name: File, FQN and offset, for messages.
    """

    source: FileReader
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    sums: ItemSums | None
    name: str


@dataclass(frozen=True, slots=True)
class _Payload:
    """Elements in row-major order: first byte in the file, length, and what there is to check them by."""

    start: int
    nbytes: int
    blocks: tuple[int, ...]
    checksum: int | None  # of all of it; stock's only


def fetch(item: SavedItem, box: Box, target: Tensor, *, verify: bool) -> None:
    """Copy a box of a saved tensor into ``target``, which has its shape (of any dtype, layout and device).

    Args:
        item: The saved tensor.
        box: Which part of it.
        target: Where to; written in part when this raises.
        verify: Check what is read. Of a part of a stock item there is nothing to check it by.

    Raises:
        CorruptCheckpointError: The bytes contradict a checksum, or the item is not the tensor that the
            metadata describes.
        StorageError: The file could not be read.
    """
    if not math.prod(box.lengths):
        return
    payload = _locate(item, whole=box.lengths == item.shape and verify)
    if payload is None:
        whole = _load_whole(item, verify=verify)
        for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            whole = whole.narrow(dim, offset, length)
        target.copy_(whole)
        return
    reading = _Reading(item, payload, verify=verify)
    reading.box(0, item.shape, box, target)
    reading.finish()


def fetch_plain(item: SavedItem, box: Box, target: Tensor) -> None:
    """As :func:`fetch`, of elements that lie in row-major order from ``item.start`` on, with nothing around
    them and nothing to check them by."""
    if math.prod(box.lengths):
        payload = _Payload(item.start, item.nbytes, (), None)
        _Reading(item, payload, verify=False).box(0, item.shape, box, target)


def _locate(item: SavedItem, *, whole: bool) -> _Payload | None:
    """Where the elements lie; None when the item has to be loaded by torch."""
    nbytes = math.prod(item.shape) * item.dtype.itemsize
    if item.sums is not None:
        if item.sums.payload_at == 0:  # all of it was made by torch.save
            return None
        if item.sums.payload_nbytes != nbytes:
            raise CorruptCheckpointError(
                f"{item.name}: {item.sums.payload_nbytes} bytes are saved, {nbytes} make {item.shape}."
            )
        return _Payload(item.start + item.sums.payload_at, nbytes, item.sums.blocks, None)
    head = _bytes(item.source, item.start, min(item.nbytes, HEAD_NBYTES))
    header = parse_header(head, origin=item.name)
    if header is None and item.nbytes > HEAD_NBYTES:
        head = _bytes(item.source, item.start, min(item.nbytes, MAX_HEADER_NBYTES))
        header = parse_header(head, origin=item.name)
    if header is None or not header.tensor.is_row_major:
        return None
    if (header.tensor.dtype, header.tensor.shape) != (item.dtype, item.shape):
        raise CorruptCheckpointError(
            f"{item.name} holds {header.tensor.dtype} of {header.tensor.shape}; the metadata has "
            f"{item.dtype} of {item.shape}."
        )
    end = header.payload_at + nbytes
    if end + 8 > item.nbytes:
        raise CorruptCheckpointError(f"{item.name} ends inside its elements.")
    checksum = _stock_checksum(item, header, end) if whole else None
    return _Payload(item.start + header.payload_at, nbytes, (), checksum)


def _stock_checksum(item: SavedItem, header: Header, end: int) -> int | None:
    """CRC-32 of the storage that ends at ``end`` of the item."""
    return header.checksum(_bytes(item.source, item.start + end, 8), origin=item.name)


def _bytes(source: FileReader, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    source.read_into(start, memoryview(data))
    return bytes(data)


def whole_item(item: SavedItem, *, verify: bool) -> bytes:
    """All bytes of an item that is all payload, or of any item of stock torch (which checks itself)."""
    data = bytearray(item.nbytes)
    blocks = () if item.sums is None else item.sums.blocks
    if item.sums is not None and (item.sums.payload_at, item.sums.payload_nbytes) != (0, item.nbytes):
        raise CorruptCheckpointError(f"{item.name} is not what the manifest describes.")
    _Reading(item, _Payload(item.start, item.nbytes, blocks, None), verify=verify).fill(0, memoryview(data))
    return bytes(data)


def _load_whole(item: SavedItem, *, verify: bool) -> Tensor:
    """A tensor that is more than elements in row-major order, by way of memory."""
    data = whole_item(item, verify=verify)
    try:
        value = load_item(data, origin=item.name)
    except CorruptCheckpointError:
        raise
    except ValueError:  # names classes of sparse, quantized, ... tensors, for which torch itself vouches
        value = _load_by_torch(data, origin=item.name)
    if not isinstance(value, torch.Tensor) or (value.dtype, tuple(value.shape)) != (item.dtype, item.shape):
        raise CorruptCheckpointError(f"{item.name} is not the {item.dtype} of {item.shape} of the metadata.")
    return value


def read_blocks(item: SavedItem, sums: ItemSums) -> None:
    """Read the payload of one of our items piece by piece, to verify it."""
    payload = _Payload(item.start + sums.payload_at, sums.payload_nbytes, sums.blocks, None)
    reading = _Reading(item, payload, verify=True)
    memory = memoryview(bytearray(min(payload.nbytes, SLAB_NBYTES)))
    for start in range(0, payload.nbytes, SLAB_NBYTES):
        reading.fill(start, memory[: payload.nbytes - start])


def check_stock_item(item: SavedItem) -> None:
    """Compare an item of stock torch with the checksums in its zip entries.

    Raises:
        CorruptCheckpointError: It contradicts one, or is no archive.
    """
    head = _bytes(item.source, item.start, min(item.nbytes, MAX_HEADER_NBYTES))
    header = parse_header(head, origin=item.name)
    if header is None:
        check_archive(whole_item(item, verify=False), origin=item.name)
        return
    nbytes = header.tensor.storage_numel * header.tensor.dtype.itemsize
    end = header.payload_at + nbytes
    if end + 8 > item.nbytes:
        raise CorruptCheckpointError(f"{item.name} ends inside its elements.")
    expected = _stock_checksum(item, header, end) if nbytes else 0
    found, memory = 0, memoryview(bytearray(min(nbytes, SLAB_NBYTES)))
    for start in range(0, nbytes, SLAB_NBYTES):
        part = memory[: nbytes - start]
        item.source.read_into(item.start + header.payload_at + start, part)
        found = crc32(part, found)
    if expected not in {found, None}:
        raise CorruptCheckpointError(f"{item.name} contradicts its checksum.")


def _load_by_torch(data: bytes, *, origin: str) -> object:
    try:
        value: object = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(f"{origin} cannot be loaded without running code ({error}).") from error
    return value


class _Reading:
    """Reads of one payload, in the order of its bytes. Positions are relative to its first byte."""

    def __init__(self, item: SavedItem, payload: _Payload, *, verify: bool) -> None:
        self._item = item
        self._payload = payload
        self._blocks = payload.blocks if verify else ()
        self._block_nbytes = block_nbytes(payload.nbytes)
        self._running = 0  # checksum of what was read in sequence, for payloads without blocks
        self._read_to = 0

    def finish(self) -> None:
        """Compare with the checksum of the whole, where that is all there is."""
        expected = self._payload.checksum
        if expected is not None and self._read_to == self._payload.nbytes and self._running != expected:
            raise CorruptCheckpointError(f"{self._item.name} contradicts its checksum.")

    def box(self, start: int, shape: Sequence[int], box: Box, target: Tensor) -> None:
        """Copy the box of the ``shape`` whose first element is at ``start``."""
        itemsize = self._item.dtype.itemsize
        if _is_run(shape, box.lengths):
            self._run(start + _position(shape, box.offsets) * itemsize, target)
            return
        row_nbytes = math.prod(shape[1:]) * itemsize
        inner = Box(box.offsets[1:], box.lengths[1:])
        run_nbytes = _run_length(shape, box.lengths) * itemsize
        if row_nbytes > SLAB_NBYTES or (not self._blocks and run_nbytes >= LONG_RUN_NBYTES):
            for n in range(box.lengths[0]):
                self.box(start + (box.offsets[0] + n) * row_nbytes, shape[1:], inner, target[n])
            return
        rows = SLAB_NBYTES // row_nbytes
        for first in range(0, box.lengths[0], rows):
            count = min(rows, box.lengths[0] - first)
            memory = self._memory(start + (box.offsets[0] + first) * row_nbytes, count * row_nbytes)
            part = memory.view(self._item.dtype).view(count, *shape[1:])
            for dim, (offset, length) in enumerate(zip(inner.offsets, inner.lengths, strict=True), start=1):
                part = part.narrow(dim, offset, length)
            target[first : first + count].copy_(part)

    def _run(self, start: int, target: Tensor) -> None:
        """Fill ``target`` with consecutive elements."""
        if target.is_cpu and target.dtype == self._item.dtype and target.is_contiguous():
            self.fill(start, bytes_of(target))
            return
        for part in slabs(target):
            nbytes = part.numel() * self._item.dtype.itemsize
            part.copy_(self._memory(start, nbytes).view(self._item.dtype).view(part.shape))
            start += nbytes

    def _memory(self, start: int, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.fill(start, bytes_of(memory))
        return memory

    def fill(self, start: int, view: memoryview) -> None:
        """Read the bytes at ``start`` into ``view``; where there are blocks, verified."""
        end = start + len(view)
        if not self._blocks:
            self._direct(start, view)
            return
        at, chunk_nbytes = start, self._chunk_nbytes(start, len(view))
        while at < end:
            block_start = at - at % self._block_nbytes
            block_end = min(block_start + self._block_nbytes, self._payload.nbytes)
            if at == block_start and block_end <= end:
                # As many whole blocks as a chunk has.
                stop = end if end == self._payload.nbytes else end - end % self._block_nbytes
                stop = min(stop, at + chunk_nbytes)
                part = view[at - start : stop - start]
                self._item.source.read_into(self._payload.start + at, part)
                self._check_blocks(at, part)
                at = stop
            else:
                block = memoryview(bytearray(block_end - block_start))
                self._item.source.read_into(self._payload.start + block_start, block)
                self._check_blocks(block_start, block)
                stop = min(block_end, end)
                view[at - start : stop - start] = block[at - block_start : stop - block_start]
                at = stop

    def _chunk_nbytes(self, start: int, nbytes: int) -> int:
        """How much to read before it is checked: a multiple of the blocks."""
        is_cached = nbytes > CACHED_CHUNK_NBYTES and self._item.source.is_cached(
            self._payload.start + start, nbytes
        )
        return CACHED_CHUNK_NBYTES if is_cached else CHUNK_NBYTES

    def _check_blocks(self, start: int, view: memoryview) -> None:
        first = start // self._block_nbytes
        for n, at in enumerate(range(0, len(view), self._block_nbytes), start=first):
            if crc32(view[at : at + self._block_nbytes]) != self._blocks[n]:
                raise CorruptCheckpointError(
                    f"{self._item.name}: block {n} of {len(self._blocks)} contradicts its checksum.{TORN}"
                )

    def _direct(self, start: int, view: memoryview) -> None:
        chunk_nbytes = self._chunk_nbytes(start, len(view))
        for at in range(0, len(view), chunk_nbytes):
            part = view[at : at + chunk_nbytes]
            self._item.source.read_into(self._payload.start + start + at, part)
            if self._payload.checksum is not None and self._read_to == start + at:
                self._running = crc32(part, self._running)
                self._read_to += len(part)


def _is_run(shape: Sequence[int], lengths: Sequence[int]) -> bool:
    """True when a box is consecutive in row-major order: single rows, then a part, then everything."""
    dim = 0
    while dim < len(shape) and lengths[dim] == 1:
        dim += 1
    return tuple(lengths[dim + 1 :]) == tuple(shape[dim + 1 :])


def _run_length(shape: Sequence[int], lengths: Sequence[int]) -> int:
    """Elements of a box that are consecutive."""
    numel = 1
    for size, length in zip(reversed(shape), reversed(lengths), strict=True):
        numel *= length
        if length != size:
            break
    return numel


def _position(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Elements before the one at ``offsets``, in row-major order."""
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position
