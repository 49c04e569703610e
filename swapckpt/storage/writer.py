"""``SwapStorageWriter``: a DCP storage writer that copies nothing, checks everything and commits in one step.

[Note: files and threads] A rank writes one file per thread. Items keep the order of the plan: each goes to
the file that is shortest so far, so that all files advance together and memory that the caller needs back
first is written first.

[Note: what is kept between saves] Skeletons of items, by dtype and shape (see ``items.py``). When the planner
hands over the same items again (``SwapSavePlanner`` does while the structure of the state is unchanged) and
they fall on the same places, ranks report checksums only, and the coordinator writes the same metadata again
with the new attempt's id in it.
"""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from zlib_ng.zlib_ng import crc32

from swapckpt._torch import StorageInfo
from swapckpt.errors import CheckpointNotFoundError, PlanError, StorageError
from swapckpt.storage import commit
from swapckpt.storage.files import open_files, split_url
from swapckpt.storage.items import Skeleton, is_dense, payload, skeleton
from swapckpt.storage.manifest import BlockSums, FileSums, ItemSums
from swapckpt.storage.metadata import VERSION, dump_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from swapckpt.storage.commit import Attempt
    from swapckpt.storage.files import Files, FileWriter

DEFAULT_THREADS = 4
FILE_NBYTES = 32 << 20
"""Fewer bytes than this per thread are not worth a file of their own."""
ALIGNED_NBYTES = 64 << 10
"""Payloads from this size on start at a multiple of ``FILE_ALIGNMENT`` in the file, for direct I/O."""
FILE_ALIGNMENT, ITEM_ALIGNMENT = 4096, 64
CHUNK_NBYTES = 16 << 20
BYTE_ITEM_NBYTES = 2048  # a guess, to divide items before their size is known

_PADDING = memoryview(bytes(FILE_ALIGNMENT))


