"""What the ranks of a cell do: train, meet the fault, and tell what they see.

Gradients are made from the parameters, without communication: a rank whose peer has died can still step, and
must arrive where plain torch does.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import swapckpt
from swapckpt.errors import StateFailedError
from tests.faults.files import Call, Calls, reader, writer
from tests.faults.matrix import NEW, OLD, RANKS, Action, After, Cell, Kind, Phase, Raised, Visible, expected
from tests.manager.training import CONFIG, Net, assert_same_bits, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
    from torch.optim import Optimizer

    from swapckpt.device import CpuDevice

LAST_STEP = 4
BEFORE = {Action.SAVE: NEW, Action.LOAD: 3}
"""The step a rank has reached when the call begins. Saves save it; loads go back to NEW from it."""
PEER_SECS = 0.4
"""A peer that does not answer for so long has failed. Doubled when that was too short to reach the fault."""
HANG_SECS = 60.0

PLACES = {
    Phase.WRITE: (Call.WRITE, ".distcp"),
    Phase.FLUSH: (Call.FSYNC, ".distcp"),
    Phase.COMMIT: (Call.RENAME, ".metadata.tmp"),
    Phase.READ: (Call.READ, ".distcp"),
}
LOST_BY = {Phase.WRITE: ".distcp", Phase.COMMIT: ".metadata.tmp", Phase.READ: ".distcp"}


class InjectedError(Exception):
    """Nothing but a test raises it."""


# ------------------------------------------------------------------------------------------------- training


@dataclass(slots=True)
class Training:
    model: nn.Module
    optimizer: Optimizer
    manager: swapckpt.StateManager

    @classmethod
    def build(
        cls, config: swapckpt.SwapConfig | None = CONFIG, *, device: CpuDevice | None = None
    ) -> Training:
        model = Net(depth=1)  # fewer system calls to kill at
        if dist.is_initialized():
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return cls(model, optimizer, swapckpt.StateManager(model, optimizer, config, device=device))

    def step(self, step: int) -> None:
        for param in self.model.parameters():
            param.grad = torch.sin(param.detach() * 3 + step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def contents(self) -> dict[str, object]:
        """Copies of this rank's shards of all parameters and state, by name."""
        copied: dict[str, object] = {}
        for name, param in self.model.named_parameters():
            copied[name] = _local(param)
            for key, value in self.optimizer.state.get(param, {}).items():
                copied[f"{name}.{key}"] = _local(value)
        return copied

    def full_contents(self) -> dict[str, object]:
        """Copies of everything, by name. A collective call."""
        full: dict[str, object] = {}
        for name, param in self.model.named_parameters():
            full[name] = _full(param)
            for key, value in self.optimizer.state.get(param, {}).items():
                full[f"{name}.{key}"] = _full(value)
        return full

    def save(self, path: Path, *, group: ProcessGroup | None = None, **options: object) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.manager}
        dcp.save(state, checkpoint_id=path, process_group=group, **options)

    def load(self, path: Path, *, group: ProcessGroup | None = None, no_dist: bool = False) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.manager}
        planner = swapckpt.StrictLoadPlanner(self.manager)
        dcp.load(state, checkpoint_id=path, process_group=group, no_dist=no_dist, planner=planner)
        self.model.load_state_dict(state["model"])

    def is_at(self, root: Path, step: int) -> bool:
        """Whether all bits of this rank are those that plain torch has after ``step``."""
        found, plain = self.contents(), torch.load(plain_path(root, step))
        return found.keys() == plain.keys() and all(same_bits(found[name], plain[name]) for name in plain)

    def recover(self, root: Path, *, alone: bool = False) -> None:
        """Load the older checkpoint and take a step from it, as plain torch."""
        with self.manager.recovery():
            self.load(root / f"step-{OLD}", no_dist=alone)
        assert self.is_at(root, OLD), "the older checkpoint has other values"
        self.step(OLD + 1)
        assert self.is_at(root, OLD + 1), "the step after a recovery differs from plain torch"


def _local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def _full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def plain_path(root: Path, step: int) -> Path:
    rank = dist.get_rank() if dist.is_initialized() else "all"
    return root / f"plain-{step}-rank-{rank}.pt"


