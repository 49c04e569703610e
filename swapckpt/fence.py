"""The gate between readers of the mirrors and the offload that overwrites them.

[Note: a lease is immutable] A snapshot does not copy: it leases the present content of host segments. No
byte of a leased segment changes before its release. An offload that comes to a leased segment is
*redirected* into a spare one, which becomes the mirror (an offload rewrites the whole run anyway, so that
costs no copy), as long as the byte budget for spares lasts; after that it waits for the reader. Readers
should therefore go through the segments in the order in which the next step overwrites them, and release
each as soon as its bytes are out.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from swapckpt.errors import LeaseTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from swapckpt.memory import HostSegment
    from swapckpt.plan import SegmentLayout


class Gate(Protocol):
    """Guards the content of host segments.

    Call sequence (per rank; readers may be other threads, the pipeline is the thread in ``step()``):

    1. reader: ``begin_read(segment)`` before it reads the first byte of a segment's mirrors;
    2. pipeline: ``before_overwrite(segment)`` right before it submits an offload into the segment. The gate
       returns the segment itself once nobody reads it (waiting if it has to), or another segment with the
       same layout, which the offload fills and which becomes the mirror from then on (a redirect);
    3. reader: ``end_read(segment)`` when it needs the bytes no more.

    A segment may be read by several readers at once; each ``begin_read`` is matched by one ``end_read``.
    """

    def begin_read(self, segment: HostSegment) -> None: ...

    def end_read(self, segment: HostSegment) -> None: ...

    def before_overwrite(self, segment: HostSegment) -> HostSegment: ...


class OpenGate:
    """The gate that never blocks: for an optimizer whose mirrors nobody reads during a step."""

    def begin_read(self, segment: HostSegment) -> None:
        pass

    def end_read(self, segment: HostSegment) -> None:
        pass

    def before_overwrite(self, segment: HostSegment) -> HostSegment:
        return segment


class LeasingGate:
    """Redirects an offload away from segments that are being read, or makes it wait (see the module's note).

    Args:
        allocate: Makes a segment for a layout.
        spare_nbytes: Budget of spare segments, asked at every redirect: it may grow with the batches.
        timeout_secs: Bound of a wait for readers.
    """

    def __init__(
        self,
        allocate: Callable[[SegmentLayout], HostSegment],
        *,
        spare_nbytes: Callable[[], int],
        timeout_secs: float,
    ) -> None:
        self._allocate = allocate
        self._budget = spare_nbytes
        self._timeout_secs = timeout_secs
        self._changed = threading.Condition()
        self._num_readers: dict[HostSegment, int] = {}
        self._replaced: set[HostSegment] = set()  # no mirror any more, still being read
        self._spares: list[HostSegment] = []
        self.spare_nbytes = 0  # held beyond one segment per mirror

    def begin_read(self, segment: HostSegment) -> None:
        with self._changed:
            self._num_readers[segment] = self._num_readers.get(segment, 0) + 1

    def end_read(self, segment: HostSegment) -> None:
        with self._changed:
            left = self._num_readers.pop(segment) - 1
            if left:
                self._num_readers[segment] = left
            elif segment in self._replaced:
                self._replaced.discard(segment)
                self._spares.append(segment)
            self._changed.notify_all()

    def before_overwrite(self, segment: HostSegment) -> HostSegment:
        """The segment to write into: itself when nobody reads it, else a spare, else itself after a wait.

        Raises:
            LeaseTimeoutError: A reader did not release the segment in time. Nothing was overwritten.
        """
        with self._changed:
            if segment not in self._num_readers:
                return segment
            spare = self._take_spare(segment.layout)
            if spare is not None:
                self._replaced.add(segment)
                return spare
            if not self._changed.wait_for(lambda: segment not in self._num_readers, self._timeout_secs):
                msg = (
                    f"A snapshot still reads a segment of {segment.nbytes:,} bytes after "
                    f"{self._timeout_secs} s, and the spare memory ({self.spare_nbytes:,} of "
                    f"{self._budget():,} bytes) is used up. "
                    "Release snapshots before stepping, or raise SwapConfig.spare_nbytes."
                )
                raise LeaseTimeoutError(msg)
            return segment

    def _take_spare(self, layout: SegmentLayout) -> HostSegment | None:
        for index, spare in enumerate(self._spares):
            if spare.layout == layout:
                return self._spares.pop(index)
        if self.spare_nbytes + layout.nbytes > self._budget():
            return None
        self.spare_nbytes += layout.nbytes
        return self._allocate(layout)


class Lease:
    """Segments whose content stays as it is until they are released. A context manager; leaving it releases
    all.

    Call sequence (any one thread at a time): 1. made between steps, 2. ``release(segment)`` as each is read,
    in the order of ``segments``, 3. ``close`` (idempotent) for what is left.
    """

    def __init__(self, guarded: Iterable[tuple[Gate, HostSegment]]) -> None:
        self._gates: dict[HostSegment, Gate] = {}
        for gate, segment in guarded:
            gate.begin_read(segment)
            self._gates[segment] = gate

    @property
    def segments(self) -> tuple[HostSegment, ...]:
        """Segments that are still leased, in the order in which the next step will overwrite them."""
        return tuple(self._gates)

    def release(self, segment: HostSegment) -> None:
        """Let the pipeline have one segment back. Releasing it again does nothing."""
        gate = self._gates.pop(segment, None)
        if gate is not None:
            gate.end_read(segment)

    def close(self) -> None:
        for segment in self.segments:
            self.release(segment)

    def __enter__(self) -> Lease:  # noqa: PYI034 - typing.Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
