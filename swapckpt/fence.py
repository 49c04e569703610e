"""The gate between readers of the mirrors and the offload that overwrites them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from swapckpt.memory import HostSegment


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
