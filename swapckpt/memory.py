"""Where swapped state lives: host slabs with exact-size mirrors, and the ring of staging buffers.

[Note: exact-size storages] A mirror is a view of a slab, yet its storage is exactly as large as the tensor
(``torch.frombuffer`` at an offset). DCP's stock writer clones every tensor whose storage is larger than
itself and keeps the clone until the file is closed: with plain slices of a slab a save would double host
memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from swapckpt.errors import HostMemoryError
from swapckpt.plan import Region, SegmentLayout, TensorSpec, align_up

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from swapckpt.device import CopyPair, Device, Event, Ledger

_MIN_SLAB_NBYTES = 1 << 20
_MAX_SLAB_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class HostSlab:
    """A block of host memory that segments are cut from. Freed with the last tensor over it.

    ``owner`` is what every alias keeps alive. It is a NumPy array and not the ``mmap`` itself because the
    weakref callback that unregisters the memory must run before it is unmapped: an array clears its weak
    references first, an ``mmap`` unmaps first.
    """

    owner: npt.NDArray[np.uint8]
    tensor: Tensor  # uint8, the whole slab
    address: int

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def alias(self, offset_nbytes: int, spec: TensorSpec) -> Tensor:
        """A tensor over this memory with a storage of exactly ``spec.nbytes``."""
        if spec.numel == 0:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
        flat = torch.frombuffer(self.owner, dtype=spec.dtype, count=spec.numel, offset=offset_nbytes)
        return flat.as_strided(spec.shape, spec.stride)


@dataclass(frozen=True, slots=True, eq=False)
class HostSegment:
    """The packed run of one batch's state: what one copy moves, one lease covers and one redirect
    replaces."""

    slab: HostSlab
    offset_nbytes: int
    layout: SegmentLayout

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def address(self, region: Region) -> int:
        """Where the region lies in this process."""
        return self.slab.address + self.offset_nbytes + region.offset_nbytes

    def mirror(self, region: Region, spec: TensorSpec) -> Tensor:
        """An exact-size alias of one region."""
        return self.slab.alias(self.offset_nbytes + region.offset_nbytes, spec)

    def bytes(self, region: Region) -> Tensor:
        """The region's bytes as a 1-D uint8 view of the slab (pinned where the slab is)."""
        return self.slab.tensor.narrow(0, self.offset_nbytes + region.offset_nbytes, region.nbytes)


class HostArena:
    """Hands out segments from slabs that grow geometrically, so that memory reserved ahead stays bounded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slab: HostSlab | None = None
        self._used_nbytes = 0
        self.reserved_nbytes = 0  # of all slabs ever made

    def allocate(self, layout: SegmentLayout, *, own_slab: bool = False) -> HostSegment:
        """A segment for ``layout``. Its content is undefined.

        ``own_slab`` gives it memory of exactly its size (in pages), with nothing reserved ahead.

        Raises:
            HostMemoryError: The operating system or the pinned allocator has no room.
        """
        if own_slab:
            return HostSegment(self._new_slab(layout.nbytes), 0, layout)
        if self._slab is None or self._used_nbytes + layout.nbytes > self._slab.nbytes:
            # Ahead of need only a quarter of what is held, and in whole segments of this size: pinned memory
            # that no segment fits into would be held for nothing.
            ahead_nbytes = min(max(self.reserved_nbytes // 4, _MIN_SLAB_NBYTES), _MAX_SLAB_NBYTES)
            self._slab = self._new_slab(max(1, ahead_nbytes // max(1, layout.nbytes)) * layout.nbytes)
            self._used_nbytes = 0
        segment = HostSegment(self._slab, self._used_nbytes, layout)
        self._used_nbytes = align_up(self._used_nbytes + layout.nbytes)
        return segment

    def _new_slab(self, nbytes: int) -> HostSlab:
        nbytes = align_up(max(nbytes, 1), mmap.PAGESIZE)
        try:
            slab = _shared_slab(self._device, nbytes)
            if slab is None:
                slab = _pinned_slab(self._device, nbytes)
        except (OSError, MemoryError, RuntimeError) as error:
            msg = (
                f"Could not allocate {nbytes:,} bytes of host memory for mirrors "
                f"({self.reserved_nbytes:,} bytes are held already): {error}. Free host memory, or swap "
                "fewer keys with SwapConfig.state_keys."
            )
            raise HostMemoryError(msg) from error
        self.reserved_nbytes += slab.nbytes
        return slab


def _shared_slab(device: Device, nbytes: int) -> HostSlab | None:
    """A memfd slab registered with the device; None where the device cannot register host memory.

    Shared by descriptor rather than private, so that another process can map and write it out.
    """
    descriptor = None
    if sys.platform == "linux":
        descriptor = os.memfd_create("swapckpt-mirrors")
        try:
            os.ftruncate(descriptor, nbytes)
            memory = _mapped(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
    else:
        memory = mmap.mmap(-1, nbytes)
    owner = np.frombuffer(memory, dtype=np.uint8)
    if descriptor is not None:
        address = int(owner.ctypes.data)
        _SHARED[address] = SharedMemory(address, nbytes, descriptor)
        weakref.finalize(owner, _forget, address)
    tensor = torch.frombuffer(owner, dtype=torch.uint8)
    unregister = device.register_host(tensor)
    if unregister is None:
        return None
    weakref.finalize(owner, unregister)
    return _accounted(device.ledger, owner, tensor)


def _mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # before, the mapping keeps a duplicate: two descriptors per slab
        return mmap.mmap(descriptor, nbytes, trackfd=False)
    return mmap.mmap(descriptor, nbytes)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory that another process can map: where it lies in this one, and the descriptor to pass on."""

    address: int
    nbytes: int
    descriptor: int


