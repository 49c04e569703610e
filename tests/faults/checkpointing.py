"""What two ranks do in a cell of the matrix when their job saves and loads through a Checkpointer."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist

import swapckpt
from swapckpt.checkpointer import service
from swapckpt.checkpointer.planners import PartLoadPlanner, RankSavePlanner
from swapckpt.errors import StateFailedError, SwapCkptError
from swapckpt.storage import committed_steps, open_files
from tests.checkpointer.jobs import ASYNC, Job, differing
from tests.checkpointer.test_ranks import local, sharded
from tests.faults.matrix import NEW, OLD, Action, After, Cell, Kind, Phase
from tests.faults.ranks import Fault
from tests.storage.stores import HookedFiles, HookedReader, HookedWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapckpt.storage.files import FileReader, Files, FileWriter

PLACES = {Phase.WRITE: "append", Phase.FLUSH: "close", Phase.COMMIT: "rename", Phase.READ: "read"}
PEER_SECS = 1.0
"""A peer that does not answer for so long has failed. Doubled when that was too short to reach the fault."""
ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of a cell."""

    raised: str  # type and message; "nothing"
    after: After | str
    visible: bool  # the step that was being saved


# ------------------------------------------------------------------------------------------------- the fault


class FaultyFiles(HookedFiles):
    """Strikes in the phases that touch files."""

    def __init__(self, files: Files, fault: Fault) -> None:
        super().__init__(files, self._strike)
        self._fault = fault

    def _strike(self, _number: int, operation: str, path: str) -> None:
        phase = self._fault.cell.phase
        suffix = f"step-{NEW + 1}" if phase is Phase.COMMIT else ".distcp"
        if operation.split(maxsplit=1)[0] == PLACES.get(phase) and path.endswith(suffix):
            self._fault.on(phase)

    def _loses(self, phase: Phase) -> bool:
        fault, cell = self._fault, self._fault.cell
        is_here = cell.kind is Kind.SHORT and cell.phase is phase and cell.rank == dist.get_rank()
        if fault.reached or not is_here:
            return False
        fault.reached = True
        return True

    def create(self, path: str, *, nbytes: int) -> FileWriter:
        if not self._loses(Phase.WRITE):
            return super().create(path, nbytes=nbytes)
        return LossyWriter(self, path, self._files.create(path, nbytes=nbytes))

    def put(self, path: str, data: bytes) -> None:
        if path.endswith(".metadata") and self._loses(Phase.COMMIT):
            data = data[: len(data) // 2]
        super().put(path, data)

    def open(self, path: str) -> FileReader:
        if not path.endswith(".distcp") or not self._loses(Phase.READ):
            return super().open(path)
        short = f"short-{dist.get_rank()}"  # what this rank alone sees of the file
        content = (Path(self.url) / path).read_bytes()
        (Path(self.url) / short).write_bytes(content[:16])
        return HookedReader(self, path, self._files.open(short))


class LossyWriter(HookedWriter):
    """Bytes are lost at the end of the file, and no error is reported."""

    def close(self) -> None:
        super().close()
        place = Path(self._files.url) / self._path
        os.truncate(place, place.stat().st_size // 2)


@dataclass(slots=True)
class FaultyState:
    """A Stateful behind all others, whose part of a save or load can fail."""

    fault: Fault

    def state_dict(self) -> dict[str, Any]:
        self.fault.on(Phase.STAGE)
        return {"n": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        self.fault.on(Phase.RESTORE)


@contextmanager
def planning(fault: Fault) -> Iterator[None]:
    """Planners that strike."""

    def striking(planner: type[RankSavePlanner | PartLoadPlanner]) -> Any:
        original: Any = planner.create_local_plan

        def create_local_plan(self: object) -> Any:
            fault.on(Phase.PLAN)
            return original(self)

        return mock.patch.object(planner, "create_local_plan", create_local_plan)

    with striking(RankSavePlanner), striking(PartLoadPlanner):
        yield


def checkpointer_of(
    job: Job, folder: Path, fault: Fault | None = None, *, config: swapckpt.CheckpointConfig = ASYNC
) -> swapckpt.Checkpointer:
    if fault is None:
        return swapckpt.Checkpointer(folder, {**job.states, "zz": {"n": 1}}, config)
    with mock.patch.object(
        service, "open_files", lambda url, **all_: FaultyFiles(open_files(url, **all_), fault)
    ):
        return swapckpt.Checkpointer(folder, {**job.states, "zz": FaultyState(fault)}, config)


# ------------------------------------------------------------------------------------------------- the cells


@dataclass(slots=True)
class Run:
    """A job that has arrived at NEW, with checkpoints of OLD and NEW."""

    job: Job
    contents: dict[int, dict[str, Any]]

    @classmethod
    def prepare(cls, folder: Path) -> Run:
        job, contents = sharded(), {}
        with checkpointer_of(job, folder) as checkpointer:
            for step in (OLD, NEW):
                job.step(step)
                contents[step] = local(job)
                checkpointer.save(step).result()
        return cls(job, contents)

    def call(self, checkpointer: swapckpt.Checkpointer, action: Action) -> str:
        try:
            if action is Action.LOAD:
                checkpointer.load(OLD)
            else:
                checkpointer.save(NEW + 1).result()
        except SwapCkptError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def after(self) -> After | str:
        try:
            self.job.manager.state_dict()
        except StateFailedError:
            return After.FAILED
        found = local(self.job)
        if not differing(found, self.contents[NEW]):
            return After.UNTOUCHED
        return After.LOADED if not differing(found, self.contents[OLD]) else "torn, and no error"

    def go_on(self, checkpointer: swapckpt.Checkpointer) -> None:
        """The older checkpoint has its values, the job goes on from it, and the next save is whole."""
        assert checkpointer.load(OLD) == OLD
        assert not differing(local(self.job), self.contents[OLD])
        self.job.step(NEW)
        assert not differing(local(self.job), self.contents[NEW])
        checkpointer.save(NEW + 1, overwrite=True).result()
        assert checkpointer.load() == NEW + 1
        assert not differing(local(self.job), self.contents[NEW])


def meet_all(root: Path, cells: list[Cell]) -> dict[str, Seen]:
    """Meet the faults one after the other, and go on after each. Ranks survive all of them."""
    run, met = Run.prepare(root / "base"), {}
    for cell in cells:
        for attempt in range(ATTEMPTS):
            folder = root / f"{cell}-{attempt}"
            if dist.get_rank() == 0:
                shutil.copytree(root / "base", folder)
            reached, met[str(cell)] = _meet(run, folder, cell, peer_secs=PEER_SECS * 2**attempt)
            if reached:
                break
        else:
            msg = f"The fault of {cell} was never reached: last seen {met[str(cell)]}"
            raise AssertionError(msg)
    return met


def _meet(run: Run, folder: Path, cell: Cell, *, peer_secs: float) -> tuple[bool, Seen]:
    breaks = cell.kind is Kind.HANG  # the group of this checkpointer
    fault = Fault(cell, folder)
    dist.barrier()
    raised = "not begun"
    checkpointer = None
    try:
        config = replace(ASYNC, timeout_secs=peer_secs) if breaks else ASYNC
        checkpointer = checkpointer_of(run.job, folder, fault, config=config)
        with planning(fault):
            raised = run.call(checkpointer, cell.action)
    except RuntimeError:  # the ranks did not meet in time for a group
        if not breaks:
            raise
    if dist.get_rank() != cell.rank:
        (folder / "gave-up").touch()
    dist.barrier()
    visible = NEW + 1 in committed_steps(open_files(str(folder)))
    seen = Seen(raised, run.after(), visible)
    dist.barrier()
    if breaks:
        if checkpointer is not None:
            checkpointer.close()
        with checkpointer_of(run.job, folder) as another:
            run.go_on(another)
    else:
        assert checkpointer is not None
        run.go_on(checkpointer)
        checkpointer.close()
    reached_by = [False, False]
    dist.all_gather_object(reached_by, fault.reached)
    return any(reached_by), seen


def meet_deadly(folder: Path, cell: Cell) -> Seen:
    """The survivor's view."""
    run, fault = Run.prepare(folder), Fault(cell, folder)
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    checkpointer = checkpointer_of(run.job, folder, fault, config=replace(ASYNC, timeout_secs=20))
    dist.barrier()
    with planning(fault):
        raised = run.call(checkpointer, cell.action)
    seen = Seen(raised, run.after(), NEW + 1 in checkpointer.steps())
    checkpointer.close()
    return seen
