"""The CPU as a device: copy streams are worker threads, the compute stream is the calling thread.

The real code path of swapping runs on it, with real concurrency, so that everything can be tried and tested
without an accelerator. For tests, :class:`Policy` delays copies in legal but hostile ways.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from swapckpt.device.base import CopyPair, Event, Ledger
from swapckpt.errors import TransferError, TransferTimeoutError
from swapckpt.trace import Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from torch import Tensor

POISON_BYTE = 0xFF  # NaN in every floating-point format
PIECE_NBYTES = 16 << 20
"""Copies of at least two pieces are shared among threads."""


class Policy(Enum):
    """When a submitted copy runs."""

    INLINE = "inline"  # at once, on the calling thread: no concurrency, the easiest to debug
    THREAD = "thread"  # on the stream's worker thread: real overlap
    LAZY = "lazy"  # as late as legal: only when something ordered after it forces it
    RANDOM = "random"  # a legal interleaving drawn from the seed


class _Progress:
    """How far a stream has come. Shared by its worker, its events and everyone who waits."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done = 0
        self.error: BaseException | None = None
        self.error_seq = 0

    def attempt(self, job: Callable[[], None]) -> BaseException | None:
        """Run one job and return its failure; after one, later jobs are skipped until the error is
        cleared."""
        if self.error is None:
            try:
                job()
            except BaseException as caught:  # noqa: BLE001 - kept and raised by every event that covers it
                return caught
        return None

    def finish(self, seq: int, error: BaseException | None) -> None:
        """Job ``seq`` has been attempted: let everyone know who waits."""
        with self.changed:
            if error is not None:
                self.error_seq = seq  # before the error: a waiter reads both without the lock
                self.error = error
            self.done = seq
            self.changed.notify_all()

    def raise_if_failed(self, seq: int, stream: str) -> None:
        if self.error is not None and self.error_seq <= seq:
            msg = f"A copy on the {stream} stream failed: {self.error}"
            raise TransferError(msg) from self.error


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None], progress: _Progress) -> None:
    while (item := jobs.get()) is not None:
        job, seq = item
        error = progress.attempt(job)
        # Its tensors must die before the job counts as done. An idle worker would keep them alive; and once
        # nobody waits any more the interpreter may be ending, in which a thread that frees a tensor aborts.
        del item, job
        progress.finish(seq, error)


class _ThreadRunner:
    """Runs jobs on a daemon thread that ends with this object (it must not keep the object alive)."""

    def __init__(self, name: str, progress: _Progress) -> None:
        self._name, self._progress = name, progress
        self._pid = 0

    def submit(self, job: Callable[[], None], seq: int) -> None:
        if self._pid != os.getpid():  # first use, or a forked child in which the thread does not exist
            self._start()
        self._jobs.put((job, seq))

    def _start(self) -> None:
        self._pid = os.getpid()
        self._progress.changed = threading.Condition()  # a child may have inherited it locked
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_work, args=(self._jobs, self._progress), daemon=True, name=f"swapckpt-{self._name}"
        )
        thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def force(self, seq: int, timeout_secs: float) -> None:
        with self._progress.changed:
            self._progress.changed.wait_for(lambda: self._progress.done >= seq, timeout_secs)


class _QueueRunner:
    """Runs jobs on the thread that forces them: at once (inline), as late as legal (lazy) or at random."""

    def __init__(self, policy: Policy, progress: _Progress, schedule: _Schedule) -> None:
        self._policy, self._progress, self._schedule = policy, progress, schedule
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._turn = threading.RLock()  # a thread that finds no job must know that the last one is done
        schedule.runners.append(weakref.ref(self))

    def submit(self, job: Callable[[], None], seq: int) -> None:
        self._jobs.append((job, seq))
        if self._policy is Policy.INLINE:
            self.advance(1)
        elif self._policy is Policy.RANDOM:
            self._schedule.shuffle()

    def force(self, seq: int, timeout_secs: float) -> None:
        del timeout_secs  # runs on the caller: there is nobody to wait for
        with self._turn:
            while self._progress.done < seq and self._jobs:
                self.advance(1)

    def advance(self, num_jobs: int) -> None:
        with self._turn:
            for _ in range(min(num_jobs, len(self._jobs))):
                job, seq = self._jobs.popleft()
                self._progress.finish(seq, self._progress.attempt(job))

    def pending(self) -> int:
        return len(self._jobs)


