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
import multiprocessing
import os
import random
import resource
import select
import shutil
import signal
import tempfile
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import swapckpt
from benchmarks._damage import DAMAGES
from benchmarks._harness import Ratio, finish, parser, print_load, print_table
from benchmarks._victims import MODES, PINNED, Begun, Failed, Job, Reference, Saved, Saving, live
from swapckpt.errors import SwapCkptError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from benchmarks._damage import Damage
    from benchmarks._victims import Event

FILES = ("__0_0.distcp", ".swapckpt.json", ".metadata")
HANG_SECS = 120.0
NUM_STEPS = 3
"""Checkpoints in a folder that is damaged: two may be, one is whole."""


@dataclass(slots=True)
class Tally:
    """What came of the faults of one kind."""

    injected: int = 0
    hit: int = 0
    losses: int = 0
    wrong_loads: int = 0

    def row(self, name: str) -> tuple[str, ...]:
        return (name, *map(str, (self.injected, self.hit, self.losses, self.wrong_loads)))


# ---------------------------------------------------------------------------------------------- processes


class Life:
    """The process of a job, from its start to its SIGKILL.

    Args:
        folder: Of the checkpoints.
        width: Of the job.
        mode: In which it saves.
    """

    def __init__(self, folder: Path, width: int, mode: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([live.__module__])
        self._child, theirs = context.Pipe()
        self._process = context.Process(target=live, args=(theirs, folder, width, mode))
        self._process.start()
        theirs.close()

    def next_event(self) -> Event | None:
        """What it says next. None: it is dead.

        Raises:
            TimeoutError: It hangs.
        """
        if not self._child.poll(HANG_SECS):
            msg = f"The job has said nothing for {HANG_SECS:.0f} s: it hangs."
            raise TimeoutError(msg)
        try:
            event: Event = self._child.recv()
        except (EOFError, ConnectionResetError):
            return None
        return event

    def go_on(self) -> None:
        """Answer that it may save."""
        self._child.send(None)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@dataclass(slots=True)
class Lives:
    """Lives of one job, one after the other: each goes on from what the one before has left.

    Attributes:
        promised: The newest step whose save has reported success.
        save_secs: What the fastest save took: others have more to prepare before they write.
    """

    folder: Path
    width: int
    mode: str
    reference: Reference
    tally: Tally = field(default_factory=Tally)
    promised: int = 0
    save_secs: float = 0.1

    @contextmanager
    def born(self) -> Iterator[Life]:
        """A life that has loaded; what it has loaded is judged. SIGKILL at the end."""
        life = self._begun()
        try:
            yield life
        finally:
            life.kill()

    def _begun(self) -> Life:
        life = Life(self.folder, self.width, self.mode)
        event = life.next_event()
        if isinstance(event, Begun):
            step = event.step or 0
            self.tally.losses += step < self.promised
            self.tally.wrong_loads += event.digest != self.reference.digest(step)
            self.promised = step
            return life
        if not self.promised:
            msg = "A job does not begin that has no checkpoint to load."
            raise RuntimeError(msg)
        self.tally.losses += 1
        self.promised = 0
        shutil.rmtree(self.folder)  # nothing in it loads
        return self._begun()

    def kill_one(self, chance: random.Random) -> None:
        """SIGKILL during one of the next saves, or right behind it."""
        with self.born() as life:
            for _ in range(chance.randint(2, 4)):
                self._next_save(life)
            self._wait(chance)
            life.kill()
            self.tally.injected += 1
            self.tally.hit += self._outcome(life) is None

    def kill_writers(self, number: int, chance: random.Random) -> None:
        """SIGKILL of who writes every second save; the others must succeed. Then the newest is loaded."""
        with self.born() as life:
            for _ in range(number):
                self._next_save(life)
                saving = self._next_save(life)
                self._wait(chance)
                assert saving.writer is not None
                kill_process(saving.writer)
                self.tally.injected += 1
                self.tally.hit += isinstance(self._outcome(life), Failed)
            self._next_save(life)
            self._next_save(life)
        with self.born():
            pass

    def _wait(self, chance: random.Random) -> None:
        """Until a moment inside the save that has begun, or short behind it."""
        time.sleep(chance.uniform(0, 1.5 * self.save_secs))

    def _next_save(self, life: Life) -> Saving:
        """Until the next save begins. One that is under way has to succeed."""
        while (event := life.next_event()) is not None:
            match event:
                case Saving():
                    life.go_on()
                    return event
                case Saved():
                    self.promised, self.save_secs = event.step, min(self.save_secs, event.secs)
                case Failed():
                    self.tally.losses += 1
        msg = "The job has ended, and nobody has killed it."
        raise RuntimeError(msg)

    def _outcome(self, life: Life) -> Event | None:
        """How the save ends that is under way. None: by the death of the job."""
        outcome = life.next_event()
        if isinstance(outcome, Saved):
            self.promised = outcome.step
        return outcome


def kill_process(pid: int) -> None:
    """SIGKILL, and wait for the death: it can be later, and strike a save that nobody meant."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [], HANG_SECS)
        finally:
            os.close(process)


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


# ---------------------------------------------------------------------------------------------- damage


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
FULL = Sizes(width=1024, kills=60, writer_kills=30, full_disks=50, damages=300)
DAMAGED_WIDTH = 96


def killed(root: Path, sizes: Sizes, chance: random.Random) -> dict[str, Tally]:
    """Processes are killed while they save."""
    found = {}
    for mode in MODES:
        lives = Lives(root / mode, sizes.width, mode, Reference(sizes.width))
        for _ in range(sizes.kills):
            lives.kill_one(chance)
        with lives.born():  # what the last one has left
            pass
        found[f"SIGKILL, {mode}"] = lives.tally
    lives = Lives(root / "writer", sizes.width, PINNED, Reference(sizes.width))
    lives.kill_writers(sizes.writer_kills, chance)
    return {**found, "SIGKILL of the writer": lives.tally}


def filled(root: Path, sizes: Sizes, chance: random.Random) -> dict[str, Tally]:
    """Disks are full in the midst of saves."""
    return {
        f"full disk, {mode}": fill_disk(
            root / f"full-{mode}", sizes.width, number=sizes.full_disks, chance=chance, mode=mode
        )
        for mode in ("async", PINNED)
    }


def damaged(root: Path, sizes: Sizes, chance: random.Random) -> tuple[dict[str, Tally], dict[str, Tally]]:
    """Files are damaged, ours and stock's."""
    ours = Damaged(root / "ours", DAMAGED_WIDTH, save_ours)
    stock = Damaged(root / "stock", DAMAGED_WIDTH, save_stock)
    number = sizes.damages
    return (
        {name: load_damaged(ours, each, number=number, chance=chance) for name, each in DAMAGES.items()},
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
