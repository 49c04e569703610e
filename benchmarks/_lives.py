"""Lives of a job that ends by SIGKILL, again and again, or whose writer process does."""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks._victims import Begun, Failed, Saved, Saving, live

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks._victims import Event, Reference

HANG_SECS = 400.0


@dataclass(slots=True)
class Tally:
    """What came of the faults of one kind."""

    injected: int = 0
    hit: int = 0
    losses: int = 0
    wrong_loads: int = 0

    def __str__(self) -> str:
        return f"{self.hit} of {self.injected} hit, {self.losses} lost, {self.wrong_loads} loaded wrong"

    def row(self, name: str) -> tuple[str, ...]:
        return (name, *map(str, (self.injected, self.hit, self.losses, self.wrong_loads)))


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
            if step < self.promised:
                self._lose(f"step {self.promised} had been saved, step {step} was loaded")
            self.tally.wrong_loads += event.digest != self.reference.digest(step)
            self.promised = step
            return life
        if not self.promised:
            msg = "A job does not begin that has no checkpoint to load."
            raise RuntimeError(msg)
        self._lose(f"step {self.promised} had been saved, and nothing loads")
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

    def _lose(self, how: str) -> None:
        self.tally.losses += 1
        print(f"Loss, {self.mode}: {how}", file=sys.stderr)

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
                    self._lose(f"step {event.step} could not be saved: {event.error}")
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