def prepare(root: Path) -> None:
    """What plain torch arrives at after each step, and whole checkpoints of both steps at stake."""
    plain, swapped = Training.build(None), Training.build()
    for step in range(1, LAST_STEP + 1):
        plain.step(step)
        swapped.step(step)
        torch.save(plain.contents(), plain_path(root, step))
        full = plain.full_contents()
        if dist.get_rank() == 0:
            torch.save(full, root / f"plain-{step}-rank-all.pt")
        assert_same_bits(swapped.contents(), plain.contents())
        if step in (OLD, NEW):
            swapped.save(root / f"step-{step}")


# ------------------------------------------------------------------------------------------------- the fault


@dataclass(slots=True)
class Fault:
    """Strikes once, on the cell's rank, when the cell's phase is reached."""

    cell: Cell
    folder: Path
    reached: bool = False

    def on_files(self, call: Call, path: Path) -> None:
        wanted, suffix = PLACES.get(self.cell.phase, (None, ""))
        if call is wanted and path.name.endswith(suffix):
            self.on(self.cell.phase)

    def on(self, phase: Phase) -> None:
        cell = self.cell
        # Only rank 0 commits: when it does is the time for another one to die.
        struck_here = dist.get_rank() == (0 if cell.phase is Phase.COMMIT else cell.rank)
        if phase is not cell.phase or self.reached or not struck_here or cell.kind is Kind.SHORT:
            return
        self.reached = True
        if cell.kind is Kind.EXCEPTION:
            raise InjectedError(str(cell))
        if cell.kind is Kind.HANG:
            wait_for((self.folder / "gave-up").exists)
        elif cell.kind is Kind.SIGKILL:
            _kill(int((self.folder / f"pid-{cell.rank}").read_text()))
        else:
            number = errno.ENOSPC if cell.kind is Kind.ENOSPC else errno.EIO
            raise OSError(number, os.strerror(number))

    def calls(self) -> Calls:
        lossy = self.cell.kind is Kind.SHORT and self.cell.rank == dist.get_rank()
        if lossy:
            self.reached = True
        return Calls(self.on_files, loses=LOST_BY[self.cell.phase] if lossy else None)

    def is_ours(self, error: BaseException) -> bool:
        """Whether ``error`` is what this fault causes by itself."""
        if self.cell.kind in (Kind.ENOSPC, Kind.EIO):
            number = errno.ENOSPC if self.cell.kind is Kind.ENOSPC else errno.EIO
            return isinstance(error, OSError) and error.errno == number
        return isinstance(error, InjectedError) or self.cell.kind is Kind.SHORT


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECS
    while not condition():
        assert time.monotonic() < deadline, f"waited for {HANG_SECS:g} s"
        time.sleep(0.01)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)

    def is_gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(is_gone)


@dataclass(slots=True)
class FaultyState:
    """The manager, with a fault in its part of a save or load."""

    manager: swapckpt.StateManager
    fault: Fault

    def state_dict(self) -> dict[str, object]:
        self.fault.on(Phase.STAGE)
        return self.manager.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            group["weight_decay"] = _Setting(self.fault, group["weight_decay"])
        self.manager.load_state_dict(state_dict)


@dataclass(slots=True)
class _Setting:
    """A group setting. It is copied when the state has been restored, and the other settings have not."""

    fault: Fault
    value: object

    def __deepcopy__(self, memo: object) -> object:
        self.fault.on(Phase.RESTORE)
        return self.value


class FaultySavePlanner(DefaultSavePlanner):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def create_local_plan(self) -> SavePlan:
        self._fault.on(Phase.PLAN)
        return super().create_local_plan()


class FaultyLoadPlanner(swapckpt.StrictLoadPlanner):
    def __init__(self, manager: swapckpt.StateManager, fault: Fault) -> None:
        super().__init__(manager)
        self._fault = fault

    def create_local_plan(self) -> LoadPlan:
        self._fault.on(Phase.PLAN)
        return super().create_local_plan()


# ------------------------------------------------------------------------------------------------- one cell


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of a cell. A str stands for what no cell expects."""

    raised: Raised | str
    after: After | str
    visible: Visible | str | None = None


def meet_all(root: Path, cells: list[Cell]) -> dict[str, Seen]:
    """Meet the faults one after the other, and recover after each. Ranks survive all of them."""
    training = Training.build()
    training.recover(root)
    return {str(cell): _meet_until_reached(cell, root, training) for cell in cells}


def meet_deadly(root: Path, cell: Cell) -> Seen:
    """The survivor's view. It has no peer any more, and reads the older checkpoint alone."""
    training = Training.build()
    training.recover(root)
    _, seen = _meet(cell, root / str(cell), training, group=None)
    training.recover(root, alone=True)
    return seen


