"""Runs a function in a process that may be killed in it, again and again, for the price of a fork each.

[Note: where victims come from] The fork server's child imports what saving needs, runs no operator and starts
no thread; every run is a fork of it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

_CONTEXT = multiprocessing.get_context("forkserver")
TIMEOUT_SECS = 60.0

Killed = bool


@contextmanager
def victims(*modules: str) -> Iterator[Callable[..., Killed]]:
    """``run(function, *arguments)``: True when it was killed by SIGKILL, False when it returned.

    Args:
        modules: Imported once, before any run.
    """
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(theirs, modules, dict(os.environ)))
    process.start()
    theirs.close()

    def run(function: Callable[..., object], *arguments: Any) -> Killed:
        ours.send((function, arguments))
        assert ours.poll(TIMEOUT_SECS), "it hangs"
        status: int = ours.recv()
        assert status in {0, -signal.SIGKILL}, f"it failed: {status}"
        return status != 0

    try:
        yield run
    finally:
        ours.close()
        process.join(TIMEOUT_SECS)
        process.kill()


def _serve(jobs: Connection, modules: tuple[str, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the fork server was started before the test's stores
    for module in modules:
        importlib.import_module(module)
    while True:
        try:
            function, arguments = jobs.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            try:
                function(*arguments)
            except BaseException:  # noqa: BLE001 - nothing may leave this process but its exit code
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        jobs.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
