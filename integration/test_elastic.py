"""A rank is killed while it writes a checkpoint; torchrun starts all ranks again, and the job goes on."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from integration.torchrun import launched, torchrun
from swapckpt.storage import committed_steps, open_files, prune

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

LAST = 12
WATCH_SECS, END_SECS = 150, 150  # nearly all of it is Python that starts


def kill_inside_save(launcher: subprocess.Popen[str], folder: Path, rank: int) -> Path:
    """SIGKILL for ``rank`` while its data file is there and shorter than it will be. Returns the attempt.

    It is stopped first, to look whether it was not done already; then it goes on, until a later save.
    """
    name = f"__{rank}_0.distcp"
    deadline = time.monotonic() + WATCH_SECS
    whole_nbytes = 0
    while time.monotonic() < deadline and launcher.poll() is None:
        time.sleep(0.0005)
        with suppress(FileNotFoundError):  # committed, or retired, since it was listed
            whole_nbytes = whole_nbytes or max(
                (path.stat().st_size for path in folder.glob(f"step-*/{name}")), default=0
            )
            for path in folder.glob(f".swapckpt-*.new/{name}"):
                if not 0 < path.stat().st_size < whole_nbytes:
                    continue
                ranks = psutil.Process(launcher.pid).children()
                (victim,) = (each for each in ranks if each.environ()["RANK"] == str(rank))
                victim.suspend()
                if path.exists() and path.stat().st_size < whole_nbytes:
                    victim.kill()
                    return path.parent
                victim.resume()
    msg = f"No save was met while it was writing; the launcher's exit code is {launcher.poll()}."
    raise AssertionError(msg)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return torchrun("elastic.py", "--last", str(LAST), "--checkpoints", str(folder), ranks=2).splitlines()


@pytest.mark.parametrize(("rank", "leaves_attempt"), [(0, True), (1, False)], ids=["coordinator", "other"])
def test_a_job_restarted_by_torchrun_goes_on_bit_for_bit(
    tmp_path: Path, undisturbed: list[str], rank: int, leaves_attempt: bool
) -> None:
    """The coordinator removes the attempt when it loses another rank; when it dies, ``prune`` does."""
    files = open_files(tmp_path)
    arguments = ["--last", str(LAST), "--checkpoints", str(tmp_path)]
    with launched("elastic.py", *arguments, ranks=2, restarts=1) as launcher:
        attempt = kill_inside_save(launcher, tmp_path, rank)
        done = committed_steps(files)[-1]
        output, errors = launcher.communicate(timeout=END_SECS)
    assert launcher.returncode == 0, f"{output}\n{errors}"
    assert f"step-{done + 1}".encode().hex() in attempt.name
    assert f"CheckpointError: Saving step {done + 1}" in errors, errors  # said by the rank that lives on

    lines = output.splitlines()
    restart = lines.index(f"begin after {done}")
    assert lines[:restart] == undisturbed[:restart]
    assert lines[restart + 1 :] == undisturbed[done + 1 :]

    removed = [removal.path for removal in prune(files, min_age_secs=0, dry_run=False)]
    assert removed == ([attempt.name] if leaves_attempt else [])
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f"step-{step}" for step in range(LAST - 2, LAST + 1)]
