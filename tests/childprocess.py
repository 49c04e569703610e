"""Runs the tests of a folder in a process of their own, and hands their reports to the run that asked.

[Note: why a process]
A device that is not there changes the process that loads it, for good: ``torch.accelerator`` finds an
accelerator, pinned memory exists, CPU-only code paths are no longer taken. Other tests in that process would
test something else. And a bug in its use can end the process: that must be one failed test.

The child is an ordinary pytest run over the folder whose loop takes tests from a pipe. Every test keeps its
own id, report, output and time limit in the run that the user started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

INLINE = "SWAPCKPT_TESTS_INLINE"
"""With this in the environment the tests run where they are collected: in the child, or for a debugger."""
_REPOSITORY = Path(__file__).parents[1]
_BACKSTOP_SECS = 900.0  # the child's own time limits come first
_SHUTDOWN_SECS = 30.0


class ChildProcess:
    """The child, as its parent sees it. It starts with the first test, and again after a crash in a test."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._environ = dict(environ or {})
        self._child: subprocess.Popen[bytes] | None = None
        self._broken: str | None = None  # why there can be no child

    def protocol(self, item: pytest.Item) -> bool | None:
        """For the hook ``pytest_runtest_protocol``, which is called for the tests of all folders."""
        if INLINE in os.environ or self._folder not in item.path.parents:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item) -> list[pytest.TestReport]:
        if self._broken is None and self._child is None:
            self._start(item.config.rootpath)
        if self._broken is not None:
            return [_failed(item, self._broken)]
        try:
            self._pipe.send(item.location)
            reports = self._receive()
        except (EOFError, OSError):
            return [_failed(item, self._end("in this test"))]
        restore = item.config.hook.pytest_report_from_serializable
        # A worker of xdist has added the group to its node ids.
        return [restore(config=item.config, data=data | {"nodeid": item.nodeid}) for data in reports]

    def close(self) -> None:
        if self._child is None:
            return
        self._pipe.close()
        try:
            self._child.wait(_SHUTDOWN_SECS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None
        self._output.close()

    def _start(self, root: Path) -> None:
        self._pipe, child_end = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        environ = os.environ | self._environ | {INLINE: "1"}
        environ.pop("PYTEST_ADDOPTS", None)  # meant for the outer run
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.childprocess", str(child_end.fileno()), root, self._folder],
            cwd=_REPOSITORY,
            env=environ,
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        child_end.close()
        try:
            self._receive()
        except (EOFError, OSError):
            self._broken = self._end("before the first test")

    def _receive(self) -> Any:
        assert self._child is not None
        if not self._pipe.poll(_BACKSTOP_SECS):
            self._child.kill()
        return self._pipe.recv()

    def _end(self, moment: str) -> str:
        assert self._child is not None
        code = self._child.wait()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")[-10_000:]
        self.close()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"The process with the tests of {self._folder.name}/ {how} {moment}. Its output:\n{output}"


def _failed(item: pytest.Item, reason: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=reason,
        when="call",
    )


class _Server:
    """The loop of the child's pytest run."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._reports: list[dict[str, Any]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:  # pytest's own loop, which this replaces, does the same
            raise session.Interrupted(f"{session.testsfailed} errors in collection")
        items = {item.location: item for item in session.items}
        self._pipe.send("ready")
        while True:
            try:
                item = items[self._pipe.recv()]
            except EOFError:  # the other end is closed, or its process gone
                return True
            self._config = item.config
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            self._pipe.send(self._reports)
            self._reports = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )


def _main(descriptor: str, root: str, folder: str) -> int:
    options = [
        f"--rootdir={root}",
        "-o",
        "cache_dir=.cache/pytest-child",
    ]  # the outer run has its own cache
    return pytest.main([*options, folder], plugins=[_Server(Connection(int(descriptor)))])


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
