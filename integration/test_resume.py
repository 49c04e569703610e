"""Runs started by torchrun: swapped equals unswapped, and a resumed run equals one that never stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.torchrun import torchrun

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def unswapped() -> list[str]:
    """Losses of six steps on two ranks, by an optimizer that nobody adopted."""
    return torchrun("train.py", "--last", "6", ranks=2).splitlines()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, unswapped: list[str]) -> Path:
    """Written by the swapped run after three steps."""
    path = tmp_path_factory.mktemp("run") / "step-3"
    first_half = torchrun("train.py", "--last", "3", "--swap", "--save", str(path), ranks=2).splitlines()
    assert first_half == unswapped[:3]
    return path


@pytest.mark.parametrize("swap", [["--swap"], []], ids=["swapped", "unswapped"])
def test_a_resumed_run_continues_bit_for_bit(checkpoint: Path, unswapped: list[str], swap: list[str]) -> None:
    rest = torchrun("train.py", "--first", "4", "--last", "6", "--load", str(checkpoint), *swap, ranks=2)
    assert len(unswapped) == 6
    assert rest.splitlines() == unswapped[3:]


def test_one_rank_resumes_what_two_have_written(checkpoint: Path) -> None:
    arguments = ["--first", "4", "--last", "4", "--load", str(checkpoint)]
    # Other ranks, other sums: compare one rank with one rank.
    assert torchrun("train.py", *arguments, "--swap", ranks=1) == torchrun("train.py", *arguments, ranks=1)
