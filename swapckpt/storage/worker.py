"""The process that ``process.py`` starts and talks to."""

from __future__ import annotations

import io
import mmap
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING

import fsspec.config
import numpy as np
import torch

from swapckpt.errors import StorageError, SwapCkptError
from swapckpt.storage.datafile import SMALL_NBYTES, WriteJob
from swapckpt.storage.files import address_of, open_files
from swapckpt.storage.items import span
from swapckpt.storage.jobs import Done, Failed, Job, Mapped, Ready, Settings, Unmapped, Written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from swapckpt.storage.datafile import PlannedFile
    from swapckpt.storage.files import Files
    from swapckpt.storage.jobs import Sources

_SMALL_AT_ONCE = 1024


class _Worker:
    """Does what the trainer says, and ends when the trainer does."""

    def __init__(self, connection: Connection[object, object]) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._mapped: dict[int, mmap.mmap] = {}
        self._plan: Sequence[PlannedFile] = ()
        self._opened: tuple[tuple[str, bool, bool], Files] | None = None

    def serve(self) -> None:
        """Until the other end is closed. Jobs have a thread of their own, so that this is noticed at once."""
        while True:
            message = self._connection.recv()
            if isinstance(message, Settings):
                fsspec.config.conf.update(message.fsspec)
                self._send(Ready())
            elif isinstance(message, Mapped):
                descriptor = recv_handle(self._connection)
                self._mapped[message.number] = mmap.mmap(descriptor, message.nbytes)
                os.close(descriptor)
            elif isinstance(message, Unmapped):
                for number in message.numbers:
                    del self._mapped[number]  # unmapped with the last tensor over it
            elif isinstance(message, Job):
                threading.Thread(target=self._run, args=(message,), name="swapckpt-job", daemon=True).start()

    def _run(self, job: Job) -> None:
        try:
            answer: object = self._written(job)
        except SwapCkptError as error:
            answer = Failed(error)
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            answer = Failed(StorageError(f"The writer process failed: {type(error).__name__}: {error}"))
        self._send(answer)

    def _written(self, job: Job) -> Done:
        if job.plan is not None:
            self._plan = job.plan
        source = _SharedSource(self._plan, job.sources, self._mapped, report=self.report)
        files = WriteJob(self._files(job), job.attempt, job.rank, source=source).run(self._plan)
        source.flush()
        return Done(tuple(files))

    def _files(self, job: Job) -> Files:
        key = (job.url, job.sync, job.drop_page_cache)
        if self._opened is None or self._opened[0] != key:
            self._opened = key, open_files(job.url, sync=job.sync, drop_page_cache=job.drop_page_cache)
        return self._opened[1]

    def _send(self, message: object) -> None:
        with self._sending:
            try:
                self._connection.send(message)
            except OSError:  # the trainer is gone: what is being written belongs to nobody
                os._exit(1)

    def report(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """Say that runs of items are written."""
        self._send(Written(tuple(runs)))


class _SharedSource:
    """A ``Source``: what lies in memory of the trainer, or came along with the job.

    What was written is reported in runs of items: large ones at once, small ones many at a time.
    """

    def __init__(
        self,
        planned: Sequence[PlannedFile],
        sources: Sequence[Sources],
        mapped: Mapping[int, mmap.mmap],
        *,
        report: Callable[[Sequence[tuple[int, int, int]]], None],
    ) -> None:
        self._planned = planned
        self._sources = sources
        self._mapped = mapped
        self._addresses = [_addresses(source, mapped) for source in sources]
        self._report = report
        self._lock = threading.Lock()
        self._runs: list[tuple[int, int, int]] = []
        self._count = 0

    def item(self, file: int, at: int) -> Tensor | io.BytesIO:
        source, item = self._sources[file], self._planned[file].items[at]
        if at in source.data:
            return io.BytesIO(source.data[at])
        assert item.dtype is not None
        numel, stride = item.shape.numel(), source.strides.get(at)
        if numel == 0:
            return torch.empty(item.shape, dtype=item.dtype, device="cpu")
        flat = torch.frombuffer(
            self._mapped[int(source.numbers[at])],
            dtype=item.dtype,
            count=numel if stride is None else span(item.shape, stride),
            offset=int(source.offsets_nbytes[at]),
        )
        return flat.view(item.shape) if stride is None else flat.as_strided(item.shape, stride)

    def addresses(self, file: int, items: range) -> list[int] | None:
        found: list[int] = self._addresses[file][items.start : items.stop].tolist()
        return found if all(found) else None

    def written(self, file: int, items: range) -> None:
        with self._lock:
            first = items.start
            if self._runs and self._runs[-1][0] == file and self._runs[-1][2] == first:
                _, first, _ = self._runs.pop()
            self._runs.append((file, first, items.stop))
            self._count += len(items)
            is_due = (
                self._planned[file].items[items.start].nbytes >= SMALL_NBYTES or self._count >= _SMALL_AT_ONCE
            )
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Report what was not reported yet."""
        with self._lock:
            runs, self._runs, self._count = self._runs, [], 0
        if runs:
            self._report(runs)


def _addresses(source: Sources, mapped: Mapping[int, mmap.mmap]) -> npt.NDArray[np.int64]:
    """Where each item lies in the memory of this process; 0 for one that does not lie there row by row."""
    begins = np.zeros(max(mapped, default=0) + 1, dtype=np.int64)
    for number, memory in mapped.items():
        begins[number] = address_of(memoryview(memory))
    addresses = begins[source.numbers] + source.offsets_nbytes
    addresses[[*source.strides, *source.data]] = 0
    return addresses


def main() -> None:
    """Serve the trainer at the other end of the descriptor given on the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        _Worker(Connection(int(sys.argv[1]))).serve()
    except (EOFError, ConnectionError):
        # At once: a job that is still running has nobody to report to. What it leaves, the next save removes.
        os._exit(0)
