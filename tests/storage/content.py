"""Bytes for the files of a store, and short ways to write, read and compare them."""

from __future__ import annotations

import mmap
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from swapckpt.storage.files import ALIGNMENT

if TYPE_CHECKING:
    from swapckpt.storage.files import Files


def aligned(nbytes: int, *, shift: int = 0) -> memoryview:
    """Random bytes in memory that is aligned to pages, or ``shift`` bytes off."""
    view = memoryview(mmap.mmap(-1, nbytes + shift + ALIGNMENT))[shift : shift + nbytes]
    view[:] = np.random.default_rng(nbytes).bytes(nbytes)
    return view


def same(found: bytes | memoryview, expected: bytes | memoryview) -> bool:
    """Compared in a call: of two memoryviews that differ pytest would compute the difference for minutes."""
    return found == expected


def write(files: Files, path: str, *pieces: bytes | memoryview) -> bytes:
    writer = files.create(path, nbytes=sum(map(len, pieces)))
    for piece in pieces:
        writer.append(memoryview(piece))
    assert writer.position == sum(map(len, pieces))
    writer.close()
    return b"".join(pieces)


def read_into(files: Files, path: str, view: memoryview) -> None:
    with closing(files.open(path)) as reader:
        reader.read_into(0, view)
