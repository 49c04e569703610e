"""The CPU as a device: order, overlap, errors, bounds and ends of its copy streams, under every policy."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from swapckpt.device import CpuDevice, Policy, cpu, device_for
from swapckpt.device.cpu import POISON_BYTE, CpuStream
from swapckpt.errors import TransferError, TransferTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapckpt.device import Event

POLICIES = list(Policy)
FOREVER_SECS = 60.0


class Gate:
    """An event of somebody else: a stream that waits for it stops until ``open``."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def open(self) -> None:
        self.opened.set()

    def query(self) -> bool:
        return self.opened.is_set()

    def synchronize(self, timeout_secs: float) -> None:
        del timeout_secs  # as a copy that hangs
        self.reached.set()
        self.opened.wait(FOREVER_SECS)


class Broken:
    """An event whose wait fails: what a failed copy looks like to those who wait for it."""

    def query(self) -> bool:
        return False

    def synchronize(self, timeout_secs: float) -> None:
        del timeout_secs
        msg = "the link is down"
        raise OSError(msg)


def copy(stream: CpuStream, target: torch.Tensor, value: int) -> None:
    stream.copy([(target, torch.full_like(target, value))])


def buffer(nbytes: int = 8) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_of_a_stream_run_in_order(policy: Policy) -> None:
    device, target = CpuDevice(policy), buffer()
    for value in range(100):
        copy(device.load, target, value)
    event = device.load.record()
    event.synchronize(FOREVER_SECS)
    assert event.query()
    assert target.tolist() == [99] * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_reads_its_source_when_it_runs_behind_what_it_waits_for(policy: Policy) -> None:
    device = CpuDevice(policy, seed=3)
    source, middle, target = torch.full((8,), 7, dtype=torch.uint8), buffer(), buffer()
    device.load.copy([(middle, source)])
    device.offload.wait(device.load.record())
    device.offload.copy([(target, middle)])
    device.load.wait(device.offload.record())
    copy(device.load, middle, 9)
    device.load.record().synchronize(FOREVER_SECS)
    assert (middle.tolist(), target.tolist()) == ([9] * 8, [7] * 8)


def test_inline_copies_have_run_when_copy_returns() -> None:
    device, target = CpuDevice("inline"), buffer()
    copy(device.load, target, 5)
    assert target.tolist() == [5] * 8
    assert device.load.record().query()


def test_lazy_copies_run_only_when_somebody_has_to_have_them() -> None:
    device, first, second, other = CpuDevice("lazy"), buffer(), buffer(), buffer()
    copy(device.load, first, 1)
    event = device.load.record()
    copy(device.load, second, 2)
    copy(device.offload, other, 3)
    assert not event.query()
    event.synchronize(FOREVER_SECS)
    assert (first.tolist(), second.tolist(), other.tolist()) == ([1] * 8, [0] * 8, [0] * 8)
    device.compute().wait(device.offload.record())
    assert (second.tolist(), other.tolist()) == ([0] * 8, [3] * 8)


def test_lazy_polling_ends() -> None:
    device, target = CpuDevice("lazy"), buffer()
    copy(device.load, target, 1)
    event = device.load.record()
    polls = 0
    while not event.query():
        polls += 1
        assert polls < 100
    assert target.tolist() == [1] * 8
    assert polls > 0


def history(seed: int) -> list[tuple[int, ...]]:
    """What two streams have done after each submission."""
    device = CpuDevice("random", seed=seed)
    marks = buffer(20)
    seen = []
    for index in range(10):
        for stream, offset in ((device.load, 0), (device.offload, 10)):
            copy(stream, marks.narrow(0, offset + index, 1), 1)
            seen.append(tuple(marks.tolist()))
    for stream in (device.load, device.offload):
        stream.record().synchronize(FOREVER_SECS)
    assert marks.tolist() == [1] * 20
    return seen


