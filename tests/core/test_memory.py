"""Host slabs with exact-size mirrors, and the ring of staging buffers."""

from __future__ import annotations

import copy
import gc
import io
import mmap
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swapckpt.device import CpuDevice
from swapckpt.errors import HostMemoryError, SwapCkptError, TransferError
from swapckpt.memory import HostArena, HostSegment, StagingRing
from swapckpt.plan import TensorSpec, align_up, lay_out
from tests.core.training import bits

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    like = torch.empty(shape, dtype=dtype, device="meta")
    return TensorSpec(tuple(like.shape), tuple(like.stride()), dtype)


class PinnedOnly(CpuDevice):
    """A device that cannot register memory of others: it has to allocate pinned memory itself."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def register_host(self, slab: torch.Tensor) -> None:  # type: ignore[override]
        del slab

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        self.asked.append(nbytes)
        return super().pinned_empty(nbytes)


# ------------------------------------------------------------------------------------------------- mirrors


@pytest.mark.parametrize("make_device", [CpuDevice, PinnedOnly])
def test_a_mirror_has_a_storage_of_exactly_its_size_over_the_memory_of_the_slab(
    make_device: Callable[[], CpuDevice],
) -> None:
    specs = [spec(40, 50), spec(3, dtype=torch.bfloat16), spec(), TensorSpec((4, 6), (1, 4), torch.float64)]
    segment = HostArena(make_device()).allocate(lay_out(each.nbytes for each in specs))
    mirrors = []
    for number, (region, each) in enumerate(zip(segment.layout.regions, specs, strict=True)):
        mirror = segment.mirror(region, each)
        assert (tuple(mirror.shape), mirror.stride(), mirror.dtype) == (each.shape, each.stride, each.dtype)
        assert mirror.untyped_storage().nbytes() == mirror.nbytes == each.nbytes
        assert mirror.storage_offset() == 0
        mirror.fill_(number + 1)
        mirrors.append(mirror)
    for number, (region, mirror) in enumerate(zip(segment.layout.regions, mirrors, strict=True)):
        assert (mirror == number + 1).all()
        memory = segment.bytes(region)
        assert (memory.dtype, memory.dim(), memory.nbytes) == (torch.uint8, 1, mirror.nbytes)
        assert memory.data_ptr() == mirror.data_ptr()
        in_memory_order = mirror.as_strided((mirror.numel(),), (1,))
        assert memory.numpy().tobytes() == bits(in_memory_order)


def test_a_mirror_without_elements_has_its_shape() -> None:
    segment = HostArena(CpuDevice()).allocate(lay_out([0]))
    mirror = segment.mirror(segment.layout.regions[0], spec(0, 7))
    assert (tuple(mirror.shape), mirror.untyped_storage().nbytes()) == ((0, 7), 0)


def test_a_mirror_is_saved_copied_and_cloned_alone() -> None:
    segment = HostArena(CpuDevice()).allocate(lay_out([4000, 4000]))
    mirror = segment.mirror(segment.layout.regions[1], spec(1000))
    mirror.copy_(torch.arange(1000.0))
    file = io.BytesIO()
    torch.save(mirror, file)
    assert file.tell() < 8000
    file.seek(0)
    for other in (torch.load(file), copy.deepcopy(mirror), mirror.clone()):
        assert torch.equal(other, mirror)
        assert other.data_ptr() != mirror.data_ptr()


# --------------------------------------------------------------------------------------------------- slabs


def test_segments_share_slabs_that_hold_whole_segments_and_little_ahead() -> None:
    device = CpuDevice()
    arena = HostArena(device)
    segments = []
    for _ in range(100):
        segments.append(arena.allocate(lay_out([100_000])))
        used = sum(segment.nbytes for segment in segments)
        assert used <= device.ledger.host_nbytes <= 1.25 * used + MIB
    slabs = {segment.slab.tensor.data_ptr(): segment.slab.nbytes for segment in segments}
    size = segments[0].nbytes
    assert 5 < len(slabs) <= 10
    assert max(slabs.values()) > 2 * size
    assert all(nbytes % size < mmap.PAGESIZE for nbytes in slabs.values())


def test_segments_larger_than_what_is_reserved_ahead_get_slabs_of_their_size() -> None:
    device = CpuDevice()
    arena = HostArena(device)
    segments = [arena.allocate(lay_out([3 * MIB])) for _ in range(4)]
    assert device.ledger.host_nbytes == sum(segment.nbytes for segment in segments)


@given(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=20))
def test_segments_are_disjoint_aligned_and_memory_is_bounded(sizes: list[int]) -> None:
    device = CpuDevice()
    arena = HostArena(device)
    segments = [arena.allocate(lay_out([nbytes])) for nbytes in sizes]
    ranges = sorted(
        (segment.slab.tensor.data_ptr() + segment.offset_nbytes, segment.nbytes) for segment in segments
    )
    assert all(begin % 512 == 0 for begin, _ in ranges)
    for (begin, nbytes), (following, _) in pairwise(ranges):
        assert begin + nbytes <= following
    assert all(segment.offset_nbytes + segment.nbytes <= segment.slab.nbytes for segment in segments)
    used = sum(map(align_up, sizes))
    slabs = len({segment.slab.tensor.data_ptr() for segment in segments})
    assert device.ledger.host_nbytes <= 2 * used + MIB + slabs * (mmap.PAGESIZE + max(sizes))
    assert device.ledger.host_peak_nbytes == device.ledger.host_nbytes


def test_a_segment_larger_than_a_slab_gets_one_of_its_size() -> None:
    device = CpuDevice()
    segment = HostArena(device).allocate(lay_out([5 * MIB + 1]))
    assert segment.nbytes <= segment.slab.nbytes < segment.nbytes + mmap.PAGESIZE
    assert device.ledger.host_nbytes == segment.slab.nbytes


def test_a_slab_of_its_own_reserves_nothing_ahead() -> None:
    device = CpuDevice()
    arena = HostArena(device)
    first = arena.allocate(lay_out([1000]))
    own = arena.allocate(lay_out([1000]), own_slab=True)
    assert own.slab is not first.slab
    assert own.slab.nbytes == mmap.PAGESIZE
    assert arena.allocate(lay_out([1000])).slab is first.slab


def test_slabs_are_page_aligned_so_that_a_device_can_register_them() -> None:
    class Registering(CpuDevice):
        def __init__(self) -> None:
            super().__init__()
            self.registered: list[tuple[int, int]] = []
            self.unregistered: list[int] = []

        def register_host(self, slab: torch.Tensor) -> Callable[[], None]:
            self.registered.append((slab.data_ptr(), slab.nbytes))
            return lambda: self.unregistered.append(len(self.registered))

    device = Registering()
    arena = HostArena(device)
    segment = arena.allocate(lay_out([3 * MIB]))
    mirror = segment.mirror(segment.layout.regions[0], spec(3 * MIB // 4))
    ((address, nbytes),) = device.registered
    assert (address % mmap.PAGESIZE, nbytes % mmap.PAGESIZE) == (0, 0)
    del arena, segment
    assert device.unregistered == []  # a mirror is memory of the slab
    mirror.fill_(1.0)
    del mirror
    assert device.unregistered == [1]


def test_pinned_slabs_are_powers_of_two_because_allocators_round_up() -> None:
    device = PinnedOnly()
    arena = HostArena(device)
    arena.allocate(lay_out([5 * MIB]))
    arena.allocate(lay_out([MIB]))
    assert device.asked[0] == 8 * MIB
    assert all(nbytes & (nbytes - 1) == 0 for nbytes in device.asked)
    assert len(device.asked) == 1  # the rest of the first slab is used
    assert device.ledger.host_nbytes == sum(device.asked)


@pytest.mark.parametrize("make_device", [CpuDevice, PinnedOnly])
def test_memory_goes_with_its_last_mirror_without_a_collection(make_device: Callable[[], CpuDevice]) -> None:
    device = make_device()
    arena = HostArena(device)
    segments: list[HostSegment] = [arena.allocate(lay_out([2 * MIB, 8])) for _ in range(3)]
    mirrors = [segment.mirror(segment.layout.regions[1], spec(2)) for segment in segments]
    held = device.ledger.host_nbytes
    gc.disable()
    try:
        del arena, segments
        assert device.ledger.host_nbytes == held
        del mirrors[0]
        assert 0 < device.ledger.host_nbytes < held
        mirrors[0].fill_(3.0)
        assert mirrors[0].tolist() == [3.0, 3.0]
        del mirrors
        assert device.ledger.host_nbytes == 0
    finally:
        gc.enable()
    assert device.ledger.host_peak_nbytes == held


def test_no_room_on_the_host_is_an_error_that_says_how_much_was_asked() -> None:
    class Full(CpuDevice):
        def register_host(self, slab: torch.Tensor) -> Callable[[], None]:
            msg = "cannot lock pages"
            raise RuntimeError(msg)

    arena = HostArena(Full())
    with pytest.raises(
        HostMemoryError, match=r"1,048,576 bytes of host memory .* cannot lock pages"
    ) as caught:
        arena.allocate(lay_out([100]))
    assert isinstance(caught.value, SwapCkptError)
    assert isinstance(caught.value, MemoryError)


def test_more_than_the_machine_has_is_an_error_of_ours() -> None:
    arena = HostArena(CpuDevice())
    with pytest.raises(HostMemoryError, match="swap fewer keys with SwapConfig"):
        arena.allocate(lay_out([1 << 60]))
    assert arena.reserved_nbytes == 0
    arena.allocate(lay_out([100]))


# ---------------------------------------------------------------------------------------------------- ring


def ring_of(device: CpuDevice, num_slots: int = 2) -> StagingRing:
    return StagingRing(device, num_slots, timeout_secs=10.0)


def test_a_slot_keeps_its_buffer_until_a_larger_one_or_another_size_is_needed() -> None:
    device = CpuDevice()
    ring = ring_of(device)
    slot = ring.slot(0)
    ring.reserve(slot, 0)
    assert slot.buffer is None
    ring.reserve(slot, 100)
    first = slot.buffer
    assert first is not None
    ring.reserve(slot, 60)
    ring.reserve(slot, 100, exact=True)
    assert slot.buffer is first
    ring.reserve(slot, 60, exact=True)
    assert slot.buffer is not None
    assert slot.buffer.nbytes == 60
    ring.reserve(slot, 200)
    assert slot.buffer.nbytes == 200
    assert (device.ledger.device_nbytes, device.ledger.device_peak_nbytes) == (200, 200)
    ring.reserve(slot, 0, exact=True)
    assert slot.buffer is None
    assert device.ledger.device_nbytes == 0


def test_a_buffer_changes_only_behind_the_offload_that_reads_it() -> None:
    device = CpuDevice("lazy")
    ring, target = ring_of(device), torch.zeros(100, dtype=torch.uint8)
    slot = ring.slot(1)
    ring.reserve(slot, 100)
    assert slot.buffer is not None
    slot.buffer.fill_(9)
    device.offload.copy([(target, slot.buffer)])
    slot.done = device.offload.record()
    ring.reserve(slot, 200)
    assert target.tolist() == [9] * 100
    assert slot.done is None


def test_created_state_is_held_until_its_offload_is_done() -> None:
    device = CpuDevice("lazy")
    ring, target, created = ring_of(device), torch.zeros(4), torch.ones(4)
    slot = ring.slot(0)
    ring.hold(slot, created)
    ring.hold(slot, torch.ones(6))
    assert device.ledger.device_nbytes == 40
    device.offload.copy([(target, created)])
    slot.done = device.offload.record()
    ring.settle(slot)
    assert target.tolist() == [1.0] * 4
    assert (slot.created, device.ledger.device_nbytes) == ([], 0)


@pytest.mark.parametrize("release", [True, False])
def test_closing_keeps_buffers_only_if_asked_to(release: bool) -> None:
    device = CpuDevice()
    ring = ring_of(device)
    ring.reserve(ring.slot(0), 100)
    ring.hold(ring.slot(1), torch.ones(2))
    ring.close(release=release)
    assert device.ledger.device_nbytes == (0 if release else 100)
    assert (ring.slot(0).buffer is None) == release
    ring.close(release=True)
    assert device.ledger.device_nbytes == 0


def test_settling_raises_what_the_offload_raised() -> None:
    device = CpuDevice("lazy")
    ring = ring_of(device)
    slot = ring.slot(0)
    device.offload.copy([(torch.zeros(3), torch.zeros(5))])
    slot.done = device.offload.record()
    with pytest.raises(TransferError, match="offload stream failed"):
        ring.settle(slot)
