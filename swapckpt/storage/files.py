"""A folder on a file system or in an object store, with the few operations a checkpoint needs.

[Note: direct I/O] Data of a checkpoint is written once and read once, in sizes near the host's memory.
Through the page cache each byte is copied and evicts what training needs. Files of the operating system are
therefore written and read with O_DIRECT where the memory is aligned, everything else is gathered in one
aligned buffer, and file systems that refuse get ordinary writes.

[Note: what is retried] Operations that can be repeated without harm (reads, listings, removals, puts of whole
objects), when the error is of the network. A stream that fails midway is not: the save fails and is repeated.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import tenacity

from swapckpt.errors import StorageError, SwapCkptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
"""File offset and length of direct I/O are multiples of this; more than any device asks for."""
RETRIES = 5
TRANSIENT_ERRNOS = frozenset(
    {
        *(errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.EPIPE),
        *(errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET),
        *(errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED),
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a folder. ``modified_secs`` is Unix time, None where the store has none (folders)."""

    name: str
    nbytes: int
    is_folder: bool
    modified_secs: float | None = None


class FileWriter(Protocol):
    """One new file, written from its start to its end by one thread.

    Called by the writer: 1. ``append`` any number of times, 2. ``close``, which returns when the bytes are
    durable; or ``abort`` at any time instead, after which nothing of the file is visible.
    """

    @property
    def position(self) -> int:
        """Bytes appended so far."""

    def append(self, data: memoryview) -> None:
        """Add bytes. They may be overwritten by the caller when this returns."""

    def close(self) -> None: ...

    def abort(self) -> None: ...


class FileReader(Protocol):
    """Bytes at any position of a file or of a part of one, for any number of threads at once.

    Call sequence: 1. ``read_into`` and ``is_cached``, 2. ``close``.
    """

    @property
    def nbytes(self) -> int: ...

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes at ``offset``.

        Raises:
            CorruptCheckpointError: The file ends too early.
        """

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """True when the host has these bytes in memory: many short reads of them take no longer than one."""

    def close(self) -> None: ...


class Files(Protocol):
    """One folder and what is in it. Paths are relative to it, with "/" between parts; "" is the folder.

    A save calls, on the rank that coordinates unless said otherwise:

    1. ``make_folder(attempt)``, then ``sync_folder("")``;
    2. every rank: ``create`` for each of its data files, filled and closed;
    3. ``entries(attempt)``, to see that all of them arrived;
    4. ``put`` of the manifest and of the metadata, then
    5. where :attr:`renames`: ``sync_folder(attempt)``, ``rename(attempt, final)``, ``sync_folder("")``.
       Elsewhere the ``put`` of the metadata (or ``swap``, when it replaces older metadata) was the commit.
    6. ``remove`` of what was replaced.

    A load calls ``entries``, ``open`` and the reader's ``read_into``, from any thread.

    Every method raises FileNotFoundError or FileExistsError where these are meant, and otherwise
    :class:`~swapckpt.errors.StorageError` with the operation, the path and the store's own error chained.
    """

    url: str

    @property
    def renames(self) -> bool:
        """True where a folder can be renamed in one step: file systems, not object stores."""

    def make_folder(self, path: str) -> None: ...

    def entries(self, path: str) -> list[Entry]:
        """What is directly in a folder, sorted by name. Empty when an object store has nothing there."""

    def create(self, path: str, *, nbytes: int) -> FileWriter:
        """A new file of about ``nbytes`` (an estimate). Its name must be new, which not all stores check."""

    def open(self, path: str) -> FileReader: ...

    def put(self, path: str, data: bytes) -> None:
        """A new small file, whole and durable when this returns. FileExistsError when there is one."""

    def version(self, path: str) -> str | None:
        """A name of the present content of a file, which another content does not have; None where the store
        has none. Where folders are renamed, a file keeps it with its folder."""

    def swap(self, path: str, data: bytes, *, version: str | None) -> None:
        """Replace a small file in one step. FileExistsError when it is no longer at ``version``."""

    def rename(self, source: str, target: str) -> None:
        """Rename a folder in one step. FileExistsError when the target is a folder that is not empty."""

    def sync_folder(self, path: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it. What does not exist is no error."""

    def uploads(self, path: str) -> list[Entry]:
        """``path`` and files below it whose upload was begun and neither finished nor aborted; ``name`` is
        the whole path, ``modified_secs`` when it was begun."""

    def abort_uploads(self, path: str) -> None:
        """Give up what :meth:`uploads` lists for ``path``."""


