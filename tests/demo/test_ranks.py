"""Rank processes must be killed exactly inside a save, report their failures, and never outlive the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest

from swapckpt.demo.config import DemoConfig
from swapckpt.demo.ranks import Ranks, RanksFailedError
from swapckpt.demo.records import Finished, Saving, Stepped
from swapckpt.storage import CheckpointState, committed_steps, list_checkpoints, open_files

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_SECS = 60.0

pytestmark = pytest.mark.xdist_group("multirank")  # not beside other tests that start ranks


@pytest.fixture
def config(tmp_path: Path) -> DemoConfig:
    """Half a million parameters on one rank, saved after every step."""
    return DemoConfig(params="500K", ranks=1, steps=3, save_every=1, batch=1, time=8, out=tmp_path / "out")


def trainers() -> list[psutil.Process]:
    """The rank processes that this process has started, among whatever else other tests have."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "swapckpt.demo.trainer" in child.cmdline()]


def test_all_ranks_die_inside_the_save(config: DemoConfig, tmp_path: Path) -> None:
    config = replace(config, ranks=2, batch=2)
    events = []
    files = open_files(config.checkpoints)
    with Ranks(config.swapped_run(), world=2, folder=tmp_path) as ranks:
        for event in ranks.events():
            events.append(event)
            if event == Saving(1):  # what comes until the kill stays in the pipe
                processes = trainers()
                assert len(processes) == 2
                written_nbytes = ranks.kill_inside_save(files, 2, at_nbytes=1)
                assert written_nbytes is not None
                assert written_nbytes > 0
                assert not [process for process in processes if process.is_running()]
    assert [event.step for event in events if isinstance(event, Stepped)][:2] == [1, 2]
    assert not any(isinstance(event, Finished) for event in events)
    assert committed_steps(files) == [1]
    assert [(info.step, info.state) for info in list_checkpoints(files)] == [
        (1, CheckpointState.COMPLETE),
        (2, CheckpointState.INCOMPLETE),
    ]


def test_ranks_go_on_when_the_save_was_too_fast(config: DemoConfig, tmp_path: Path) -> None:
    files = open_files(config.checkpoints)
    with Ranks(config.swapped_run(), world=1, folder=tmp_path) as ranks:
        events = []
        for event in ranks.events():
            events.append(event)
            if event == Saving(2):
                assert ranks.kill_inside_save(files, 2, at_nbytes=10**12) is None
                assert committed_steps(files) == [1, 2]
    assert [event.step for event in events if isinstance(event, Stepped)] == [1, 2, 3]
    assert isinstance(events[-1], Finished)


def test_failing_rank_is_an_error_with_its_log(config: DemoConfig, tmp_path: Path) -> None:
    train = replace(config.reference_run(), data=tmp_path / "absent.txt")
    with (
        Ranks(train, world=1, folder=tmp_path) as ranks,
        pytest.raises(RanksFailedError, match=r"Rank 0 of 1 ended.*(?s:.*)absent\.txt cannot be read"),
    ):
        list(ranks.events())


def test_leaving_ends_ranks_that_still_run(config: DemoConfig, tmp_path: Path) -> None:
    with Ranks(config.reference_run(), world=1, folder=tmp_path) as ranks:
        next(ranks.events())
        (process,) = trainers()
        assert process.is_running()
    assert not process.is_running()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_demo(how: signal.Signals, tmp_path: Path) -> None:
    options = ["--quick", "--steps", "100000", "--device", "cpu", "--out", str(tmp_path / "out")]
    demo = subprocess.Popen(
        [sys.executable, "-m", "swapckpt.cli", "demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A background job of a shell inherits SIGINT as ignored, and so would the demo.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert demo.stdout is not None
    with demo, demo.stdout:
        for line in demo.stdout:
            if b" step " in line and b" loss " in line:
                break
        ranks = psutil.Process(demo.pid).children(recursive=True)
        assert len(ranks) == 2
        demo.send_signal(how)
        assert demo.wait(DEADLINE_SECS) != 0
        assert_all_end(ranks)


STOP_RANKS_AND_WAIT = """
import os, signal, sys, time
from pathlib import Path
import psutil
from swapckpt.demo.config import DemoConfig
from swapckpt.demo.ranks import Ranks

config = DemoConfig(params="500K", ranks=2, batch=2, time=8)
with Ranks(config.reference_run(), world=2, folder=Path(sys.argv[1])) as ranks:
    next(ranks.events())
    for rank in psutil.Process().children():
        rank.suspend()
        print(rank.pid)
    print("stopped", flush=True)
    time.sleep(1000)
"""


def test_stopped_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    """The demo may be killed in the moment between stopping and killing its ranks."""
    command = [sys.executable, "-c", STOP_RANKS_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = list(iter(parent.stdout.readline, "stopped\n"))
        ranks = [psutil.Process(int(pid)) for pid in pids]
        assert len(ranks) == 2
        parent.kill()
        assert_all_end(ranks)


def assert_all_end(ranks: list[psutil.Process]) -> None:
    deadline = time.monotonic() + DEADLINE_SECS
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = list(filter(alive, ranks))
    for rank in left:
        rank.kill()
    assert not left


def alive(process: psutil.Process) -> bool:
    """Orphans that ended stay zombies where nobody reaps them (PID 1 of a container)."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
