"""Writes what ``torch.save`` writes, with the elements of one piece of one tensor in memory.

[Note: how] ``torch.serialization.skip_data`` lets torch write a whole archive without the bytes of its
storages, of a state dict whose tensors have memory that is reserved and never touched. What it writes is kept
(a few hundred bytes per tensor); the elements are put in between while it is written out. Their checksums,
unknown to torch, stand in two places behind them.

Which record is which tensor's is read from the pickle that torch wrote.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.serialization import skip_data
from zlib_ng.zlib_ng import crc32

from swapckpt.errors import StorageError
from swapckpt.storage.items import bytes_of
from swapckpt.tools.archive import StoredTensor, describe, flattened
from swapckpt.tools.content import fqn_of, nested, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from swapckpt.storage.files import FileWriter
    from swapckpt.tools.content import Content

_LOCAL_MAGIC, _DESCRIPTOR_MAGIC, _CENTRAL_MAGIC = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"
_CENTRAL_NBYTES = 46


def write(content: Content, out: FileWriter, *, on_progress: Callable[[int], None]) -> None:
    """Append a whole file: the nested state dict, values included.

    Raises:
        SchemaError: Names collide.
        StorageError: This torch writes archives of another form.
        CorruptCheckpointError, UnsafePickleError: Of ``content``.
    """
    skeleton = _Skeleton(content)
    checksums: dict[str, int] = {}
    for gap in skeleton.gaps():
        out.append(memoryview(_patched(gap.before, checksums)))
        if gap.key is None:
            continue
        checksum, written = 0, 0
        for piece in pieces(content, skeleton.fqns[gap.key]):
            view = bytes_of(piece)
            out.append(view)
            checksum = crc32(view, checksum)
            written += len(view)
            on_progress(len(view))
        assert written == gap.nbytes
        checksums[gap.key] = checksum


@dataclass(frozen=True, slots=True)
class _Gap:
    """What torch wrote before the bytes of a storage, and which these are (``key`` None: the end)."""

    before: bytes
    key: str | None = None
    nbytes: int = 0


class _Sink:
    """Takes what torch writes, and how many bytes it skips in between."""

    def __init__(self) -> None:
        self.written: list[bytearray] = [bytearray()]
        self.skipped: list[int] = []
        self._at = 0

    def write(self, data: bytes) -> int:
        self.written[-1] += data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        target = self._at + offset if whence else offset
        self.skipped.append(target - self._at)
        self.written.append(bytearray())
        self._at = target
        return self._at

    def tell(self) -> int:
        return self._at

    def flush(self) -> None: ...


class _Skeleton:
    """An archive without the bytes of its storages. ``fqns`` has the tensor of each storage's key."""

    def __init__(self, content: Content) -> None:
        state = nested(
            {path: _leaf(content, fqn) for fqn, path in content.paths.items()}, where=content.where
        )
        self._sink = _Sink()
        with skip_data():
            torch.save(state, self._sink)  # type: ignore[arg-type]
        head = bytes(self._sink.written[0])
        described = flattened(describe(_pickle_in(head), origin="a new archive"), where="a new archive")
        stored = {path: leaf for path, leaf in described.items() if isinstance(leaf, StoredTensor)}
        self.fqns: Mapping[str, str] = {leaf.storage.key: fqn_of(path) for path, leaf in stored.items()}
        if len(self.fqns) != len(content.tensors):
            raise _unexpected()

    def gaps(self) -> Iterator[_Gap]:
        for before, nbytes in zip(self._sink.written[:-1], self._sink.skipped, strict=True):
            yield _Gap(bytes(before), _last_key(before), nbytes)
        yield _Gap(bytes(self._sink.written[-1]))


def _leaf(content: Content, fqn: str) -> object:
    if fqn not in content.tensors:
        return content.value(fqn)
    info = content.tensors[fqn]
    return torch.empty(info.shape, dtype=info.dtype)  # never touched


def _unexpected() -> StorageError:
    return StorageError(f"torch {torch.__version__} writes archives in a form that is not known here.")


def _last_key(before: bytearray) -> str:
    """The key of the storage that follows: its local header is the last one."""
    at = before.rfind(_LOCAL_MAGIC)
    (name_nbytes,) = struct.unpack_from("<H", before, at + 26)
    name = bytes(before[at + 30 : at + 30 + name_nbytes]).decode()
    archive, _, key = name.partition("/data/")
    if at < 0 or not archive or not key.isdecimal():
        raise _unexpected()
    return key


def _pickle_in(head: bytes) -> bytes:
    """The record ``data.pkl``, the first one; its length stands behind it."""
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", head, 26)
    start = 30 + name_nbytes + extra_nbytes
    if head[:4] != _LOCAL_MAGIC or not head[30 : 30 + name_nbytes].endswith(b"/data.pkl"):
        raise _unexpected()
    at = head.find(_DESCRIPTOR_MAGIC, start)
    while at >= 0:
        crc, nbytes = struct.unpack_from("<II", head, at + 4)
        if (nbytes, crc) == (at - start, crc32(head[start:at])):
            return head[start:at]
        at = head.find(_DESCRIPTOR_MAGIC, at + 1)
    raise _unexpected()


def _patched(part: bytes, checksums: Mapping[str, int]) -> bytes:
    """``part`` with the checksum of the storage before it, and in the directory those of all."""
    if not checksums:
        return part
    patched = bytearray(part)
    if part[:4] != _DESCRIPTOR_MAGIC:
        raise _unexpected()
    last = list(checksums)[-1]
    patched[4:8] = checksums[last].to_bytes(4, "little")
    at = part.find(_CENTRAL_MAGIC) if b"/data/" in part else -1
    while at >= 0:
        name_nbytes, extra_nbytes, comment_nbytes = struct.unpack_from("<HHH", part, at + 28)
        name = part[at + _CENTRAL_NBYTES : at + _CENTRAL_NBYTES + name_nbytes].decode()
        key = name.partition("/data/")[2]
        if key in checksums:
            patched[at + 16 : at + 20] = checksums[key].to_bytes(4, "little")
        at += _CENTRAL_NBYTES + name_nbytes + extra_nbytes + comment_nbytes
        if part[at : at + 4] != _CENTRAL_MAGIC:
            break
    return bytes(patched)
