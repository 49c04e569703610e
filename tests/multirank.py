"""Run a plain function on real gloo ranks; get back every rank's value, or how every rank failed.

``run_ranks(2, train, path)`` (the fixture in conftest.py) runs ``train(path)`` on two ranks that share a
process group, and returns their values in rank order. Inside, ``torch.distributed`` is ready to use.

[Note: where ranks come from]
A rank is forked from a *fork server*: a process that has imported torch and swapckpt, has run no operator and
has one thread. Forking the test process itself would be as fast, but copies whatever earlier tests left
there: an OpenMP pool whose threads do not exist in the child (the first parallel operator hangs), threads of
a device, held locks. Spawning is safe too and costs seconds of ``import torch`` per rank and test. The price
of the fork server: functions, arguments and values travel by pickle, so functions stand at the top of a
module.

[Note: how a run ends]
A rank sends its value, meets the others in a barrier and only then destroys its group: without the barrier
gloo can abort at exit. When the first rank fails, the others get ``grace_secs`` to end by themselves (gloo
tells most of them at once); then whoever still runs is made to print the stacks of all its threads and is
killed. The same happens ``timeout_secs`` after the last rank has started.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

P = ParamSpec("P")
T = TypeVar("T")

STARTUP_SECS = 120.0
"""Until all ranks run. The first use of the fork server imports torch, maybe without bytecode."""
STACKS_SECS = 3.0
"""How long a rank that is about to be killed may take to print its stacks."""
LOG_LINES = 80

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",  # the main module of the test run, which every rank imports under another name
        "swapckpt.checkpointer",
        "torch._dynamo",  # the first use of FSDP or of a DTensor imports it
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.nn.parallel",
    ]
)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How one rank ended. A survivor of its peers can have a value *and* an error (of the last barrier)."""

    rank: int
    value: T | None
    error: str | None  # traceback, signal, exit code or timeout
    log: str  # end of its stdout and stderr, stacks included