@dataclass(frozen=True, slots=True)
class WriteTask:
    """What the coordinator tells a rank, in ``SavePlan.storage_data``."""

    attempt: Attempt
    rank: int
    knows_places: bool  # the coordinator has this rank's places of the last save


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file, as the thread that wrote it reports it."""

    sums: FileSums
    places: tuple[tuple[int, int], ...]  # start and length of each item


@dataclass(frozen=True, slots=True)
class RankReport:
    """All that a rank wrote, in the ``storage_data`` of the only result it hands to DCP.

    Attributes:
        rank: Which one.
        files: The data files.
        places: Item, start and length of all in each file; None when they are those of the last save.
    """

    rank: int
    files: tuple[FileSums, ...]
    places: tuple[tuple[tuple[MetadataIndex, int, int], ...], ...] | None


class SwapStorageWriter(StorageWriter):
    """Writes checkpoints in the format of stock DCP, for ``dcp.save`` and ``dcp.async_save``.

    Payloads go from the tensors' own memory to the file, with their checksums computed on the way; nothing
    is cloned. Any thread's failure on any rank fails the save on all ranks. What is visible under the
    checkpoint's name is complete and durable, see ``commit.py``.

    Use one instance for all saves of a job, with ``checkpoint_id``: what it keeps makes later saves faster.

    Args:
        path: Path or URL of the checkpoint, for example ``runs/a/step-5`` or ``s3://bucket/runs/step-5``.
            May be given as ``checkpoint_id`` instead.
        threads: Threads (and files) per rank, at most; small states use fewer.
        sync_files: False does not wait for the device: a crash of the machine (not of the job) may then leave
            a checkpoint that looks complete and is not.
        drop_page_cache: Forget cached pages of what was written. Direct I/O leaves none.
        overwrite: Replace a committed checkpoint of the same name. It stays readable until the new one is.
        files: The folder that checkpoints are in, for a store of your own; ``path`` then only names one.
        on_written: Called with each tensor when all its bytes were taken and its memory may change, from a
            writer thread.

    Raises:
        CheckpointExistsError: From planning: the checkpoint is committed and ``overwrite`` is False.
        StorageError: From any phase: the store failed. Nothing is visible, the old checkpoint is untouched.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        threads: int = DEFAULT_THREADS,
        sync_files: bool = True,
        drop_page_cache: bool = False,
        overwrite: bool = False,
        files: Files | None = None,
        on_written: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._threads = threads
        self._sync = sync_files
        self._drop = drop_page_cache
        self._overwrite = overwrite
        self._given_files = files
        self._on_written = on_written
        self._path: str | None = None if path is None else os.fspath(path)
        self._files: Files | None = None
        self._attempt: Attempt | None = None  # the coordinator's, until it is committed or abandoned
        self._used: set[str] = set()
        self._written: tuple[Sequence[WriteItem], tuple[tuple[tuple[int, int], ...], ...]] | None = None
        self._places: dict[int, tuple[tuple[tuple[MetadataIndex, int, int], ...], ...]] = {}
        self._dumped: tuple[Metadata, str, bytes] | None = None

    # ---------------------------------------------------------------------------- DCP's call sequence

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save. (all ranks)"""
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        self._files = None

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002, FBT001 - the signature is DCP's
        *args: object,  # noqa: ARG002
        **kwargs: object,
    ) -> None:
        """Refuse to save without collectives: nobody could tell that all ranks are done. (all ranks)"""
        if not kwargs.get("use_collectives", True):
            raise StorageError(
                "use_collectives=False cannot be committed in one step; save with collectives."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt. (coordinator)"""
        files, name = self._target()
        if self._attempt is not None:  # the last save failed after this point
            commit.abandon(files, self._attempt)
        self._attempt = commit.begin(files, name, overwrite=self._overwrite)
        return [
            replace(plan, storage_data=WriteTask(self._attempt, rank, rank in self._places))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. (all ranks)"""
        task = plan.storage_data
        if not isinstance(task, WriteTask) or task.attempt.id in self._used:
            raise PlanError(
                "The plan is not that of this save: DefaultSavePlanner(enable_plan_caching=True) hands out "
                "old ones. Use swapckpt.storage.SwapSavePlanner, whose cache knows attempts."
            )
        self._used.add(task.attempt.id)
        files, _ = self._target()
        buckets = _divided(plan.items, count=self._count(plan.items))
        job = _WriteJob(files, task, planner, on_written=self._on_written)
        written = job.run(buckets)
        future: Future[list[WriteResult]] = Future()
        report = self._report(task, plan.items, buckets, written)
        nbytes = sum(file.nbytes for file in report.files)
        future.set_result([WriteResult(MetadataIndex(f"rank {task.rank}"), nbytes, report)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. (coordinator)"""
        files, _ = self._target()
        attempt = self._attempt
        if attempt is None:
            raise PlanError("finish() was called without prepare_global_plan() on this writer.")
        reports = [cast("RankReport", result.storage_data) for of_rank in results for result in of_rank]
        data = [file for report in reports for file in report.files]
        dumped = self._dump(metadata, reports, attempt)
        self._attempt = None  # what is left of it from here on, commit() removes
        commit.commit(files, attempt, dumped, data=data, world_size=len(results))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for every path and URL; whether its store can be used is found out by using it."""
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path or URL that is being saved to."""
        return self._path or ""

    # ---------------------------------------------------------------------------- details

    def _target(self) -> tuple[Files, str]:
        if self._path is None:
            raise CheckpointNotFoundError("Pass a path to SwapStorageWriter or checkpoint_id to dcp.save.")
        parent, name = split_url(self._path)
        if self._files is None:
            self._files = self._given_files or open_files(parent, sync=self._sync, drop_page_cache=self._drop)
        return self._files, name

    def _count(self, items: Sequence[WriteItem]) -> int:
        nbytes = sum(map(_estimated_nbytes, items))
        return max(1, min(self._threads, -(-nbytes // FILE_NBYTES)))

    def _report(
        self,
        task: WriteTask,
        items: Sequence[WriteItem],
        buckets: Sequence[Sequence[WriteItem]],
        written: Sequence[DataFile],
    ) -> RankReport:
        places = tuple(file.places for file in written)
        unchanged = self._written is not None and self._written[0] is items and self._written[1] == places
        self._written = (items, places)
        indexed = (
            tuple(
                tuple(
                    (item.index, start, nbytes) for item, (start, nbytes) in zip(bucket, of_file, strict=True)
                )
                for bucket, of_file in zip(buckets, places, strict=True)
            )
            if not (unchanged and task.knows_places)
            else None
        )
        sums = tuple(file.sums for file in written)
        return RankReport(task.rank, sums, indexed)

    def _dump(self, metadata: Metadata, reports: Sequence[RankReport], attempt: Attempt) -> bytes:
        """DCP's metadata for the file, with places and this attempt's id."""
        unchanged = self._dumped is not None and self._dumped[0] is metadata
        for report in reports:
            if report.places is not None:
                self._places[report.rank] = report.places
                unchanged = False
        if self._dumped is not None and unchanged:
            # The id has one length and is unlike anything else, and names of data files differ in it at most.
            dumped = self._dumped[2].replace(self._dumped[1].encode(), attempt.id.encode())
        else:
            metadata.version = VERSION
            metadata.storage_data = self._storage_data(reports)
            # A checkpoint may be moved or copied: where it was saved is not part of it.
            metadata.storage_meta = StorageMeta(save_id=f"{commit.SAVE_ID}{attempt.id}")
            dumped = dump_metadata(metadata)
        self._dumped = (metadata, attempt.id, dumped)
        return dumped

    def _storage_data(self, reports: Sequence[RankReport]) -> dict[MetadataIndex, StorageInfo]:
        return {
            index: StorageInfo(file.name, start, nbytes)
            for report in reports
            for file, places in zip(report.files, self._places[report.rank], strict=True)
            for index, start, nbytes in places
        }


def _estimated_nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None or data.chunk is None:
        return BYTE_ITEM_NBYTES
    return BYTE_ITEM_NBYTES + data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _divided(items: Sequence[WriteItem], *, count: int) -> list[list[WriteItem]]:
    """Items by file, in the order of the plan (see the note on files at the top)."""
    buckets: list[list[WriteItem]] = [[] for _ in range(count)]
    lengths = [0] * count
    for item in items:
        shortest = lengths.index(min(lengths))
        buckets[shortest].append(item)
        lengths[shortest] += _estimated_nbytes(item)
    return buckets


class _WriteJob:
    """The data files of one rank, one thread each. The first failure stops all of them."""

    def __init__(
        self,
        files: Files,
        task: WriteTask,
        planner: SavePlanner,
        *,
        on_written: Callable[[Tensor], None] | None,
    ) -> None:
        self._files = files
        self._task = task
        self._planner = planner
        self._on_written = on_written
        self._failed = threading.Event()

    def run(self, buckets: Sequence[Sequence[WriteItem]]) -> list[DataFile]:
        """Write all files. Raises the first error, after all threads have ended and removed their files."""
        if len(buckets) == 1:
            return [self._file(0, buckets[0])]
        with ThreadPoolExecutor(len(buckets), thread_name_prefix="swapckpt-write") as pool:
            futures = [pool.submit(self._file, number, bucket) for number, bucket in enumerate(buckets)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            for number, future in enumerate(futures):
                if future.exception() is None:
                    with suppress(StorageError):  # else the next save or prune removes it
                        self._files.remove(self._path(number))
            raise next(error for error in errors if not isinstance(error, _StoppedError))
        return [future.result() for future in futures]

    def _path(self, number: int) -> str:
        attempt = self._task.attempt
        return f"{attempt.folder}/{attempt.data_file(self._task.rank, number)}"

    def _file(self, number: int, items: Iterable[WriteItem]) -> DataFile:
        items = list(items)
        try:
            self._check()
            out = self._files.create(self._path(number), nbytes=sum(map(_estimated_nbytes, items)))
            try:
                sums = [self._item(out, item) for item in items]
                nbytes = out.position
                out.close()
            except BaseException:
                out.abort()
                raise
        except BaseException:
            self._failed.set()
            raise
        name = self._task.attempt.data_file(self._task.rank, number)
        rows = ",".join([item.to_row() for item in sums])
        return DataFile(FileSums(name, nbytes, rows), tuple((item.start, item.nbytes) for item in sums))

    def _check(self) -> None:
        if self._failed.is_set():
            raise _StoppedError("another thread failed")

    def _item(self, out: FileWriter, item: WriteItem) -> ItemSums:
        self._check()
        data = self._planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            return _write_bytes(out, data.getbuffer())
        frame = self._frame(item, data)
        if frame is None:
            written = _write_bytes(out, _saved(data))
        else:
            written = self._dense(out, frame, data, name=item.index.fqn)
        if self._on_written is not None:
            self._on_written(data)
        return written

    @staticmethod
    def _frame(item: WriteItem, tensor: Tensor) -> Skeleton | None:
        if item.type == WriteItemType.BYTE_IO or item.tensor_data is None or item.tensor_data.chunk is None:
            raise PlanError(f"{item.index.fqn}: the plan says bytes, the planner resolved a tensor.")
        planned = (item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
        if (tensor.dtype, tensor.shape) != planned:
            raise PlanError(
                f"{item.index.fqn}: planned as {planned[0]} of {tuple(planned[1])}, resolved as "
                f"{tensor.dtype} of {tuple(tensor.shape)}."
            )
        return skeleton(tensor.dtype, tuple(tensor.shape)) if is_dense(tensor) else None

    def _dense(self, out: FileWriter, frame: Skeleton, tensor: Tensor, *, name: str) -> ItemSums:
        start = _pad(out, len(frame.header), frame.payload_nbytes)
        out.append(memoryview(frame.header))
        sums = BlockSums(frame.payload_nbytes)
        for view in payload(tensor, name=name):
            for at in range(0, len(view), CHUNK_NBYTES):
                self._check()
                chunk = view[at : at + CHUNK_NBYTES]
                sums.add(chunk)
                out.append(chunk)
        footer = frame.footer_with(sums.whole)
        out.append(memoryview(footer))
        return ItemSums(
            start=start,
            nbytes=frame.nbytes,
            payload_at=len(frame.header),
            payload_nbytes=frame.payload_nbytes,
            envelope=crc32(footer, frame.header_crc),
            blocks=tuple(sums.checksums),
        )


class _StoppedError(Exception):
    """This thread stopped because another one failed."""


def _pad(out: FileWriter, header_nbytes: int, payload_nbytes: int) -> int:
    """Add zeros so that the item may start here. Returns where that is."""
    position = out.position
    if payload_nbytes >= ALIGNED_NBYTES:
        padding = -(position + header_nbytes) % FILE_ALIGNMENT
    else:
        padding = -position % ITEM_ALIGNMENT
    if padding:
        out.append(_PADDING[:padding])
    return position + padding


def _write_bytes(out: FileWriter, data: memoryview) -> ItemSums:
    """An item that is all payload."""
    start, sums = _pad(out, 0, len(data)), BlockSums(len(data))
    sums.add(data)
    out.append(data)
    blocks = tuple(sums.checksums)
    return ItemSums(start, len(data), payload_at=0, payload_nbytes=len(data), envelope=0, blocks=blocks)


def _saved(tensor: Tensor) -> memoryview:
    """A tensor that is more than elements in memory, as torch saves it."""
    stream = io.BytesIO()
    torch.save(tensor.detach().cpu(), stream)
    return stream.getbuffer()
