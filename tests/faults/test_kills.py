"""A save is killed before each system call that changes the file system; then a new process loads."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from swapckpt.storage import committed_steps, open_files
from tests.faults.files import Call, Calls, writer
from tests.faults.matrix import NEW, OLD
from tests.faults.ranks import Training, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.multirank import RankRunner

pytestmark = pytest.mark.xdist_group("multirank")

WRONG = "wrong values, and no error"
REFUSED = "an error"


def kill_at_every_call(root: Path, folder: Path, *, into: str) -> list[Call]:
    """Save ``NEW`` into ``folder/<n>/<into>``, beside a checkpoint of ``OLD``; the n-th is killed before its
    n-th call. The last one is not killed. Returns the calls that it makes."""
    training = Training.build()
    training.load(root / f"step-{OLD}")
    training.save(folder / "old", no_dist=True)
    training.load(root / f"step-{NEW}")
    made: list[Call] = []
    number = 0
    while number <= len(made):
        place = folder / str(number)
        shutil.copytree(folder / "old", place / f"step-{OLD}")
        if number == 0:
            shutil.copytree(folder / "old", folder / "counted" / f"step-{OLD}")
            made = _calls_of(training, folder / "counted" / into)
        assert _save_in_child(training, place / into, killed_at=number) == (number < len(made))
        number += 1
    return made


def _calls_of(training: Training, path: Path) -> list[Call]:
    calls = Calls(lambda _call, _path: None)
    training.save(path, storage_writer=writer(path, calls), no_dist=True)
    return [call for call, _ in calls.made]


def _save_in_child(training: Training, path: Path, *, killed_at: int) -> bool:
    """Whether it was killed. The child is a copy of this process, which has no threads in torch."""

    def strike(call: Call, path: Path) -> None:
        if len(calls.made) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        try:
            calls = Calls(strike)
            training.save(path, storage_writer=writer(path, calls), no_dist=True)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def what_loads(root: Path, places: list[Path]) -> list[int | str]:
    """The step whose bits a resuming job has, for each place: it loads the newest complete checkpoint."""
    training = Training.build()
    return [_what_loads(training, root, place) for place in places]


def _what_loads(training: Training, root: Path, place: Path) -> int | str:
    steps = committed_steps(open_files(place))
    if not steps:
        return REFUSED
    try:
        with training.manager.recovery():
            training.load(place / f"step-{steps[-1]}")
    except CheckpointException:
        return REFUSED
    return next((step for step in (OLD, NEW) if training.is_at(root, step)), WRONG)


def loaded_after_kills(
    root: Path, folder: Path, run_ranks: RankRunner, into: str
) -> tuple[list[Call], list[int | str]]:
    made = run_ranks(1, kill_at_every_call, root, folder, into=into)[0]
    places = [folder / str(number) for number in range(len(made) + 1)]
    first, second = run_ranks(2, what_loads, root, places)  # two new ranks for what one rank saved
    assert first == second
    return made, first


def test_a_folder_per_step_loses_nothing(root: Path, tmp_path: Path, run_ranks: RankRunner) -> None:
    made, loaded = loaded_after_kills(root, tmp_path, run_ranks, f"step-{NEW}")
    assert Counter(made).keys() == {Call.MKDIR, Call.OPEN, Call.WRITE, Call.FSYNC, Call.RENAME}
    assert made[-1] is Call.RENAME
    assert loaded == [OLD] * len(made) + [NEW]


def test_stock_loses_a_checkpoint_that_it_saves_over(
    root: Path, tmp_path: Path, run_ranks: RankRunner
) -> None:
    """As docs/faults.md warns: the old values are gone from the first open on, and before the rename there is
    nothing to load, or values that were not committed."""
    made, loaded = loaded_after_kills(root, tmp_path, run_ranks, f"step-{OLD}")
    opened = made.index(Call.OPEN)
    assert loaded[: opened + 1] == [OLD] * (opened + 1)
    written = loaded.index(NEW)
    assert loaded[opened + 1 : written] == [REFUSED] * (written - opened - 1)
    assert made[-2:] == [Call.UNLINK, Call.RENAME]
    assert loaded[written:] == [NEW] * (len(made) - written - 1) + [REFUSED, NEW]


def die_when_the_peer_has_written(root: Path, path: Path) -> None:
    def strike(call: Call, file: Path) -> None:
        if call is Call.OPEN and dist.get_rank() == 0:
            name = "__1_0.distcp"
            wait_for(lambda: (path / name).read_bytes() == (root / f"step-{NEW}" / name).read_bytes())
            os.kill(os.getpid(), signal.SIGKILL)

    training = Training.build()
    training.load(root / f"step-{NEW}")
    training.save(path, storage_writer=writer(path, Calls(strike)))


def test_stock_mixes_two_checkpoints_when_one_is_saved_over(
    root: Path, tmp_path: Path, run_ranks: RankRunner
) -> None:
    """As docs/faults.md warns: one rank's shards of the new step, the other's of the old, and no error."""
    shutil.copytree(root / f"step-{OLD}", tmp_path / f"step-{OLD}")
    dead, survivor = run_ranks.outcomes(2, die_when_the_peer_has_written, root, tmp_path / f"step-{OLD}")
    assert "SIGKILL" in dead.error
    assert survivor.error is not None
    assert what_loads(root, [tmp_path]) == [WRONG]
