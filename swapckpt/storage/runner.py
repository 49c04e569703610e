"""Who writes a rank's data files: threads of the trainer, or (see ``process.py``) another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor, strided
from torch.nn import Parameter

from swapckpt.storage.datafile import WriteJob

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.planner import SavePlanner

    from swapckpt.storage.commit import Attempt
    from swapckpt.storage.datafile import DataFile, PlannedFile
    from swapckpt.storage.files import Files


class Runner(Protocol):
    """Writes the data files of one rank. Called by the storage writer, once per save, on every rank."""

    def run(
        self,
        files: Files,
        attempt: Attempt,
        rank: int,
        *,
        planned: Sequence[PlannedFile],
        planner: SavePlanner,
        on_written: Callable[[Tensor], None] | None,
    ) -> list[DataFile]:
        """Write and sync all files.

        Args:
            files: The folder that checkpoints are in.
            attempt: Where they are written.
            rank: Whose they are.
            planned: The files.
            planner: Resolves items.
            on_written: Called with each tensor when its memory may change, from any thread.

        Raises:
            StorageError: A file could not be written. What was begun is removed where that is possible.
        """


class ThreadRunner:
    """One thread of this process per file."""

    def run(
        self,
        files: Files,
        attempt: Attempt,
        rank: int,
        *,
        planned: Sequence[PlannedFile],
        planner: SavePlanner,
        on_written: Callable[[Tensor], None] | None,
    ) -> list[DataFile]:
        """As :class:`Runner` says."""
        source = _Resolved(planned, planner, on_written)
        return WriteJob(files, attempt, rank, source=source).run(planned)


class _Resolved:
    """A ``Source``: what the planner resolves."""

    def __init__(
        self,
        planned: Sequence[PlannedFile],
        planner: SavePlanner,
        on_written: Callable[[Tensor], None] | None,
    ) -> None:
        self._planned = planned
        self._planner = planner
        self._on_written = on_written
        self._being_written: list[list[Tensor | io.BytesIO]] = [[] for _ in planned]

    def item(self, file: int, at: int) -> Tensor | io.BytesIO:
        data: Tensor | io.BytesIO = self._planner.resolve_data(self._planned[file].items[at].item)
        self._being_written[file] = [data]
        return data

    def addresses(self, file: int, items: range) -> list[int] | None:
        planned = self._planned[file].items[items.start : items.stop]
        resolve = self._planner.resolve_data
        tensors: list[Tensor | io.BytesIO] = []
        addresses: list[int] = []
        for item in planned:
            # Run for each of tens of thousands of tensors: is_dense and is_in_order, without their calls.
            data = resolve(item.item)
            if (
                not (type(data) is Tensor or type(data) is Parameter)
                or data.dtype is not item.dtype
                or data.shape != item.shape
                or data.layout is not strided
                or not (data.is_cpu and data.is_contiguous())
                or data.is_conj()
                or data.is_neg()
                or data.untyped_storage().nbytes() < data.nbytes + data.storage_offset() * item.dtype.itemsize
            ):
                return None
            tensors.append(data)
            addresses.append(data.data_ptr())
        self._being_written[file] = tensors
        return addresses

    def written(self, file: int, items: range) -> None:
        del items
        tensors, self._being_written[file] = self._being_written[file], []
        if self._on_written is not None:
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    self._on_written(tensor)
