"""Files of the operating system: positional, direct where the file system allows, durable when closed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swapckpt.errors import CorruptCheckpointError, StorageError
from swapckpt.storage.files import (
    ALIGNMENT,
    Entry,
    ThreadMemory,
    address_of,
    copy_bytes,
    explained,
    private_memory,
    read_bytes,
    retried,
)
from swapckpt.storage.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapckpt.storage.files import FileReader, FileWriter

MEMORY_ALIGNMENT = 512
"""Memory of direct I/O begins at a multiple of this, as mirrors do. Few devices want more: PosixWriter."""
BUFFER_NBYTES = 8 << 20
BOUNCE_NBYTES = 1 << 20
CHUNK_NBYTES = 16 << 20
MIN_DIRECT_NBYTES = 64 << 10
"""Shorter pieces are gathered in the buffer: a system call of their own would cost more than the copy."""

UNREADABLE = "unreadable"
"""Version of a file that the device does not give back."""

_NOTHING = memoryview(b"")
_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0


def fits_direct(view: memoryview, offset: int) -> bool:
    """True when direct I/O at ``offset`` of a file is possible and worth it for ``view`` (its tail excepted),
    as far as the file is concerned."""
    return len(view) >= MIN_DIRECT_NBYTES and offset % ALIGNMENT == 0


_bounce = ThreadMemory(BOUNCE_NBYTES)  # for memory that direct I/O cannot fill


class PosixFiles:
    """A folder of a mounted file system.

    Args:
        root: The folder. It is made when the first checkpoint is.
        direct: False never uses O_DIRECT (for a file system that takes it and is slow with it).
        sync: False leaves out every fsync: a crash of the machine may then leave a damaged checkpoint that
            looks complete.
        drop_page_cache: True asks the system to forget the cached pages of files written and read without
            direct I/O, when they are closed. Direct I/O leaves none.
    """

    renames = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        direct: bool = True,
        sync: bool = True,
        drop_page_cache: bool = False,
    ) -> None:
        self._root = Path(root).absolute()
        self.url = str(self._root)
        self.direct = direct
        self.sync = sync
        self.drop_page_cache = drop_page_cache

    def _at(self, path: str) -> Path:
        return self._root / path

    def make_folder(self, path: str) -> None:
        try:
            self._at(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_folder(self._at(path), error) from error

    def entries(self, path: str) -> list[Entry]:
        try:
            with explained("listing", self._at(path)), os.scandir(self._at(path)) as found:
                entries = [entry for item in found if (entry := _entry(item)) is not None]
        except StorageError as error:
            if isinstance(error.__cause__, NotADirectoryError):
                raise _no_folder(self._at(path), error.__cause__) from error.__cause__
            raise
        return sorted(entries, key=lambda entry: entry.name)

    def create(self, path: str, *, nbytes: int) -> FileWriter:  # noqa: ARG002 - stores need the size
        with explained("creating", self._at(path)):
            return PosixWriter(
                self._at(path), direct=self.direct, sync=self.sync, drop_page_cache=self.drop_page_cache
            )

    def open(self, path: str) -> FileReader:
        with explained("opening", self._at(path)), _unreadable(self._at(path)):
            return retried(
                lambda: PosixReader(self._at(path), direct=self.direct, drop_page_cache=self.drop_page_cache)
            )

    def put(self, path: str, data: bytes) -> None:
        writer = self.create(path, nbytes=len(data))
        try:
            writer.append(memoryview(data))
            writer.close()
        except BaseException:
            writer.abort()
            raise

    def version(self, path: str) -> str | None:
        # Of the content: not every file system keeps inodes, and times are as coarse as the kernel's clock.
        try:
            content = read_bytes(self, path)
        except CorruptCheckpointError:  # it can be replaced, all the same
            return UNREADABLE
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def swap(self, path: str, data: bytes, *, version: str | None) -> None:  # noqa: ARG002
        raise StorageError(f"{self._at(path)}: checkpoints in a file system are replaced by renaming.")

    def rename(self, source: str, target: str) -> None:
        with explained("renaming to", self._at(target)):
            try:
                self._at(source).rename(self._at(target))
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:  # EEXIST is a FileExistsError by itself
                    raise FileExistsError(error.errno, error.strerror, str(self._at(target))) from error
                raise

    def sync_folder(self, path: str) -> None:
        if not self.sync:
            return
        with explained("syncing the folder", self._at(path)):
            descriptor = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, path: str) -> None:
        with explained("removing", self._at(path)):
            where = self._at(path)
            with suppress(FileNotFoundError):  # another process may be removing the same
                if where.is_dir() and not where.is_symlink():
                    shutil.rmtree(where)
                else:
                    where.unlink()

    def uploads(self, path: str) -> list[Entry]:  # noqa: ARG002 - files are written in place
        return []

    def abort_uploads(self, path: str) -> None: ...


def _no_folder(path: Path, error: OSError) -> StorageError:
    """The error about a folder that cannot be, which says what is in its way."""
    files = [each for each in (path, *path.parents) if each.exists() and not each.is_dir()]
    if files:
        return StorageError(
            f"{path} cannot be a folder: {files[0]} is a file ({error.strerror}). Name another folder."
        )
    return StorageError(
        f"The folder {path} cannot be made ({type(error).__name__}: {error.strerror}). Name one below a "
        "folder that this user may write in."
    )


@contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    """Around reads: a file that the device does not give back is damaged. The store as a whole has not
    failed."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise CorruptCheckpointError(
            f"{path} cannot be read: {error.strerror} (EIO). The device has lost a part of it or fails: "
            "see the kernel's log."
        ) from error