class _Schedule:
    """Seeded choice of which streams make progress."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - a test schedule, not a secret
        self.runners: list[weakref.ref[_QueueRunner]] = []

    def shuffle(self) -> None:
        for reference in self.runners:
            runner = reference()
            if runner is not None and runner.pending() and self._rng.random() < 0.4:
                runner.advance(self._rng.randint(1, runner.pending()))


class CpuEvent:
    """A point in a :class:`CpuStream`."""

    POLLS_UNTIL_PROGRESS = 8

    def __init__(self, stream: CpuStream, seq: int) -> None:
        self._stream, self._seq = stream, seq
        self._polls = 0

    def reached(self) -> bool:
        """True when this point was reached without a failure before it."""
        progress = self._stream.progress
        return progress.done >= self._seq and (progress.error is None or progress.error_seq > self._seq)

    def query(self) -> bool:
        if not self.reached():
            self._polls += 1
            if self._polls % self.POLLS_UNTIL_PROGRESS == 0:  # a polling loop must end under LAZY too
                self._stream.force(self._seq, 0.0)
        return self.reached()

    def synchronize(self, timeout_secs: float) -> None:
        stream = self._stream
        stream.force(self._seq, timeout_secs)
        stream.progress.raise_if_failed(self._seq, stream.name)
        if stream.progress.done < self._seq:
            msg = f"The {stream.name} stream did not finish its copies within {timeout_secs} s."
            raise TransferTimeoutError(msg)


class CpuStream:
    """One direction of copies."""

    def __init__(self, name: str, *, direction: str, device: CpuDevice, schedule: _Schedule) -> None:
        self.name = name
        self.progress = _Progress()
        self._direction = direction
        self._ledger, self._timeout_secs = device.ledger, device.timeout_secs
        self._device = weakref.ref(device)  # the device owns the stream: no cycle, so threads end at once
        self._seq = 0
        self._runner: _ThreadRunner | _QueueRunner
        if device.policy is Policy.THREAD:
            self._runner = _ThreadRunner(name, self.progress)
        else:
            self._runner = _QueueRunner(device.policy, self.progress, schedule)

    def _submit(self, job: Callable[[], None]) -> None:
        self._seq += 1
        self._runner.submit(job, self._seq)

    def force(self, seq: int, timeout_secs: float) -> None:
        """Wait until (or, where nobody else does it, make sure that) job ``seq`` has run."""
        self._runner.force(seq, timeout_secs)

    def come_to_rest(self) -> None:
        """Wait (bounded) for everything submitted and forget its errors."""
        self.force(self._seq, self._timeout_secs)
        self.progress.error = None
        self.record().synchronize(0.0)

    def wait(self, event: Event) -> None:
        if isinstance(event, CpuEvent) and event.reached():
            return
        self._submit(partial(event.synchronize, self._timeout_secs))

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        count = self._ledger.count_load if self._direction == "load" else self._ledger.count_offload
        for destination, _ in pairs:
            count(destination.nbytes)
        self._submit(partial(_copy, pairs))

    def record(self) -> CpuEvent:
        return CpuEvent(self, self._seq)

    def span(self, name: str, *, batch: int, nbytes: int = 0) -> AbstractContextManager[None]:
        device = self._device()
        if device is None or device.timeline is None:
            return nullcontext()
        return self._recorded_span(device.timeline, name, batch, nbytes)

    @contextmanager
    def _recorded_span(self, timeline: Timeline, name: str, batch: int, nbytes: int) -> Iterator[None]:
        begin: list[int] = []
        self._submit(lambda: begin.append(time.perf_counter_ns()))
        yield
        self._submit(
            lambda: timeline.add(Span(self.name, name, batch, begin[0], time.perf_counter_ns(), nbytes))
        )


def _copy(pairs: Sequence[CopyPair]) -> None:
    """Copy on the calling thread, what is large in pieces on several.

    NumPy's copy is one memmove: up to twice as fast as one thread of ``Tensor.copy_``, and it starts no team
    of OpenMP threads for each stream. Pieces use the cores while nothing else runs beside a large copy, as in
    the first load and the last offload of a step.
    """
    pieces: list[Future[None]] = []
    for destination, source in pairs:
        target, origin = destination.numpy(), source.numpy()
        if target.nbytes < 2 * PIECE_NBYTES:
            np.copyto(target, origin)
            continue
        for begin in range(0, target.nbytes, PIECE_NBYTES):
            piece = slice(begin, begin + PIECE_NBYTES)
            pieces.append(_copiers(os.getpid()).submit(np.copyto, target[piece], origin[piece]))
    wait(pieces)  # all of them, before the first failure is raised: none may write afterwards
    for future in pieces:
        future.result()


@cache
def _copiers(pid: int) -> ThreadPoolExecutor:
    """Threads that both streams share. A forked child has none of its parent's, so it makes its own."""
    del pid
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="swapckpt-copy")


