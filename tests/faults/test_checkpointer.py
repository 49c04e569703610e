"""The matrix through the Checkpointer. Stricter than stock DCP: what strikes one rank is an error on both,
nothing incomplete is visible, and the same checkpointer goes on unless a rank was lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from swapckpt.storage import committed_steps, open_files
from tests.checkpointer.jobs import Job, differing
from tests.checkpointer.test_ranks import without_norm
from tests.faults.checkpointing import Seen, checkpointer_of, meet_all, meet_deadly
from tests.faults.matrix import (
    DEADLY,
    NEW,
    OLD,
    RANKS,
    SURVIVABLE,
    Action,
    After,
    Cell,
    Kind,
    Phase,
    markdown,
)

if TYPE_CHECKING:
    from tests.multirank import RankRunner

TEXTS = {
    Kind.ENOSPC: "OSError: [Errno 28] No space left on device",
    Kind.EIO: "OSError: [Errno 5] Input/output error",
    Kind.HANG: "a rank is gone or does not answer in time",
    Kind.SIGKILL: "a rank is gone or does not answer in time",
}
SHORT_TEXTS = {
    Phase.WRITE: "is not what the ranks wrote",
    Phase.COMMIT: "is not what the ranks wrote",
    Phase.READ: "bytes too early",
}
LOST = (Kind.HANG, Kind.SIGKILL)
LAUNCHES = {
    f"{action.value}-{name}": [cell for cell in SURVIVABLE if cell.action is action and is_in(cell)]
    for action in Action
    for name, is_in in {
        "rank0": lambda cell: cell.rank == 0 and cell.kind is not Kind.HANG,
        "rank1": lambda cell: cell.rank == 1 and cell.kind is not Kind.HANG,
        "hang": lambda cell: cell.kind is Kind.HANG,
    }.items()
}
"""Cells that one pair of ranks meets one after the other."""


def text_of(cell: Cell) -> str:
    """Part of what both ranks raise."""
    if cell.kind is Kind.SHORT:
        return SHORT_TEXTS[cell.phase]
    return TEXTS.get(cell.kind, f"InjectedError: {cell}")


def after(cell: Cell) -> After:
    """The state of both ranks."""
    return After.FAILED if cell.phase in (Phase.READ, Phase.RESTORE) else After.UNTOUCHED


def is_visible(cell: Cell) -> bool:
    """Rank 0 finishes a commit that it has begun, and only then learns that nobody listens."""
    return cell.phase is Phase.COMMIT and (cell.kind is Kind.HANG or cell.rank != 0)


def problems_of(cell: Cell, seen: Seen) -> list[str]:
    """What is not as it must be on one rank."""
    expected = {"raised": text_of(cell), "after": after(cell), "visible": is_visible(cell)}
    found = {"raised": seen.raised, "after": seen.after, "visible": seen.visible}
    return [
        f"{cell}: {name} {found[name]!r}, not {expected[name]!r}"
        for name in expected
        if (expected[name] not in seen.raised if name == "raised" else expected[name] != found[name])
    ]


def told(cell: Cell) -> str:
    """What the error of both ranks says, in the words of the docs."""
    if cell.kind in LOST:
        return "a rank is gone"
    return f"*{SHORT_TEXTS[cell.phase]}*" if cell.kind is Kind.SHORT else "the rank and its error"


def outcome(cell: Cell) -> tuple[str, ...]:
    """A line of the docs' table."""
    shown = "the new checkpoint" if is_visible(cell) else "nothing"
    return told(cell), after(cell).value, shown if cell.action is Action.SAVE else ""


def test_the_docs_have_the_matrix() -> None:
    page = Path(__file__).parents[2] / "docs/faults.md"
    table = markdown(("the CheckpointError of both says", "state of both", "visible"), outcome)
    assert table in page.read_text(), f"put this table into {page}:\n{table}"


@pytest.mark.parametrize("cells", LAUNCHES.values(), ids=LAUNCHES)
def test_faults_that_both_ranks_survive(tmp_path: Path, run_ranks: RankRunner, cells: list[Cell]) -> None:
    met = replace(run_ranks, timeout_secs=150)(2, meet_all, tmp_path, cells)
    assert not [
        problem for rank in RANKS for cell in cells for problem in problems_of(cell, met[rank][str(cell)])
    ]
    same = [cell for cell in cells if cell.kind not in LOST]
    assert not [str(cell) for cell in same if met[0][str(cell)] != met[1][str(cell)]]


@pytest.mark.parametrize("cell", DEADLY, ids=str)
def test_a_rank_is_killed(tmp_path: Path, run_ranks: RankRunner, cell: Cell) -> None:
    ended = run_ranks.outcomes(2, meet_deadly, tmp_path, cell)
    assert "SIGKILL" in ended[cell.rank].error
    survivor = ended[1 - cell.rank]
    assert survivor.value is not None, f"{survivor.error}\n{survivor.log}"
    assert not problems_of(cell, survivor.value)

    restarted = Job.build(model=without_norm())  # on one rank: nothing is left of the two but files
    steps = [OLD, NEW, *([NEW + 1] if is_visible(cell) and cell.action is Action.SAVE else [])]
    assert committed_steps(open_files(str(tmp_path))) == steps
    with checkpointer_of(restarted, tmp_path) as checkpointer:
        assert checkpointer.load() == steps[-1]
        plain = Job.build(None, model=without_norm())
        plain.step(OLD)
        old = plain.contents()
        plain.step(NEW)
        assert not differing(restarted.contents(), plain.contents())
        assert checkpointer.load(OLD) == OLD
        assert not differing(restarted.contents(), old)
