"""Who writes a rank's data files: threads of the trainer, or (see ``process.py``) another process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from swapckpt.storage.datafile import WriteJob

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.planner import SavePlanner

    from swapckpt.storage.commit import Attempt
    from swapckpt.storage.datafile import DataFile, PlannedItem
    from swapckpt.storage.files import Files


class Runner(Protocol):
    """Writes the data files of one rank. Called by the storage writer, once per save, on every rank."""

    def run(
        self,
        files: Files,
        attempt: Attempt,
        rank: int,
        *,
        planned: Sequence[Sequence[PlannedItem]],
        planner: SavePlanner,
        on_written: Callable[[Tensor], None] | None,
    ) -> list[DataFile]:
        """Write and sync all files.

        Args:
            files: The folder that checkpoints are in.
            attempt: Where they are written.
            rank: Whose they are.
            planned: The items of each file.
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
        planned: Sequence[Sequence[PlannedItem]],
        planner: SavePlanner,
        on_written: Callable[[Tensor], None] | None,
    ) -> list[DataFile]:
        """As :class:`Runner` says."""
        current = threading.local()  # a thread writes one item at a time

        def resolve(file: int, at: int) -> Tensor | io.BytesIO:
            current.data = planner.resolve_data(planned[file][at].item)
            return current.data  # type: ignore[no-any-return]

        def written(_file: int, _at: int) -> None:
            if on_written is not None and isinstance(current.data, Tensor):
                on_written(current.data)

        return WriteJob(files, attempt, rank, resolve=resolve, on_written=written).run(planned)