class _CompleteEvent:
    """A point that is always reached: the calling thread is the compute stream."""

    def query(self) -> bool:
        return True

    def synchronize(self, timeout_secs: float) -> None:
        del timeout_secs


class _ComputeStream:
    """The calling thread. Waiting blocks it; whatever it has called has already run."""

    name = "compute"

    def __init__(self, device: CpuDevice) -> None:
        self._device = device

    def wait(self, event: Event) -> None:
        event.synchronize(self._device.timeout_secs)

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        _copy(pairs)

    def record(self) -> _CompleteEvent:
        return _CompleteEvent()

    @contextmanager
    def span(self, name: str, *, batch: int, nbytes: int = 0) -> Iterator[None]:
        begin_ns = time.perf_counter_ns()
        yield
        if self._device.timeline is not None:
            self._device.timeline.add(Span(self.name, name, batch, begin_ns, time.perf_counter_ns(), nbytes))


class CpuDevice:
    """Worker-thread streams over host memory.

    Streams and update share the cores: with several intra-op threads those of OpenMP spin where copies could
    run. ``torch.set_num_threads(1)`` or ``OMP_WAIT_POLICY=passive`` avoids that.

    Freed staging buffers stay cached for the next step, as in an accelerator's allocator: touching fresh
    memory costs more than copying it. ``empty_cache`` returns them; the ledger never counts them.
    """

    def __init__(
        self, policy: Policy | str = Policy.THREAD, *, seed: int = 0, timeout_secs: float = 600.0
    ) -> None:
        self.policy = Policy(policy)
        self.timeout_secs = timeout_secs
        self.ledger = Ledger()
        self.timeline: Timeline | None = None
        schedule = _Schedule(seed)
        self.load = CpuStream("load", direction="load", device=self, schedule=schedule)
        self.offload = CpuStream("offload", direction="offload", device=self, schedule=schedule)
        self._cache: list[Tensor] = []
        # Adversarial policies poison memory, so that a missing wait reads NaN instead of a lucky value.
        self._poison = self.policy in (Policy.LAZY, Policy.RANDOM)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def is_host(self) -> bool:
        return True

    def compute(self) -> _ComputeStream:
        return _ComputeStream(self)

    def is_capturing(self) -> bool:
        return False

    def allocate(self, nbytes: int) -> Tensor:
        buffer = self._from_cache(nbytes)
        if buffer is None:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self._poison:
            buffer.fill_(POISON_BYTE)
        self.ledger.hold_device(nbytes)
        return buffer

    def _from_cache(self, nbytes: int) -> Tensor | None:
        for index, buffer in enumerate(self._cache):
            if buffer.nbytes == nbytes:
                return self._cache.pop(index)
        self._cache.clear()  # sizes changed: a cache of the old ones would only hold memory
        return None

    def release(self, buffer: Tensor) -> None:
        self.ledger.drop_device(buffer.nbytes)
        if self._poison:
            buffer.fill_(POISON_BYTE)
        self._cache.append(buffer)

    def empty_cache(self) -> None:
        """Return cached staging buffers to the operating system."""
        self._cache.clear()

    def hold(self, tensor: Tensor) -> None:
        self.ledger.hold_device(tensor.nbytes)

    def drop(self, tensor: Tensor) -> None:
        self.ledger.drop_device(tensor.nbytes)

    def pinned_empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def register_host(self, slab: Tensor) -> Callable[[], None]:
        del slab
        return _nothing

    def reset(self) -> None:
        for stream in (self.load, self.offload):
            stream.come_to_rest()


def _nothing() -> None:
    """Undo of a registration that did not need to be done."""
