"""A race detector: are any two accesses to the same bytes, one of them a write, left unordered?

Every *actor* (a copy stream, the compute stream, a host thread) has a vector clock. Recording and waiting for
events, submitting work and synchronising carry clocks from one actor to another. An access is ordered after
an earlier one if its actor knows the time of the earlier one. The answer does not depend on timing: one run
of a step, in any schedule, shows a missing wait.

Method: happens-before by vector clocks (Lamport, 1978), on byte ranges instead of variables.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swapckpt._torch import OperationWatch, local_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

Clock = dict[str, int]
"""The latest time of every actor that one actor knows of."""


@dataclass(frozen=True, slots=True)
class Access:
    """One read or write of the bytes ``[begin, end)`` (addresses)."""

    actor: str
    time: int
    what: str
    begin: int
    end: int
    is_write: bool

    def overlaps(self, other: Access) -> bool:
        return self.begin < other.end and other.begin < self.end

    def covers(self, other: Access) -> bool:
        return self.begin <= other.begin and other.end <= self.end

    def __str__(self) -> str:
        return f"{'write' if self.is_write else 'read'} by {self.what} on {self.actor}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same bytes that nothing orders, at least one of them a write."""

    earlier: Access
    later: Access
    block: str

    def __str__(self) -> str:
        first = max(self.earlier.begin, self.later.begin)
        last = min(self.earlier.end, self.later.end)
        return f"{self.later} is not ordered after {self.earlier} ({last - first} bytes of {self.block})"


@dataclass(slots=True)
class Block:
    """Watched memory and the accesses that later ones have to be ordered after."""

    name: str
    begin: int
    end: int
    on_device: bool
    accesses: list[Access] = field(default_factory=list)


class RaceDetector:
    """Collects races between streams and host threads on watched memory.

    Device memory is touched by the compute stream, host memory by the thread that calls; ``watching`` sees
    torch's own operations of a thread, ``read`` and ``write`` tell of anything torch's dispatcher does not
    see (a file being written from a mirror).
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self.unheld: list[str] = []
        self._clocks: dict[str, Clock] = {}
        self._blocks: list[Block] = []
        self._lock = threading.RLock()
        self._hidden = threading.local()

    # ------------------------------------------------------------------ actors and order

    @staticmethod
    def host() -> str:
        """The actor of the calling thread."""
        return f"host thread {threading.current_thread().name}"

    def submit(self, actor: str) -> None:
        """Work is submitted to ``actor``: it comes after everything the calling thread knows of."""
        if actor != self.host():
            self.join(actor, self.now(self.host()))

    def now(self, actor: str) -> Clock:
        """A copy of what ``actor`` knows: what an event recorded on it carries."""
        with self._lock:
            return dict(self._clocks.get(actor, {}))

    def join(self, actor: str, clock: Mapping[str, int]) -> None:
        """``actor`` waits for the point at which ``clock`` was taken."""
        with self._lock:
            own = self._clocks.setdefault(actor, {})
            for other, time in clock.items():
                own[other] = max(own.get(other, 0), time)

    # ------------------------------------------------------------------ memory

    def watch(self, tensor: Tensor, name: str, *, on_device: bool) -> None:
        """Watch the memory of a dense tensor. What was known of these addresses is forgotten."""
        begin = tensor.data_ptr()
        with self._lock:
            self.forget(tensor)
            self._blocks.append(Block(name, begin, begin + tensor.nbytes, on_device))

    def forget(self, tensor: Tensor) -> None:
        """Watch the memory no more."""
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        with self._lock:
            self._blocks = [block for block in self._blocks if block.end <= begin or end <= block.begin]

    def access(self, tensor: Tensor, *, actor: str, what: str, is_write: bool) -> None:
        """``actor`` reads or writes a tensor. Nothing happens if its memory is not watched."""
        block = self._block_of(tensor)
        if block is None or tensor.numel() == 0:
            return
        begin = tensor.data_ptr()
        span = (
            sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        )
        with self._lock:
            clock = self._clocks.setdefault(actor, {})
            clock[actor] = clock.get(actor, 0) + 1
            end = begin + span * tensor.element_size()
            self._check(block, Access(actor, clock[actor], what, begin, end, is_write), clock)

    def require_watched(self, tensor: Tensor, *, what: str) -> None:
        """An asynchronous copy of memory that nobody holds: it may be freed while the copy still runs."""
        if self._block_of(tensor) is None:
            self.unheld.append(f"{what} of {tensor.nbytes} bytes that nobody holds until it is complete")

    def _block_of(self, tensor: Tensor) -> Block | None:
        begin = tensor.data_ptr()
        return next((block for block in self._blocks if block.begin <= begin < block.end), None)

    def _check(self, block: Block, new: Access, clock: Clock) -> None:
        kept = []
        for old in block.accesses:
            ordered = clock.get(old.actor, 0) >= old.time
            if old.overlaps(new) and not ordered and (old.is_write or new.is_write):
                self.races.append(Race(old, new, block.name))
            # Whoever is ordered after the new access is ordered after this one too: it need not be kept.
            replaced = ordered and new.covers(old) and (new.is_write or not old.is_write)
            if not replaced:
                kept.append(old)
        block.accesses = [*kept, new]

    # ------------------------------------------------------------------ what threads do

    def read(self, tensor: Tensor, what: str = "host read") -> None:
        """The calling thread reads a tensor in a way that torch's dispatcher does not see."""
        self.access(local_of(tensor), actor=self.host(), what=what, is_write=False)

    def write(self, tensor: Tensor, what: str = "host write") -> None:
        """The calling thread writes a tensor in a way that torch's dispatcher does not see."""
        self.access(local_of(tensor), actor=self.host(), what=what, is_write=True)

    @contextmanager
    def watching(self, after: Mapping[str, int] | None = None) -> Iterator[None]:
        """See torch's operations of the calling thread: kernels on device memory, reads and writes of host
        memory. ``after`` is the clock of whoever started this thread."""
        if after is not None:
            self.join(self.host(), after)
        with OperationWatch(self._operation):
            yield

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """What the device does for itself is not an operation of the thread that calls it."""
        before = self.is_hidden
        self._hidden.now = True
        try:
            yield
        finally:
            self._hidden.now = before

    @property
    def is_hidden(self) -> bool:
        """True while the calling thread is inside ``hidden``."""
        return "now" in self._hidden.__dict__ and bool(self._hidden.now)

    def _operation(self, tensor: Tensor, what: str, *, is_write: bool) -> None:
        """A torch operation of the calling thread on one tensor."""
        block = self._block_of(tensor) if not self.is_hidden else None
        if block is None:
            return
        actor = "compute" if block.on_device else self.host()
        self.submit(actor)
        self.access(tensor, actor=actor, what=what, is_write=is_write)

    def check(self) -> None:
        """Raise AssertionError with every race found so far."""
        found = [*map(str, self.races), *self.unheld]
        if found:
            listed = "\n".join(f"  - {each}" for each in dict.fromkeys(found))
            msg = f"{len(found)} races:\n{listed}"
            raise AssertionError(msg)