def test_random_schedules_are_legal_differ_by_seed_and_repeat() -> None:
    histories = [history(seed) for seed in range(8)]
    assert [history(seed) for seed in range(8)] == histories
    assert len(set(map(tuple, histories))) == 8
    for seen in histories:
        for marks in seen:
            for half in (marks[:10], marks[10:]):
                assert list(half) == sorted(half, reverse=True)  # a stream never skips a copy
        assert seen[-1] != (1,) * 20 or any(each != (1,) * 20 for each in seen)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_event_covers_what_was_submitted_before_it_and_nothing_else(policy: Policy) -> None:
    device = CpuDevice(policy)
    assert device.load.record().query()  # nothing submitted: complete
    gate = Gate()
    if policy is not Policy.THREAD:
        gate.open()
    copy(device.load, buffer(), 1)
    before = device.load.record()
    device.load.wait(gate)
    after = device.load.record()
    before.synchronize(FOREVER_SECS)
    assert before.query()
    if policy is Policy.THREAD:
        assert not after.query()
    gate.open()
    after.synchronize(FOREVER_SECS)
    assert after.query()


def test_threads_copy_while_the_caller_does_something_else() -> None:
    """Both streams are inside a job at once, and the caller goes on."""
    device, gates = CpuDevice("thread"), [Gate(), Gate()]
    for stream, gate in zip((device.load, device.offload), gates, strict=True):
        stream.wait(gate)
    assert all(gate.reached.wait(FOREVER_SECS) for gate in gates)
    for gate in gates:
        gate.open()
    for stream in (device.load, device.offload):
        stream.record().synchronize(FOREVER_SECS)


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_for_a_complete_event_submits_nothing(policy: Policy) -> None:
    device = CpuDevice(policy)
    copy(device.load, buffer(), 1)
    event = device.load.record()
    event.synchronize(FOREVER_SECS)
    before = device.offload._seq
    device.offload.wait(event)
    assert device.offload._seq == before


# -------------------------------------------------------------------------------------------------- errors


def raised_by(event: Event) -> str | None:
    try:
        event.synchronize(FOREVER_SECS)
    except TransferError as error:
        return str(error)
    return None


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_reaches_every_event_that_covers_it_and_no_earlier_one(policy: Policy) -> None:
    device, targets = CpuDevice(policy), [buffer() for _ in range(4)]
    events = []
    for index, target in enumerate(targets):
        if index == 2:
            device.offload.wait(Broken())
            events.append(device.offload.record())
        copy(device.offload, target, 1)
        events.append(device.offload.record())
    behind = device.load
    behind.wait(events[1])
    copy(behind, targets[3], 5)
    fine = behind.record()
    behind.wait(events[4])
    failed = behind.record()
    assert [raised_by(event) is None for event in events] == [True, True, False, False, False]
    message = "A copy on the offload stream failed: the link is down"
    for event in events[2:]:
        assert raised_by(event) == message  # again and again
        assert not event.query()
    assert raised_by(fine) is None
    assert raised_by(failed) == f"A copy on the load stream failed: {message}"
    # what was submitted after the failure has not run
    assert [target.tolist() for target in targets] == [[1] * 8, [1] * 8, [0] * 8, [5] * 8]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_that_fails_keeps_its_cause(policy: Policy) -> None:
    device = CpuDevice(policy)
    device.load.copy([(buffer(8), buffer(4))])
    with pytest.raises(TransferError, match=r"load stream failed: .*shape") as caught:
        device.compute().wait(device.load.record())
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PIECE_NBYTES", 8)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("nbytes", [15, 16, 17, 203])
def test_a_large_copy_is_whole(policy: Policy, nbytes: int) -> None:
    source, middle, target = (
        torch.randint(1, 200, (nbytes,), dtype=torch.uint8),
        buffer(nbytes),
        buffer(nbytes),
    )
    device = CpuDevice(policy)
    device.load.copy([(middle, source)])
    device.offload.wait(device.load.record())
    device.offload.copy([(target, middle)])
    device.offload.record().synchronize(FOREVER_SECS)
    assert torch.equal(target, source)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_piece_that_fails_fails_its_copy(policy: Policy) -> None:
    device = CpuDevice(policy)
    device.load.copy([(buffer(64), buffer(62))])
    assert str(raised_by(device.load.record())).startswith(
        "A copy on the load stream failed: could not broadcast"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_reset_waits_for_both_streams_and_forgets_errors(policy: Policy) -> None:
    device, target = CpuDevice(policy), buffer()
    device.load.wait(Broken())
    copy(device.load, target, 1)
    copy(device.offload, target, 2)
    assert raised_by(device.load.record()) is not None
    device.reset()
    assert target.tolist() == [2] * 8
    assert device.load.record().query()
    copy(device.load, target, 3)
    device.load.record().synchronize(FOREVER_SECS)
    assert target.tolist() == [3] * 8


def test_an_error_is_never_seen_by_an_event_before_it() -> None:
    """A waiting thread looks at the error while the worker is still writing it down."""
    for _ in range(50):
        device = CpuDevice("thread")
        copy(device.load, buffer(), 1)
        before = device.load.record()
        before.synchronize(FOREVER_SECS)
        device.load.wait(Broken())
        failed = device.load.record()
        while raised_by(before) is None and not device.load.progress.done >= 2:
            pass
        assert raised_by(before) is None
        assert raised_by(failed) is not None


# -------------------------------------------------------------------------------------------------- bounds


def test_a_wait_is_bounded() -> None:
    device, gate = CpuDevice("thread"), Gate()
    device.load.wait(gate)
    event = device.load.record()
    with pytest.raises(
        TransferTimeoutError, match=r"load stream did not finish its copies within 0\.01 s"
    ) as caught:
        event.synchronize(0.01)
    assert isinstance(caught.value, TimeoutError)
    gate.open()
    event.synchronize(FOREVER_SECS)


def test_a_wait_of_a_stream_is_bounded_by_the_device() -> None:
    device, gate = CpuDevice("thread", timeout_secs=0.01), Gate()
    device.load.wait(gate)
    device.offload.wait(device.load.record())
    with pytest.raises(TransferError, match="offload stream failed: The load stream did not finish"):
        device.offload.record().synchronize(FOREVER_SECS)
    gate.open()


def test_reset_says_when_a_stream_does_not_come_to_rest() -> None:
    """Its late copies would write into memory that is used for something else by then."""
    device, gate, target = CpuDevice("thread", timeout_secs=0.01), Gate(), buffer()
    device.load.wait(gate)
    copy(device.load, target, 1)
    with pytest.raises(TransferTimeoutError, match="load stream"):
        device.reset()
    gate.open()
    device.load.record().synchronize(FOREVER_SECS)
    device.reset()
    assert target.tolist() == [1] * 8


# ------------------------------------------------------------------------------------------------- threads


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("swapckpt-")}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + FOREVER_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_threads_start_with_the_first_copy_and_end_with_the_device() -> None:
    before = workers()
    device = CpuDevice("thread")
    assert workers() == before
    for stream in (device.load, device.offload):
        copy(stream, buffer(), 1)
        stream.record().synchronize(FOREVER_SECS)
    started = workers() - before
    assert sorted(thread.name for thread in started) == ["swapckpt-load", "swapckpt-offload"]
    assert all(thread.daemon for thread in started)
    gone = weakref.ref(device)
    gc.disable()
    try:
        del device, stream
        assert gone() is None
        wait_until(lambda: not any(thread.is_alive() for thread in started))
    finally:
        gc.enable()


