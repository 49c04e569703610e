"""``SwapStorageWriter``: a DCP storage writer that copies nothing, checks everything and commits in one step.

[Note: what is kept between saves] When the planner hands over the same items again (``SwapSavePlanner`` does
while the structure of the state is unchanged) they are divided into files as before. When they fall on the
same places, and the coordinator still has those, ranks report checksums only; when this holds for all ranks,
the coordinator writes the same metadata again, with the new attempt's id in it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from swapckpt._torch import StorageInfo
from swapckpt.collector import collector_paused
from swapckpt.errors import CheckpointNotFoundError, PlanError, StorageError
from swapckpt.storage import commit
from swapckpt.storage.datafile import PlannedFile, divided
from swapckpt.storage.files import open_files, split_url
from swapckpt.storage.metadata import VERSION, dump_metadata
from swapckpt.storage.runner import ThreadRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from swapckpt.storage.commit import Attempt
    from swapckpt.storage.datafile import DataFile
    from swapckpt.storage.files import Files
    from swapckpt.storage.manifest import FileSums
    from swapckpt.storage.runner import Runner

DEFAULT_THREADS = 4


@dataclass(frozen=True, slots=True)
class WriteTask:
    """What the coordinator tells a rank, in ``SavePlan.storage_data``.

    Attributes:
        attempt: Where to write.
        rank: The rank's number in this save.
        places_from: The attempt in which the rank reported the places that the coordinator has of it.
    """

    attempt: Attempt
    rank: int
    places_from: str | None


@dataclass(frozen=True, slots=True)
class RankReport:
    """All that a rank wrote, in the ``storage_data`` of the only result it hands to DCP.

    Attributes:
        rank: Which one.
        files: The data files.
        places: Item, start and length of all in each file; None when they are those that the coordinator has.
    """

    rank: int
    files: tuple[FileSums, ...]
    places: tuple[tuple[tuple[MetadataIndex, int, int], ...], ...] | None


@dataclass(slots=True)
class _Kept:
    """What a rank keeps of its last save."""

    items: Sequence[WriteItem]
    files: list[PlannedFile]
    places: tuple[tuple[tuple[int, int], ...], ...] = ()
    reported_in: str | None = None  # attempt


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
            May be changed between saves.
        files: The folder that checkpoints are in, for a store of your own; ``path`` then only names one.
        on_written: Called with each tensor when all its bytes were taken and its memory may change, from a
            writer thread.
        runner: Who writes data files; default threads of this process.

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
        runner: Runner | None = None,
    ) -> None:
        super().__init__()
        self._runner = runner if runner is not None else ThreadRunner()
        self._threads = threads
        self._sync = sync_files
        self._drop = drop_page_cache
        self.overwrite = overwrite
        self._given_files = files
        self._on_written = on_written
        self._path: str | None = None if path is None else os.fspath(path)
        self._opened: tuple[str, Files] | None = None
        self.written_nbytes = 0  # by this rank, in its last save
        self._attempt: Attempt | None = None  # the coordinator's, until it is committed or abandoned
        self._used: set[str] = set()
        self._kept: _Kept | None = None
        # The coordinator's: attempt in which each rank reported its places, and these; metadata in bytes.
        self._places: dict[int, tuple[str, tuple[tuple[tuple[MetadataIndex, int, int], ...], ...]]] = {}
        self._dumped: tuple[Metadata, str, bytes] | None = None

    # ---------------------------------------------------------------------------- DCP's call sequence

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save. (all ranks)"""
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

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
        self.abandon()
        self._attempt = commit.begin(files, name, overwrite=self.overwrite)
        return [
            replace(plan, storage_data=WriteTask(self._attempt, rank, self._places_from(rank)))
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
        if self._kept is None or self._kept.items is not plan.items:
            self._kept = _Kept(plan.items, divided(plan.items, threads=self._threads))
        written = self._runner.run(
            files,
            task.attempt,
            task.rank,
            planned=self._kept.files,
            planner=planner,
            on_written=self._on_written,
        )
        report = self._report(task, self._kept, written)
        self.written_nbytes = nbytes = sum(file.nbytes for file in report.files)
        future: Future[list[WriteResult]] = Future()
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
        with collector_paused():
            dumped = self._dump(metadata, reports, attempt)
        self._attempt = None  # what is left of it from here on, commit() removes
        commit.commit(files, attempt, dumped, data=data, world_size=len(results))

    def abandon(self) -> None:
        """Remove what a failed save left, which the next save or prune would do otherwise. (coordinator)"""
        if self._attempt is not None:
            commit.abandon(self._target()[0], self._attempt)
            self._attempt = None

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
        if self._given_files is not None:
            return self._given_files, name
        # Kept for the next save: an object store was asked what it can do.
        if self._opened is None or self._opened[0] != parent:
            self._opened = parent, open_files(parent, sync=self._sync, drop_page_cache=self._drop)
        return self._opened[1], name

    @staticmethod
    def _report(task: WriteTask, kept: _Kept, written: Sequence[DataFile]) -> RankReport:
        sums = tuple(file.sums for file in written)
        places = tuple(file.places for file in written)
        if places == kept.places and kept.reported_in is not None and kept.reported_in == task.places_from:
            return RankReport(task.rank, sums, None)
        kept.places, kept.reported_in = places, task.attempt.id
        indexed = tuple(
            tuple((item.item.index, *place) for item, place in zip(planned.items, of_file, strict=True))
            for planned, of_file in zip(kept.files, places, strict=True)
        )
        return RankReport(task.rank, sums, indexed)

    def _places_from(self, rank: int) -> str | None:
        return self._places[rank][0] if rank in self._places else None

    def _dump(self, metadata: Metadata, reports: Sequence[RankReport], attempt: Attempt) -> bytes:
        """DCP's metadata for the file, with places and this attempt's id."""
        unchanged = self._dumped is not None and self._dumped[0] is metadata
        for report in reports:
            if report.places is not None:
                self._places[report.rank] = attempt.id, report.places
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
            for file, places in zip(report.files, self._places[report.rank][1], strict=True)
            for index, start, nbytes in places
        }
