"""Ways in which a process ends, or becomes two, with a save under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import swapckpt
from swapckpt.errors import ConfigError, PhaseError
from swapckpt.storage import committed_steps, open_files
from tests.checkpointer.jobs import ASYNC, Gate, Job, differing, history, hooked, loaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAVES_LAST = """
import sys, time
import swapckpt
from swapckpt.storage.posix import PosixWriter
from tests.checkpointer.jobs import Job

close = PosixWriter.close

def slowly(self):
    time.sleep(1.0)  # the script has ended by then
    close(self)

PosixWriter.close = slowly
job = Job.build()
job.step(1)
checkpointer = swapckpt.Checkpointer(sys.argv[1], job.states)
checkpointer.save(1)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('in training')", 1, "ValueError: in training"),
    ],
    ids=["end", "exit", "error"],
)
def test_a_script_that_ends_without_close_has_its_last_save(
    tmp_path: Path, end: str, code: int, says: str
) -> None:
    command = [sys.executable, "-c", SAVES_LAST.format(end=end), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "The interpreter exits while step 1 is being saved" in done.stderr
    assert not differing(loaded(tmp_path, 1)[1].contents(), history()[1])


def test_a_save_that_fails_at_the_exit_says_so(tmp_path: Path) -> None:
    script = SAVES_LAST.replace("    close(self)", "    raise OSError('the disk is gone')")
    command = [sys.executable, "-c", script.format(end=""), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Saving step 1 failed, and nobody has asked" in done.stderr
    assert "the disk is gone" in done.stderr
    assert committed_steps(open_files(str(tmp_path))) == []


def test_a_forked_child_is_refused_and_its_parent_goes_on(tmp_path: Path) -> None:
    job, gate = Job.build(), Gate()
    with hooked(gate), swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        job.step(1)
        with gate.closed():
            saved = checkpointer.save(1)
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # what is not refused hangs
                os._exit(refusals(checkpointer))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        saved.result()
        job.step(2)
        checkpointer.save(2)
    assert checkpointer.steps() == [1, 2]


def refusals(checkpointer: swapckpt.Checkpointer) -> int:
    """How many calls say that they are made in a forked process; for the exit code."""
    refused = sum(map(is_refused, (lambda: checkpointer.save(2), checkpointer.load, checkpointer.wait)))
    checkpointer.close()  # nothing of it is the child's
    return refused


def is_refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except PhaseError as error:
        return "in a forked process" in str(error)
    return False


def test_a_closed_checkpointer_is_not_entered(tmp_path: Path) -> None:
    with swapckpt.Checkpointer(tmp_path, {"epoch": 1}, ASYNC) as checkpointer:
        pass
    with pytest.raises(ConfigError, match="Cannot enter: this Checkpointer is closed"), checkpointer:
        pass
