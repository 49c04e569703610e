"""Which pages of a file the page cache has.

[Note: not by trying] ``preadv2(RWF_NOWAIT)`` would read them in the same call. Where the first page is
missing it starts read-ahead, though, which fills the cache behind the back of direct I/O.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from swapckpt.storage.files import address_of

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Residency:
    """Asks about one open file, from any thread. Of files of other users Linux tells nothing: none of their
    pages counts as cached.

    Args:
        descriptor: Of the file; may be closed afterwards.
        nbytes: Its length.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._view: memoryview | None = None
        if _libc is not None and nbytes and os.geteuid() in {0, os.fstat(descriptor).st_uid}:
            # Only addresses: nothing is read through it.
            self._view = memoryview(mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ))
            self._address = address_of(self._view)

    def has(self, offset: int, nbytes: int) -> bool:
        """True when all pages of a range of the file are in the cache, now."""
        if self._view is None or _libc is None or offset + nbytes > len(self._view):
            return False
        start = offset - offset % mmap.PAGESIZE
        pages = bytearray(-(-(offset + nbytes - start) // mmap.PAGESIZE))
        failed: int = _libc.mincore(
            ctypes.c_void_p(self._address + start),
            ctypes.c_size_t(offset + nbytes - start),
            (ctypes.c_ubyte * len(pages)).from_buffer(pages),
        )
        return not failed and pages.count(0) == 0

    def close(self) -> None:
        """Give up the mapping."""
        self._view = None
