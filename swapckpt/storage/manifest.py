"""The manifest of a checkpoint: every length and checksum, in a file that stock readers ignore.

[Note: format] ``{"crc32": "<8 hex digits>", "body": {...}}``, where the checksum is that of the bytes of the
body exactly as they stand in the file. The body::

    {"format": 1, "attempt": "<32 hex digits>", "step": 5 (or null), "world_size": 2,
     "saved_at": "<ISO 8601, UTC>", "versions": {"swapckpt": "0.1.0", "torch": "2.13.0"},
     "metadata": {"nbytes": 4711, "crc32": "<8 hex digits>"},
     "files": {"__0_0.distcp": {"nbytes": 123456, "items": [
         [start, nbytes, payload_at, payload_nbytes, "<crc of the envelope>", "<crcs of the blocks>"]]}}}

An item is ``nbytes`` bytes from ``start``. Its payload (the elements of a tensor) begins ``payload_at`` bytes
into it; the envelope is what stands before and behind. FQNs are in DCP's metadata, which has the same starts.

[Note: blocks] A payload is checked in blocks of :func:`block_nbytes`, so that a reader that needs a part of a
tensor can verify it: it reads whole blocks, at most 2/128 of the payload more than it needs (or 64 KiB at
either end). All checksums are CRC-32, which zip entries have anyway; that of the whole payload follows from
its blocks'.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from zlib_ng.zlib_ng import crc32, crc32_combine

from swapckpt.errors import CorruptCheckpointError
from swapckpt.storage.metadata import check_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FORMAT = 1
MIN_BLOCK_NBYTES = 64 << 10
MAX_BLOCK_NBYTES = 1 << 20
BLOCKS_PER_PAYLOAD = 128

_PREFIX, _MIDDLE, _SUFFIX = b'{"crc32": "', b'", "body": ', b"}\n"


def block_nbytes(payload_nbytes: int) -> int:
    """Length of the blocks of a payload (the last one is shorter): a power of two from 64 KiB to 1 MiB."""
    wanted = max(payload_nbytes // BLOCKS_PER_PAYLOAD, MIN_BLOCK_NBYTES)
    return min(1 << (wanted.bit_length() - 1), MAX_BLOCK_NBYTES)


class BlockSums:
    """CRC-32 of each block of a payload that arrives in pieces of any length.

    Args:
        payload_nbytes: Length of the whole payload.
    """

    def __init__(self, payload_nbytes: int) -> None:
        self._block_nbytes = block_nbytes(payload_nbytes)
        self._left = self._block_nbytes  # of the block being summed
        self._lengths: list[int] = []
        self.checksums: list[int] = []

    def add(self, view: memoryview) -> None:
        """The next bytes of the payload."""
        at, end = 0, len(view)
        while at < end:
            if self._left == self._block_nbytes:
                self.checksums.append(0)
                self._lengths.append(0)
            taken = min(self._left, end - at)
            self.checksums[-1] = crc32(view[at : at + taken], self.checksums[-1])
            self._lengths[-1] += taken
            self._left = self._left - taken or self._block_nbytes
            at += taken

    @property
    def whole(self) -> int:
        """CRC-32 of all that was added."""
        checksum = 0
        for block, nbytes in zip(self.checksums, self._lengths, strict=True):
            checksum = crc32_combine(checksum, block, nbytes)
        return checksum


@dataclass(frozen=True, slots=True)
class ItemSums:
    """One item of a data file: where it lies, where its payload lies in it, and their checksums."""

    start: int
    nbytes: int
    payload_at: int
    payload_nbytes: int
    envelope: int
    blocks: tuple[int, ...]

    def describes(self, payload: memoryview) -> bool:
        """True when these are the bytes that were saved."""
        step = block_nbytes(self.payload_nbytes)
        return len(payload) == self.payload_nbytes and all(
            crc32(payload[at : at + step]) == block
            for at, block in zip(range(0, self.payload_nbytes, step), self.blocks, strict=True)
        )

    def to_row(self) -> str:
        """This item in JSON."""
        blocks = "".join([f"{block:08x}" for block in self.blocks])
        places = f"{self.start},{self.nbytes},{self.payload_at},{self.payload_nbytes}"
        return f'[{places},"{self.envelope:08x}","{blocks}"]'

    @staticmethod
    def from_row(row: Sequence[object]) -> ItemSums:
        """The item of a row. Raises ValueError or TypeError for what is no such row."""
        start, nbytes, payload_at, payload_nbytes, envelope, blocks = row
        item = ItemSums(
            start=_int(start),
            nbytes=_int(nbytes),
            payload_at=_int(payload_at),
            payload_nbytes=_int(payload_nbytes),
            envelope=_hex(envelope),
            blocks=tuple(_blocks(blocks)),
        )
        if item.payload_at + item.payload_nbytes > item.nbytes:
            raise ValueError("a payload reaches beyond its item")
        if len(item.blocks) != -(-item.payload_nbytes // block_nbytes(item.payload_nbytes)):
            raise ValueError("a payload has the wrong number of blocks")
        return item


def _hex(text: object) -> int:
    if type(text) is not str or len(text) != 8:
        raise ValueError(f"{text!r} is not a checksum")
    return int(text, 16)


def _blocks(text: object) -> Iterator[int]:
    if type(text) is not str:
        raise TypeError("no checksums")
    return (_hex(text[at : at + 8]) for at in range(0, len(text), 8))


@dataclass(frozen=True, slots=True)
class FileSums:
    """One data file. ``rows`` are its items in JSON, as the rank that wrote it made them."""

    name: str
    nbytes: int
    rows: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest says of one data file: its length, and the rows of its items by their start."""

    nbytes: int
    rows: Mapping[int, Sequence[object]]

    def item(self, start: int) -> ItemSums | None:
        """The item at ``start``, None where there is none. Rows are looked at when they are needed.

        Raises ValueError or TypeError for a row that says what no writer says.
        """
        if start not in self.rows:
            return None
        item = ItemSums.from_row(self.rows[start])
        if item.start + item.nbytes > self.nbytes:
            raise ValueError("it ends behind the end of its file")
        return item


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the manifest of a checkpoint says."""

    attempt: str
    step: int | None
    world_size: int
    saved_at: dt.datetime
    versions: Mapping[str, str]
    metadata_nbytes: int
    metadata_crc: int
    files: Mapping[str, FileEntry]

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files.values())

    def describes(self, metadata: bytes) -> bool:
        """True when ``metadata`` is the one this manifest was written with."""
        return len(metadata) == self.metadata_nbytes and crc32(metadata) == self.metadata_crc


def dump_manifest(
    files: Sequence[FileSums], metadata: bytes, *, attempt: str, step: int | None, world_size: int
) -> bytes:
    """The manifest of a checkpoint about to be committed."""
    head = {
        "format": FORMAT,
        "attempt": attempt,
        "step": step,
        "world_size": world_size,
        "saved_at": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "versions": {"swapckpt": _own_version(), "torch": torch.__version__},
        "metadata": {"nbytes": len(metadata), "crc32": f"{crc32(metadata):08x}"},
    }
    listed = ",\n".join(
        f'{json.dumps(file.name)}: {{"nbytes": {file.nbytes}, "items": [{file.rows}]}}' for file in files
    )
    body = f'{json.dumps(head)[:-1]}, "files": {{{listed}}}}}'.encode()
    return b"".join([_PREFIX, f"{crc32(body):08x}".encode(), _MIDDLE, body, _SUFFIX])


def _own_version() -> str:
    try:
        return importlib.metadata.version("swapckpt")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def load_manifest(data: bytes, *, origin: str) -> Manifest:
    """The manifest in ``data``.

    Raises:
        CorruptCheckpointError: It contradicts its own checksum, or says what no writer says.
    """
    at = len(_PREFIX)
    body = data[at + 8 + len(_MIDDLE) : -len(_SUFFIX)]
    if data != b"".join([_PREFIX, f"{crc32(body):08x}".encode(), _MIDDLE, body, _SUFFIX]):
        raise CorruptCheckpointError(f"{origin} contradicts its own checksum.")
    try:
        return _manifest(json.loads(body))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{origin} is not a manifest: {error!r}.") from error


def _manifest(body: dict[str, object]) -> Manifest:
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}, this version reads {FORMAT}")
    step, metadata = body["step"], _dict(body["metadata"])
    return Manifest(
        attempt=str(body["attempt"]),
        step=None if step is None else _int(step),
        world_size=_int(body["world_size"]),
        saved_at=dt.datetime.fromisoformat(str(body["saved_at"])),
        versions={name: str(value) for name, value in _dict(body["versions"]).items()},
        metadata_nbytes=_int(metadata["nbytes"]),
        metadata_crc=_hex(metadata["crc32"]),
        files={name: _file(name, _dict(entry)) for name, entry in _dict(body["files"]).items()},
    )


def _file(name: str, entry: dict[str, object]) -> FileEntry:
    check_name(name)
    rows = cast("list[list[object]]", entry["items"])
    return FileEntry(_int(entry["nbytes"]), {_int(row[0]): row for row in rows})


def _dict(value: object) -> dict[str, object]:
    if type(value) is not dict:
        raise TypeError("an object is missing")
    return value


def _int(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no length or number")
    return value
