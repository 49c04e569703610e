"""A file layer for stock DCP that strikes: before the n-th system call that changes the file system, or while
it reads. Real files underneath, one object per system call: what a kill leaves behind is what is there.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

READS_BEFORE_STRIKE = 2
"""Buffers of 8 KiB of a file that are read first, so that a part of a checkpoint has arrived."""


class Call(Enum):
    MKDIR = "mkdir"
    OPEN = "open"
    WRITE = "write"
    FSYNC = "fsync"
    UNLINK = "unlink"
    RENAME = "rename"
    READ = "read"


@dataclass(slots=True)
class Calls:
    """Every system call on files passes here, before it is made."""

    strike: Callable[[Call, Path], None]
    made: list[tuple[Call, str]] = field(default_factory=list)
    loses: str | None = None
    """Files whose name ends like this lose all but the first half of their bytes, without an error."""

    def about_to(self, call: Call, path: Path) -> None:
        self.strike(call, path)
        self.made.append((call, path.name))


class _WatchedFile(io.FileIO):
    def __init__(self, path: Path, mode: str, calls: Calls) -> None:
        self._path, self._calls, self._num_reads = path, calls, 0
        if mode == "wb":
            calls.about_to(Call.OPEN, path)
        super().__init__(path, mode)

    @property
    def _is_lossy(self) -> bool:
        return self._calls.loses is not None and self._path.name.endswith(self._calls.loses)

    def write(self, data: object) -> int:
        self._calls.about_to(Call.WRITE, self._path)
        return super().write(data)

    def fileno(self) -> int:
        self._calls.about_to(Call.FSYNC, self._path)  # DCP asks for it to that end alone
        return super().fileno()

    def readinto(self, buffer: object) -> int:
        self._num_reads += 1
        if self._num_reads > READS_BEFORE_STRIKE:
            if self._is_lossy:
                return 0
            self._calls.about_to(Call.READ, self._path)
        return super().readinto(buffer)

    def close(self) -> None:
        if not self.closed and self.writable() and self._is_lossy:
            self.truncate(self._path.stat().st_size // 2)
        super().close()


class WatchedFiles(FileSystem):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        raw = _WatchedFile(Path(path), mode, self._calls)
        with io.BufferedWriter(raw) if mode == "wb" else io.BufferedReader(raw) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._calls.about_to(Call.RENAME, Path(path))
        super().rename(path, new_path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._calls.about_to(Call.MKDIR, Path(path))
        super().mkdir(path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._calls.about_to(Call.UNLINK, Path(path))
        super().rm_file(path)


def writer(path: Path, calls: Calls) -> FileSystemWriter:
    """Stock's writer over watched files."""
    made = FileSystemWriter(path)
    made.fs = WatchedFiles(calls)
    return made


def reader(path: Path, calls: Calls) -> FileSystemReader:
    """Stock's reader over watched files."""
    made = FileSystemReader(path)
    made.fs = WatchedFiles(calls)
    return made