def _entry(item: os.DirEntry[str]) -> Entry | None:
    try:
        status = item.stat()
    except FileNotFoundError:  # removed since the folder was read
        return None
    return Entry(item.name, status.st_size, item.is_dir(), status.st_mtime)


class PosixWriter:
    """A new file. Aligned memory goes to the device directly, the rest through one aligned buffer."""

    def __init__(self, path: Path, *, direct: bool, sync: bool, drop_page_cache: bool) -> None:
        self._path = path
        self._sync = sync
        self._drop = drop_page_cache
        self._flushed = 0  # bytes handed to the system; a multiple of ALIGNMENT while direct
        self._held = 0  # bytes in the buffer, which belong behind them
        self._memory = MEMORY_ALIGNMENT  # or more, once the device has asked for it
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor, self._direct = _open_direct(path, flags, wanted=direct)
        self._buffer = private_memory(BUFFER_NBYTES)

    @property
    def position(self) -> int:
        return self._flushed + self._held

    def append(self, data: memoryview) -> None:
        with explained("writing", self._path):
            fits = self._direct and fits_direct(data, self.position)
            if fits and address_of(data) % self._memory == 0:
                body = len(data) - len(data) % ALIGNMENT
                self._flush(then=data[:body])
                data = data[body:]
            elif not self._direct and len(data) >= MIN_DIRECT_NBYTES:
                self._flush(then=data)
                return
            self._hold(data)

    def _hold(self, data: memoryview) -> None:
        while len(data) > BUFFER_NBYTES - self._held:
            taken = BUFFER_NBYTES - self._held
            self._buffer[self._held :] = data[:taken]
            self._held, data = BUFFER_NBYTES, data[taken:]
            self._flush()
        self._buffer[self._held : self._held + len(data)] = data
        self._held += len(data)

    def _flush(self, *, then: memoryview = _NOTHING) -> None:
        """Hand the buffer to the system, and what follows it in the same call: alone, the few bytes before an
        item's elements would wait for the device as long as these. The length of both is aligned, except at
        the end of the file."""
        held, self._held = self._held, 0
        self._write(self._buffer[:held], then)

    def _flush_end(self) -> None:
        """As :meth:`_flush`; of an odd length only the last bytes go through the page cache."""
        held, self._held = self._held, 0
        body = held - held % ALIGNMENT
        self._write(self._buffer[:body])
        if held > body:
            if self._direct:
                self._stop_direct()
            self._write(self._buffer[body:held])

    def _write(self, *parts: memoryview) -> None:
        left = [part for part in parts if len(part)]
        while left:
            try:
                written = os.pwritev(self._descriptor, left, self._flushed)
            except OSError as error:
                # Some file systems accept the flag and then refuse the write.
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                *before, last = left
                if address_of(last) % ALIGNMENT and self._memory < ALIGNMENT:  # perhaps it is the memory
                    self._memory = ALIGNMENT
                    self._write(*before)  # at most the buffer, which is aligned
                    self._hold(last)
                    return
                self._stop_direct()
                continue
            self._flushed += written
            left = _behind(left, written)
            if self._direct and written % ALIGNMENT:  # a full device ends a write anywhere
                self._stop_direct()

    def _stop_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        self._direct = False

    def close(self) -> None:
        with explained("closing", self._path):
            self._flush_end()
            if self._sync:
                os.fsync(self._descriptor)
            if self._drop:  # after the sync: pages that are not on the device yet do not go away
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._release()

    def abort(self) -> None:
        self._release()
        with explained("removing", self._path):
            self._path.unlink(missing_ok=True)

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _behind(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of ``parts`` after their first ``nbytes``."""
    for number, part in enumerate(parts):
        if nbytes < len(part):
            return [part[nbytes:], *parts[number + 1 :]]
        nbytes -= len(part)
    return []


class PosixReader:
    """A file. What the page cache has comes from there; the rest goes into aligned memory by direct I/O
    where the offset allows it."""

    def __init__(self, path: Path, *, direct: bool, drop_page_cache: bool) -> None:
        self._path = path
        self._drop = drop_page_cache
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct_descriptor = -1
        if direct:
            descriptor, is_direct = _open_direct(path, os.O_RDONLY | os.O_CLOEXEC, wanted=True)
            if is_direct:
                self._direct_descriptor = descriptor
            else:
                os.close(descriptor)
        self._nbytes = os.fstat(self._descriptor).st_size
        self._residency = Residency(self._descriptor, self._nbytes)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        with explained("reading", self._path), _unreadable(self._path):
            body = 0
            # Direct I/O goes to the device, for what the page cache has too.
            fits = self._direct_descriptor >= 0 and fits_direct(view, offset)
            is_cached = fits and self.is_cached(offset, len(view))
            if fits and not is_cached:
                body = self._read_direct(offset, view[: len(view) - len(view) % ALIGNMENT])
            rest = len(view) - body
            if rest > ALIGNMENT and not is_cached:
                # All of it on its way at once, and nothing more: read-ahead would go on into what lies behind
                # the part of a tensor that is wanted.
                os.posix_fadvise(self._descriptor, offset + body, rest, os.POSIX_FADV_WILLNEED)
            retried(lambda: self._read(self._descriptor, offset + body, view[body:]))

    def is_cached(self, offset: int, nbytes: int) -> bool:
        return self._residency.has(offset, nbytes)

    def _read_direct(self, offset: int, view: memoryview) -> int:
        """Bytes read; 0 when the file system refuses this one, which is then read through the cache."""
        read = self._read if address_of(view) % MEMORY_ALIGNMENT == 0 else self._read_bounced
        try:
            retried(lambda: read(self._direct_descriptor, offset, view))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0
        return len(view)

    def _read_bounced(self, descriptor: int, offset: int, view: memoryview) -> None:
        """For memory that direct I/O cannot fill: still without a page of the cache for each page read."""
        for start in range(0, len(view), BOUNCE_NBYTES):
            part = view[start : start + BOUNCE_NBYTES]
            bounce = _bounce.view[: len(part)]
            self._read(descriptor, offset + start, bounce)
            copy_bytes(bounce, part)

    def _read(self, descriptor: int, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + CHUNK_NBYTES]], offset + done)
            if count == 0:
                missing = len(view) - done
                raise CorruptCheckpointError(
                    f"{self._path} ends at byte {offset + done}, {missing} bytes too early."
                )
            done += count

    def close(self) -> None:
        self._residency.close()
        if self._drop:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for descriptor in (self._descriptor, self._direct_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct_descriptor = -1


def _open_direct(path: Path, flags: int, *, wanted: bool) -> tuple[int, bool]:
    """A descriptor, and whether it is for direct I/O (not every file system has it)."""
    if wanted and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o666), True
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
            # The refusal comes after the file was made: a second exclusive open would find it.
            if flags & os.O_EXCL:
                path.unlink()
    return os.open(path, flags, 0o666), False
