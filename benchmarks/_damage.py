"""What disks, file systems and people do to files of a checkpoint that was committed, and what loads then."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks._lives import Tally
from benchmarks._victims import Job, Reference
from swapckpt.errors import SwapCkptError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Damage = Callable[[Path, Path, random.Random], None]
    """Of a file; beside it the same file of an older step, and what decides where."""

FILES = ("__0_0.distcp", ".swapckpt.json", ".metadata")
NUM_STEPS = 3
"""Checkpoints in a folder that is damaged: two may be, one is whole."""
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


# ---------------------------------------------------------------------------------------------- loads


class Damaged:
    """Checkpoints of three steps, and copies of them in which something is wrong.

    Args:
        root: Where they are made.
        width: Of the job.
        save: Saves a job into a folder.
    """

    def __init__(self, root: Path, width: int, save: Callable[[Job, Path], object]) -> None:
        self._whole, self.folder = root / "whole", root / "damaged"
        self.width, self.reference = width, Reference(width)
        job = Job(width)
        for _ in range(NUM_STEPS):
            job.step()
            save(job, self._whole)

    @contextmanager
    def by(self, damage: Damage, name: str, chance: random.Random) -> Iterator[Path]:
        """The folder, with the file of this name damaged in its newest step."""
        shutil.copytree(self._whole, self.folder)
        newest, older = (self.folder / f"step-{step}" / name for step in (NUM_STEPS, NUM_STEPS - 1))
        damage(newest, older, chance)
        try:
            yield self.folder
        finally:
            shutil.rmtree(self.folder)

    def is_right(self, job: Job, step: int | None) -> bool:
        return step is not None and job.digest() == self.reference.digest(step)


def save_ours(job: Job, folder: Path) -> None:
    with job.checkpointer(folder) as checkpointer:
        checkpointer.save(job.steps)


def load_damaged(
    damaged: Damaged, damage: Damage, *, number: int, chance: random.Random, verify: bool = True
) -> Tally:
    """Damage each file of a checkpoint in turn. It is refused, or right; with a fallback, always right."""
    tally = Tally()
    for count in range(number):
        with damaged.by(damage, FILES[count % len(FILES)], chance) as folder:
            tally.injected += 1
            for fallback in (False, True):
                job = Job(damaged.width)
                with job.checkpointer(folder, verify_on_load=verify) as checkpointer:
                    try:
                        step = checkpointer.load(fallback=fallback)
                    except SwapCkptError:
                        tally.hit += not fallback
                        tally.losses += fallback
                        continue
                tally.wrong_loads += not damaged.is_right(job, step)
    return tally


def stock_state(job: Job) -> dict[str, object]:
    """Plain torch's state of a job that has stepped, to be saved or loaded into."""
    moments = {str(n): state for n, state in enumerate(job.optimizer.state.values())}
    return {"model": job.model.state_dict(), "optimizer": moments, "progress": job.progress}


def save_stock(job: Job, folder: Path) -> None:
    dcp.save(stock_state(job), checkpoint_id=folder / f"step-{job.steps}", no_dist=True)


def load_damaged_stock(damaged: Damaged, damage: Damage, *, number: int, chance: random.Random) -> Tally:
    """Data alone: stock runs what damaged metadata says."""
    tally = Tally()
    for _ in range(number):
        with damaged.by(damage, FILES[0], chance) as folder:
            tally.injected += 1
            job = Job(damaged.width, is_swapped=False)
            job.step()
            try:
                dcp.load(stock_state(job), checkpoint_id=folder / f"step-{NUM_STEPS}", no_dist=True)
            except (Exception, CheckpointException):  # noqa: BLE001 - of many kinds
                tally.hit += 1
            else:
                tally.wrong_loads += not damaged.is_right(job, NUM_STEPS)
    return tally
