"""C8: a save is killed at each system call that changes the file system; a new job loads, and saves on."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import swapckpt
from swapckpt.storage.catalog import CheckpointState, list_checkpoints
from swapckpt.storage.files import open_files
from tests.checkpointer.jobs import ASYNC, Job, differing, loaded
from tests.storage.victims import die_at_system_call, victims

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = 1, 2

Contents = dict[str, object]


def prepare(folder: Path) -> tuple[Job, dict[int, Contents]]:
    """Checkpoints of the steps, each in ``folder/from-<step>``, and what they hold."""
    job, contents = Job.build(), {}
    for step in (OLD, NEW):
        job.step(step)
        contents[step] = job.contents()
        with swapckpt.Checkpointer(folder / f"from-{step}", job.states, ASYNC) as checkpointer:
            checkpointer.save(step)
    return job, contents


def save_and_die(source: str, folder: str, step: int, number: int) -> None:
    """Save what ``source`` holds as ``step``. Nothing is computed, so that every kill is one of the save."""
    _, job = loaded(source)
    die_at_system_call(number)
    with swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
        checkpointer.save(step, overwrite=True)


def check_listing(folder: Path, *, num_complete: int) -> None:
    """Nothing but whole checkpoints and what is known to be none."""
    listed = list_checkpoints(open_files(str(folder)))
    assert {info.folder for info in listed} == {path.name for path in folder.iterdir()}
    states = [info.state for info in listed]
    assert states.count(CheckpointState.COMPLETE) == num_complete
    assert states.count(CheckpointState.INCOMPLETE) == len(states) - num_complete


def load_and_save_on(folder: Path, step: int, job: Job, contents: dict[int, Contents]) -> int:
    """Whose values the newest checkpoint has."""
    with swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
        found = checkpointer.load()
        (left,) = (each for each in (OLD, NEW) if not differing(job.contents(), contents[each]))
        assert found == (step if left == NEW else OLD)
        if step != OLD:
            assert checkpointer.load(OLD) == OLD
            assert not differing(job.contents(), contents[OLD])
        check_listing(folder, num_complete=len({OLD, found}))
        job.step(NEW)
        expected = job.contents()
        checkpointer.save(step, overwrite=True)
        checkpointer.wait()
        assert checkpointer.load() == step
        assert not differing(job.contents(), expected)
    return left


@pytest.mark.parametrize("step", [NEW, OLD], ids=["new step", "same step"])
def test_c8_a_kill_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path: Path, step: int) -> None:
    job, contents = prepare(tmp_path)
    left: list[int] = []
    was_killed = True
    with victims("tests.checkpointer.jobs") as run:
        while was_killed:
            folder = tmp_path / str(len(left))
            shutil.copytree(tmp_path / f"from-{OLD}", folder)
            was_killed = run(save_and_die, str(tmp_path / f"from-{NEW}"), str(folder), step, len(left))
            left.append(load_and_save_on(folder, step, job, contents))
    assert left == sorted(left)  # once visible, it stays
    assert {*left} == {OLD, NEW}
    assert len(left) > 14
