"""The runner of these tests leaves nothing behind and shows what a failing script said."""

from __future__ import annotations

import psutil
import pytest

from integration.torchrun import launched, torchrun


def test_no_rank_outlives_its_launcher() -> None:
    """torchrun gives each rank a session of its own: they do not end with its group."""
    with launched("train.py", "--last", "1000000", ranks=2) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().startswith("1 ")
        ranks = psutil.Process(launcher.pid).children()
        for rank in ranks:
            rank.suspend()  # else they notice that nobody reads what they print, which those that hang do not
    assert len(ranks) == 2
    _, left = psutil.wait_procs(ranks, timeout=10)
    # Who adopted them may not have asked for their exit status yet.
    assert [rank for rank in left if rank.status() != psutil.STATUS_ZOMBIE] == []


def test_a_failing_script_shows_what_it_said() -> None:
    with pytest.raises(AssertionError, match="unrecognized arguments: --no-such-option"):
        torchrun("train.py", "--last", "1", "--no-such-option", ranks=1)