_SHARED: dict[int, SharedMemory] = {}  # by address; of all slabs that are alive


def _forget(address: int) -> None:
    os.close(_SHARED.pop(address).descriptor)


def shared_memory() -> list[SharedMemory]:
    """All slabs of this process that can be shared, by address."""
    return sorted(_SHARED.copy().values(), key=lambda each: each.address)


def _pinned_slab(device: Device, nbytes: int) -> HostSlab:
    # Pinned allocators round up to a power of two: ask for one, and use all of it.
    tensor = device.pinned_empty(1 << (nbytes - 1).bit_length())
    return _accounted(device.ledger, tensor.numpy(), tensor)


def _accounted(ledger: Ledger, owner: npt.NDArray[np.uint8], tensor: Tensor) -> HostSlab:
    ledger.hold_host(tensor.nbytes)
    weakref.finalize(owner, ledger.drop_host, tensor.nbytes)
    return HostSlab(owner, tensor, tensor.data_ptr())


@dataclass(slots=True)
class StagingSlot:
    """One staging buffer and what keeps its content alive: freed together, after ``done``."""

    buffer: Tensor | None = None  # uint8 on the device
    created: list[Tensor] = field(default_factory=list)  # state made by the update, on its way to the host
    shadowed: list[CopyPair] = field(default_factory=list)  # packed small state; not swapped, not accounted
    done: Event | None = None  # the offload that last read buffer and created


class StagingRing:
    """A fixed number of device buffers that batches travel through, one after the other."""

    def __init__(self, device: Device, num_slots: int, *, timeout_secs: float) -> None:
        self._device = device
        self._timeout_secs = timeout_secs
        self._slots = [StagingSlot() for _ in range(num_slots)]

    def slot(self, index: int) -> StagingSlot:
        """The slot that batches with this buffer index use."""
        return self._slots[index]

    def reserve(self, slot: StagingSlot, nbytes: int, *, exact: bool = False) -> None:
        """Give ``slot`` a buffer of at least (``exact``: of exactly) ``nbytes``.

        ``exact`` is for batches that will create state: their new tensors come on top of the buffer, and
        together they must not exceed what the batch will need from then on.
        """
        held = slot.buffer.nbytes if slot.buffer is not None else 0
        if held == nbytes or (held > nbytes and not exact):
            return
        self.settle(slot)
        if slot.buffer is not None:
            self._device.release(slot.buffer)
            slot.buffer = None
        if nbytes:
            slot.buffer = self._device.allocate(nbytes)

    def settle(self, slot: StagingSlot) -> None:
        """Host-wait for the slot's last offload and drop the tensors it was reading."""
        if slot.done is not None:
            slot.done.synchronize(self._timeout_secs)
            slot.done = None
        self._drop_created(slot)

    def hold(self, slot: StagingSlot, tensor: Tensor) -> None:
        """Keep a state tensor that the update created alive, and accounted, until its offload is done."""
        slot.created.append(tensor)
        self._device.hold(tensor)

    def _drop_created(self, slot: StagingSlot) -> None:
        for tensor in slot.created:
            self._device.drop(tensor)
        slot.created.clear()
        slot.shadowed = []

    def close(self, *, release: bool) -> None:
        """After every offload has been waited for: drop created state and (``release``) all buffers."""
        for slot in self._slots:
            slot.done = None
            self._drop_created(slot)
            if release and slot.buffer is not None:
                self._device.release(slot.buffer)
                slot.buffer = None
