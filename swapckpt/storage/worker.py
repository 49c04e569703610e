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
import torch

from swapckpt.errors import StorageError, SwapCkptError
from swapckpt.storage.datafile import SMALL_NBYTES, WriteJob
from swapckpt.storage.files import open_files
from swapckpt.storage.items import span
from swapckpt.storage.jobs import Done, Failed, Job, Mapped, Ready, Settings, Unmapped, Written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from swapckpt.storage.datafile import PlannedItem
    from swapckpt.storage.files import Files

_SMALL_AT_ONCE = 1024


class _Worker:
    """Does what the trainer says, and ends when the trainer does."""

    def __init__(self, connection: Connection[object, object]) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._mapped: dict[int, mmap.mmap] = {}
        self._plan: Sequence[Sequence[PlannedItem]] = ()
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
        plan = self._plan
        tally = _Tally(self, plan)

        def resolve(file: int, at: int) -> Tensor | io.BytesIO:
            source, item = job.sources[file], plan[file][at]
            if at in source.data:
                return io.BytesIO(source.data[at])
            assert item.dtype is not None
            numel, stride = item.shape.numel(), source.strides.get(at)
            if numel == 0:
                return torch.empty(item.shape, dtype=item.dtype, device="cpu")
            flat = torch.frombuffer(
                self._mapped[source.numbers[at]],
                dtype=item.dtype,
                count=numel if stride is None else span(item.shape, stride),
                offset=source.offsets_nbytes[at],
            )
            return flat.view(item.shape) if stride is None else flat.as_strided(item.shape, stride)

        write = WriteJob(self._files(job), job.attempt, job.rank, resolve=resolve, on_written=tally.add)
        files = write.run(plan)
        tally.flush()
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


class _Tally:
    """Items that were written and not reported yet: large ones are at once, small ones many at a time."""

    def __init__(self, worker: _Worker, plan: Sequence[Sequence[PlannedItem]]) -> None:
        self._worker = worker
        self._plan = plan
        self._lock = threading.Lock()
        self._runs: list[tuple[int, int, int]] = []
        self._count = 0

    def add(self, file: int, at: int) -> None:
        with self._lock:
            first = at
            if self._runs and self._runs[-1][0] == file and self._runs[-1][2] == at:
                _, first, _ = self._runs.pop()
            self._runs.append((file, first, at + 1))
            self._count += 1
            is_due = self._plan[file][at].nbytes >= SMALL_NBYTES or self._count >= _SMALL_AT_ONCE
        if is_due:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            runs, self._runs, self._count = self._runs, [], 0
        if runs:
            self._worker.report(runs)


def main() -> None:
    """Serve the trainer at the other end of the descriptor given on the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        _Worker(Connection(int(sys.argv[1]))).serve()
    except (EOFError, ConnectionError):
        # At once: a job that is still running has nobody to report to. What it leaves, the next save removes.
        os._exit(0)