def test_a_device_that_goes_finishes_its_copies() -> None:
    device, gate, target = CpuDevice("thread"), Gate(), buffer()
    device.offload.wait(gate)
    copy(device.offload, target, 4)
    event = device.offload.record()
    del device
    gate.open()
    event.synchronize(FOREVER_SECS)
    assert target.tolist() == [4] * 8


def test_an_idle_worker_keeps_no_tensor_alive() -> None:
    device = CpuDevice("thread")
    source, target = buffer(), buffer()
    gone = weakref.ref(source)
    device.load.copy([(target, source)])
    del source
    device.load.record().synchronize(FOREVER_SECS)
    wait_until(lambda: gone() is None)


def test_the_tensors_of_a_copy_die_before_it_counts_as_done() -> None:
    """Afterwards the interpreter may be ending, in which a worker that frees a tensor aborts the process."""
    happened: list[str] = []

    class Tag:
        def __del__(self) -> None:
            time.sleep(0.05)  # lets whoever waits for the copy go first, if it may
            happened.append("freed")

    device, source, target = CpuDevice("thread"), buffer(), buffer()
    source.tag = Tag()  # type: ignore[attr-defined] # dies with the tensor
    device.load.copy([(target, source)])
    del source
    device.load.record().synchronize(FOREVER_SECS)
    happened.append("done")
    wait_until(lambda: len(happened) == 2)
    assert happened == ["freed", "done"]


