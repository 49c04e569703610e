"""A process that writes data files out of memory it shares with the trainer, whose interpreter stays free.

[Note: lifetimes] The writer process is started ahead, for it takes seconds to import torch, and lives as long
as its end of the socket pair: it notices within an item when the trainer is gone, however that ended. All
memory is of anonymous files that only descriptors keep: when both processes are gone nothing is left.

[Note: the script is not run again] The process is a Python of its own, not a fork and not
``multiprocessing``: forking a process with threads and a device is unsafe, and spawning would import the
user's script. It searches for modules where the trainer does, and not (as ``python -m`` would) in the working
directory first, where a ``queue.py`` of the user may lie.
"""

from __future__ import annotations

import io
import mmap
import os
import subprocess
import sys
import time
import weakref
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Protocol

import fsspec.config
import numpy as np
import torch

from swapckpt.collector import collector_paused
from swapckpt.errors import ConfigError, StorageError
from swapckpt.storage.datafile import saved_tensor
from swapckpt.storage.items import bytes_of, check_storage, is_dense, is_row_by_row, span
from swapckpt.storage.jobs import Done, Failed, Job, Mapped, Ready, Settings, Sources, Unmapped, Written
from swapckpt.storage.posix import PosixFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection

    import numpy.typing as npt
    from torch import Tensor
    from torch.distributed.checkpoint.planner import SavePlanner

    from swapckpt.storage.commit import Attempt
    from swapckpt.storage.datafile import DataFile, PlannedFile, PlannedItem
    from swapckpt.storage.files import Files

_PROGRAM = """import sys
if "" in sys.path[:1]:
    del sys.path[0]
from swapckpt.storage.worker import main
main()"""
_ALIGNMENT = 64
_POLL_SECS = 0.5
_EXIT_SECS = 5.0


class SharedRange(Protocol):
    """Memory of this process that another one can map."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def descriptor(self) -> int: ...


class ProcessRunner:
    """Lets a process of its own write data files (a ``Runner`` for ``SwapStorageWriter``).

    What lies in shared memory is written from there; the rest is copied into shared memory first. When the
    process dies, the save under way fails, and the next one starts another process.

    Call sequence: 1. made; 2. ``run``, once per save, from one thread at a time; 3. ``close``.

    Args:
        shared: Gives all memory that can be shared now, by address.
        timeout_secs: Bound of the time in which the process reports nothing.

    Raises:
        ConfigError: This operating system has no shared memory that only descriptors keep (Linux has).
    """

    def __init__(self, shared: Callable[[], Sequence[SharedRange]], *, timeout_secs: float) -> None:
        if sys.platform != "linux":
            raise ConfigError("A writer process needs Linux (memfd). Use async_mode='async'.")
        self._shared = shared
        self.timeout_secs = timeout_secs
        self.is_writing = False  # the process has a job, and has not answered
        self.copied_nbytes = 0  # in the last save: of what does not lie in shared memory
        self._writer = _Writer()

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

        Raises:
            StorageError: The process died or did not report in time, or a file could not be written.
        """
        if not self._writer.is_alive():
            self._writer.close()
            self._writer = _Writer()
        data = [[planner.resolve_data(item.item) for item in of_file.items] for of_file in planned]
        try:
            return self._run(files, attempt, rank, planned=planned, data=data, on_written=on_written)
        except (EOFError, ConnectionError) as error:
            status = self._writer.close()
            raise StorageError(
                f"The process that wrote {files.url}/{attempt.folder} ended with status {status}. Nothing of "
                "this save is visible; the next one starts another process."
            ) from error
        finally:
            self.is_writing = False

    def _run(
        self,
        files: Files,
        attempt: Attempt,
        rank: int,
        *,
        planned: Sequence[PlannedFile],
        data: list[list[Tensor | io.BytesIO]],
        on_written: Callable[[Tensor], None] | None,
    ) -> list[DataFile]:
        writer = self._writer
        with collector_paused():
            places = _Places(self._shared(), data, planned)
        self.copied_nbytes = places.copied_nbytes
        writer.share(places.used())
        local = files if isinstance(files, PosixFiles) else None
        writer.send(
            Job(
                url=files.url,
                sync=local is None or local.sync,
                drop_page_cache=local is not None and local.drop_page_cache,
                attempt=attempt,
                rank=rank,
                plan=None if planned is writer.plan else planned,
                sources=places.sources(writer.numbers),
            )
        )
        writer.plan = planned
        self.is_writing = True
        while True:
            answer = writer.receive(self.timeout_secs)
            if isinstance(answer, Done):
                return list(answer.files)
            if isinstance(answer, Failed):
                raise answer.error
            assert isinstance(answer, Written)
            if on_written is None:
                continue
            for file, first, stop in answer.runs:
                for tensor in data[file][first:stop]:
                    if isinstance(tensor, torch.Tensor):
                        on_written(tensor)

    @property
    def pid(self) -> int:
        """The process that writes now."""
        return self._writer.pid

    def close(self) -> None:
        """End the process. A save that is under way fails."""
        self._writer.close()


