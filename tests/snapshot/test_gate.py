"""The leasing gate on its own: who waits, who is redirected, what it costs."""

from __future__ import annotations

import threading

import pytest

from swapckpt.device import CpuDevice
from swapckpt.errors import LeaseTimeoutError
from swapckpt.fence import Lease, LeasingGate
from swapckpt.memory import HostArena, HostSegment
from swapckpt.plan import SegmentLayout, lay_out

LAYOUT = lay_out([4096, 4096])


class Bench:
    """A gate over an arena, with a fixed budget of spares."""

    def __init__(self, budget_nbytes: int, *, timeout_secs: float = 30.0) -> None:
        self.arena = HostArena(CpuDevice())
        self.num_allocated = 0
        self.gate = LeasingGate(self._allocate, spare_nbytes=lambda: budget_nbytes, timeout_secs=timeout_secs)

    def _allocate(self, layout: SegmentLayout) -> HostSegment:
        self.num_allocated += 1
        return self.arena.allocate(layout)

    def segment(self, layout: SegmentLayout = LAYOUT) -> HostSegment:
        return self.arena.allocate(layout)


def test_a_segment_that_nobody_reads_is_overwritten_in_place() -> None:
    bench = Bench(budget_nbytes=LAYOUT.nbytes)
    segment = bench.segment()
    assert bench.gate.before_overwrite(segment) is segment
    with Lease([(bench.gate, segment)]):
        pass
    assert bench.gate.before_overwrite(segment) is segment
    assert bench.num_allocated == 0


def test_a_leased_segment_is_redirected_once_per_spare_in_the_budget() -> None:
    bench = Bench(budget_nbytes=2 * LAYOUT.nbytes)
    segments = [bench.segment() for _ in range(2)]
    with Lease((bench.gate, segment) for segment in segments):
        spares = [bench.gate.before_overwrite(segment) for segment in segments]
        assert not set(spares) & set(segments)
        assert [spare.layout for spare in spares] == [LAYOUT, LAYOUT]
        assert bench.gate.spare_nbytes == 2 * LAYOUT.nbytes
    assert bench.num_allocated == 2


def test_what_was_replaced_becomes_a_spare_when_its_last_reader_is_done() -> None:
    bench = Bench(budget_nbytes=LAYOUT.nbytes)
    first = bench.segment()
    readers = [Lease([(bench.gate, first)]) for _ in range(2)]
    second = bench.gate.before_overwrite(first)
    with Lease([(bench.gate, second)]):
        readers[0].close()
        blocked = threading.Event()
        result: list[HostSegment] = []

        def overwrite() -> None:
            blocked.set()
            result.append(bench.gate.before_overwrite(second))

        thread = threading.Thread(target=overwrite)
        thread.start()
        blocked.wait()
        assert not result  # first is still read by readers[1], and the budget is used up
    thread.join(10)
    assert result == [second]
    readers[1].close()
    with Lease([(bench.gate, second)]):
        assert bench.gate.before_overwrite(second) is first
    assert bench.num_allocated == 1


def test_without_budget_an_overwrite_waits_for_the_release() -> None:
    bench = Bench(budget_nbytes=0)
    segment = bench.segment()
    lease = Lease([(bench.gate, segment)])
    threading.Timer(0.05, lease.release, [segment]).start()
    assert bench.gate.before_overwrite(segment) is segment
    assert lease.segments == ()
    assert bench.num_allocated == 0


def test_a_reader_that_never_releases_is_an_error_that_says_what_to_do() -> None:
    bench = Bench(budget_nbytes=0, timeout_secs=0.05)
    segment = bench.segment()
    with Lease([(bench.gate, segment)]), pytest.raises(LeaseTimeoutError, match="spare_nbytes") as caught:
        bench.gate.before_overwrite(segment)
    assert f"{segment.nbytes:,} bytes" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert bench.gate.before_overwrite(segment) is segment


def test_a_spare_of_another_layout_is_not_taken() -> None:
    bench = Bench(budget_nbytes=2 * LAYOUT.nbytes)
    small = lay_out([4096])
    segment, other = bench.segment(), bench.segment(small)
    with Lease([(bench.gate, segment)]):
        bench.gate.before_overwrite(segment)
    with Lease([(bench.gate, other)]):
        assert bench.gate.before_overwrite(other).layout == small


def test_a_lease_releases_each_segment_once_and_keeps_their_order() -> None:
    bench = Bench(budget_nbytes=0, timeout_secs=0.05)
    segments = [bench.segment() for _ in range(3)]
    lease = Lease((bench.gate, segment) for segment in segments)
    assert lease.segments == tuple(segments)
    other = Lease([(bench.gate, segments[1])])
    lease.release(segments[1])
    lease.release(segments[1])
    assert lease.segments == (segments[0], segments[2])
    with pytest.raises(LeaseTimeoutError):
        bench.gate.before_overwrite(segments[1])
    other.close()
    assert bench.gate.before_overwrite(segments[1]) is segments[1]
    lease.close()
    lease.close()
    assert bench.gate.before_overwrite(segments[0]) is segments[0]