FORK = """
import os, threading, torch
from swapckpt.device import CpuDevice, cpu

cpu.PIECE_NBYTES = 1  # so that the copies below are large, and use every thread there may be
device, target = CpuDevice("thread"), torch.zeros(64, dtype=torch.uint8)
device.load.copy([(target, target + 1)])
device.load.record().synchronize(60)
held, release = threading.Event(), threading.Event()

def hold():  # as the worker does for a moment after each copy
    with device.load.progress.changed:
        held.set()
        release.wait(60)

threading.Thread(target=hold, daemon=True).start()
held.wait(60)
child = os.fork()
release.set()
for value in range(2, 5):
    device.load.copy([(target, torch.full_like(target, value))])
    device.offload.wait(device.load.record())
    device.offload.record().synchronize(60)
    assert target.tolist() == [value] * 64
if child == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("both", flush=True)
"""


def test_a_forked_child_gets_threads_of_its_own() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=FOREVER_SECS, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "both\n"), ended.stderr


# -------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("policy", POLICIES)
def test_buffers_are_accounted_and_cached_by_size(policy: Policy) -> None:
    device = CpuDevice(policy)
    first = device.allocate(100)
    second = device.allocate(300)
    assert (first.nbytes, first.dtype, first.device.type) == (100, torch.uint8, "cpu")
    assert device.ledger.device_nbytes == 400
    addresses = first.data_ptr(), second.data_ptr()
    for each in (first, second):
        device.release(each)
    assert (device.ledger.device_nbytes, device.ledger.device_peak_nbytes) == (0, 400)
    again = device.allocate(300), device.allocate(100)
    assert (again[1].data_ptr(), again[0].data_ptr()) == addresses
    device.release(again[0])
    gone = weakref.ref(again[0])
    del again, first, second, each
    device.allocate(8)  # another size: what is cached is of no use any more
    assert gone() is None


def test_empty_cache_gives_buffers_back() -> None:
    device = CpuDevice()
    released = device.allocate(64)
    device.release(released)
    gone = weakref.ref(released)
    del released
    assert gone() is not None
    device.empty_cache()
    assert gone() is None


@pytest.mark.parametrize("policy", POLICIES)
def test_hostile_policies_poison_fresh_and_released_buffers(policy: Policy) -> None:
    device = CpuDevice(policy)
    fresh = device.allocate(16)
    hostile = policy in (Policy.LAZY, Policy.RANDOM)
    if hostile:
        assert fresh.tolist() == [POISON_BYTE] * 16
    fresh.fill_(1)
    device.release(fresh)
    assert fresh.tolist() == ([POISON_BYTE] if hostile else [1]) * 16
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert torch.isnan(torch.full((16,), POISON_BYTE, dtype=torch.uint8).view(dtype)).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_traffic_is_counted_by_direction(policy: Policy) -> None:
    device = CpuDevice(policy)
    device.load.copy([(buffer(8), buffer(8)), (buffer(4), buffer(4))])
    device.offload.copy([(buffer(2), buffer(2))])
    device.compute().copy([(buffer(2), buffer(2))])
    ledger = device.ledger
    assert (ledger.num_loads, ledger.loaded_nbytes) == (2, 12)
    assert (ledger.num_offloads, ledger.offloaded_nbytes) == (1, 2)
    device.reset()


def test_the_cpu_is_its_own_host() -> None:
    device = device_for(torch.device("cpu"), timeout_secs=5.0)
    assert isinstance(device, CpuDevice)
    assert (device.device, device.is_host, device.policy) == (torch.device("cpu"), True, Policy.THREAD)
    assert device.timeout_secs == 5.0
    assert device.pinned_empty(16).nbytes == 16
    undo = device.register_host(buffer())
    assert undo is not None
    undo()
    assert CpuDevice("inline").policy is Policy.INLINE
    with pytest.raises(ValueError, match="sometimes"):
        CpuDevice("sometimes")


def test_the_ledger_keeps_peaks_until_they_are_reset() -> None:
    ledger = CpuDevice().ledger
    ledger.hold_device(10)
    ledger.drop_device(4)
    ledger.hold_host(7)
    ledger.drop_host(7)
    assert (ledger.device_nbytes, ledger.device_peak_nbytes) == (6, 10)
    ledger.hold_host(5)  # in the place of what is gone
    assert (ledger.host_nbytes, ledger.host_peak_nbytes) == (5, 7)
    ledger.reset_peak()
    assert (ledger.device_peak_nbytes, ledger.host_peak_nbytes) == (6, 5)
