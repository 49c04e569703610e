"""What the page cache holds of files, asked without touching it (Linux)."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def cached_nbytes(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    nbytes = path.stat().st_size
    if not nbytes:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
        memory = np.frombuffer(mapped, dtype=np.uint8)
        address, vector = (ctypes.c_void_p(array.ctypes.data) for array in (memory, pages))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(address, ctypes.c_size_t(nbytes), vector) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        del memory  # else the mapping cannot be closed
    return int((pages & 1).sum()) * mmap.PAGESIZE


def drop(paths: Iterable[Path]) -> None:
    """Make the page cache forget files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # pages that are not on the device yet do not go away
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
