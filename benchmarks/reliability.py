"""Faults in saves, and in checkpoints that were saved: what is lost, and what is loaded wrong.

A "loss" is a save that had reported success and does not load, or one that fails though nothing strikes it; a
"wrong load" one that raises no error and gives other bits than plain torch has at that step. "hit" counts the
faults that cut a save off or raised an error; others came too late, or met bytes that nothing reads. Faults
are real: SIGKILL of the job, and of the process that writes for it, at random moments; a limit of the size of
files, as a full disk; damage to files. Of three checkpoints the newest is damaged, and has to be refused,
while load(fallback=True) finds an older one. Rows of stock: dcp.load of what dcp.save has written.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import sys
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import swapckpt
from benchmarks._damage import (
    DAMAGES,
    FILES,
    Damaged,
    load_damaged,
    load_damaged_stock,
    save_ours,
    save_stock,
)
from benchmarks._harness import Ratio, finish, parser, print_load, print_table
from benchmarks._lives import Lives, Tally
from benchmarks._victims import MODES, PINNED, Job, Reference
from swapckpt.errors import SwapCkptError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

# ---------------------------------------------------------------------------------------------- full disks


@contextmanager
def file_limit(checkpointer: swapckpt.Checkpointer, nbytes: int) -> Iterator[None]:
    """No file of who writes may become larger (EFBIG): what a full disk is, without a disk to fill."""
    pid = checkpointer.runner.pid if checkpointer.runner is not None else os.getpid()
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def fill_disk(folder: Path, width: int, *, number: int, chance: random.Random, mode: str) -> Tally:
    """Every second save meets the limit. It has to say so, and the next one to succeed."""
    job, tally, reference = Job(width), Tally(), Reference(width)
    with job.checkpointer(folder, mode) as checkpointer:
        for _ in range(number):
            job.step()
            checkpointer.save(job.steps).result()
            promised, largest = job.steps, (folder / f"step-{job.steps}" / FILES[0]).stat().st_size
            job.step()
            tally.injected += 1
            with file_limit(checkpointer, chance.randrange(largest)):
                try:
                    checkpointer.save(job.steps).result()
                except SwapCkptError:
                    tally.hit += 1
                else:
                    promised = job.steps
            judge_load(tally, folder, promised, reference=reference, width=width)
    return tally


def judge_load(tally: Tally, folder: Path, promised: int, *, reference: Reference, width: int) -> None:
    """The newest checkpoint is at least the promised one, and has its bits."""
    job = Job(width)
    with job.checkpointer(folder) as checkpointer:
        try:
            step = checkpointer.load()
        except SwapCkptError:
            step = None
    if step is None or step < promised:
        tally.losses += 1
    elif job.digest() != reference.digest(step):
        tally.wrong_loads += 1


# ---------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    width: int
    kills: int  # of each mode
    writer_kills: int
    full_disks: int  # of each mode
    damages: int  # of each kind


QUICK = Sizes(width=512, kills=2, writer_kills=2, full_disks=3, damages=6)
FULL = Sizes(width=512, kills=60, writer_kills=30, full_disks=50, damages=300)
DAMAGED_WIDTH = 96


def told(name: str, tally: Tally) -> Tally:
    """Say what came of one kind, for whoever waits: all of them take minutes."""
    print(f"{name}: {tally}", file=sys.stderr, flush=True)
    return tally


def killed(root: Path, sizes: Sizes, chance: random.Random) -> dict[str, Tally]:
    """Processes are killed while they save."""
    found = {}
    for mode in MODES:
        lives = Lives(root / mode, sizes.width, mode, Reference(sizes.width))
        for _ in range(sizes.kills):
            lives.kill_one(chance)
        with lives.born():  # what the last one has left
            pass
        found[f"SIGKILL, {mode}"] = told(f"SIGKILL, {mode}", lives.tally)
    lives = Lives(root / "writer", sizes.width, PINNED, Reference(sizes.width))
    lives.kill_writers(sizes.writer_kills, chance)
    return {**found, "SIGKILL of the writer": told("SIGKILL of the writer", lives.tally)}


def filled(root: Path, sizes: Sizes, chance: random.Random) -> dict[str, Tally]:
    """Disks are full in the midst of saves."""
    found = {}
    for mode in ("async", PINNED):
        folder, name = root / f"full-{mode}", f"full disk, {mode}"
        tally = fill_disk(folder, sizes.width, number=sizes.full_disks, chance=chance, mode=mode)
        found[name] = told(name, tally)
    return found


def damaged(root: Path, sizes: Sizes, chance: random.Random) -> tuple[dict[str, Tally], dict[str, Tally]]:
    """Files are damaged, ours and stock's."""
    ours = Damaged(root / "ours", DAMAGED_WIDTH, save_ours)
    stock = Damaged(root / "stock", DAMAGED_WIDTH, save_stock)
    number = sizes.damages
    return (
        {
            name: told(name, load_damaged(ours, each, number=number, chance=chance))
            for name, each in DAMAGES.items()
        },
        {
            f"{name}, stock": load_damaged_stock(stock, each, number=number, chance=chance)
            for name, each in DAMAGES.items()
        },
    )


def ratios(tallies: dict[str, Tally], *, planned: int) -> dict[str, Ratio]:
    return {
        "losses": Ratio(sum(tally.losses for tally in tallies.values()), 0.0),
        "wrong_loads": Ratio(sum(tally.wrong_loads for tally in tallies.values()), 0.0),
        "faults_injected": Ratio(sum(tally.injected for tally in tallies.values()), planned, "higher"),
    }


def main(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger(swapckpt.__name__).setLevel(logging.ERROR)  # that a load falls back is what is wanted
    torch.set_num_threads(1)
    print_load()
    sizes = QUICK if arguments.quick else FULL
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        ours = killed(root, sizes, chance) | filled(root, sizes, chance)
        files, stock = damaged(root, sizes, chance)
    ours |= files
    print_table(
        ("", "injected", "hit", "losses", "wrong loads"),
        [tally.row(name) for name, tally in (ours | stock).items()],
    )
    planned = (
        len(MODES) * sizes.kills + sizes.writer_kills + 2 * sizes.full_disks + len(DAMAGES) * sizes.damages
    )
    finish(ratios(ours, planned=planned), arguments.json)


if __name__ == "__main__":
    options = parser(__doc__ or "")
    options.add_argument("--folder", type=Path, help="where to save (default: the system's folder)")
    options.add_argument("--seed", type=int, default=0, help="decides when and where it strikes")
    main(options.parse_args())
