"""Every cell of the matrix on two real ranks, through stock DCP: who raises, what is visible, what loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.matrix import DEADLY, NEW, OLD, RANKS, SURVIVABLE, Action, Cell, expected, table
from tests.faults.ranks import Seen, Training, look, meet_all, meet_deadly
from tests.multirank import RankRunner

pytestmark = pytest.mark.xdist_group("multirank")


@pytest.fixture(scope="module")
def met(root: Path) -> list[dict[str, Seen]]:
    """What each rank saw of each cell that all survive. One pair of ranks meets them all."""
    return RankRunner(root, timeout_secs=150)(2, meet_all, root, SURVIVABLE)


def test_the_docs_have_the_matrix() -> None:
    page = Path(__file__).parents[2] / "docs/faults.md"
    assert table() in page.read_text(), f"put this table into {page}:\n{table()}"


@pytest.mark.parametrize("cell", SURVIVABLE, ids=str)
def test_a_fault_that_all_survive(met: list[dict[str, Seen]], cell: Cell) -> None:
    outcome = expected(cell)
    for rank in RANKS:
        assert met[rank][str(cell)] == Seen(outcome.raised[rank], outcome.after[rank], outcome.visible)


@pytest.mark.parametrize("cell", DEADLY, ids=str)
def test_a_rank_is_killed(root: Path, run_ranks: RankRunner, cell: Cell) -> None:
    outcome = expected(cell)
    ended = run_ranks.outcomes(2, meet_deadly, root, cell)
    assert "SIGKILL" in ended[cell.rank].error
    survivor = ended[1 - cell.rank]
    assert survivor.value is not None, f"{survivor.error}\n{survivor.log}"
    assert survivor.value == Seen(outcome.raised[survivor.rank], outcome.after[survivor.rank])

    restarted = Training.build()  # on one rank: nothing is left of the two but files
    if cell.action is Action.SAVE:
        assert look(restarted, root / str(cell) / f"step-{NEW}", root) is outcome.visible
    with restarted.manager.recovery():
        restarted.load(root / f"step-{OLD}")
    assert restarted.is_at(root, OLD)
