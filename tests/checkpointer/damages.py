"""Ways to damage the folder of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import swapckpt
from tests.checkpointer.jobs import SYNC, Job

if TYPE_CHECKING:
    from pathlib import Path


def data_file(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)


def flip(folder: Path) -> None:
    content = bytearray(data_file(folder).read_bytes())
    content[len(content) // 2] ^= 1
    data_file(folder).write_bytes(content)


def truncate(folder: Path) -> None:
    file = data_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose(folder: Path) -> None:
    data_file(folder).unlink()


def swap_file(folder: Path) -> None:
    """With that of a run with other values."""
    other = folder.parent / "other"
    job = Job.build()
    job.step(77)
    with swapckpt.Checkpointer(other, job.states, SYNC) as checkpointer:
        checkpointer.save(2, overwrite=True)
    data_file(folder).write_bytes(data_file(other / "step-2").read_bytes())


def lose_metadata_bytes(folder: Path) -> None:
    file = folder / ".metadata"
    file.write_bytes(file.read_bytes()[:-50])


def lose_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / ".swapckpt.json").unlink()


def metadata_as_folder(folder: Path) -> None:
    lose_metadata(folder)
    (folder / ".metadata").mkdir()
