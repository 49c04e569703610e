"""Start a script under torchrun, as a user would, and get what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPTS = Path(__file__).parent / "scripts"
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else a restarted job shares a store with the first one, where gloo finds the addresses of dead ranks."""


def torchrun(script: str, *arguments: str, ranks: int, fails: bool = False, timeout_secs: float = 150) -> str:
    """Standard output of ``integration/scripts/<script>`` on ``ranks`` gloo ranks.

    Raises:
        AssertionError: It failed (``fails``: it did not) or took longer than ``timeout_secs``; with all its
            output.
    """
    with launched(script, *arguments, ranks=ranks) as process:
        try:
            output, errors = process.communicate(timeout=timeout_secs)
            outcome = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            kill(process)
            output, errors = process.communicate()
            outcome = f"killed after {timeout_secs:g} s"
    ended_as_meant = process.returncode == (1 if fails else 0)
    assert ended_as_meant, f"{script}: {outcome}\n{output}\n{errors}"
    return output


@contextmanager
def launched(script: str, *arguments: str, ranks: int, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """The launcher's process while it runs; nothing of it is left afterwards.

    ``restarts``: how often torchrun starts all ranks again when one has failed.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with subprocess.Popen(
        [sys.executable, *launcher, f"--max-restarts={restarts}", str(SCRIPTS / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **RESTARTABLE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            kill(process)


def kill(launcher: subprocess.Popen[str]) -> None:
    """End the launcher and its ranks, which are in sessions of their own: killing a group misses them."""
    if launcher.poll() is not None:
        return
    parent = psutil.Process(launcher.pid)
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