class RanksFailedError(AssertionError):
    """At least one rank did not end well. The message shows the failed ones, first failure first."""

    def __init__(self, world_size: int, failed: list[Outcome[Any]]) -> None:
        lines = [f"{len(failed)} of {world_size} ranks failed; rank {failed[0].rank} was the first"]
        for outcome in failed:
            lines.append(f"----- rank {outcome.rank}: {outcome.error}")
            if outcome.log:
                lines.append(f"----- rank {outcome.rank}, end of its output:\n{outcome.log}")
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class RankRunner:
    """Runs functions on ranks. ``dataclasses.replace(run_ranks, timeout_secs=5)`` has other limits."""

    scratch: Path  # holds the rendezvous and the logs
    timeout_secs: float = 60.0
    grace_secs: float = 5.0

    def __call__(
        self, world_size: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """``function(*args, **kwargs)`` on every rank; the values in rank order.

        Raises:
            RanksFailedError: A rank raised, died, hung, or did not close down cleanly.
        """
        ranks = self._run(world_size, pickle.dumps((function, args, kwargs)))
        failed = sorted((rank for rank in ranks if rank.error), key=lambda rank: rank.failed_at)
        if failed:
            raise RanksFailedError(world_size, [rank.outcome() for rank in failed])
        return [rank.value for rank in ranks]

    def outcomes(
        self, world_size: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Outcome[T]]:
        """The same for tests in which ranks are meant to fail: how each ended, without raising."""
        return [rank.outcome() for rank in self._run(world_size, pickle.dumps((function, args, kwargs)))]

    def _run(self, world_size: int, call: bytes) -> list[_Rank]:
        scratch = Path(tempfile.mkdtemp(prefix="ranks-", dir=self.scratch))
        job = _Job(call, world_size, scratch, dict(os.environ), self.timeout_secs)
        ranks: list[_Rank] = []
        try:
            # One by one: what has started must be killed when the next cannot.
            ranks.extend(_Rank(rank, job) for rank in range(world_size))
            self._watch(ranks)
        finally:
            for each in ranks:
                each.kill()
        return ranks

    def _watch(self, ranks: list[_Rank]) -> None:
        deadline, reason = time.monotonic() + STARTUP_SECS, f"not all ranks started within {STARTUP_SECS:g} s"
        timing = failing = False
        while running := [rank for rank in ranks if rank.running]:
            now = time.monotonic()
            if now >= deadline:
                _stop(running, reason)
                return
            wait([source for rank in running for source in rank.sources()], timeout=deadline - now)
            for rank in running:
                rank.advance()
            if not timing and all(rank.started for rank in ranks):
                timing = True
                deadline, reason = time.monotonic() + self.timeout_secs, f"ran for {self.timeout_secs:g} s"
            if not failing and any(rank.error for rank in ranks):
                failing = timing = True
                deadline = min(deadline, time.monotonic() + self.grace_secs)
                reason = f"still running {self.grace_secs:g} s after the first failure"


@dataclass(frozen=True, slots=True)
class _Job:
    """What every rank of a run gets."""

    call: bytes  # pickle of (function, args, kwargs)
    world_size: int
    scratch: Path
    environ: dict[str, str]
    timeout_secs: float

    @property
    def longest_life_secs(self) -> float:
        """Longer than any run: until then its runner has ended it."""
        return STARTUP_SECS + 2 * self.timeout_secs

    def log_path(self, rank: int) -> Path:
        return self.scratch / f"rank{rank}.log"


class _Told(Enum):
    """What a rank sends, in this order unless it fails."""

    STARTED = "the process group works"
    VALUE = "the function returned this (pickled)"
    CLOSED = "the process group is gone"
    ERROR = "traceback; the last thing that is sent"


class _Rank:
    """A rank as its runner sees it."""

    def __init__(self, rank: int, job: _Job) -> None:
        self.rank = rank
        self.running = True
        self.started = False
        self.value: Any = None
        self.error: str | None = None
        self.failed_at = float("inf")
        self._closed = False
        self._log_path = job.log_path(rank)
        self._log_path.touch()
        channel, rank_end = _CONTEXT.Pipe(duplex=False)
        self._channel: Connection | None = channel
        self._process = _CONTEXT.Process(target=_rank_main, args=(rank, job, rank_end), name=f"rank{rank}")
        self._process.start()
        rank_end.close()

    def sources(self) -> list[Connection | int]:
        """What becomes readable when there is something to ``advance`` with."""
        return [self._process.sentinel, *([self._channel] if self._channel else [])]

    def advance(self) -> None:
        """Take in what the rank has sent, then its end."""
        ended = self._process.exitcode is not None  # asked first: afterwards nothing more can arrive
        try:
            while self._channel and self._channel.poll():
                self._take(*self._channel.recv())
        except EOFError:
            self._channel = None
        if ended:
            self.running = False
            if not self._closed or self._process.exitcode:
                self.fail(
                    f"{self._how_it_ended()} {'after' if self._closed else 'before'} it had closed down"
                )

    def fail(self, error: str) -> None:
        if self.error is None:
            self.error, self.failed_at = error, time.monotonic()

    def ask_for_stacks(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)

    def has_printed_stacks(self) -> bool:
        return b"most recent call first" in self._log_path.read_bytes()

    def kill(self) -> None:
        if self.running:
            self.running = False
            self._process.kill()
            self._process.join()

    def outcome(self) -> Outcome[Any]:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return Outcome(self.rank, self.value, self.error, "\n".join(lines[-LOG_LINES:]))

    def _take(self, told: _Told, content: bytes) -> None:
        if told is _Told.STARTED:
            self.started = True
        elif told is _Told.VALUE:
            self.value = pickle.loads(content)
        elif told is _Told.CLOSED:
            self._closed = True
        else:
            self.fail(content.decode())

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        return f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with {code}"


def _stop(ranks: list[_Rank], reason: str) -> None:
    """End ranks that have run out of time, with their stacks in their logs."""
    for rank in ranks:
        rank.fail(f"{reason}; killed")
        rank.ask_for_stacks()
    # All have to print before the first dies: its peers would notice, and leave where they hang.
    give_up = time.monotonic() + STACKS_SECS
    while time.monotonic() < give_up and not all(rank.has_printed_stacks() for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()


def _rank_main(rank: int, job: _Job, channel: Connection) -> None:
    """The life of a rank, in its own process."""
    _settle(job.log_path(rank), job)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        function, args, kwargs = pickle.loads(job.call)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(job.scratch / "store"), job.world_size),
            rank=rank,
            world_size=job.world_size,
            # A hang is for the runner to report, with stacks.
            timeout=timedelta(seconds=job.longest_life_secs),
        )
        dist.barrier()  # A peer that fails in its first line must not look like a rendezvous that failed.
        channel.send((_Told.STARTED, b""))
        channel.send((_Told.VALUE, pickle.dumps(function(*args, **kwargs))))
        dist.barrier()
        dist.destroy_process_group()
        channel.send((_Told.CLOSED, b""))
    except BaseException:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures of a rank too
        channel.send((_Told.ERROR, traceback.format_exc().encode()))
        # At once: closed sockets tell the peers, and leaving politely can wait for them.
        os._exit(1)


def _settle(log: Path, job: _Job) -> None:
    """Environment, output and diagnostics of a fresh rank."""
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A rank whose runner was killed ends too.
    faulthandler.dump_traceback_later(job.longest_life_secs, exit=True)
