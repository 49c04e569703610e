"""Host copies of what training is about to change: parameters, and state that is not swapped.

Mirrors are leased and need no copy. Everything else in an asynchronous save is copied: what is small at once,
the rest on a copy stream while training goes on. The copy is ordered behind the compute stream, and what
changes the sources is ordered behind the copy.

[Note: changes without a fence] Steps of optimizers are fenced. Code that changes parameters otherwise
(weights exchanged for their average, clipped, loaded) may come before the copy. torch counts changes in
place: where the count of a source is another one when its copy is done, the save fails.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swapckpt._torch import foreach_copy, local_of, spec_of, version_of, wrap_local
from swapckpt.device import device_for
from swapckpt.errors import PhaseError, TransferError, TransferTimeoutError, listing
from swapckpt.memory import HostArena
from swapckpt.plan import lay_out
from swapckpt.state import byte_view, tensor_spec
from swapckpt.state import is_dense as has_no_gaps
from swapckpt.storage.items import check_storage, is_dense, is_in_order, is_row_by_row

if TYPE_CHECKING:
    from torch import Tensor

    from swapckpt.device import CopyPair, Event
    from swapckpt.memory import HostSegment
    from swapckpt.plan import TensorSpec

logger = logging.getLogger(__name__)

SMALL_NBYTES = 64 << 10
"""Host tensors below this are copied at once: that takes less than asking a thread to do it."""


class Staging:
    """Copies for one save after the other, in host memory that is kept and used again.

    Call sequence (per rank, for each save):

    1. training thread: ``copy(tensor)`` for each tensor, in the same order every time;
    2. training thread: ``start()``, which returns at once;
    3. training thread: ``fence()`` before anything changes a source (see the note at the top);
    4. any thread: ``synchronize()`` before anything reads a copy;
    5. training thread: ``copy`` again, for the next save, when nothing reads the copies any more.

    Args:
        timeout_secs: Bound of the waits.
    """

    def __init__(self, *, timeout_secs: float) -> None:
        self._timeout_secs = timeout_secs
        self._lanes: dict[torch.device, _Lane] = {}
        self._small = _SmallTensors(timeout_secs=timeout_secs)

    def copy(self, tensor: Tensor, *, name: str = "a tensor") -> Tensor:
        """A host tensor that will hold what ``tensor`` holds now, as soon as :meth:`synchronize` returns.

        Raises:
            ReleasedStorageError: There is no memory behind ``tensor``, which the message calls ``name``.
        """
        # Run for each of tens of thousands of tensors while training waits: every call in here is felt.
        again = self._small.copy_again(tensor)
        if again is not None:
            return again
        local = local_of(tensor)
        if is_dense(local) and 0 < local.nbytes < SMALL_NBYTES and is_in_order(local):
            small = self._small.copy(local)
            return small if local is tensor else wrap_local(small, spec_of(tensor))
        check_storage(local, name=name)
        local = local.detach()
        if not _is_plain(local):
            return wrap_local(local.to("cpu", copy=True), spec_of(tensor))
        if local.device not in self._lanes:
            self._lanes[local.device] = _Lane(local.device, timeout_secs=self._timeout_secs)
        return wrap_local(self._lanes[local.device].copy(local, name=name), spec_of(tensor))

    def start(self) -> None:
        """Submit the copies, behind what the compute stream has been given so far. Small ones are made."""
        self._small.start()
        for lane in self._lanes.values():
            lane.start()

    def reset(self) -> None:
        """Forget what ``copy`` was called for since the last ``start``: that save does not take place."""
        self._small.reset()
        for lane in self._lanes.values():
            lane.reset()

    def fence(self) -> None:
        """Order what the compute stream is given from now on behind the copies."""
        for lane in self._lanes.values():
            lane.fence()

    def synchronize(self) -> None:
        """Wait until the copies are there.

        Raises:
            TransferError: A copy failed or did not come to an end in time.
            PhaseError: Sources were changed while they were copied; all are listed.
        """
        changed = [name for lane in self._lanes.values() for name in lane.synchronize()]
        if changed:
            raise PhaseError(
                "Changed while the save was copying them, which may have caught a part of the change. Steps "
                "of optimizers wait for the copies; before other code changes parameters, call fence() of "
                f"the Checkpointer:{listing(changed)}"
            )

    @property
    def nbytes(self) -> int:
        """Host bytes held for copies."""
        return self._small.nbytes + sum(lane.nbytes for lane in self._lanes.values())


@dataclass(frozen=True, slots=True)
class _Small:
    """Where a small tensor lay, and the memory that its copy is made in."""

    address: int
    copy: Tensor

    def is_of(self, tensor: Tensor) -> bool:
        """True for a plain host tensor in the same place, of the same form: what was true of it still is."""
        copy = self.copy
        return (
            type(tensor) is torch.Tensor
            and tensor.data_ptr() == self.address
            and tensor.dtype is copy.dtype
            and tensor.shape == copy.shape
            and is_row_by_row(tensor)
        )


class _SmallTensors:
    """Copies of small host tensors, made all at once: one call for each would take longer than the copy.

    They lie where mirrors do, in memory that a writer process maps: it would be given copies of them else.
    """

    def __init__(self, *, timeout_secs: float) -> None:
        self._device = device_for(torch.device("cpu"), timeout_secs=timeout_secs)
        self._arena = HostArena(self._device)
        self._kept: list[_Small] = []
        self._sources: list[Tensor] = []

    def copy_again(self, tensor: Tensor) -> Tensor | None:
        """The copy of what the last save copied in this turn; None when that was another tensor."""
        index = len(self._sources)
        if index >= len(self._kept) or not self._kept[index].is_of(tensor):
            return None
        self._sources.append(tensor)
        return self._kept[index].copy

    def copy(self, local: Tensor) -> Tensor:
        index = len(self._sources)
        self._sources.append(local)
        if index < len(self._kept):
            kept = self._kept[index].copy
            if kept.shape == local.shape and kept.dtype is local.dtype:
                self._kept[index] = _Small(local.data_ptr(), kept)
                return kept
            del self._kept[index:]
        segment = self._arena.allocate(lay_out([local.nbytes]))
        (region,) = segment.layout.regions
        kept = segment.mirror(region, tensor_spec(local))
        self._kept.append(_Small(local.data_ptr(), kept))
        return kept

    def reset(self) -> None:
        self._sources = []

    def start(self) -> None:
        sources, self._sources = self._sources, []
        del self._kept[len(sources) :]
        if sources:
            with torch.no_grad():
                foreach_copy([kept.copy for kept in self._kept], sources)

    @property
    def nbytes(self) -> int:
        return self._device.ledger.host_nbytes


@dataclass(frozen=True, slots=True)
class _Watched:
    """A source, and how often it had been changed in place when its copy was asked for."""

    name: str
    local: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        return version_of(self.local) != self.version


class _Lane:
    """The copies from one device."""

    def __init__(self, device: torch.device, *, timeout_secs: float) -> None:
        self._device = device_for(device, timeout_secs=timeout_secs)
        self._timeout_secs = timeout_secs
        self._arena = HostArena(self._device)
        self._kept: list[tuple[TensorSpec, HostSegment]] = []
        self._pairs: list[CopyPair] = []
        self._copying: list[CopyPair] = []  # held until it is done: its sources may be nobody else's by then
        self._done: Event | None = None
        self._has_failed = False
        self._watched: list[_Watched] = []
        self._changed: list[str] = []
        self._lock = threading.Lock()  # of these two: fence and synchronize are of two threads

    def copy(self, local: Tensor, *, name: str) -> Tensor:
        spec, index = tensor_spec(local), len(self._pairs)
        if index == len(self._kept) or self._kept[index][0] != spec:
            # What was kept for another order is of no use: all of it goes, so that memory is held once.
            del self._kept[index:]
            self._kept.append((spec, self._arena.allocate(lay_out([spec.nbytes]))))
        segment = self._kept[index][1]
        (region,) = segment.layout.regions
        self._pairs.append((segment.bytes(region), byte_view(local)))
        self._watched.append(_Watched(name, local, version_of(local)))
        return segment.mirror(region, spec)

    def start(self) -> None:
        del self._kept[len(self._pairs) :]
        pairs, self._pairs = self._pairs, []
        if self._has_failed:  # else its stream would skip these copies too
            self._device.reset()
            self._has_failed = False
        stream = self._device.offload
        stream.wait(self._device.compute().record())
        self._copying = pairs
        self._changed = []
        stream.copy(pairs)
        self._done = stream.record()

    def reset(self) -> None:
        self._pairs, self._watched = [], []

    def fence(self) -> None:
        if self._done is None:
            return
        self._look_at_sources()
        try:
            self._device.compute().wait(self._done)
        except TransferTimeoutError:
            raise
        except TransferError as error:  # raised by the save; there is nothing left to be waited for
            logger.debug("Nothing to wait for, the copies have failed: %s", error)

    def synchronize(self) -> list[str]:
        """Names of sources that were changed before the copies were there, as far as torch has counted."""
        if self._done is None:
            return []
        try:
            self._done.synchronize(self._timeout_secs)
        except TransferError:
            self._has_failed = True
            raise
        self._look_at_sources()
        self._copying = []
        return self._changed

    def _look_at_sources(self) -> None:
        with self._lock:
            watched, self._watched = self._watched, []
            self._changed += [each.name for each in watched if each.is_changed]

    @property
    def nbytes(self) -> int:
        return self._device.ledger.host_nbytes


def _is_plain(local: Tensor) -> bool:
    """True when the bytes of a tensor are all there is to it."""
    return (
        is_dense(local)
        and local.numel() > 0
        and (local.is_contiguous() or has_no_gaps(local))
        and not local.is_conj()
        and not local.is_neg()
    )
