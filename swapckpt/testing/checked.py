"""The CPU device and the gate of snapshots under a race detector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapckpt.device import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from swapckpt.device import CopyPair, Event, Stream
    from swapckpt.device.base import Ledger
    from swapckpt.fence import Gate
    from swapckpt.memory import HostSegment
    from swapckpt.testing.races import Clock, RaceDetector
    from swapckpt.trace import Timeline


class CheckedEvent:
    """An event and what its stream knew when it was recorded."""

    def __init__(self, inner: Event, clock: Clock, detector: RaceDetector) -> None:
        self.inner, self.clock = inner, clock
        self._detector = detector

    def query(self) -> bool:
        with self._detector.hidden():
            reached = self.inner.query()
        if reached:
            self._detector.join(self._detector.host(), self.clock)
        return reached

    def synchronize(self, timeout_secs: float) -> None:
        with self._detector.hidden():
            self.inner.synchronize(timeout_secs)
        self._detector.join(self._detector.host(), self.clock)


class CheckedStream:
    """A stream whose copies, waits and events the detector sees."""

    def __init__(self, inner: Stream, detector: RaceDetector) -> None:
        self._inner, self._detector = inner, detector

    @property
    def name(self) -> str:
        return self._inner.name

    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent), f"{event!r} is an event of another device"
        with self._detector.hidden():
            self._inner.wait(event.inner)
        self._detector.submit(self.name)
        self._detector.join(self.name, event.clock)

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        self._detector.submit(self.name)
        for destination, source in pairs:
            for end in (destination, source):
                self._detector.require_watched(end, what=f"{self.name} copy")
            self._detector.access(source, actor=self.name, what=f"{self.name} copy", is_write=False)
            self._detector.access(destination, actor=self.name, what=f"{self.name} copy", is_write=True)
        with self._detector.hidden():
            self._inner.copy(pairs)

    def record(self) -> CheckedEvent:
        self._detector.submit(self.name)
        return CheckedEvent(self._inner.record(), self._detector.now(self.name), self._detector)

    def span(self, name: str, *, batch: int, nbytes: int = 0) -> AbstractContextManager[None]:
        return self._inner.span(name, batch=batch, nbytes=nbytes)


class CheckedDevice:
    """A :class:`~swapckpt.device.CpuDevice` that reports to a detector.

    The compute stream is an actor of its own, as on an accelerator, although its kernels run on the calling
    thread: what only a host wait would order is a race.
    """

    def __init__(self, detector: RaceDetector, inner: CpuDevice | None = None) -> None:
        self._inner = inner if inner is not None else CpuDevice("inline")
        self.detector = detector
        self.load = CheckedStream(self._inner.load, detector)
        self.offload = CheckedStream(self._inner.offload, detector)

    @property
    def ledger(self) -> Ledger:
        return self._inner.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._inner.ledger = ledger

    @property
    def timeline(self) -> Timeline | None:
        return self._inner.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._inner.timeline = timeline

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def is_host(self) -> bool:
        return self._inner.is_host

    def is_capturing(self) -> bool:
        return self._inner.is_capturing()

    def compute(self) -> CheckedStream:
        return CheckedStream(self._inner.compute(), self.detector)

    def _compute_writes(self, tensor: Tensor, what: str) -> None:
        # Memory changes hands on the compute stream: work of other streams on its former or its next content
        # has to be ordered with that.
        self.detector.submit("compute")
        self.detector.access(tensor, actor="compute", what=what, is_write=True)

    def allocate(self, nbytes: int) -> Tensor:
        with self.detector.hidden():
            buffer = self._inner.allocate(nbytes)
        self.detector.watch(buffer, "a staging buffer", on_device=True)
        self._compute_writes(buffer, "allocation")
        return buffer

    def release(self, buffer: Tensor) -> None:
        self._compute_writes(buffer, "release")
        with self.detector.hidden():
            self._inner.release(buffer)

    def hold(self, tensor: Tensor) -> None:
        self.detector.watch(tensor, "created state", on_device=True)
        self._compute_writes(tensor, "the update that created it")
        self._inner.hold(tensor)

    def drop(self, tensor: Tensor) -> None:
        self._compute_writes(tensor, "drop")
        self.detector.forget(tensor)
        self._inner.drop(tensor)

    def pinned_empty(self, nbytes: int) -> Tensor:
        slab = self._inner.pinned_empty(nbytes)
        self.detector.watch(slab, "a mirror slab", on_device=False)
        return slab

    def register_host(self, slab: Tensor) -> Callable[[], None] | None:
        self.detector.watch(slab, "a mirror slab", on_device=False)
        return self._inner.register_host(slab)

    def reset(self) -> None:
        for stream in (self.load, self.offload):
            self.detector.join(self.detector.host(), self.detector.now(stream.name))
        with self.detector.hidden():
            self._inner.reset()


class WatchedGate:
    """A gate whose releases order the overwrite after the reader."""

    def __init__(self, inner: Gate, detector: RaceDetector) -> None:
        self._inner, self._detector = inner, detector
        self._released: dict[HostSegment, Clock] = {}

    def begin_read(self, segment: HostSegment) -> None:
        self._inner.begin_read(segment)

    def end_read(self, segment: HostSegment) -> None:
        clock = self._released.setdefault(segment, {})
        for actor, time in self._detector.now(self._detector.host()).items():
            clock[actor] = max(clock.get(actor, 0), time)
        self._inner.end_read(segment)

    def before_overwrite(self, segment: HostSegment) -> HostSegment:
        target = self._inner.before_overwrite(segment)
        self._detector.join(self._detector.host(), self._released.get(target, {}))
        return target
