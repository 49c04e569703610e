"""Start a script under torchrun, as a user would, and get what it printed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def torchrun(script: str, *arguments: str, ranks: int, fails: bool = False, timeout_secs: float = 150) -> str:
    """Standard output of ``integration/scripts/<script>`` on ``ranks`` gloo ranks.

    Raises:
        AssertionError: It failed (``fails``: it did not) or took longer than ``timeout_secs``; with all its
            output.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPTS / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a hang ends with all its ranks
    )
    try:
        output, errors = process.communicate(timeout=timeout_secs)
        outcome = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        outcome = f"killed after {timeout_secs:g} s"
    ended_as_meant = process.returncode == (1 if fails else 0)
    assert ended_as_meant, f"{script}: {outcome}\n{output}\n{errors}"
    return output
