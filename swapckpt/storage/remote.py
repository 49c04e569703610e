"""Files of an object store or any other file system that fsspec speaks to.

[Note: conditional puts] A commit must not overwrite another one that it does not know of. Only the store
can promise that: on S3 with ``If-None-Match`` and ``If-Match``. Not every server that speaks S3 honours
them, so :class:`FsspecFiles` asks once, with an object of its own. Elsewhere fsspec looks first and writes
then, which two writers may do at once: such a store needs a single writer, and the log says so once.

[Note: failed streams] Closing a stream of fsspec publishes what was written so far, and a stream closes
itself when it is collected. After an error it must be discarded and marked closed, or a truncated object
appears.
"""

from __future__ import annotations

import datetime as dt
import errno
import logging
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

from fsspec.spec import AbstractBufferedFile

from swapckpt.errors import CorruptCheckpointError, StorageError
from swapckpt.storage.files import Entry, explained, is_transient, retried

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsspec import AbstractFileSystem

    from swapckpt.storage.files import FileReader, FileWriter

PART_NBYTES = 8 << 20
MAX_PARTS = 9_000
"""S3 allows 10,000 parts of an upload; larger files get larger parts."""

logger = logging.getLogger(__name__)


class _S3(Protocol):
    """What s3fs offers beyond fsspec."""

    def call_s3(self, method: str, **kwargs: object) -> Mapping[str, object]: ...
    def list_multipart_uploads(self, bucket: str) -> list[Mapping[str, object]]: ...
    def abort_mpu(self, bucket: str, key: str, upload_id: str) -> None: ...
    def split_path(self, path: str) -> tuple[str, str, str | None]: ...


