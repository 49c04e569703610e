"""CPU devices that fail on purpose: an allocation, or a copy of a chosen batch and direction."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from swapckpt.device import CpuDevice
from swapckpt.device.cpu import CpuStream

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from torch import Tensor

    from swapckpt.device import CopyPair


class FailingDevice(CpuDevice):
    """Fails the n-th allocation, or the n-th copy of a direction, counted from 0 when it is armed."""

    load: FailingStream
    offload: FailingStream

    def __init__(self, policy: str, *, seed: int = 0, timeout_secs: float = 600.0) -> None:
        super().__init__(policy, seed=seed, timeout_secs=timeout_secs)
        self.allocations_left: int | None = None
        self.load = FailingStream(self.load)
        self.offload = FailingStream(self.offload)

    def allocate(self, nbytes: int) -> Tensor:
        if self.allocations_left is not None:
            self.allocations_left -= 1
            if self.allocations_left < 0:
                self.allocations_left = None
                msg = "no room for staging"
                raise MemoryError(msg)
        return super().allocate(nbytes)


class FailingStream(CpuStream):
    """A copy stream whose n-th copy from now on raises where and when it would have run, or waits for
    ``resume``."""

    def __init__(self, stream: CpuStream) -> None:
        self.__dict__.update(stream.__dict__)
        self.copies_left: int | None = None
        self.resume: threading.Event | None = None

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        if self.copies_left is not None:
            self.copies_left -= 1
            if self.copies_left < 0:
                self.copies_left = None
                if self.resume is None:
                    self._submit(_fail)
                    return
                self._submit(partial(_hang, self.resume))
        super().copy(pairs)


def _hang(resume: threading.Event) -> None:
    resume.wait(60.0)


def _fail() -> None:
    msg = "the link is down"
    raise OSError(msg)
