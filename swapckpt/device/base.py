"""What the pipeline asks of a device: memory, two copy streams, events and bounded waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from swapckpt.trace import Timeline

CopyPair = tuple["Tensor", "Tensor"]
"""``(destination, source)``: 1-D contiguous uint8 tensors of equal length, one on the host."""


@dataclass(slots=True)
class Ledger:
    """Accounted bytes of swapped state, and the traffic that moved it.

    Memory is asserted on these figures, never on RSS. Device bytes are staging buffers plus state the
    optimizer created on the device that has not been offloaded yet; host bytes are mirror slabs.
    """

    device_nbytes: int = 0
    device_peak_nbytes: int = 0
    host_peak_nbytes: int = 0
    num_loads: int = 0
    loaded_nbytes: int = 0
    num_offloads: int = 0
    offloaded_nbytes: int = 0
    _host_nbytes: int = 0
    # Slabs die in garbage collection, at any moment and on any thread: appending is atomic, subtracting is
    # not.
    _dropped_host: deque[int] = field(default_factory=deque)

    @property
    def host_nbytes(self) -> int:
        while self._dropped_host:
            self._host_nbytes -= self._dropped_host.popleft()
        return self._host_nbytes

    def hold_host(self, nbytes: int) -> None:
        """Count a new slab."""
        self._host_nbytes = self.host_nbytes + nbytes
        self.host_peak_nbytes = max(self.host_peak_nbytes, self._host_nbytes)

    def drop_host(self, nbytes: int) -> None:
        """Count a slab that is gone. Safe in a finalizer."""
        self._dropped_host.append(nbytes)

    def hold_device(self, nbytes: int) -> None:
        """Count device memory that now holds swapped state."""
        self.device_nbytes += nbytes
        self.device_peak_nbytes = max(self.device_peak_nbytes, self.device_nbytes)

    def drop_device(self, nbytes: int) -> None:
        """Count device memory given back."""
        self.device_nbytes -= nbytes

    def count_load(self, nbytes: int) -> None:
        """Count one host-to-device copy."""
        self.num_loads += 1
        self.loaded_nbytes += nbytes

    def count_offload(self, nbytes: int) -> None:
        """Count one device-to-host copy."""
        self.num_offloads += 1
        self.offloaded_nbytes += nbytes

    def reset_peak(self) -> None:
        """Start new peaks from the current figures."""
        self.device_peak_nbytes = self.device_nbytes
        self.host_peak_nbytes = self.host_nbytes


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """True when everything before this point has run. Never blocks."""
        ...

    def synchronize(self, timeout_secs: float) -> None:
        """Block the calling thread until this point is reached.

        Raises:
            TransferError: Something before this point failed.
            TransferTimeoutError: The point was not reached within ``timeout_secs``.
        """
        ...


class Stream(Protocol):
    """Work that runs in submission order, concurrently with other streams."""

    @property
    def name(self) -> str: ...

    def wait(self, event: Event) -> None:
        """Order everything submitted from now on after ``event``. Does not block a device's host thread."""
        ...

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        """Submit copies. Nothing is known about their completion until an event recorded later is
        complete."""
        ...

    def record(self) -> Event:
        """An event after everything submitted so far."""
        ...

    def span(self, name: str, *, batch: int, nbytes: int = 0) -> AbstractContextManager[None]:
        """Record what is submitted inside as one span of the timeline, if one is being recorded."""
        ...


class Device(Protocol):
    """One device and the host beside it.

    Call sequence of a step (the thread that calls ``optimizer.step()``; all ranks on their own):

    1. ``allocate`` the staging buffers, record ``compute()`` and let ``load`` wait for it: fresh memory may
       still be in use by work queued on the compute stream.
    2. Per batch: ``load.copy``; ``compute().wait(loaded)``; the optimizer's own kernels on ``compute()``;
       ``offload.wait(updated)``; ``offload.copy``; an event is recorded after each.
    3. ``synchronize`` the event of every offload before a mirror counts as written. A device-wide
       synchronize is no proof: after a failed asynchronous copy it can return normally.
    4. ``drop`` what was created and ``release`` the staging buffers. After an error: ``reset``, which waits
       for both streams.
    """

    ledger: Ledger
    timeline: Timeline | None

    @property
    def load(self) -> Stream:
        """The host-to-device copy stream."""
        ...

    @property
    def offload(self) -> Stream:
        """The device-to-host copy stream."""
        ...

    @property
    def device(self) -> torch.device:
        """Where parameters and staging buffers live."""
        ...

    @property
    def is_host(self) -> bool:
        """True when the device's tensors are host memory: small state needs no shadow."""
        ...

    def compute(self) -> Stream:
        """The stream on which the calling thread's kernels run now."""
        ...

    def is_capturing(self) -> bool:
        """True while the compute stream is captured into a graph: a replay would not swap."""
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """A 1-D uint8 device buffer, owned by the compute stream.

        Raises:
            torch.OutOfMemoryError: The device has no room.
        """
        ...

    def release(self, buffer: Tensor) -> None:
        """Give a buffer of ``allocate`` back. All work on it must be complete or ordered before compute."""
        ...

    def hold(self, tensor: Tensor) -> None:
        """Account for state that an update created on the device, until ``drop``: it is being offloaded."""
        ...

    def drop(self, tensor: Tensor) -> None:
        """The created state is needed no more: from here on its memory may be used for something else."""
        ...

    def pinned_empty(self, nbytes: int) -> Tensor:
        """A 1-D uint8 host tensor that asynchronous copies can use (plain memory on a host device)."""
        ...

    def register_host(self, slab: Tensor) -> Callable[[], None] | None:
        """Make existing host memory usable for asynchronous copies.

        Returns the call that undoes it, or None where the device cannot (use ``pinned_empty`` then).
        """
        ...

    def reset(self) -> None:
        """After a failure: wait (bounded) until both copy streams are idle and forget their errors.

        Raises:
            TransferTimeoutError: A stream did not come to rest. Its late copies may still write memory.
        """
        ...