def read_bytes(files: Files, path: str) -> bytes:
    """All of a small file."""
    reader = files.open(path)
    try:
        data = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(data))
    finally:
        reader.close()
    return bytes(data)


def private_memory(nbytes: int) -> memoryview:
    """Memory that begins at a page, as direct I/O wants, and is of this process alone: what ``mmap`` makes by
    default is shared with forked children, who would read into the same bytes."""
    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, nbytes))
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class ThreadMemory(threading.local):
    """Memory that each thread has one piece of, and uses again: new pages for every read would take longer
    than what is read into them.

    Args:
        nbytes: Length of the piece.
    """

    def __init__(self, nbytes: int) -> None:
        self.view = private_memory(nbytes)


def address_of(view: memoryview) -> int:
    """Where the bytes of a view lie in memory; 0 for an empty one."""
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if len(view) else 0


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy while other threads run, which a slice assignment of memoryviews does not let them."""
    import numpy as np

    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def open_files(
    url: str | os.PathLike[str], *, sync: bool = True, drop_page_cache: bool = False, direct: bool = True
) -> Files:
    """The folder at a path or URL. The options are those of :class:`~swapckpt.storage.posix.PosixFiles` and
    mean nothing elsewhere: what an object store has taken is durable.

    Raises:
        StorageError: Nothing installed speaks the URL's protocol.
    """
    from swapckpt.storage.posix import PosixFiles

    location = os.fspath(url)
    if "://" in location or "::" in location:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        from swapckpt.storage.remote import FsspecFiles

        with explained("opening", location):
            filesystem, path = url_to_fs(location)
        if not isinstance(filesystem, LocalFileSystem):
            return FsspecFiles(filesystem, path, url=location)
        location = path
    return PosixFiles(location, direct=direct, sync=sync, drop_page_cache=drop_page_cache)


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder that holds ``url``, and the last part of its name.

    Raises:
        StorageError: It has no parent (the root of a bucket or file system).
    """
    location = os.fspath(url)
    if "://" not in location and "::" not in location:
        location = str(Path(location).absolute())
    parent, _, name = location.rstrip("/").rpartition("/")
    if not name or not parent or parent.endswith((":/", ":")):
        raise StorageError(f"{location!r} has no folder above it; a checkpoint needs one to be committed in.")
    return parent, name


@contextmanager
def explained(operation: str, where: object) -> Iterator[None]:
    """Turn whatever a store raises into a StorageError that says what was tried where."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, SwapCkptError):
        raise
    # Each fsspec implementation raises exceptions of its own (botocore, aiohttp, paramiko, ...).
    except Exception as error:
        raise StorageError(f"{operation} {where} failed: {type(error).__name__}: {error}") from error


def is_transient(error: BaseException) -> bool:
    """True for errors of the network that the next attempt may not meet."""
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS


def retried(operation: Callable[[], T], *, transient: Callable[[BaseException], bool] = is_transient) -> T:
    """The result of ``operation``, repeated with growing pauses while its error is transient."""
    try:
        return operation()  # by itself: what counts attempts takes longer than a short read
    except Exception as error:
        if not transient(error):
            raise
        failed = [error]

    def attempt() -> T:
        if failed:
            raise failed.pop()
        return operation()

    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(RETRIES),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
        retry=tenacity.retry_if_exception(transient),
        before_sleep=tenacity.before_sleep_log(logger, logging.INFO),
        reraise=True,
    )
    return attempts(attempt)
