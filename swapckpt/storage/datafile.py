"""The data files of one rank: which item goes to which, and the threads that write them.

[Note: files and threads] One file per thread. Items keep the order of the plan: each goes to the file that is
shortest so far, so that all files advance together and memory that the caller needs back first is written
first.

[Note: small items] Of an item of a few kilobytes the time goes into Python, not into the device. Such items
are put together in memory, frame and elements, where they are alike as whole runs (see ``runs.py``), and
handed over many at a time, to a thread that waits for the device meanwhile. More files for them would only
take turns.
"""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from zlib_ng.zlib_ng import crc32

from swapckpt.errors import PlanError, StorageError
from swapckpt.storage.files import ALIGNMENT
from swapckpt.storage.items import Skeleton, is_dense, is_in_order, payload, skeleton
from swapckpt.storage.manifest import BlockSums, FileSums, ItemSums
from swapckpt.storage.pieces import Pieces
from swapckpt.storage.runs import ITEM_ALIGNMENT, Run, runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.checkpoint.planner import WriteItem

    from swapckpt.storage.commit import Attempt
    from swapckpt.storage.files import Files, FileWriter

FILE_NBYTES = 32 << 20
"""Fewer bytes than this per thread are not worth a file of their own."""
SMALL_NBYTES = 64 << 10
"""Payloads from this size on start at a multiple of ``ALIGNMENT`` in the file, for direct I/O."""
CHUNK_NBYTES = 16 << 20
BYTE_ITEM_NBYTES = 2048  # a guess, to divide items before their size is known

_PADDING = bytes(ALIGNMENT)


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item of the plan and what can be known of it before its tensor is seen.

    Attributes:
        item: DCP's.
        dtype: Element type; None for bytes.
        shape: Of the chunk to be saved.
        frame: What stands around its elements; None where torch has to save it.
        nbytes: Length in the file, as far as it can be told.
    """

    item: WriteItem
    dtype: torch.dtype | None
    shape: torch.Size
    frame: Skeleton | None
    nbytes: int

    def check(self, data: Tensor) -> None:
        """Raise PlanError unless ``data`` is what was planned."""
        if data.dtype != self.dtype or data.shape != self.shape:
            raise PlanError(
                f"{self.item.index.fqn}: planned as {self.dtype} of {tuple(self.shape)}, "
                f"resolved as {data.dtype} of {tuple(data.shape)}."
            )


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """The items of one data file, in order.

    Attributes:
        items: All.
        parts: What they are written as: runs, and numbers of items that stand alone.
    """

    items: tuple[PlannedItem, ...]
    parts: tuple[Run | int, ...]

    @classmethod
    def of(cls, items: Sequence[PlannedItem]) -> PlannedFile:
        frames = [
            item.frame if item.frame is not None and 0 < item.frame.payload_nbytes < SMALL_NBYTES else None
            for item in items
        ]
        return cls(tuple(items), tuple(runs(frames)))


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file, as the thread that wrote it reports it."""

    sums: FileSums
    places: tuple[tuple[int, int], ...]  # start and length of each item