class _Writer:
    """The process, and what it has been told."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
        # Hidden devices: a context there would take device memory. One thread: it shares the trainer's cores.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the trainer, which then ends this one
        )
        theirs.close()
        self._connection: Connection[object, object] = ours
        self._end = weakref.finalize(self, _end, self._process, ours)
        self._is_ready = False
        self._next_number = 0
        self.numbers: dict[int, int] = {}  # of memory it has mapped, by inode
        self.plan: Sequence[PlannedFile] | None = None
        self.send(Settings(dict(fsspec.config.conf)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: object) -> None:
        self._connection.send(message)

    def share(self, ranges: Iterable[tuple[int, SharedRange]]) -> None:
        """Let it map what it will need (by inode, which is unique while it has it mapped), and no more."""
        wanted = dict(ranges)
        gone = [inode for inode in self.numbers if inode not in wanted]
        if gone:
            self.send(Unmapped(tuple(self.numbers.pop(inode) for inode in gone)))
        for inode, each in wanted.items():
            if inode not in self.numbers:
                self.send(Mapped(self._next_number, each.nbytes))
                send_handle(self._connection, each.descriptor, self._process.pid)
                self.numbers[inode] = self._next_number
                self._next_number += 1

    def receive(self, timeout_secs: float) -> object:
        """Its next answer. Raises EOFError when it is dead, StorageError when it says nothing."""
        deadline = time.monotonic() + timeout_secs
        while not self._connection.poll(_POLL_SECS):
            if time.monotonic() > deadline:
                self.close()
                raise StorageError(
                    f"The writer process reported nothing for {timeout_secs} s and was ended. Nothing of "
                    "this save is visible."
                )
        with collector_paused():
            answer = self._connection.recv()
        return self.receive(timeout_secs) if isinstance(answer, Ready) else answer

    def close(self) -> int:
        """End it. Returns its exit status (minus the signal, if one ended it)."""
        self._end()
        return self._process.wait()


def _end(process: subprocess.Popen[bytes], connection: Connection[object, object]) -> None:
    connection.close()  # it ends by itself when it has nobody to talk to
    try:
        process.wait(_EXIT_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Places:
    """Where each tensor of a save lies in shared memory, after what did not lie there has been copied."""

    def __init__(
        self,
        shared: Sequence[SharedRange],
        data: Sequence[Sequence[Tensor | io.BytesIO]],
        planned: Sequence[PlannedFile],
    ) -> None:
        ranges = list(shared)
        self._files = [_FileData(each, of_file.items) for each, of_file in zip(data, planned, strict=True)]
        where = [each.locate(ranges) for each in self._files]
        strays = [
            (file, at)
            for file, (each, found) in enumerate(zip(self._files, where, strict=True))
            for at in each.strays(found)
        ]
        scratch = _Scratch([self._files[file].tensors[at] for file, at in strays])
        self.copied_nbytes = sum(self._files[file].tensors[at].nbytes for file, at in strays)
        for (file, at), offset in zip(strays, scratch.offsets, strict=True):
            where[file][at] = len(ranges)
            self._files[file].moved(at, scratch.address + offset)
        ranges.append(scratch)
        self._used = {
            at: (os.fstat(ranges[at].descriptor).st_ino, ranges[at])
            for at in sorted({int(at) for found in where for at in np.unique(found) if at >= 0})
        }
        self._begins = np.array([each.address for each in ranges])
        self._where = where

    def used(self) -> Iterable[tuple[int, SharedRange]]:
        """Memory that is needed, by inode."""
        return self._used.values()

    def sources(self, numbers: dict[int, int]) -> list[Sources]:
        """What the process is told of each file."""
        known = np.zeros(len(self._begins), dtype=np.int64)
        for at, (inode, _) in self._used.items():
            known[at] = numbers[inode]
        return [
            Sources(
                known[found],
                each.addresses - self._begins[found],
                each.strides,
                each.carried,
            )
            for each, found in zip(self._files, self._where, strict=True)
        ]


class _FileData:
    """The items of one file: what comes along, and where the memory of the others is."""

    def __init__(self, data: Sequence[Tensor | io.BytesIO], planned: Sequence[PlannedItem]) -> None:
        self.carried: dict[int, bytes] = {}
        self.strides: dict[int, tuple[int, ...]] = {}  # of those that do not lie row by row
        self.tensors: dict[int, Tensor] = {}  # others than those that are carried
        addresses, lengths = [], []
        for at, (each, item) in enumerate(zip(data, planned, strict=True)):
            # Run for each of tens of thousands of tensors in the trainer: every call in here is felt.
            if (
                type(each) is torch.Tensor
                and item.frame is not None
                and each.dtype is item.dtype
                and each.shape == item.shape
                and each.layout is torch.strided
                and is_row_by_row(each)
            ):
                self.tensors[at] = each
                address, nbytes = each.data_ptr(), item.frame.payload_nbytes
            else:
                address, nbytes = self._other(at, each, item)
            addresses.append(address)
            lengths.append(nbytes)
        self._planned = planned
        self.addresses = np.array(addresses, dtype=np.int64)
        self._ends = self.addresses + np.array(lengths, dtype=np.int64)

    def _other(self, at: int, each: Tensor | io.BytesIO, item: PlannedItem) -> tuple[int, int]:
        """Where the memory of an item is that does not lie row by row on the host, and its length; zeros for
        one that lies nowhere or comes along."""
        if isinstance(each, io.BytesIO):
            self.carried[at] = each.getvalue()
            return 0, 0
        item.check(each)
        if item.frame is None or not is_dense(each):
            self.carried[at] = bytes(saved_tensor(each))
            return 0, 0
        self.tensors[at] = each
        if is_row_by_row(each):
            return each.data_ptr(), item.frame.payload_nbytes
        return self._scattered(at, each, name=item.item.index.fqn)

    def _scattered(self, at: int, tensor: Tensor, *, name: str) -> tuple[int, int]:
        check_storage(tensor, name=name)
        if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
            return 0, 0
        self.strides[at] = tuple(tensor.stride())
        return tensor.data_ptr(), span(tensor.shape, tensor.stride()) * tensor.itemsize

    def locate(self, ranges: Sequence[SharedRange]) -> npt.NDArray[np.int64]:
        """Of each item the number of the range that it lies in, -1 for none."""
        if not ranges:
            return np.full(len(self.addresses), -1)
        begins = np.array([each.address for each in ranges])
        ends = begins + np.array([each.nbytes for each in ranges])
        found = np.searchsorted(begins, self.addresses, side="right") - 1
        return np.where((found >= 0) & (self._ends <= ends[found]), found, -1)

    def strays(self, where: npt.NDArray[np.int64]) -> list[int]:
        """Items that lie in no range and do not come along.

        Raises:
            ReleasedStorageError: There is no memory behind one. (In a range there is.)
        """
        found = [at for at in np.flatnonzero(where < 0).tolist() if at in self.tensors]
        for at in found:
            check_storage(self.tensors[at], name=self._planned[at].item.index.fqn)
        return found

    def moved(self, at: int, address: int) -> None:
        """An item has been copied to ``address``, row by row."""
        self.addresses[at] = address
        self.strides.pop(at, None)


class _Scratch:
    """Shared memory with copies of tensors. Freed when this object and the process's mapping are gone."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.offsets: list[int] = []
        end = 0
        for tensor in tensors:
            self.offsets.append(end)
            end += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        self.nbytes = max(end, mmap.PAGESIZE)
        self.descriptor = os.memfd_create("swapckpt-scratch")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.nbytes)
        self._memory = np.frombuffer(mmap.mmap(self.descriptor, self.nbytes), dtype=np.uint8)
        self.address = int(self._memory.ctypes.data)
        for tensor, offset in zip(tensors, self.offsets, strict=True):
            plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
            self._memory[offset : offset + plain.nbytes] = np.frombuffer(bytes_of(plain), dtype=np.uint8)