class FsspecFiles:
    """A folder of an fsspec file system.

    Args:
        filesystem: Any implementation.
        root: The folder's path on it.
        url: How users name it, for messages.
    """

    renames = False

    def __init__(self, filesystem: AbstractFileSystem, root: str, *, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._conditional: bool | None = None  # not asked yet

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _named(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    @property
    def _s3(self) -> _S3 | None:
        protocols = self._fs.protocol
        protocols = (protocols,) if isinstance(protocols, str) else protocols
        return cast("_S3", self._fs) if "s3" in protocols else None

    def make_folder(self, path: str) -> None:
        if self._s3 is not None:
            return  # has no folders, and s3fs would make a missing bucket instead of reporting it
        with explained("making the folder", self._named(path)):
            retried(lambda: self._fs.makedirs(self._at(path), exist_ok=True), transient=_is_transient)

    def entries(self, path: str) -> list[Entry]:
        def listed() -> list[Mapping[str, object]]:
            self._fs.invalidate_cache(self._at(path))
            return cast("list[Mapping[str, object]]", self._fs.ls(self._at(path), detail=True))

        with explained("listing", self._named(path)):
            try:
                found = retried(listed, transient=_is_transient)
            except (FileNotFoundError, NotADirectoryError):  # an object store has no empty folders
                return []
        entries = [
            _entry(info) for info in found if str(info["name"]).strip("/") != self._at(path).strip("/")
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def create(self, path: str, *, nbytes: int) -> FileWriter:
        with explained("creating", self._named(path)):
            return FsspecWriter(self._fs, self._at(path), name=self._named(path), nbytes=nbytes)

    def open(self, path: str) -> FileReader:
        with explained("opening", self._named(path)):
            return FsspecReader(self._fs, self._at(path), name=self._named(path))

    def put(self, path: str, data: bytes) -> None:
        def created() -> None:
            # Not every implementation knows of modes.
            self._fs.pipe_file(self._at(path), data, **({"mode": "create"} if conditional else {}))

        conditional = self.is_conditional()
        with explained("writing", self._named(path)):
            if not conditional and self._exists(path):
                raise FileExistsError(self._named(path))
            try:
                retried(created, transient=_is_transient)
            except OSError as error:
                if not _is_precondition(error):
                    raise
                # The answer to an earlier attempt that succeeded may have been lost.
                if self._fs.cat_file(self._at(path)) != data:
                    raise FileExistsError(self._named(path)) from error

    def version(self, path: str) -> str | None:
        if not self.is_conditional():
            return None
        with explained("looking up", self._named(path)):
            self._fs.invalidate_cache(self._fs._parent(self._at(path)))  # noqa: SLF001 - fsspec's own idiom
            info = retried(lambda: self._fs.info(self._at(path)), transient=_is_transient)
        return str(info["ETag"]) if "ETag" in info else None

    def swap(self, path: str, data: bytes, *, version: str | None) -> None:
        s3 = self._s3
        with explained("replacing", self._named(path)):
            if version is None or s3 is None:
                retried(lambda: self._fs.pipe_file(self._at(path), data), transient=_is_transient)
                return
            # Ceph compares with the version without its quotes, and refuses what has them.
            conditions = dict.fromkeys((version, version.strip('"')))
            if not any(self._swapped(s3, path, data, condition=condition) for condition in conditions):
                raise FileExistsError(self._named(path))

    def _swapped(self, s3: _S3, path: str, data: bytes, *, condition: str) -> bool:
        """Put an object if it is at a version; False when it is not."""
        bucket, key, _ = s3.split_path(self._at(path))
        try:
            s3.call_s3("put_object", Bucket=bucket, Key=key, Body=data, IfMatch=condition)
        except OSError as error:
            if not _is_precondition(error):
                raise
            return False
        self._fs.invalidate_cache(self._at(path))
        return True

    def rename(self, source: str, target: str) -> None:
        raise StorageError(
            f"{self._named(source)} cannot be renamed to {target!r} in one step by this store."
        )

    def sync_folder(self, path: str) -> None: ...

    def remove(self, path: str) -> None:
        def removed() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm(self._at(path), recursive=True)

        with explained("removing", self._named(path)):
            self._fs.invalidate_cache(self._at(path))
            retried(removed, transient=_is_transient)

    def uploads(self, path: str) -> list[Entry]:
        return sorted((entry for entry, _ in self._pending(path)), key=lambda entry: entry.name)

    def abort_uploads(self, path: str) -> None:
        s3 = self._s3
        if s3 is None:
            return
        bucket = s3.split_path(self._at(""))[0]
        with explained("aborting uploads of", self._named(path)):
            for entry, upload in self._pending(path):
                s3.abort_mpu(bucket, self._key(entry.name), upload)

    def _pending(self, path: str) -> list[tuple[Entry, str]]:
        """Each unfinished upload of ``path`` or below it, and its id."""
        s3 = self._s3
        if s3 is None:
            return []
        root = self._key("").rstrip("/")
        prefix = f"{root}/" if root else ""
        with explained("listing uploads of", self._named(path)):
            found = s3.list_multipart_uploads(s3.split_path(self._at(""))[0])
        pending = []
        for upload in found:
            key, begun = str(upload["Key"]), upload.get("Initiated")
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and (not path or name == path or name.startswith(f"{path}/")):
                begun_secs = begun.timestamp() if isinstance(begun, dt.datetime) else None
                entry = Entry(name, 0, is_folder=False, modified_secs=begun_secs)
                pending.append((entry, str(upload["UploadId"])))
        return pending

    def _key(self, path: str) -> str:
        s3 = self._s3
        assert s3 is not None
        return s3.split_path(self._at(path))[1]

    def _exists(self, path: str) -> bool:
        return any(entry.name == path.rpartition("/")[2] for entry in self.entries(path.rpartition("/")[0]))

    def is_conditional(self) -> bool:
        """True when the store itself refuses to overwrite (see the note at the top). Asked once."""
        if self._conditional is None:
            self._conditional = self._s3 is not None and self._refuses_second_put()
            if not self._conditional:
                logger.warning(
                    "%s cannot refuse to overwrite an object: let only one job at a time save there.",
                    self.url,
                )
        return self._conditional

    def _refuses_second_put(self) -> bool:
        probe = self._at(f".swapckpt-probe-{uuid.uuid4().hex}")
        with explained("probing", self.url):
            try:
                self._fs.pipe_file(probe, b"1", mode="create")
                self._fs.pipe_file(probe, b"2", mode="create")
            except OSError as error:
                if _is_precondition(error):
                    return True
                # Some servers refuse the header instead of honouring it.
                if error.errno not in {errno.EINVAL, errno.ENOSYS}:
                    raise
                return False
            finally:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(probe)
        return False


def _entry(info: Mapping[str, object]) -> Entry:
    modified = info.get("LastModified", info.get("modified", info.get("mtime", info.get("created"))))
    if isinstance(modified, dt.datetime):
        modified = modified.timestamp()
    size = info.get("size")
    return Entry(
        name=str(info["name"]).rstrip("/").rpartition("/")[2],
        nbytes=size if isinstance(size, int) else 0,
        is_folder=info.get("type") == "directory",
        modified_secs=modified if isinstance(modified, int | float) else None,
    )


def _is_transient(error: BaseException) -> bool:
    # EIO is how s3fs and others report "500 Internal Error": of a server it passes, of a disk it does not.
    return is_transient(error) or (isinstance(error, OSError) and error.errno == errno.EIO)


def _is_precondition(error: OSError) -> bool:
    # Where the server sends no message (Ceph), only the cause that s3fs translates from has the code.
    said = f"{error} {error.__cause__}".lower()
    return isinstance(error, FileExistsError) or "precondition" in said or "pre-condition" in said


class FsspecWriter:
    """A new object, uploaded in parts while it is written."""

    def __init__(self, filesystem: AbstractFileSystem, path: str, *, name: str, nbytes: int) -> None:
        self._fs = filesystem
        self._path = path
        self._name = name
        self._position = 0
        part_nbytes = max(PART_NBYTES, -(-nbytes // MAX_PARTS))
        self._stream = filesystem.open(path, "wb", block_size=part_nbytes)

    @property
    def position(self) -> int:
        return self._position

    def append(self, data: memoryview) -> None:
        with explained("writing", self._name):
            for start in range(0, len(data), PART_NBYTES):
                self._stream.write(data[start : start + PART_NBYTES])
        self._position += len(data)

    def close(self) -> None:
        with explained("closing", self._name):
            self._stream.close()

    def abort(self) -> None:
        with explained("discarding", self._name):
            with suppress(Exception):  # the upload may be what failed; prune finds what is left of it
                self._stream.discard()
            if isinstance(self._stream, AbstractBufferedFile):
                self._stream.closed = True
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path)


class FsspecReader:
    """An object, read by ranges from as many threads as call."""

    def __init__(self, filesystem: AbstractFileSystem, path: str, *, name: str) -> None:
        self._fs = filesystem
        self._path = path
        self._name = name
        info = retried(lambda: filesystem.info(path), transient=_is_transient)
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{name} is a folder.")
        self._nbytes = int(info["size"])

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        with explained("reading", self._name):
            for start in range(0, len(view), PART_NBYTES):
                self._read(offset + start, view[start : start + PART_NBYTES])

    def _read(self, offset: int, view: memoryview) -> None:
        end = offset + len(view)
        data = retried(lambda: self._fs.cat_file(self._path, start=offset, end=end), transient=_is_transient)
        if len(data) != len(view):
            missing = len(view) - len(data)
            raise CorruptCheckpointError(
                f"{self._name} ends at byte {offset + len(data)}, {missing} bytes too early."
            )
        view[:] = data

    def is_cached(self, offset: int, nbytes: int) -> bool:  # noqa: ARG002 - every read is a request
        return False

    def close(self) -> None: ...
