"""What disks, file systems and people do to files of a checkpoint that was committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    Damage = Callable[[Path, Path, random.Random], None]
    """Of a file; beside it the same file of an older step, and what decides where."""

PAGE_NBYTES = 4096


def flip_bit(path: Path, _: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def lose_page(path: Path, _: Path, chance: random.Random) -> None:
    """A write that never arrived: zeros in its place. In a small file a part of it."""
    data = bytearray(path.read_bytes())
    nbytes = min(PAGE_NBYTES, len(data) // 2)
    start = chance.randrange(len(data) // nbytes) * nbytes
    data[start : start + nbytes] = bytes(nbytes)
    path.write_bytes(data)


def truncate(path: Path, _: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def remove(path: Path, _: Path, __: random.Random) -> None:
    path.unlink()


def exchange(path: Path, older: Path, _: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(older.read_bytes())
    older.write_bytes(content)


DAMAGES: dict[str, Damage] = {
    "flipped bit": flip_bit,
    "lost write": lose_page,
    "truncated": truncate,
    "removed": remove,
    "exchanged with older": exchange,
}
