"""Runs: consecutive small items of a data file, put together many at a time.

Of the item of a small tensor all but its elements and three checksums depends on dtype and shape. A run is
made with the plan and kept with it: it knows where each frame, each tensor's elements and their checksums go.
What is left for a save takes a few microseconds per item, of which copy and checksum are the larger part.

[Note: checksums of frames] CRC-32 is affine: as a function of the four bytes of a checksum within it, the
checksum of a frame is what it is for four zeros, xor a value for each bit that is set. So those of all frames
of a kind are looked up in four tables (one for each byte) instead of being computed one by one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided
from zlib_ng.zlib_ng import crc32

from swapckpt.storage.pieces import PIECE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from swapckpt.storage.items import Skeleton

ITEM_ALIGNMENT = 64
"""Items start at multiples of this in a data file."""
RUN_NBYTES = PIECE_NBYTES
"""A run is no longer: a piece has room for one."""
MIN_ALIKE = 8
"""Fewer items than this per dtype and shape are not worth a run: each of these costs some microseconds."""

_UNIT = np.dtype(f"V{ITEM_ALIGNMENT}")


class _Form:
    """What all items of one frame have in common. Shared by runs: it is as long as an item."""

    def __init__(self, frame: Skeleton) -> None:
        image = frame.header + bytes(frame.payload_nbytes) + frame.footer_with(0)
        self.image = np.frombuffer(image + bytes(-len(image) % ITEM_ALIGNMENT), dtype=_UNIT)
        before, between, _ = frame.footer
        first = len(frame.header) + frame.payload_nbytes + len(before)
        self.checksums = np.array([[first], [first + 4 + len(between)]]) + np.arange(4)  # their bytes
        self.empty, self.tables = _tables(frame)


class _Frames:
    """The items of a run that have one frame."""

    def __init__(self, form: _Form, members: Sequence[int], starts: npt.NDArray[np.int64]) -> None:
        self._form = form
        self.members = np.array(members)  # their numbers in the run
        self._starts = starts[self.members]
        gaps = np.diff(self._starts)
        self._step = int(gaps[0]) if len(gaps) and bool((gaps == gaps[0]).all()) else None

    def put(self, memory: npt.NDArray[np.uint8]) -> None:
        """Frames around nothing yet, and the zeros between them."""
        units, image = memory.view(_UNIT), self._form.image
        if self._step is not None:  # several times as fast as by index
            strides = (self._step, ITEM_ALIGNMENT)
            rows = units[self._starts[0] // ITEM_ALIGNMENT :]
            as_strided(rows, (len(self._starts), len(image)), strides)[:] = image
        else:
            units[self._starts[:, None] // ITEM_ALIGNMENT + np.arange(len(image))] = image

    def seal(
        self, memory: npt.NDArray[np.uint8], checksums: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.uint32]:
        """Write the checksums of the elements into the frames. Returns those of the frames.

        Args:
            memory: Of the run.
            checksums: Of all items of the run.
        """
        columns = checksums[self.members].astype("<u4").view(np.uint8).reshape(-1, 4)
        memory[self._starts[:, None, None] + self._form.checksums] = columns[:, None, :]
        of_frames = np.full(len(columns), self._form.empty, dtype=np.uint32)
        for table, column in zip(self._form.tables, columns.T, strict=True):
            of_frames ^= table[column]
        return of_frames


def _tables(frame: Skeleton) -> tuple[int, list[npt.NDArray[np.uint32]]]:
    """The checksum of a frame around a checksum of zero, and for each byte of another one what it changes."""
    start = crc32(frame.footer_with(0), frame.header_crc)
    bits = [crc32(frame.footer_with(1 << bit), frame.header_crc) ^ start for bit in range(32)]
    tables = []
    for byte in range(4):
        table = np.zeros(256, dtype=np.uint32)
        for bit in range(8):
            table[np.arange(256) >> bit & 1 == 1] ^= np.uint32(bits[8 * byte + bit])
        tables.append(table)
    return start, tables


@dataclass(frozen=True, slots=True)
class Checksums:
    """Of each item of a run, when it is put together: of its elements, and of its frame."""

    payloads: npt.NDArray[np.uint32]
    frames: npt.NDArray[np.uint32]


class Run:
    """Items that follow each other, each at the next multiple of ``ITEM_ALIGNMENT``. Immutable.

    Args:
        frames: Of each item; all have elements.
        forms: Of the frames that other runs have too; added to.
    """

    def __init__(self, frames: Sequence[Skeleton], forms: dict[Skeleton, _Form]) -> None:
        lengths = np.array([frame.nbytes for frame in frames], dtype=np.int64)
        ends = np.cumsum(lengths + -lengths % ITEM_ALIGNMENT)
        self.starts: npt.NDArray[np.int64] = np.concatenate(([0], ends[:-1]))
        self.nbytes = int(self.starts[-1] + lengths[-1])
        self._filled_nbytes = int(ends[-1])
        self._headers = np.array([len(frame.header) for frame in frames], dtype=np.int64)
        self._payloads = np.array([frame.payload_nbytes for frame in frames], dtype=np.int64)
        self.lengths: list[int] = lengths.tolist()
        known = {frame: f",{frame.nbytes},{len(frame.header)},{frame.payload_nbytes}," for frame in frames}
        self._rows = [known[frame] for frame in frames]  # what of a row is known ahead
        members: dict[Skeleton, list[int]] = {}
        for number, frame in enumerate(frames):
            members.setdefault(frame, []).append(number)
        for frame in members.keys() - forms.keys():
            forms[frame] = _Form(frame)
        self._kinds = [_Frames(forms[frame], each, self.starts) for frame, each in members.items()]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def room_nbytes(self) -> int:
        """Length of the memory that ``fill`` takes: that of the run, and zeros up to a multiple of
        ``ITEM_ALIGNMENT``."""
        return self._filled_nbytes

    def fill(self, view: memoryview, sources: Sequence[int]) -> Checksums:
        """Put the items together.

        Args:
            view: ``room_nbytes`` of memory.
            sources: The address of each item's elements, which lie there in row-major order.
        """
        memory = np.frombuffer(view, dtype=np.uint8)
        for kind in self._kinds:
            kind.put(memory)
        starts = self.starts + self._headers
        ends = (starts + self._payloads).tolist()
        targets = (starts + int(memory.ctypes.data)).tolist()
        for target, source, nbytes in zip(targets, sources, self._payloads.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)
        found = [crc32(view[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)]
        payloads = np.array(found, dtype=np.uint32)
        frames = np.empty_like(payloads)
        for kind in self._kinds:
            frames[kind.members] = kind.seal(memory, payloads)
        return Checksums(payloads, frames)

    def rows(self, at: int, checksums: Checksums) -> Iterator[str]:
        """The row of each item in the manifest.

        Args:
            at: Where the run starts in the file.
            checksums: What ``fill`` returned.
        """
        # Run for each of tens of thousands of items: hexadecimal digits are made for all at once.
        frames = checksums.frames.astype(">u4").tobytes().hex()
        payloads = checksums.payloads.astype(">u4").tobytes().hex()
        starts = (self.starts + at).tolist()
        for digit, start, form in zip(range(0, len(frames), 8), starts, self._rows, strict=True):
            yield f'[{start}{form}"{frames[digit : digit + 8]}","{payloads[digit : digit + 8]}"]'


def runs(frames: Sequence[Skeleton | None]) -> Iterator[Run | int]:
    """A data file's items in order: runs, and numbers of items that stand alone.

    Args:
        frames: Of each item; None for one that belongs to no run.
    """
    forms: dict[Skeleton, _Form] = {}
    first = 0
    while first < len(frames):
        members = _next(frames, first)
        if len(members) >= MIN_ALIKE * len(set(members)) > 0:
            yield Run(members, forms)
            first += len(members)
        else:
            yield from range(first, first + max(1, len(members)))
            first += max(1, len(members))


def _next(frames: Sequence[Skeleton | None], first: int) -> list[Skeleton]:
    """Frames from ``first`` on that one run takes."""
    members: list[Skeleton] = []
    nbytes = 0
    for frame in frames[first:]:
        if frame is None:
            break
        nbytes += frame.nbytes + -frame.nbytes % ITEM_ALIGNMENT
        if nbytes > RUN_NBYTES:
            break
        members.append(frame)
    return members