def _meet_until_reached(cell: Cell, root: Path, training: Training) -> Seen:
    seen = None
    for attempt in range(5):
        folder = root / f"{cell}-{attempt}"
        group = None
        if Raised.LOST_PEER in expected(cell).raised:  # such a group cannot be used again
            group = dist.new_group(timeout=timedelta(seconds=PEER_SECS * 2**attempt))
        reached, seen = _meet(cell, folder, training, group=group)
        dist.barrier()
        if cell.action is Action.SAVE:
            seen = replace(seen, visible=look(training, folder / f"step-{NEW}", root))
        training.recover(root)
        reached_by: list[bool] = [False] * len(RANKS)
        dist.all_gather_object(reached_by, reached)
        if any(reached_by):
            return seen
    msg = f"The fault of {cell} was never reached: last seen {seen}"
    raise AssertionError(msg)


def look(training: Training, path: Path, root: Path) -> Visible | str:
    """What a reader finds under the name of the newer checkpoint."""
    if not (path / ".metadata").exists():
        return Visible.NOTHING
    try:
        with training.manager.recovery():
            training.load(path)
    except CheckpointException:
        return Visible.BROKEN
    return Visible.WHOLE if training.is_at(root, NEW) else "wrong values, and no error"


def _meet(cell: Cell, folder: Path, training: Training, *, group: ProcessGroup | None) -> tuple[bool, Seen]:
    """Call with the fault: whether it was reached here, and what this rank is left with."""
    root, rank = folder.parent, dist.get_rank()
    if cell.action is Action.LOAD:
        training.step(BEFORE[cell.action])
    folder.mkdir(exist_ok=True)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    fault, error = Fault(cell, folder), None
    try:
        if cell.action is Action.SAVE:
            _save(training, fault, folder / f"step-{NEW}", group)
        else:
            _load(training, fault, root / f"step-{NEW}", group)
    except (Exception, CheckpointException) as raised:  # noqa: BLE001 - what it is, is the question
        error = raised
    if rank != cell.rank:
        (folder / "gave-up").touch()
    return fault.reached, Seen(_classify(error, fault), _state_after(training, root, cell))


def _save(training: Training, fault: Fault, path: Path, group: ProcessGroup | None) -> None:
    dcp.save(
        {"model": training.model.state_dict(), "optimizer": FaultyState(training.manager, fault)},
        storage_writer=writer(path, fault.calls()),
        planner=FaultySavePlanner(fault),
        process_group=group,
    )


def _load(training: Training, fault: Fault, path: Path, group: ProcessGroup | None) -> None:
    dcp.load(
        {"model": training.model.state_dict(), "optimizer": FaultyState(training.manager, fault)},
        storage_reader=reader(path, fault.calls()),
        planner=FaultyLoadPlanner(training.manager, fault),
        process_group=group,
    )


def _classify(error: BaseException | None, fault: Fault) -> Raised | str:
    if error is None:
        return Raised.NOTHING
    if isinstance(error, CheckpointException):
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        if causes.keys() == {fault.cell.rank} and fault.is_ours(causes[fault.cell.rank]):
            return Raised.WRAPPED
    elif fault.cell.kind is not Kind.SHORT and fault.is_ours(error):
        return Raised.ITS_OWN
    elif isinstance(error, RuntimeError) and "gloo" in str(error).lower():
        return Raised.LOST_PEER
    return f"{type(error).__name__}: {error}"


def _state_after(training: Training, root: Path, cell: Cell) -> After | str:
    """Compared with plain torch; what seems ready must step as plain torch does."""
    manager = training.manager
    calls = (
        manager.state_dict,
        manager.snapshot,
        training.optimizer.state_dict,
        lambda: training.step(0),
        lambda: training.save(root / "never", no_dist=True),
    )
    if _refuses(manager.state_dict):
        refused = [_refuses(call) for call in calls]
        return After.FAILED if all(refused) else f"refuses only some calls: {refused}"
    before = BEFORE[cell.action]
    for step, after in ((before, After.UNTOUCHED), (NEW, After.LOADED)):
        if training.is_at(root, step):
            training.step(step + 1)
            return after if training.is_at(root, step + 1) else f"{after}, but the next step is wrong"
    return "wrong values, and no error"


def _refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except StateFailedError:
        return True
    return False
