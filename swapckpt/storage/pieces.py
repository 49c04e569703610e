"""Bytes of many small items, put together in aligned memory and given to a file many at a time.

[Note: two at work] While a thread of its own waits for the device with one piece, the next one is filled. A
piece is given without the bytes behind the last multiple of a page in the file, which begin the next one: so
direct I/O takes all of it as it lies.
"""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from swapckpt.storage.files import ALIGNMENT, address_of, private_memory

if TYPE_CHECKING:
    from concurrent.futures import Future

    from swapckpt.storage.files import FileWriter

PIECE_NBYTES = 2 << 20
MAX_PUT_NBYTES = 256 << 10
MAX_GIVEN = 3
"""Pieces that wait for the device, at most."""


class _Piece:
    """Memory that bytes are put into."""

    def __init__(self) -> None:
        self.view = private_memory(PIECE_NBYTES + MAX_PUT_NBYTES)
        self.address = address_of(self.view)


class Pieces:
    """Gathers what is appended to one file.

    Call sequence (by the thread that writes the file): 1. ``reserve``, then ``put``, ``copy`` and ``take`` of
    as many bytes, any number of times; 2. ``flush`` before anything else is appended to the file; 3.
    ``close``.

    Args:
        out: The file.
    """

    def __init__(self, out: FileWriter) -> None:
        self._out = out
        self._piece = _Piece()
        self._used = 0
        self._position = 0  # of the piece in the file
        self._free: list[_Piece] = []
        self._given: deque[tuple[Future[None], _Piece]] = deque()
        self._pool: ThreadPoolExecutor | None = None  # of one thread: pieces arrive in order

    @property
    def position(self) -> int:
        """Where the next byte will be in the file."""
        return self._position + self._used

    def reserve(self, nbytes: int) -> None:
        """Make room for the next bytes (at most ``PIECE_NBYTES`` and half of ``MAX_PUT_NBYTES``). Raises what
        went wrong with earlier ones."""
        if self._used + nbytes > len(self._piece.view):
            self._give()

    def put(self, data: bytes) -> None:
        """Add bytes."""
        end = self._used + len(data)
        self._piece.view[self._used : end] = data
        self._used = end

    def copy(self, address: int, nbytes: int) -> memoryview:
        """Add bytes that lie in memory. Returns them, valid until the next call."""
        start, self._used = self._used, self._used + nbytes
        ctypes.memmove(self._piece.address + start, address, nbytes)
        return self._piece.view[start : self._used]

    def take(self, nbytes: int, *, room_nbytes: int) -> memoryview:
        """Add bytes that the caller fills in, before the next call. Returns their memory and, up to
        ``room_nbytes``, some behind it that may be written to."""
        start, self._used = self._used, self._used + nbytes
        return self._piece.view[start : start + room_nbytes]

    def flush(self) -> None:
        """Append everything to the file, now."""
        self._settle()
        used, self._used = self._used, 0
        if used:
            self._position += used
            self._out.append(self._piece.view[:used])

    def passed(self, nbytes: int) -> None:
        """Others have appended bytes to the file, after a ``flush``."""
        self._position += nbytes

    def close(self) -> None:
        """Wait until nothing is on its way to the file. What was not flushed is given up."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _give(self) -> None:
        """Append all but the end to the file while this thread goes on."""
        whole = self._used - (self._position + self._used) % ALIGNMENT
        self._settle(left=MAX_GIVEN - 1)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="swapckpt-append")
        full, self._piece = self._piece, self._free.pop() if self._free else _Piece()
        self._given.append((self._pool.submit(self._out.append, full.view[:whole]), full))
        rest = self._used - whole
        self._piece.view[:rest] = full.view[whole : self._used]
        self._position, self._used = self._position + whole, rest

    def _settle(self, *, left: int = 0) -> None:
        """Wait until at most ``left`` pieces are on their way. Raises what went wrong with one."""
        while len(self._given) > left:
            future, piece = self._given.popleft()
            future.result()
            self._free.append(piece)