def divided(items: Sequence[WriteItem], *, threads: int) -> list[PlannedFile]:
    """The items of each file (see the note on files at the top); no file where there is nothing to write."""
    if not items:
        return []
    planned = [_planned(item) for item in items]
    worthwhile = sum(item.nbytes for item in planned if item.nbytes >= SMALL_NBYTES)
    files: list[list[PlannedItem]] = [[] for _ in range(max(1, min(threads, -(-worthwhile // FILE_NBYTES))))]
    lengths = [0] * len(files)
    for item in planned:
        shortest = lengths.index(min(lengths))
        files[shortest].append(item)
        lengths[shortest] += item.nbytes
    return [PlannedFile.of(of_file) for of_file in files]


def _planned(item: WriteItem) -> PlannedItem:
    data = item.tensor_data
    if data is None or data.chunk is None:
        return PlannedItem(item, None, torch.Size(()), None, BYTE_ITEM_NBYTES)
    dtype, shape = data.properties.dtype, data.chunk.sizes
    frame = skeleton(dtype, tuple(shape)) if data.properties.layout is torch.strided else None
    nbytes = BYTE_ITEM_NBYTES + shape.numel() * dtype.itemsize if frame is None else frame.nbytes
    return PlannedItem(item, dtype, shape, frame, nbytes)


class Source(Protocol):
    """Has what is written. Items are named by the number of their file and their numbers in it.

    Call sequence (by the thread that writes the file): 1. ``item``, or ``addresses`` for many; 2.
    ``written``, with the same items, before the next.
    """

    def item(self, file: int, at: int) -> Tensor | io.BytesIO:
        """The data of an item."""

    def addresses(self, file: int, items: range) -> Sequence[int] | None:
        """Where the elements of each tensor lie, row by row, in host memory and with the dtype and shape that
        were planned; None where this is not so for all of them."""

    def written(self, file: int, items: range) -> None:
        """The memory of these items may change."""


class WriteJob:
    """All data files of one rank. The first failure stops all threads.

    Args:
        files: The folder that checkpoints are in.
        attempt: Where they are written.
        rank: Whose they are.
        source: Has the data of the items.
    """

    def __init__(self, files: Files, attempt: Attempt, rank: int, *, source: Source) -> None:
        self._files = files
        self._attempt = attempt
        self._rank = rank
        self._source = source
        self._failed = threading.Event()

    def run(self, files: Sequence[PlannedFile]) -> list[DataFile]:
        """Write all files. Raises the first error, after all threads have ended and removed their files."""
        if len(files) <= 1:
            return [self._file(number, planned) for number, planned in enumerate(files)]
        with ThreadPoolExecutor(len(files), thread_name_prefix="swapckpt-write") as pool:
            futures = [pool.submit(self._file, number, planned) for number, planned in enumerate(files)]
            try:
                wait(futures)
            except BaseException:  # interrupted: do not go on writing what nobody waits for
                self._failed.set()
                raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            for number, future in enumerate(futures):
                if future.exception() is None:
                    with suppress(StorageError):  # else the next save or prune removes it
                        self._files.remove(self._path(number))
            raise next(error for error in errors if not isinstance(error, _StoppedError))
        return [future.result() for future in futures]

    def check(self) -> None:
        """Raise when another thread has failed: this one's work is of no use any more."""
        if self._failed.is_set():
            raise _StoppedError

    def _path(self, number: int) -> str:
        return f"{self._attempt.folder}/{self._attempt.data_file(self._rank, number)}"

    def _file(self, number: int, planned: PlannedFile) -> DataFile:
        try:
            self.check()
            nbytes = sum(item.nbytes for item in planned.items)
            writing = _Writing(self, self._files.create(self._path(number), nbytes=nbytes))
            try:
                places: list[tuple[int, int]] = []
                for part in planned.parts:
                    at = len(places)
                    places += (
                        self._run(writing, number, part, first=at, items=planned.items)
                        if isinstance(part, Run)
                        else self._one(writing, number, at, planned.items[at])
                    )
                writing.close()
            except BaseException:
                writing.abort()
                raise
        except BaseException:
            self._failed.set()
            raise
        name = self._attempt.data_file(self._rank, number)
        return DataFile(FileSums(name, writing.position, ",".join(writing.rows)), tuple(places))

    def _one(self, writing: _Writing, number: int, at: int, item: PlannedItem) -> list[tuple[int, int]]:
        place = writing.add(item, self._source.item(number, at))
        self._source.written(number, range(at, at + 1))
        return [place]

    def _run(
        self, writing: _Writing, number: int, run: Run, *, first: int, items: Sequence[PlannedItem]
    ) -> list[tuple[int, int]]:
        these = range(first, first + len(run))
        addresses = self._source.addresses(number, these)
        if addresses is None:
            return [place for at in these for place in self._one(writing, number, at, items[at])]
        places = writing.add_run(run, addresses)
        self._source.written(number, these)
        return places


class _StoppedError(Exception):
    """This thread stopped because another one failed."""


class _Writing:
    """One data file while it is written: items go in, rows of the manifest come out."""

    def __init__(self, job: WriteJob, out: FileWriter) -> None:
        self.out = out
        self.rows: list[str] = []
        self._job = job
        self._pieces = Pieces(out)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._pieces.position

    def add(self, planned: PlannedItem, data: Tensor | io.BytesIO) -> tuple[int, int]:
        """Write an item. Returns its start and length."""
        if isinstance(data, io.BytesIO):
            return self._opaque(data.getbuffer())
        planned.check(data)
        frame = planned.frame
        if frame is None or not is_dense(data):
            return self._opaque(saved_tensor(data))
        if frame.payload_nbytes < SMALL_NBYTES:
            return self._small(frame, data, name=planned.item.index.fqn)
        return self._large(frame, data, name=planned.item.index.fqn)

    def add_run(self, run: Run, addresses: Sequence[int]) -> list[tuple[int, int]]:
        """Write a run. Returns the start and length of each item."""
        start = self._pad(ITEM_ALIGNMENT, before=0, room_nbytes=run.room_nbytes)
        checksums = run.fill(self._pieces.take(run.nbytes, room_nbytes=run.room_nbytes), addresses)
        self.rows += run.rows(start, checksums)
        return list(zip((run.starts + start).tolist(), run.lengths, strict=True))

    def close(self) -> None:
        self._pieces.flush()
        self._pieces.close()
        self.out.close()

    def abort(self) -> None:
        """Remove the file, when nothing is on its way to it any more."""
        self._pieces.close()
        self.out.abort()

    def _small(self, frame: Skeleton, tensor: Tensor, *, name: str) -> tuple[int, int]:
        # Run for each of tens of thousands of tensors: every call in here is felt.
        pieces, nbytes = self._pieces, frame.payload_nbytes
        if not is_in_order(tensor):
            elements = bytearray()
            for view in payload(tensor, name=name):  # each is valid until the next
                elements += view
            tensor = torch.frombuffer(elements, dtype=torch.uint8) if elements else tensor
        start = self._pad(ITEM_ALIGNMENT, before=0, room_nbytes=frame.nbytes)
        pieces.put(frame.header)
        checksum = crc32(pieces.copy(tensor.data_ptr(), nbytes))
        footer = frame.footer_with(checksum)
        pieces.put(footer)
        envelope = crc32(footer, frame.header_crc)
        block = f"{checksum:08x}" if nbytes else ""
        self.rows.append(f'[{start},{frame.nbytes},{len(frame.header)},{nbytes},"{envelope:08x}","{block}"]')
        return start, frame.nbytes

    def _large(self, frame: Skeleton, tensor: Tensor, *, name: str) -> tuple[int, int]:
        start = self._pad(ALIGNMENT, before=len(frame.header), room_nbytes=len(frame.header))
        self._pieces.put(frame.header)
        sums = BlockSums(frame.payload_nbytes)
        for view in payload(tensor, name=name):
            self._through(view, sums)
        footer = frame.footer_with(sums.whole)
        self._pieces.reserve(len(footer))
        self._pieces.put(footer)
        item = ItemSums(
            start=start,
            nbytes=frame.nbytes,
            payload_at=len(frame.header),
            payload_nbytes=frame.payload_nbytes,
            envelope=crc32(footer, frame.header_crc),
            blocks=tuple(sums.checksums),
        )
        self.rows.append(item.to_row())
        return start, frame.nbytes

    def _opaque(self, data: memoryview) -> tuple[int, int]:
        """An item that is all payload."""
        start, sums = self._pad(ITEM_ALIGNMENT, before=0, room_nbytes=0), BlockSums(len(data))
        self._through(data, sums)
        blocks = tuple(sums.checksums)
        item = ItemSums(start, len(data), payload_at=0, payload_nbytes=len(data), envelope=0, blocks=blocks)
        self.rows.append(item.to_row())
        return start, len(data)

    def _through(self, view: memoryview, sums: BlockSums) -> None:
        """Bytes that are handed on as they are, with their checksums."""
        self._pieces.flush()
        for at in range(0, len(view), CHUNK_NBYTES):
            self._job.check()
            chunk = view[at : at + CHUNK_NBYTES]
            sums.add(chunk)
            self.out.append(chunk)
            self._pieces.passed(len(chunk))

    def _pad(self, alignment: int, *, before: int, room_nbytes: int) -> int:
        """Add zeros so that ``before`` bytes further on is aligned, with room behind them. Returns where the
        next item starts."""
        self._job.check()
        padding = -(self.position + before) % alignment
        self._pieces.reserve(padding + room_nbytes)
        self._pieces.put(_PADDING[:padding])
        return self.position


def saved_tensor(tensor: Tensor) -> memoryview:
    """A tensor that is more than elements in memory, as torch saves it."""
    stream = io.BytesIO()
    torch.save(tensor.detach().cpu(), stream)
    return stream.getbuffer()
