"""The fault matrix: which cells exist, and what each must show. Nothing here runs anything.

A cell is one fault: ``action`` (a save or a load on two ranks), the ``phase`` it strikes in, the ``rank`` it
strikes, and its ``kind``. Cells come from the product of small tables; ``expected`` derives the outcome of a
cell from a few rules, and ``table`` writes them down as docs/faults.md has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANKS = (0, 1)
OLD, NEW = 1, 2
"""Steps whose checkpoints are at stake: the older one is whole, the newer one is being saved or loaded."""


class Action(Enum):
    SAVE = "save"
    LOAD = "load"


class Phase(Enum):
    STAGE = "stage"  # state_dict()
    PLAN = "plan"  # the planner
    WRITE = "write"  # into a data file
    FLUSH = "flush"  # fsync of a data file
    COMMIT = "commit"  # .metadata; done by rank 0 alone
    READ = "read"  # from a data file, after a part of it
    RESTORE = "restore"  # load_state_dict()


class Kind(Enum):
    EXCEPTION = "exception"
    ENOSPC = "ENOSPC"
    EIO = "EIO"
    SHORT = "short"  # bytes are lost at the end of the file, and no error is reported
    HANG = "hang"  # until the peer has given up
    SIGKILL = "SIGKILL"


PHASES = {
    Action.SAVE: (Phase.STAGE, Phase.PLAN, Phase.WRITE, Phase.FLUSH, Phase.COMMIT),
    Action.LOAD: (Phase.STAGE, Phase.PLAN, Phase.READ, Phase.RESTORE),
}
FILE_KINDS = {
    Phase.WRITE: {Kind.ENOSPC, Kind.EIO, Kind.SHORT},
    Phase.FLUSH: {Kind.ENOSPC, Kind.EIO},
    Phase.COMMIT: {Kind.ENOSPC, Kind.EIO, Kind.SHORT},
    Phase.READ: {Kind.EIO, Kind.SHORT},
}
"""Errors that only a file can have, by the phases that touch files."""


@dataclass(frozen=True, slots=True)
class Cell:
    action: Action
    phase: Phase
    rank: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.action.value}-{self.phase.value}-rank{self.rank}-{self.kind.value}"

    @property
    def exists(self) -> bool:
        if self.phase not in PHASES[self.action]:
            return False
        if self.phase is Phase.COMMIT and self.rank != 0:
            return self.kind is Kind.SIGKILL  # it only waits for rank 0: it cannot fail, but it can die
        return self.kind in FILE_KINDS.get(self.phase, set()) | {Kind.EXCEPTION, Kind.HANG, Kind.SIGKILL}


CELLS = [cell for cell in (Cell(*each) for each in product(Action, Phase, RANKS, Kind)) if cell.exists]
SURVIVABLE = [cell for cell in CELLS if cell.kind is not Kind.SIGKILL]
DEADLY = [cell for cell in CELLS if cell.kind is Kind.SIGKILL]


class Raised(Enum):
    """What a call raised on one rank."""

    NOTHING = "-"
    ITS_OWN = "the error itself"
    WRAPPED = "CheckpointException"
    LOST_PEER = "process group error"  # a timeout, or a connection that the peer closed
    DEAD = "killed"


class After(Enum):
    """The state of one rank after the call."""

    UNTOUCHED = "as before"  # the very bits, and ready for the next step
    LOADED = "loaded"  # the newer checkpoint, ready for the next step
    FAILED = "FAILED"  # everything refuses until the older checkpoint is loaded in recovery()
    DEAD = "killed"


class Visible(Enum):
    """What lies at the newer checkpoint's place after a save."""

    NOTHING = "no `.metadata`"
    WHOLE = "the new checkpoint"
    BROKEN = "`.metadata`; a load refuses"


@dataclass(frozen=True, slots=True)
class Expected:
    raised: tuple[Raised, Raised]  # by rank
    after: tuple[After, After]
    visible: Visible | None  # None: the cell is a load


def expected(cell: Cell) -> Expected:
    raised = [_raised(cell, rank) for rank in RANKS]
    after = [_after(cell, rank) for rank in RANKS]
    return Expected((raised[0], raised[1]), (after[0], after[1]), _visible(cell))


def _raised(cell: Cell, rank: int) -> Raised:
    struck = rank == cell.rank
    if cell.kind is Kind.SIGKILL and struck:
        return Raised.DEAD
    if cell.phase is Phase.RESTORE:  # each rank for itself, no communication
        return Raised.ITS_OWN if struck and cell.kind is Kind.EXCEPTION else Raised.NOTHING
    if cell.kind in (Kind.HANG, Kind.SIGKILL):
        return Raised.LOST_PEER
    if cell.kind is Kind.SHORT and cell.action is Action.SAVE:
        return Raised.NOTHING
    if cell.phase is Phase.STAGE:  # DCP calls state_dict() outside of what it reports to the other ranks
        return Raised.ITS_OWN if struck else Raised.LOST_PEER
    return Raised.WRAPPED


def _after(cell: Cell, rank: int) -> After:
    if cell.kind is Kind.SIGKILL and rank == cell.rank:
        return After.DEAD
    if cell.phase is Phase.RESTORE:
        failed = cell.kind is Kind.EXCEPTION and rank == cell.rank
        return After.FAILED if failed else After.LOADED
    return After.FAILED if cell.phase is Phase.READ else After.UNTOUCHED


def _visible(cell: Cell) -> Visible | None:
    if cell.action is Action.LOAD:
        return None
    if cell.kind is Kind.SHORT:
        return Visible.BROKEN
    if cell.phase is Phase.COMMIT and (cell.kind is Kind.HANG or cell.rank != 0):
        return Visible.WHOLE  # rank 0 finishes its work, and only then learns that nobody listens
    return Visible.NOTHING


# ------------------------------------------------------------------------------------------------- the table


def table() -> str:
    """All cells through stock DCP."""
    columns = ("raised there", "on the other", "state there", "on the other", "visible")
    return markdown(columns, _outcome)


def markdown(columns: Sequence[str], outcome: Callable[[Cell], tuple[str, ...]]) -> str:
    """All cells in Markdown, with the given columns of their outcome; those that share it share a line."""
    header = ("phase", "fault", "on rank", *columns)
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for (name, *values), ranks_by_kind in _by_outcome(outcome).items():
        kinds_by_ranks: dict[tuple[int, ...], list[str]] = {}
        for kind, ranks in ranks_by_kind.items():
            kinds_by_ranks.setdefault(tuple(ranks), []).append(kind.value)
        for struck, kinds in kinds_by_ranks.items():
            where = " or ".join(map(str, struck))
            lines.append(f"| {name} | {', '.join(kinds)} | {where} | {' | '.join(values)} |")
    return "\n".join(lines)


def _by_outcome(outcome: Callable[[Cell], tuple[str, ...]]) -> dict[tuple[str, ...], dict[Kind, list[int]]]:
    lines: dict[tuple[str, ...], dict[Kind, list[int]]] = {}
    for cell in CELLS:
        line = (f"{cell.action.value}, {cell.phase.value}", *outcome(cell))
        lines.setdefault(line, {}).setdefault(cell.kind, []).append(cell.rank)
    return lines


def _outcome(cell: Cell) -> tuple[str, ...]:
    outcome, other = expected(cell), 1 - cell.rank
    return (
        outcome.raised[cell.rank].value,
        outcome.raised[other].value,
        outcome.after[cell.rank].value,
        outcome.after[other].value,
        outcome.visible.value if outcome.visible is not None else "",
    )
