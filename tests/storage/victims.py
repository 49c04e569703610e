"""Runs a function in a process that may be killed in it, again and again, for the price of a fork each.

[Note: where victims come from] The fork server's child imports what saving needs, runs no operator and starts
no thread; every run is a fork of it.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import signal
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

_CONTEXT = multiprocessing.get_context("forkserver")
TIMEOUT_SECS = 120.0
CHANGING = ("open", "pwritev", "fsync", "rename", "unlink", "rmdir", "mkdir")

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


def first(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """So many bytes of ``parts``."""
    taken = []
    for part in parts:
        taken.append(part[:nbytes])
        nbytes -= len(taken[-1])
    return taken


def die_at_system_call(number: int) -> None:
    """SIGKILL in place of the n-th call from now on, of any thread, that changes the file system; of a write,
    in its middle."""
    counted = itertools.count()  # counts atomically: writers are threads

    def dying(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_change = name != "open" or bool(args[1] & os.O_CREAT)
            if is_change and next(counted) == number:
                if name == "pwritev":
                    half = sum(map(len, args[1])) // 2
                    with suppress(OSError):  # of a file that is written around the page cache: whole blocks
                        original(args[0], first(args[1], half // 4096 * 4096 or half), *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in CHANGING:
        setattr(os, name, dying(name))
