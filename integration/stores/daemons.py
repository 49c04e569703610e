"""Daemons in the foreground: children of the test session, ended with it."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

STOP_SECS = 10.0


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """True when something accepts connections at a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def daemon(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running program; its output goes to ``log``."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, timeout_secs: float = 60.0
) -> None:
    """Return when ``ready()``. Raises RuntimeError with the log when the process ends before, or after
    ``timeout_secs``."""
    deadline = time.monotonic() + timeout_secs
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").splitlines()[-30:]
            raise RuntimeError(f"{process.args!r} is not ready:\n" + "\n".join(lines))
        time.sleep(0.1)
