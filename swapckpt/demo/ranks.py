"""The rank processes of one run: started together, read as one stream of events, ended without leftovers.

A rank ends with its parent in every case: leaving the ``with`` block kills and reaps all of them (also on
Ctrl-C, which does not reach them directly since they lead their own sessions), and the kernel kills them if
the parent is killed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from swapckpt.demo.checkpoints import progress
from swapckpt.demo.records import DIE_WITH, decode
from swapckpt.errors import SwapCkptError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Self

    from swapckpt.demo.records import Event, TrainConfig
    from swapckpt.storage import Files

_POLL_SECS = 0.2
_SLICE_SECS = 0.002
_SETTLE_SECS = 0.2
_LOG_TAIL_LINES = 15
_EXIT_SECS = 10.0


class RanksFailedError(SwapCkptError, ChildProcessError):
    """A rank of the demo ended with an error. The message shows the last lines of its log."""


class Ranks:
    """``world`` processes that run the trainer with one config.

    Call sequence: enter; iterate :meth:`events`; in between, after a ``Saving`` event, optionally
    :meth:`kill_inside_save`; leave.
    """

    def __init__(self, config: TrainConfig, *, world: int, folder: Path) -> None:
        """``folder`` receives the config and one log per rank."""
        self._config = config
        self._world = world
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cleanup = ExitStack()
        self._is_killed = False

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        config_path = self._folder / "config.json"
        config_path.write_text(self._config.to_json())
        parent = [DIE_WITH, str(os.getpid())]
        command = [sys.executable, "-m", "swapckpt.demo.trainer", str(config_path), *parent]
        self._cleanup.callback(self.kill)
        try:
            port = _free_port()
            for rank in range(self._world):
                self._start(command, rank=rank, port=port)
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _start(self, command: list[str], *, rank: int, port: int) -> None:
        log = self._cleanup.enter_context(self._log_path(rank).open("wb"))
        process = subprocess.Popen(
            command,
            env={**os.environ, **_rank_environment(rank=rank, world=self._world, port=port)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else log,
            stderr=log,
            start_new_session=True,
        )
        self._processes.append(process)

    def events(self) -> Iterator[Event]:
        """Rank 0's records as they come, until all ranks ended well or were killed inside a save.

        What a rank reported before it was killed comes too: it trained while it was saving.

        Raises:
            RanksFailedError: A rank ended with an error.
        """
        pipe = self._processes[0].stdout
        assert pipe is not None
        pending = b""
        while True:
            readable, _, _ = select.select([pipe], [], [], _POLL_SECS)
            if not readable:
                self._raise_if_failed()  # rank 0 may be waiting for a dead one
                continue
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                yield decode(line.decode())
        if not self._is_killed:
            self._await_exit()
            self._raise_if_failed()

    def kill_inside_save(self, files: Files, step: int, *, at_nbytes: int) -> int | None:
        """SIGKILL all ranks while they write the checkpoint of ``step``; call it when the save begins.

        The moment is when ``at_nbytes`` of data are there, but the checkpoint is not committed. The ranks
        run for a moment, stand still while this looks, and so on: however slow the look is, the save is
        not over meanwhile. One that was committed in between costs nothing, they go on.

        Returns:
            Bytes of data written when the ranks died, or None if the save was already committed.
        """
        while True:
            self._stop()
            seen = progress(files, step)
            if not files.renames and seen.nbytes >= at_nbytes:
                time.sleep(_SETTLE_SECS)  # a server works on what it was sent before
                seen = progress(files, step)
            if seen.is_committed:
                self._signal(signal.SIGCONT)
                return None
            if seen.nbytes >= at_nbytes:
                self._is_killed = True
                self._end()
                return seen.nbytes
            self._raise_if_failed()
            self._signal(signal.SIGCONT)
            time.sleep(_SLICE_SECS)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _stop(self) -> None:
        """Stop all ranks, and wait until they stand still."""
        self._signal(signal.SIGSTOP)
        for process in [process for process in self._processes if process.returncode is None]:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """SIGKILL and reap every rank. Does nothing to ranks that ended already."""
        self._end()
        for process in self._processes:
            if process.stdout is not None:
                process.stdout.close()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _await_exit(self) -> None:
        """Give ranks time to leave after rank 0 closed its pipe; what stays is killed on leaving."""
        deadline = time.monotonic() + _EXIT_SECS
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(_POLL_SECS / 10)

    def _raise_if_failed(self) -> None:
        failed = [rank for rank, process in enumerate(self._processes) if process.poll()]
        if failed:
            tails = "".join(f"\n--- rank {rank}: {self._log_tail(rank)}" for rank in failed)
            msg = f"Rank {', '.join(map(str, failed))} of {self._world} ended with an error.{tails}"
            raise RanksFailedError(msg)

    def _log_path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def _log_tail(self, rank: int) -> str:
        lines = self._log_path(rank).read_text(errors="replace").splitlines()
        return "\n".join([str(self._log_path(rank)), *lines[-_LOG_TAIL_LINES:]])


def _rank_environment(*, rank: int, world: int, port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // world)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is deterministic only with a fixed workspace
        "PYTHONFAULTHANDLER": "1",  # a crash leaves its stack in the log
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
