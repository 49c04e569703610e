"""What a folder or bucket can do, found out with small files of our own that are removed again."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swapckpt.errors import StorageError
from swapckpt.report import format_nbytes
from swapckpt.storage import open_files
from swapckpt.storage.posix import PosixFiles
from swapckpt.storage.remote import FsspecFiles
from swapckpt.tools.findings import ok, problem, warning
from swapckpt.tools.location import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapckpt.storage import Files
    from swapckpt.tools.findings import Finding

MIN_FREE_NBYTES = 10 << 30
_PROBE_NBYTES = 64 << 10
_RANGE = (1000, 5000)


def look_at_store(url: str) -> Iterator[Finding]:
    """What can be told of the folder at ``url``. Writes small files there, and removes them."""
    try:
        kind = kind_of(url)
    except (StorageError, OSError) as error:
        yield problem("folder", str(error), "check the address, credentials and permissions")
        return
    if kind not in {Kind.FOLDER, Kind.NOTHING}:
        yield problem("folder", f"{url} is {kind.value}", "name a folder of checkpoints")
        return
    files = open_files(url)
    if isinstance(files, PosixFiles) and kind is Kind.NOTHING:
        existing = _existing(Path(files.url))
        yield ok("folder", f"{url} is not there yet; a save makes it, in {existing}")
        files = open_files(existing)
    else:
        yield ok("folder", files.url)
    probe = f".swapckpt-probe-{uuid.uuid4().hex}"
    try:
        yield from _probed(files, probe)
    except (StorageError, OSError) as error:
        yield problem("writing", str(error), "check the address, credentials and permissions")
    finally:
        with suppress(StorageError, OSError):  # the finding says what is wrong
            files.remove(probe)
    if isinstance(files, PosixFiles):
        yield _free(Path(files.url))


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _probed(files: Files, probe: str) -> Iterator[Finding]:
    data = bytes(range(256)) * (_PROBE_NBYTES // 256)
    files.make_folder(probe)
    files.put(f"{probe}/a", data)
    yield ok("writing", "works")
    yield _listing(files, probe)
    yield _ranges(files, f"{probe}/a", data)
    yield _committing(files, probe)
    if isinstance(files, PosixFiles):
        yield _direct(Path(files.url) / probe / "a")


def _listing(files: Files, probe: str) -> Finding:
    found = [(entry.name, entry.nbytes) for entry in files.entries(probe)]
    if found == [("a", _PROBE_NBYTES)]:
        return ok("listing", "shows what was just written")
    advice = "checkpoints are found by listing: use a store with consistent listings"
    return problem("listing", f"shows {found} after a file 'a' was written", advice)


def _ranges(files: Files, path: str, data: bytes) -> Finding:
    start, end = _RANGE
    part = bytearray(end - start)
    with closing(files.open(path)) as reader:
        reader.read_into(start, memoryview(part))
    if bytes(part) == data[start:end]:
        return ok("reading parts", "works")
    return problem("reading parts", "gives other bytes", "this store cannot be used")


def _committing(files: Files, probe: str) -> Finding:
    if files.renames:
        files.make_folder(f"{probe}/b")
        files.rename(f"{probe}/b", f"{probe}/c")
        files.sync_folder(probe)
        return ok("committing", "by renaming a folder, in one step")
    if isinstance(files, FsspecFiles) and not files.is_conditional():
        return warning(
            "committing",
            "this store cannot refuse to overwrite an object",
            "let only one job at a time save there",
        )
    return ok("committing", "by a conditional put, which no other job can overwrite")


def _direct(path: Path) -> Finding:
    """Read a little with O_DIRECT, which not every file system has."""
    advice = "saves and loads go through the page cache there, and evict what training needs"
    flag = vars(os).get("O_DIRECT")
    if flag is None:
        return warning("direct I/O", "this system has none", advice)
    try:
        descriptor = os.open(path, os.O_RDONLY | flag)
        try:
            os.preadv(descriptor, [mmap.mmap(-1, 4096)], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
        return warning("direct I/O", "this file system has none", advice)
    return ok("direct I/O", "works")


def _free(path: Path) -> Finding:
    usage = shutil.disk_usage(path)
    found = f"{format_nbytes(usage.free)} of {format_nbytes(usage.total)} free"
    if usage.free < MIN_FREE_NBYTES:
        return warning("free space", found, "a save needs room beside the checkpoints that are kept")
    return ok("free space", found)
