"""What another process can see of a checkpoint that ranks are writing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapckpt.storage.commit import asides, has_metadata

if TYPE_CHECKING:
    from swapckpt.storage import Files


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes in the data files of a checkpoint (0 while there are none), and whether it is committed."""

    nbytes: int
    is_committed: bool


def progress(files: Files, step: int) -> Progress:
    """How far the checkpoint of ``step`` is."""
    name = f"step-{step}"
    nbytes = sum(_data_nbytes(files, folder) for folder in (name, *_attempts(files, name)))
    return Progress(nbytes, nbytes > 0 and has_metadata(files, name))


def _attempts(files: Files, name: str) -> list[str]:
    if not files.renames:
        return []  # they write to the final folder
    try:
        return [other.folder for other in asides(files) if other.name == name]
    except FileNotFoundError:  # nothing was ever saved
        return []


def _data_nbytes(files: Files, folder: str) -> int:
    try:
        entries = files.entries(folder)
    except FileNotFoundError:  # not begun yet, or renamed just now: that is the commit
        return 0
    return sum(entry.nbytes for entry in entries if entry.name.endswith(".distcp"))
